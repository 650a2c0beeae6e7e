"""Ranks that another launcher started (torchrun, srun) over the transport ``hosts``.

The process of rank 0 starts the registrar beside it, as a process of its own, which goes on when
rank 0 is lost, and ends when all ranks are gone. All ranks find it at the address of rank 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.comm.launchers import Launched
from paceline.comm.limits import Limits
from paceline.errors import NotLaunched, UsageError
from paceline.launcher.many_hosts import TOKEN_FILE, TOKEN_VARIABLE, ManyHosts, read_token

if TYPE_CHECKING:
    from paceline.comm.hosts.world import HostsPorts


def connect_beside_registrar(
    process: Launched, limits: Limits, token_file: Path | None, *, workers: int, elastic: bool
) -> HostsPorts:
    """Connect a process of another launcher to the others, and to the registrar.

    Args:
        process: which rank it is, and where rank 0 is.
        limits: how long to wait.
        token_file: holds the run's token, unless the environment does.
        workers: how many of the ranks, the first ones, are workers.
        elastic: whether the others go on when one is lost.
    """
    try:
        from paceline.comm.hosts.refusals import await_admission
        from paceline.comm.hosts.secret import Secret
        from paceline.comm.hosts.world import HostsPorts
        from paceline.comm.hosts.zeromq import ZmqWire
    except ImportError:
        needs = 'transport (hosts) needs pyzmq: pip install "paceline[hosts]"'
        raise UsageError(needs) from None
    from paceline.launcher.agent import own_address

    if token_file is None and TOKEN_VARIABLE not in os.environ:
        token_file = Path(TOKEN_FILE)
    token, started_s = read_token(token_file), time.monotonic()
    own, port = own_address(process.address, process.port), registrar_port(process)
    at_rank_0 = ManyHosts(process.size, own, port, None)
    encrypted = not ManyHosts(process.size, process.address, port, None).is_loopback
    if process.rank == 0:
        facts = {"token": token.hex(), "encrypted": encrypted, "limits": asdict(limits)}
        _start_registrar(at_rank_0, {**facts, "size": process.size, "workers": workers})
    host = f"[{process.address}]" if ":" in process.address else process.address
    registrar, secret = f"tcp://{host}:{port}", Secret(token, encrypted)
    await_admission(registrar, secret, limits)
    return HostsPorts(
        registrar,
        own,
        ZmqWire(secret, limits.dead_s),
        process.rank,
        process.size,
        limits,
        started_s,
        elastic=elastic,
        workers=workers,
    )


def registrar_port(process: Launched) -> int:
    """The port of the registrar: the one of rank 0, or the next if torchrun itself has that."""
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return process.port + taken


def _start_registrar(where: ManyHosts, facts: dict[str, object]) -> None:
    """Start the registrar in a session of its own: no signal to rank 0 reaches it."""
    from paceline.comm.hosts.journal import Journal

    try:
        listener = where.listener(where.port)
    except UsageError as error:
        why = str(error).rpartition(": ")[2]
        raise NotLaunched(f"cannot listen at {where.address}:{where.port}: {why}") from None
    journal = Journal.create()
    try:
        with listener:
            fds = {"listener": listener.fileno(), "journal": journal}
            registrar = subprocess.Popen(
                [sys.executable, "-m", "paceline.comm.hosts.registrar_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[*fds.values()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert registrar.stdin is not None
            registrar.stdin.write(json.dumps({**facts, **fds}).encode())
            registrar.stdin.close()
            registrar.returncode = 0  # nobody waits for it: it may outlive this process
    finally:
        os.close(journal)
