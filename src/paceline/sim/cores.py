"""The cores of a node; its computing ranks share them evenly."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.sim.kernel import Calendar


class _Job(NamedTuple):
    """A rank that computes until each job of this node has had ``until_s`` seconds of a core."""

    until_s: float
    sequence: int
    rank: int


class Cores:
    """Processor sharing: n ranks that compute on c cores run at ``min(1, c / n)`` each.

    All of them run at the same rate, so the one with the least work left ends first. The calendar
    holds one valid event, for that end; it is planned anew whenever a rank begins or leaves.

    Args:
        calendar: of the simulation.
        count: the number of cores.
        ended: called with each rank that has finished computing.
    """

    def __init__(self, calendar: Calendar, count: int, ended: Callable[[int], None]) -> None:
        self._calendar, self._count, self._ended = calendar, count, ended
        self._jobs: dict[int, _Job] = {}
        self._order: list[_Job] = []
        self._served_s = self._since_s = 0.0
        self._sequence = 0

    def state(self) -> tuple[float, float]:
        """The state for a checkpoint; no rank may be computing."""
        return self._served_s, self._since_s

    def load_state(self, state: tuple[float, float]) -> None:
        """Restore what :meth:`state` returned."""
        self._served_s, self._since_s = state

    def begin(self, rank: int, seconds: float) -> None:
        """Let ``rank`` compute work that takes ``seconds`` on a core of its own."""
        self._advance()
        job = self._jobs[rank] = _Job(self._served_s + seconds, self._sequence, rank)
        heapq.heappush(self._order, job)
        self._plan()

    def leave(self, rank: int) -> float | None:
        """Remove ``rank``; return its seconds of work left, None if it does not compute."""
        self._advance()
        job = self._jobs.pop(rank, None)
        if job is None:
            return None
        self._plan()
        return max(0.0, job.until_s - self._served_s)

    def _rate(self) -> float:
        return min(1.0, self._count / len(self._jobs)) if self._jobs else 1.0

    def _advance(self) -> None:
        now_s = self._calendar.now_s
        self._served_s += (now_s - self._since_s) * self._rate()
        self._since_s = now_s

    def _plan(self) -> None:
        """Plan the event at which the next rank ends; it replaces the one planned before."""
        self._sequence += 1
        while self._order and self._jobs.get(self._order[0].rank) is not self._order[0]:
            heapq.heappop(self._order)
        if self._order:
            remaining_s = max(0.0, self._order[0].until_s - self._served_s)
            end_s = self._calendar.now_s + remaining_s / self._rate()
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
