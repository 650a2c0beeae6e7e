"""Which ranks of this host are dead or stopped: the kernel shows it.

The pidfd of a process shows at once that it has ended. ``/proc`` shows that it is stopped (SIGSTOP,
a debugger); it is lost when it stays stopped for ``dead_s``. A busy process is neither, however
long it is busy.

No rank is lost while all are stopped (Ctrl-Z, a paused job): time in which no worker runs does not
count, nor does time in which the observing process was stopped itself.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from paceline.comm.limits import Limits
from paceline.errors import CommTimeout, PeerLost, name_ranks

TICK_S = 0.1
"""How often a wait checks the ranks that it waits for."""
SLACK_S = 1.0
"""How much later than ``dead_s`` a heartbeat or a reply of the store may be, and how long a process
may have made no check before it counts as stopped itself."""


@dataclass
class _Pause:
    """A stopped process: the time from which its stop counts, and when it was last checked."""

    since_s: float
    seen_s: float
    forgiven: bool = False


class Processes:
    """The processes of the ranks on this host.

    Args:
        pid_of: the pid of a rank; 0 while it is unknown.
        limits: when a stopped process counts as lost.
        some_go_on: whether any worker runs or has finished. While none does, the time for which
            a process is stopped does not count.
    """

    def __init__(
        self,
        pid_of: Callable[[int], int],
        limits: Limits,
        some_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pid_of, self._limits, self._some_go_on = pid_of, limits, some_go_on
        self._pidfds: dict[int, int | None] = {}
        self._pids: dict[int, int] = {}
        self._poll, self._rank_of = select.poll(), dict[int, int]()
        self._pauses: dict[int, _Pause] = {}

    def why_stopped(self, rank: int) -> str | None:
        """Why ``rank``, whose process exists, counts as lost; None if it does not."""
        if not self.is_stopped(rank):
            self._pauses.pop(rank, None)
            return None
        now_s, dead_s = time.monotonic(), self._limits.dead_s
        pause = self._pauses.setdefault(rank, _Pause(now_s, now_s))
        # After so long without a check, this process may have been stopped, too. Forgive that
        # once: a process that was only busy would forgive for ever.
        was_away = now_s - pause.seen_s > dead_s / 2 and not pause.forgiven
        if was_away or not self._some_go_on():
            pause.since_s, pause.forgiven = now_s, pause.forgiven or was_away
        pause.seen_s = now_s
        stopped_s = now_s - pause.since_s
        return None if stopped_s < dead_s else f"it has been stopped for {stopped_s:.1f} s"

    def forgive(self, seconds: float) -> None:
        """Do not count the last ``seconds``: this process was stopped itself."""
        for pause in self._pauses.values():
            pause.since_s += seconds

    def stopped(self) -> frozenset[int]:
        """The ranks that were stopped at their last check."""
        return frozenset(self._pauses)

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of ``rank`` is stopped now, for however short a time."""
        return is_stopped(self._pid_of(rank))

    def has_died(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended."""
        return self._await_end(rank, 0)

    def dead(self) -> list[int]:
        """The ranks that have died, among those checked before: one system call for all of them."""
        return [self._rank_of[pidfd] for pidfd, _ in self._poll.poll(0)]

    def end(self, rank: int) -> None:
        """Kill the process of ``rank``, and wait until it is gone."""
        self.has_died(rank)
        if (pidfd := self._pidfds.get(rank)) is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._await_end(rank, None)

    def _await_end(self, rank: int, milliseconds: int | None) -> bool:
        pid = self._pid_of(rank)
        if pid and self._pids.get(rank) != pid:
            self._open(rank, pid)
        pidfd = self._pidfds.get(rank, -1)
        if pidfd is None or pidfd < 0:
            return pidfd is None
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def _open(self, rank: int, pid: int) -> None:
        """Open a pidfd of the present process of ``rank``."""
        if (old := self._pidfds.get(rank)) is not None:
            self._poll.unregister(old)
            os.close(old)
        self._pids[rank] = pid
        try:
            pidfd = self._pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfds[rank] = None
            return
        self._rank_of[pidfd] = rank
        self._poll.register(pidfd, select.POLLIN)


class Watch:
    """One wait: prints a notice after ``notice_s``, and fails at ``progress_limit_s``.

    Args:
        op: what waits.
        limits: for how long.
        patient: whether to wait without a limit, and without a notice.
        whom: what it waits for, where that is no rank.
        now_s: the time.
    """

    def __init__(
        self,
        op: str,
        limits: Limits,
        patient: bool = False,
        whom: str | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.op, self._limits, self._patient, self._whom = op, limits, patient, whom
        self._now_s = now_s
        self._start_s = self._looked_s = now_s()
        self._noticed = False

    @property
    def waited_s(self) -> float:
        """How long this wait has lasted."""
        return self._now_s() - self._start_s

    def look(self) -> None:
        """Call this many times a second: a long gap was a stop, and does not count as waiting."""
        now_s = self._now_s()
        if now_s - self._looked_s > SLACK_S:
            self._start_s += now_s - self._looked_s
        self._looked_s = now_s

    def lost(self, ranks: Sequence[int], reason: str) -> PeerLost:
        """The error of this wait when ``ranks`` are lost."""
        return PeerLost(ranks, self.op, reason, self.waited_s)

    def check_limits(self, missing: Sequence[int]) -> None:
        """Print the ranks waited for after ``notice_s``; raise after ``progress_limit_s``."""
        self.look()
        waited_s = self.waited_s
        if waited_s > self._limits.progress_limit_s and not self._patient:
            raise CommTimeout(missing, self.op, waited_s, self._whom)
        if waited_s > self._limits.notice_s and not self._noticed and not self._patient:
            self._noticed = True
            text = f"still waiting in {self.op} for {self._whom or name_ranks(missing)}"
            print(f"paceline: {text} after {waited_s:.0f} s", file=sys.stderr, flush=True)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped now."""
    return _stat(pid)[:1] in ([b"T"], [b"t"])


def goes_on(pid: int) -> bool:
    """Whether a process exists, and is neither stopped nor ended."""
    return _stat(pid)[:1] not in ([], [b"T"], [b"t"], [b"Z"], [b"X"])


def is_gone(pid: int) -> bool:
    """Whether a process has ended and its parent has waited for it."""
    return not _stat(pid)


def exit_code(pid: int) -> int | None:
    """The exit code of an ended process that nobody has waited for yet; None if unknown."""
    stat = _stat(pid)
    return os.waitstatus_to_exitcode(int(stat[49])) if stat[:1] == [b"Z"] else None


def _stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from the state on; empty if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []
