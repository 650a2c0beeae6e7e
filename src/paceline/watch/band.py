"""Values over time in little memory, however long a run is."""

from __future__ import annotations

from dataclasses import dataclass

MOST_BINS = 160
FINEST_S = 2.0**-20


@dataclass
class Bin:
    """The values of a short time."""

    count: int
    total: float
    low: float
    high: float

    def merge(self, other: Bin) -> None:
        """Take in the values of another bin."""
        self.count, self.total = self.count + other.count, self.total + other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


class Band:
    """The mean, least and greatest value of all workers over time.

    Times are divided into bins. When there are too many, each two become one.

    >>> band = Band(most=2)
    >>> for t, value in [(0.0, 1.0), (0.0, 3.0), (1.0, 5.0), (2.0, 7.0)]:
    ...     band.add(t, value)
    >>> band.rows()
    [[0.0, 3.0, 1.0, 5.0], [2.0, 7.0, 7.0, 7.0]]
    """

    def __init__(self, most: int = MOST_BINS) -> None:
        self._most, self._width_s = most, FINEST_S
        self._bins: dict[int, Bin] = {}
        self.last: float | None = None

    def add(self, t: float, value: float) -> None:
        """Add a value at a time."""
        self.last = value
        self._put(int(t / self._width_s), Bin(1, value, value, value))
        while len(self._bins) > self._most:
            before, self._bins = self._bins, {}
            self._width_s *= 2
            for number, each in before.items():
                self._put(number // 2, each)

    def _put(self, number: int, new: Bin) -> None:
        if number in self._bins:
            self._bins[number].merge(new)
        else:
            self._bins[number] = new

    def rows(self) -> list[list[float]]:
        """Time, mean, least and greatest value of each bin, in order."""
        return [
            [_short(n * self._width_s), _short(b.total / b.count), _short(b.low), _short(b.high)]
            for n, b in sorted(self._bins.items())
        ]


def _short(value: float) -> float:
    """A number with as many digits as a chart can show."""
    return float(f"{value:.5g}")
