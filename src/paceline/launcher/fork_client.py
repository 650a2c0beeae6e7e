"""The launcher's side of the fork server, :mod:`paceline.launcher.fork_server`."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from paceline.comm.limits import Limits
from paceline.comm.liveness import Processes, is_stopped
from paceline.errors import PacelineError
from paceline.launcher.fork_server import receive_message, send_message
from paceline.launcher.rank_process import Message


class ForkServer:
    """A fork server as the launcher sees it; it serves one run at a time."""

    _idle: ClassVar[list[ForkServer]] = []
    _choosing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.ended: dict[int, int] = {}
        self.was_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        started = threading.Event()
        threading.Thread(target=self._run, args=(theirs, started), daemon=True).start()
        started.wait()

    def _run(self, theirs: socket.socket, started: threading.Event) -> None:
        """Start the process and wait for its end: it dies with the thread that started it.

        SIGINT is blocked from its start, because only the launcher handles Ctrl-C.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        command = [sys.executable, "-m", "paceline.launcher.fork_server", str(theirs.fileno())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
                )
        finally:
            started.set()
        self._process.wait()

    @classmethod
    @contextmanager
    def borrow(cls) -> Iterator[ForkServer]:
        """A fork server for one run: an idle one, or a new one."""
        cls.warm_up()
        with cls._choosing:
            fork_server = cls._idle.pop() if cls._idle else cls()
        try:
            yield fork_server
        finally:
            # one that was stopped may still send messages about ranks of this run
            if fork_server.is_stopped() or fork_server.was_stopped:
                fork_server.end()
            else:
                cls._idle.append(fork_server)

    @classmethod
    def warm_up(cls) -> None:
        """Start a fork server ahead of the next run, unless there is an idle one."""
        with cls._choosing:
            for server in list(cls._idle):
                if server.has_ended() or server.is_stopped():
                    cls._idle.remove(server)
                    server.end()
            if not cls._idle:
                cls._idle.append(cls())

    @classmethod
    def stop_idle(cls) -> None:
        """End the idle fork servers of this process, and wait until they have ended."""
        while cls._idle:
            cls._idle.pop().end()

    def end(self) -> None:
        """End the process, even if it is stopped, and wait until it has ended."""
        self.socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @classmethod
    def idle_pids(cls) -> set[int]:
        """The pids of the idle fork servers of this process."""
        processes = [fork_server._process for fork_server in cls._idle]
        return {process.pid for process in processes if process is not None}

    def has_ended(self) -> bool:
        """Whether the process has ended, or was never started."""
        return self._process is None or self._process.poll() is not None

    def is_stopped(self) -> bool:
        """Whether the process is stopped now; ``was_stopped`` remembers it."""
        stopped = self._process is not None and is_stopped(self._process.pid)
        self.was_stopped = self.was_stopped or stopped
        return stopped

    def start(self, config: Message, fds: Sequence[int], limits: Limits) -> int:
        """Start a rank with its own file descriptors; return its pid."""
        itself = Processes(lambda _: self._process.pid if self._process else 0, limits)
        try:
            send_message(self.socket, config, [1, 2, *fds])
        except (BrokenPipeError, ConnectionResetError):
            raise _fork_server_lost("has ended, and the ranks with it") from None
        while True:
            while not readable([self.socket.fileno()]):
                if reason := itself.why_stopped(0):
                    raise _fork_server_lost(f"cannot start one: {reason}")
            if (pid := self.receive()) is not None:
                self.ended.pop(pid, None)
                return pid

    def await_ready(self, limits: Limits) -> None:
        """Wait until it has loaded what ranks need, and can start one at once."""
        self.start({"role": "none"}, [], limits)

    def receive(self) -> int | None:
        """Receive one message; the pid of a rank that started, or None when a rank has ended."""
        received = receive_message(self.socket)
        if received is None:
            raise _fork_server_lost("has ended, and the ranks with it")
        message, _ = received
        if "started" in message:
            return int(message["started"])
        self.ended[message["ended"]] = message["code"]
        return None


def _fork_server_lost(what: str) -> PacelineError:
    """The error of a run that has lost its fork server."""
    error = PacelineError(f"the fork server, which starts the ranks, {what}")
    error.exit_code = 3
    return error


def readable(fds: Sequence[int]) -> set[int]:
    """Which of ``fds`` can be read; waits up to 200 ms for the first."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(200)}
