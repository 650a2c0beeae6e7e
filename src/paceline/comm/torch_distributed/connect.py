"""How a rank joins a run over torch.distributed, under any launcher.

torch.distributed has neither authentication nor encryption: trusted networks only.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from paceline.comm.launchers import LOOPBACK, Launched
from paceline.comm.limits import Limits
from paceline.comm.torch_distributed.collectives import forever
from paceline.comm.torch_distributed.peers import Peers
from paceline.comm.torch_distributed.world import PREFIX, DistributedPorts
from paceline.errors import NotLaunched, PeerLost

Tell = Callable[[PeerLost], None]
_TICK_S = 0.25
_SIOCGIFADDR = 0x8915


def connect_on_loopback(
    fd: int, port: int, rank: int, size: int, limits: Limits, started_s: float, tell: Tell
) -> DistributedPorts:
    """Join the run of a launcher on this host, which listens at ``fd``."""
    with _watched(rank, size, limits, tell) as peers:
        peers.set_awaited([0], "rank 0")
        store = open_store(LOOPBACK, port, rank, size, fd)
        return _join(store, LOOPBACK, peers, started_s, size, rank_order=False)


def connect_launched(
    place: Launched, limits: Limits, *, rank_order: bool = False, tell: Tell
) -> DistributedPorts:
    """Join the run that a launcher has started (torchrun, mpirun, srun, Ray)."""
    started_s = time.monotonic()
    rank, size, host, port = place.rank, place.size, place.address, place.port
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: dist.Store
    with _watched(rank, size, limits, tell) as peers:
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            return DistributedPorts(store, peers, started_s, rank_order, owns_groups=False)
        if rank or agent:
            _reach(host, port, peers)
        with peers.explaining("the start", 0), peers.asking():
            store = open_store(host, port, None if agent else rank, size)
        if agent:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt_{attempt}", store)
        return _join(store, host, peers, started_s, place.local_size, rank_order)


@contextmanager
def _watched(rank: int, size: int, limits: Limits, tell: Tell) -> Iterator[Peers]:
    """Those that look after the others; until the end of the run, if it comes to begin."""
    peers = Peers(rank, size, limits, tell)
    try:
        yield peers
    except BaseException:
        peers.close()
        raise


def _reach(host: str, port: int, peers: Peers) -> None:
    """Wait until somebody listens there."""
    while True:
        try:
            socket.create_connection((host, port), 1.0).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        peers.set_awaited([0], f"rank 0 at {host}:{port} ({why})")
        time.sleep(_TICK_S)


def open_store(
    host: str, port: int, rank: int | None, size: int, fd: int | None = None
) -> dist.Store:
    """A store of our own: rank 0 listens on the one address that was given, and on no other."""
    if rank != 0:
        if fd is not None:
            os.close(fd)
        return dist.TCPStore(host, port, size, False)
    if fd is None:
        try:
            fd = socket.create_server((host, port)).detach()
        except OSError as error:
            raise NotLaunched(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return dist.TCPStore(host, port, size, True, wait_for_workers=False, master_listen_fd=fd)


def _join(
    store: dist.Store, host: str, peers: Peers, started_s: float, local_size: int, rank_order: bool
) -> DistributedPorts:
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_towards(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    peers.wait_for_all(dist.PrefixStore(PREFIX, store))
    backend, timeout = _backend(local_size), forever(peers.limits)
    with peers.explaining("the start"):
        dist.init_process_group(
            backend, store=store, rank=peers.rank, world_size=peers.size, timeout=timeout
        )
    return DistributedPorts(store, peers, started_s, rank_order)


def _backend(here: int) -> str:
    """nccl for what lies on GPUs, unless ranks of this host share one, which nccl refuses."""
    return "cpu:gloo,cuda:nccl" if here <= torch.cuda.device_count() else "gloo"


def interface_towards(host: str) -> str | None:
    """The name of the network interface that reaches ``host``; None where that is not known."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            mine = probe.getsockname()[0]
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == mine:
                return name
    return None
