"""What the full form of a claim consists of, and the runs that it is judged by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

from paceline.lab.papers.claim import LEAST_STEPS, Described
from paceline.lab.papers.curves import curve
from paceline.lab.papers.full.setup import Way
from paceline.lab.papers.verdict import LEAST_SEEDS, Figure, shown
from paceline.record.result import Result

THE_RATE = "the rate"
Results = Mapping[int, Result]
"""The results of a run by seed."""
Pairs = Mapping[int, tuple[Result, Result]]
"""The results of two runs by seed."""
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A chart of lines.

    Attributes:
        title, x, y: of the chart and its axes.
        lines: the points of each, by its name.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]


class FullClaim(Described):
    """The full form of a claim.

    Class attributes:
        ways: the ways to train that decide it.
        beside: those that are only shown; they come last.
        sizes: the shares of the best rate at which each is run.
    """

    ways: ClassVar[tuple[Way, ...]]
    beside: ClassVar[tuple[Way, ...]] = ()
    sizes: ClassVar[Mapping[str, float]] = {THE_RATE: 1.0}

    @abstractmethod
    def judge(self, runs: FullRuns) -> Iterator[Figure]:
        """The figures that the runs yield, with their verdicts; as far as there are runs."""

    @abstractmethod
    def panels(self, runs: FullRuns) -> Iterator[Panel]:
        """The charts of its picture."""


class FullRuns:
    """The results of a claim's runs, so far."""

    def __init__(self, results: Mapping[tuple[Way, float], Results], epochs: int) -> None:
        self._results, self.epochs = results, epochs

    def of(self, way: Way, size: float = 1.0) -> Results:
        """The results of a way, at this share of its best rate."""
        return self._results.get((way, size), {})

    def pairs(self, one: Way, other: Way, size: float = 1.0) -> Pairs:
        """The results of two ways, seed by seed."""
        ours, theirs = self.of(one, size), self.of(other, size)
        return {seed: (ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}

    def show(self, what: str, of: Callable[[Result], float], way: Way) -> Iterator[Figure]:
        """A figure of a way's results, for information."""
        values = [of(result) for result in self.of(way).values()]
        if values:
            yield shown(what, values)

    def line(self, way: Way, metric: str, against: str = "progress") -> list[Point]:
        """The mean curve of a way at its best rate; over epochs, or over time."""
        curves = [curve(result, against, metric) for result in self.of(way).values()]
        count = min((len(x) for x, _ in curves), default=0)
        unit = self.epochs if against == "progress" else 1
        return [
            (unit * fmean(float(x[n]) for x, _ in curves), fmean(float(y[n]) for _, y in curves))
            for n in range(count)
        ]


def ruled(
    rule: Callable[..., Figure], what: str, values: Iterable[float], *bounds: float, of: Pairs
) -> Iterator[Figure]:
    """The figure of a rule, by the runs ``of``; for information only while there are few seeds."""
    known = list(values)
    if 0 < len(known) < LEAST_SEEDS:
        yield shown(f"{what}; {len(known)} of {LEAST_SEEDS} seeds", known)
    elif known:
        yield rule(what, known, *bounds).unless_too_small(too_short(of))


def shown_only(figures: Iterable[Figure]) -> Iterator[Figure]:
    """The same figures, for information only."""
    return (shown(figure.what, figure.values) for figure in figures)


def too_short(pairs: Pairs) -> str | None:
    """Why the runs are too short to compare accuracies, if they are."""
    steps = min(result.steps / result.workers for pair in pairs.values() for result in pair)
    if steps >= LEAST_STEPS:
        return None
    return f"{steps:.0f} steps a worker, where {LEAST_STEPS} are needed (a larger --scale has them)"
