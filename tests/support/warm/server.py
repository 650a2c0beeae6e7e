"""Fork a process for each request of ``client.py``, until the standard input ends."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

LOADED = (
    "jinja2",
    "numpy",
    "rich.console",
    "rich.progress",
    "rich.table",
    "safetensors.torch",
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "typer",
)
AT_START = ("GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "PYTHON")
"""The variables that Python or a loaded library has read already begin with one of these."""
READ_AGAIN = ("OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED")
SPARE_FD = 512
REFUSED = -1
ENVIRONMENT = dict(os.environ)


def main() -> None:
    folder = sys.argv[1]
    for name in LOADED:
        importlib.import_module(name)
    import torch

    torch.optim.SGD([torch.zeros(1)]).zero_grad()  # the first call loads torch's compiler
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(folder, "socket"))
        listener.listen(64)
        os.write(1, b"ready\n")
        request = serve(listener)
    if request is not None:
        become(request)
        try:
            run(request["arguments"])
        except SystemExit as ending:
            if not isinstance(ending.code, int | None):
                raise
            end(ending.code or 0)
        end(0)


# The server --------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Serve until the input ends; in a process that was forked, its request."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, woken, listener, *clients.values()], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_ends(clients)
        for pid in [pid for pid, client in clients.items() if client in ready]:
            os.kill(pid, signal.SIGKILL)  # a client sends one request: it has ended
        if 0 in ready:
            for pid in clients:
                os.kill(pid, signal.SIGKILL)
            return None
        if listener in ready:
            client, _ = listener.accept()
            request, files = receive(client)
            pid = os.fork() if fits(request) else REFUSED
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for sock in (listener, client, *clients.values()):
                    sock.detach()  # or it closes a file of the process later
                place(files, request["files"])
                return request
            for fd in files:
                os.close(fd)
            send(client, pid)
            if pid != REFUSED:
                clients[pid] = client


def report_ends(clients: dict[int, socket.socket]) -> None:
    for pid in list(clients):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with clients.pop(pid) as client:
                send(client, status)


def send(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        client.sendall(struct.pack("!i", number))


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request of a client and its files; an empty one if the client was killed before."""
    try:
        header, files, _, _ = socket.recv_fds(client, 4, 253)
        (length,) = struct.unpack("!I", header)
        return json.loads(client.recv(length, socket.MSG_WAITALL)), files
    except (OSError, ValueError, struct.error):
        return {"arguments": [], "environment": {}}, []


def fits(request: dict[str, Any]) -> bool:
    """Whether a process that is forked here is as one that was started anew."""
    first, environment = request["arguments"][:1], request["environment"]
    if not first or (first[0].startswith("-") and first[0] not in ("-c", "-m", "-u")):
        return False
    return all(
        environment.get(name) == ENVIRONMENT.get(name)
        for name in {*environment, *ENVIRONMENT}
        if name.startswith(AT_START) and name not in READ_AGAIN
    )


# The process -------------------------------------------------------------------------------------


def place(files: list[int], numbers: list[int]) -> None:
    """Give each file the number that it has in the client; close all others."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, SPARE_FD) for fd in files]
    os.closerange(0, SPARE_FD)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def become(request: dict[str, Any]) -> None:
    """Be as a Python that was started with this environment, in this folder."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.executable = request["program"]
    sys.orig_argv = [sys.executable, *request["arguments"]]
    write_through = "PYTHONUNBUFFERED" in os.environ or request["arguments"][0] == "-u"
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=write_through)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    sys.stderr.reconfigure(line_buffering=True, write_through=write_through)
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if "outside" in sys.modules:
        sys.modules["outside"].watch()


def run(arguments: list[str]) -> None:
    """Run a script, a module or code as Python does."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = dict.fromkeys([*map(os.path.abspath, given), *SITE])  # each once, as Python has it
    if arguments[0] == "-m":
        sys.path[:] = [os.getcwd(), *paths]
        sys.argv[:] = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if arguments[0] == "-c":
        sys.path[:] = ["", *paths]
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
        return
    sys.path[:] = [os.path.dirname(os.path.realpath(arguments[0])), *paths]
    sys.argv[:] = arguments
    main.__file__ = os.path.abspath(arguments[0])
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    exec(main.__loader__.get_code("__main__"), vars(main))


def end(code: int) -> None:
    """End as Python does, without the half second in which it frees all of torch's objects."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def site_folders() -> list[str]:
    """What is in the path of every Python, without ``PYTHONPATH`` and the script's folder.

    A test may have set ``PYTHONPATH`` to some of it when the server starts.
    """
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    program = "import sys; print(*sys.path[1:], sep='\\n')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


SITE = site_folders()
if __name__ == "__main__":
    main()
