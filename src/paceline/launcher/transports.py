"""The transports of real ranks: how a rank connects, and what a run can do over each of them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.comm.launchers import LOOPBACK
from paceline.comm.limits import Limits
from paceline.errors import PeerLost, UsageError
from paceline.launcher.many_hosts import ManyHosts

if TYPE_CHECKING:
    from paceline.comm.launchers import Launched
    from paceline.comm.ports import Ports

Config = dict[str, Any]
Report = Callable[[PeerLost], None]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A transport that the launcher has opened for one run.

    Args:
        fd: a descriptor that each rank inherits.
        config: what each rank has to know beside it.
        helper_fds: the descriptors that the helper of the transport inherits.
    """

    fd: int
    config: Config = field(default_factory=dict)
    helper_fds: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How the ranks of one host communicate.

    Args:
        open: the launcher opens it for so many ranks, on one host or on many.
        connect: a rank connects with its configuration, that descriptor, and what reports a loss.
        survives_losses: whether a run can continue without a lost rank, restart it, and inject
            faults.
        makes_checkpoints: whether ranks have a rendezvous for checkpoints.
        helper: the process beside the ranks that it needs, if it needs one.
        spans_hosts: whether ranks may be on many hosts.
    """

    open: Callable[[int, ManyHosts | None], AbstractContextManager[Opening]]
    connect: Callable[[Config, int, Report], Ports]
    survives_losses: bool
    makes_checkpoints: bool
    helper: str | None = None
    spans_hosts: bool = False


@contextmanager
def _open_memory(size: int, hosts: ManyHosts | None) -> Iterator[Opening]:
    """Anonymous shared memory."""
    from paceline.comm.shared.memory import Arena

    if sys.platform != "linux":
        raise UsageError('transport (shared_memory) needs Linux; use transport="distributed"')
    fd = Arena.create(size)
    try:
        yield Opening(fd=fd)
    finally:
        os.close(fd)


def _connect_memory(config: Config, fd: int, report: Report) -> Ports:
    from paceline.comm.shared.world import SharedPorts

    names = ("rank", "size", "started_s", "late", "elastic", "workers", "device")
    own = {name: config[name] for name in names}
    return SharedPorts(fd, limits=Limits(**config["limits"]), **own)


@contextmanager
def _open_listener(size: int, hosts: ManyHosts | None) -> Iterator[Opening]:
    """A socket on the loopback, at which rank 0 serves torch's store."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        yield Opening(fd=listener.fileno())


def _connect_loopback(config: Config, fd: int, report: Report) -> Ports:
    from paceline.comm.torch_distributed.connect import connect_on_loopback

    with socket.socket(fileno=os.dup(fd)) as listener:
        port = listener.getsockname()[1]
    rank, size, limits = config["rank"], config["size"], Limits(**config["limits"])
    return connect_on_loopback(fd, port, rank, size, limits, config["started_s"], report)


@contextmanager
def _open_registrar(size: int, hosts: ManyHosts | None) -> Iterator[Opening]:
    """A socket at which the registrar listens, and memory for its journal.

    Both outlive the process of the registrar.
    """
    try:
        from paceline.comm.hosts.secret import new_token
    except ImportError:
        needs = 'transport (hosts) needs pyzmq: pip install "paceline[hosts]"'
        raise UsageError(needs) from None
    from paceline.comm.hosts.journal import Journal

    where = hosts or ManyHosts(1, LOOPBACK, 0, None)
    with where.listener() as listener:
        address = f"[{where.address}]" if ":" in where.address else where.address
        config = {
            "registrar": f"tcp://{address}:{listener.getsockname()[1]}",
            "host": where.address,
            "token": (new_token() if hosts is None else hosts.token()).hex(),
            "encrypted": where.encrypted,
        }
        journal = Journal.create()
        try:
            yield Opening(
                fd=journal,
                config=config,
                helper_fds=[journal, listener.fileno()],
            )
        finally:
            os.close(journal)


def _connect_registrar(config: Config, fd: int, report: Report) -> Ports:
    from paceline.comm.hosts.secret import Secret
    from paceline.comm.hosts.world import HostsPorts
    from paceline.comm.hosts.zeromq import ZmqWire

    os.close(fd)
    names = ("rank", "size", "started_s", "late", "elastic", "workers", "start")
    own = {name: config[name] for name in names}
    secret = Secret(bytes.fromhex(config["token"]), config["encrypted"])
    limits = Limits(**config["limits"])
    wire = ZmqWire(secret, limits.dead_s)
    return HostsPorts(config["registrar"], config["host"], wire, limits=limits, **own)


TRANSPORTS = {
    "shared_memory": Transport(
        open=_open_memory,
        connect=_connect_memory,
        survives_losses=True,
        makes_checkpoints=True,
    ),
    "distributed": Transport(
        open=_open_listener,
        connect=_connect_loopback,
        survives_losses=False,
        makes_checkpoints=False,
    ),
    "hosts": Transport(
        open=_open_registrar,
        connect=_connect_registrar,
        survives_losses=True,
        makes_checkpoints=True,
        helper="registrar",
        spans_hosts=True,
    ),
}


def connect_under_launcher(process: Launched, limits: Limits, rank_order: bool) -> Ports:
    """Connect a process of another launcher by torch.distributed; such a run survives no loss."""
    from paceline.comm.solo import solo_ports
    from paceline.comm.torch_distributed.connect import connect_launched

    if process.size == 1:
        return solo_ports()

    def report(loss: PeerLost) -> None:
        print(f"paceline: {loss}, on rank {process.rank}", file=sys.stderr, flush=True)

    return connect_launched(process, limits, rank_order=rank_order, tell=report)
