"""Where the processes of a run are: what the supervisor asks of a host, and the host it is on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from paceline.comm.limits import Limits
from paceline.comm.liveness import Processes, exit_code, goes_on, is_gone
from paceline.launcher.fork_client import ForkServer, readable
from paceline.launcher.rank_process import Message

PATIENCE_S = 1.5
"""How much longer than ``dead_s`` the supervisor waits for a stopped rank: peers report it first,
because they know in which operation it is missing."""


class RankHost(Protocol):
    """A host on which ranks of a run are, each named by its number.

    Attributes:
        slots: how many ranks may be there at a time; None for any number.
    """

    slots: int | None

    @property
    def is_silent(self) -> bool:
        """Whether nothing is heard of it."""

    def fds(self) -> Sequence[int]:
        """Descriptors that become readable when something has happened here."""

    def receive(self, ready: set[int]) -> None:
        """Take in what has happened, without waiting."""

    def start(self, number: int, config: Message) -> None:
        """Start a process for a rank."""

    def messages(self, number: int) -> Iterator[Message]:
        """The messages that a rank has sent since the last look, without waiting."""

    def code_of(self, number: int) -> int | None:
        """The exit code of the process of a rank; None while it runs."""

    def send_signal(self, number: int, what: int) -> None:
        """Send a signal to the process of a rank, if it runs."""

    def is_stopped(self, number: int) -> bool:
        """Whether the process of a rank is stopped now."""

    def why_stopped(self, number: int) -> str | None:
        """Why a rank, whose process exists, counts as lost; None if it does not."""

    def goes_on(self, number: int) -> bool:
        """Whether the process of a rank runs, and is not stopped."""


class ThisHost(RankHost):
    """The host of the launcher, where a fork server starts processes.

    Args:
        fork_server: starts them, and reports their ends.
        fd: the descriptor that each rank inherits beside its pipe.
        limits: how long to wait.
        some_go_on: whether any worker of the run goes on.
    """

    is_silent = False
    slots: int | None = None

    def __init__(
        self,
        fork_server: ForkServer,
        fd: int,
        limits: Limits,
        some_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._fork_server, self._fd, self._limits = fork_server, fd, limits
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        self._unread: dict[int, bytes] = {}
        patience = replace(limits, dead_s=limits.dead_s + PATIENCE_S)
        self._processes = Processes(self.pid_of, patience, some_go_on)

    def pid_of(self, number: int) -> int:
        """The pid of a rank's process; 0 before it has one."""
        return self._pids.get(number, 0)

    def fds(self) -> Sequence[int]:
        return [self._fork_server.socket.fileno(), *self._pipes.values()]

    def receive(self, ready: set[int]) -> None:
        if self._fork_server.socket.fileno() in ready:
            self._fork_server.receive()

    def start(self, number: int, config: Message) -> None:
        self._close_pipe(number)
        self._pipes[number], writer = os.pipe()
        os.set_blocking(self._pipes[number], False)
        self._unread[number] = b""
        try:
            fds = [writer, self._fd]
            self._pids[number] = self._fork_server.start(config, fds, self._limits)
        finally:
            os.close(writer)

    def start_helper(self, number: int, config: Message, fds: Sequence[int]) -> None:
        """Start a process beside the ranks, which sends no messages."""
        self._pids[number] = self._fork_server.start(config, fds, self._limits)

    def messages(self, number: int) -> Iterator[Message]:
        while number in self._pipes:
            try:
                data = os.read(self._pipes[number], 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._close_pipe(number)
            *lines, self._unread[number] = (self._unread[number] + data).split(b"\n")
            yield from map(json.loads, lines)

    def _close_pipe(self, number: int) -> None:
        if number in self._pipes:
            os.close(self._pipes.pop(number))

    def code_of(self, number: int) -> int | None:
        """The fork server reports it.

        While the fork server is stopped, the kernel still has the exit code, because the parent has
        not collected it.
        """
        fork_server, pid = self._fork_server, self._pids[number]
        if pid in fork_server.ended:
            return fork_server.ended.pop(pid)
        if not fork_server.is_stopped():
            return None
        if is_gone(pid) and not readable([fork_server.socket.fileno()]):
            return 1  # the fork server collected the exit code and was stopped before reporting it
        return exit_code(pid)

    def send_signal(self, number: int, what: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pids[number], what)

    def is_stopped(self, number: int) -> bool:
        return self._processes.is_stopped(number)

    def why_stopped(self, number: int) -> str | None:
        return self._processes.why_stopped(number)

    def goes_on(self, number: int) -> bool:
        return goes_on(self.pid_of(number))

    def end(self, numbers: Sequence[int]) -> dict[int, int]:
        """Kill processes, wait until they have ended, and close all pipes; their exit codes."""
        for number in numbers:
            self.send_signal(number, signal.SIGKILL)
        codes: dict[int, int] = {}
        try:
            while left := [number for number in numbers if number not in codes]:
                self.receive(readable([self._fork_server.socket.fileno()]))
                found = {number: self.code_of(number) for number in left}
                codes |= {number: code for number, code in found.items() if code is not None}
        finally:
            for number in [*self._pipes]:
                self._close_pipe(number)
        return codes
