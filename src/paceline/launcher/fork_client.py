"""The launcher's end of the fork server: :mod:`paceline.launcher.fork_server` is the other."""

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

from paceline.comm.base import Limits
from paceline.comm.liveness import Processes, is_stopped
from paceline.errors import PacelineError
from paceline.launcher.fork_server import receive_message, send_message
from paceline.launcher.rank_process import Message

STARTER = "the process that ranks are started from"


class ForkServer:
    """The launcher's end of :mod:`paceline.launcher.fork_server`; it serves one run at a time."""

    _idle: ClassVar[list[ForkServer]] = []
    _choosing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.ended: dict[int, int] = {}
        self.was_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        started = threading.Event()
        threading.Thread(target=self._keep, args=(theirs, started), daemon=True).start()
        started.wait()

    def _keep(self, theirs: socket.socket, started: threading.Event) -> None:
        """Start the process and wait for its end: it dies with the thread that started it.

        It ignores Ctrl-C, which is the launcher's to handle, from its first moment on.
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
        """A fork server that nobody else uses now: an idle one, or a new one."""
        cls.warm_up()
        with cls._choosing:
            fork_server = cls._idle.pop() if cls._idle else cls()
        try:
            yield fork_server
        finally:
            if (
                fork_server.is_stopped() or fork_server.was_stopped
            ):  # it may yet tell of ranks of this run
                fork_server.end()
            else:
                cls._idle.append(fork_server)

    @classmethod
    def warm_up(cls) -> None:
        """Start a fork server for a run that comes soon, unless there is an idle one."""
        with cls._choosing:
            for fork_server in [n for n in cls._idle if n.has_ended() or n.is_stopped()]:
                cls._idle.remove(fork_server)
                fork_server.end()
            if not cls._idle:
                cls._idle.append(cls())

    @classmethod
    def stop_idle(cls) -> None:
        """End the fork servers of this process, and wait for their end."""
        while cls._idle:
            cls._idle.pop().end()

    def end(self) -> None:
        """End the process, also one that is stopped, and wait for that."""
        self.socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @classmethod
    def idle_pids(cls) -> set[int]:
        """The fork servers of this process that wait for its next run."""
        return {
            fork_server._process.pid
            for fork_server in cls._idle
            if fork_server._process is not None
        }

    def has_ended(self) -> bool:
        """Whether the process is gone, or never came."""
        return self._process is None or self._process.poll() is not None

    def is_stopped(self) -> bool:
        """Whether the process is stopped now, and so tells nothing; that is remembered."""
        stopped = self._process is not None and is_stopped(self._process.pid)
        self.was_stopped = self.was_stopped or stopped
        return stopped

    def start(self, config: Message, fds: Sequence[int], limits: Limits) -> int:
        """Start a rank with file descriptors of its own; return its pid."""
        itself = Processes(lambda _: self._process.pid if self._process else 0, limits)
        try:
            send_message(self.socket, config, [1, 2, *fds])
        except (BrokenPipeError, ConnectionResetError):
            raise _fork_server_lost("has ended, and the ranks with it") from None
        while True:
            while not readable([self.socket.fileno()]):
                if reason := itself.why_stopped(0):
                    raise _fork_server_lost(f"cannot start one: {reason}")
            if (pid := self.hear()) is not None:
                self.ended.pop(pid, None)
                return pid

    def hear(self) -> int | None:
        """Hear one message: the pid of a rank that started, or that one has ended."""
        heard = receive_message(self.socket)
        if heard is None:
            raise _fork_server_lost("has ended, and the ranks with it")
        message, _ = heard
        if "started" in message:
            return int(message["started"])
        self.ended[message["ended"]] = message["code"]
        return None


def _fork_server_lost(what: str) -> PacelineError:
    """The error of a run that has lost the process its ranks are started from."""
    error = PacelineError(f"{STARTER} {what}")
    error.exit_code = 3
    return error


def readable(fds: Sequence[int]) -> set[int]:
    """Which of ``fds`` can be read, now or a little later."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(200)}
