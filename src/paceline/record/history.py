"""The progress of a rank over time: the samples of its steps and the bytes that it sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Row = tuple[float, int, int]
"""A time in seconds, and a rank's total samples and bytes at that time."""
MOST_ROWS = 2048


class History:
    """The rows of one rank in order; when there are too many, every second one is dropped."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._seen, self._every = 0, 1

    def note(self, time_s: float, samples: int, nbytes: int, last: bool = False) -> None:
        """Add a row; the ``last`` row of a run is always kept."""
        self._seen += 1
        if last or self._seen % self._every == 0:
            self.rows.append((time_s, samples, nbytes))
            if len(self.rows) >= MOST_ROWS and not last:
                del self.rows[::2]
                self._every *= 2


def totals_at(time_s: float, histories: Iterable[Sequence[Row]]) -> tuple[int, int]:
    """The total samples and bytes of all ranks at a time.

    >>> one, other = [(1.0, 8, 100), (2.0, 16, 200)], [(1.5, 8, 100)]
    >>> totals_at(1.0, [one, other]), totals_at(9.0, [one, other])
    ((8, 100), (24, 300))
    """
    samples = nbytes = 0
    for rows in histories:
        index = bisect_right(rows, time_s, key=lambda row: row[0])
        if index:
            samples, nbytes = samples + rows[index - 1][1], nbytes + rows[index - 1][2]
    return samples, nbytes
