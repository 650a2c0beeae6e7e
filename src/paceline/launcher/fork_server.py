"""The fork server: a process that has torch loaded, and so starts a rank in milliseconds.

``python -m paceline.launcher.fork_server FD`` serves one launcher over the socket FD. For each
request it forks a rank and reports its pid, and later its exit code. A rank dies with the fork
server, and the fork server with its launcher, whatever ends them: no process outlives its run.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_MAX_FDS = 8
_PR_SET_PDEATHSIG = 1


def send_message(
    sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None
) -> None:
    """Send one JSON message together with file descriptors."""
    body = json.dumps(message).encode()
    header = struct.pack("!I", len(body))
    socket.send_fds(sock, [header], fds or [])
    sock.sendall(body)


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its file descriptors; None if the other side has ended."""
    try:
        header, fds, _, _ = socket.recv_fds(sock, 4, _MAX_FDS)
        if not header:
            return None
        (length,) = struct.unpack("!I", header)
        body = b""
        while len(body) < length:
            part = sock.recv(length - len(body))
            if not part:
                return None
            body += part
    except ConnectionResetError:  # the other side was killed before it read our message
        return None
    return json.loads(body), fds


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux; a no-op elsewhere)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def serve(sock: socket.socket) -> None:
    """Fork ranks on request until the launcher has ended."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([sock.fileno(), reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            for pid, code in _ended(children):
                with suppress(BrokenPipeError):
                    send_message(sock, {"ended": pid, "code": code})
        if sock.fileno() in ready:
            request = receive_message(sock)
            if request is None:
                break
            pid = _fork(*request, inherited=[sock.fileno(), reader, writer])
            children.add(pid)
            send_message(sock, {"started": pid})
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ended(children: set[int]) -> Iterator[tuple[int, int]]:
    """Remove the children that have ended; their pids and exit codes."""
    for pid in list(children):
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            children.discard(pid)
            yield pid, os.waitstatus_to_exitcode(status)


def _fork(config: dict[str, Any], fds: list[int], inherited: list[int]) -> int:
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    code = 1
    try:
        die_with_parent()
        _name_process(config)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for fd in inherited:
            os.close(fd)
        stdout, stderr, *rest = fds
        for source, target in ((stdout, 1), (stderr, 2)):
            os.dup2(source, target)
            os.close(source)
        from paceline.launcher.rank_process import MAIN_OF

        code = MAIN_OF[config["role"]](config, rest)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _name_process(config: dict[str, Any]) -> None:
    """Let ``ps`` and ``top`` show which process is which: ``pl-rank-3``, ``pl-registrar``."""
    number = f"-{config['rank']}" if "rank" in config else ""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(f"pl-{config['role']}{number}")


def main() -> None:
    """Load what every rank needs, then serve.

    Only the launcher handles signals, even those that are sent to the whole process group.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with_parent()
    sock = socket.socket(fileno=int(sys.argv[1]))
    import torch

    import paceline.comm.shared.world
    import paceline.comm.torch_distributed.world
    import paceline.launcher.launch  # a rank needs these, and would import them itself

    with suppress(ImportError):  # without pyzmq
        import paceline.comm.hosts.world  # noqa: F401

    torch.optim.SGD([torch.zeros(1)]).zero_grad()  # the first call loads torch's compiler
    gc.collect()
    gc.freeze()
    serve(sock)


if __name__ == "__main__":
    main()
