"""The cores of a node, shared evenly by those of its ranks that compute."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.sim.kernel import Calendar


class _Job(NamedTuple):
    """A rank that computes until each on this node has been served for ``until_s``."""

    until_s: float
    sequence: int
    rank: int


class Cores:
    """Processor sharing: n ranks that compute on c cores run at ``min(1, c / n)`` each.

    All of them run at one pace, so that they end in the order of what they have left: it takes one
    event for the next to end, moved whenever a rank begins or leaves.

    Args:
        calendar: of the simulation.
        count: how many cores there are.
        ended: called with each rank that has computed what it had to.
    """

    def __init__(self, calendar: Calendar, count: int, ended: Callable[[int], None]) -> None:
        self._calendar, self._count, self._ended = calendar, count, ended
        self._jobs: dict[int, _Job] = {}
        self._order: list[_Job] = []
        self._served_s = self._since_s = 0.0
        self._sequence = 0

    def state(self) -> tuple[float, float]:
        """What a checkpoint holds of it, while nobody computes."""
        return self._served_s, self._since_s

    def load_state(self, state: tuple[float, float]) -> None:
        """Take up what :meth:`state` gave."""
        self._served_s, self._since_s = state

    def begin(self, rank: int, seconds: float) -> None:
        """Let ``rank`` compute what takes ``seconds`` on a core of its own."""
        self._advance()
        job = self._jobs[rank] = _Job(self._served_s + seconds, self._sequence, rank)
        heapq.heappush(self._order, job)
        self._plan()

    def leave(self, rank: int) -> float | None:
        """Take ``rank`` away: the seconds that it had left; None if it does not compute."""
        self._advance()
        job = self._jobs.pop(rank, None)
        if job is None:
            return None
        self._plan()
        return max(0.0, job.until_s - self._served_s)

    def _stepper(self) -> float:
        return min(1.0, self._count / len(self._jobs)) if self._jobs else 1.0

    def _advance(self) -> None:
        now_s = self._calendar.now_s
        self._served_s += (now_s - self._since_s) * self._stepper()
        self._since_s = now_s

    def _plan(self) -> None:
        """Have the next rank end when it is due; what was planned before is void."""
        self._sequence += 1
        while self._order and self._jobs.get(self._order[0].rank) is not self._order[0]:
            heapq.heappop(self._order)
        if self._order:
            left_s = max(0.0, self._order[0].until_s - self._served_s)
            end_s = self._calendar.now_s + left_s / self._stepper()
            self._calendar.call(end_s, partial(self._end, self._sequence))

    def _end(self, sequence: int) -> None:
        if sequence != self._sequence:
            return
        self._advance()
        job = heapq.heappop(self._order)
        del self._jobs[job.rank]
        self._served_s = max(self._served_s, job.until_s)
        self._ended(job.rank)
        self._plan()
