"""Ranks that are parked until their results are computed together, in no virtual time.

A parked rank promises to do nothing that others can see before a certain time. Events before that
time may happen first, so the calendar gets ahead of the rank: it *lags*, and has its own time and
its own place in the order of events, those that it had when it parked.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

Moment = tuple[float, int]
"""A time, and a place in the order of events of that time."""
NEVER: Moment = (math.inf, 0)


class Parking:
    """The parked ranks of one run.

    Args:
        compute: computes what parked ranks wait for, and returns the ranks that may go on.
    """

    def __init__(self, compute: Callable[[], Iterable[int]]) -> None:
        self._compute = compute
        self._until: dict[int, Moment] = {}
        self._horizon = NEVER
        self._ready: deque[int] = deque()
        self._last: deque[int] = deque()

    def park(self, rank: int, until: Moment) -> None:
        """Park ``rank``, which does nothing that others can see before ``until``."""
        self._until[rank] = until
        self._horizon = min(self._horizon, until)

    def go_last(self, rank: int) -> bool:
        """Have ``rank`` go on when no other is parked; False if no other is."""
        if not (self._until or self._ready):
            return False
        self._last.append(rank)
        return True

    def next(self, event: Moment) -> int | None:
        """The rank that goes on before ``event``, the next of the calendar; None if none does."""
        while not self._ready:
            if not self._until:
                return self._last.popleft() if self._last else None
            if not self._last and event < self._horizon:
                return None
            self._release(self._compute())
        return self._ready.popleft()

    def release_all(self) -> None:
        """Let every parked rank go on, without its result: the run has failed."""
        self._release([*self._until])

    def _release(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self._until.pop(rank, None) is not None:
                self._ready.append(rank)
        self._horizon = min(self._until.values(), default=NEVER)
