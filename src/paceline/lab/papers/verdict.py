"""Figures with their spread, and the rules that turn them into verdicts.

Each rule compares the 90 % interval of a figure over seeds with a bound. The claim holds if the
interval lies on the claim's side of the bound, fails if it lies on the other side, and is open if
it contains the bound. The claims' files define the bounds. If the set-up is too small to decide a
figure, its verdict is "too small to tell", wherever the interval lies.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.lab.stats import spread

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
SMALL = "too small to tell"
UNFINISHED = "not finished"
LEAST_SEEDS = 3


def interval_90(values: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the mean, by Student's t.

    >>> low, high = interval_90([1.0, 2.0, 3.0])
    >>> round(low, 3), round(high, 3)
    (0.314, 3.686)
    """
    if len(values) < LEAST_SEEDS:
        raise ValueError(f"{len(values)} values, where an interval needs {LEAST_SEEDS}")
    interval = spread(values)
    return interval.low, interval.high


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number measured with several seeds; one that decides has a ``wanted`` and a ``verdict``.

    Attributes:
        what: what it measures, in words.
        values: one per seed.
        wanted: the rule in words; None if the figure decides nothing.
        verdict: what the rule yields.
        column: ``held`` for learning rates chosen at 8 workers, ``own`` for rates of each count.
        too_small: why the set-up cannot decide it, and which could; None if it can.
    """

    what: str
    values: tuple[float, ...]
    wanted: str | None = None
    verdict: str | None = None
    column: str = "held"
    too_small: str | None = None

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the mean; for a single value, an interval of width zero."""
        interval = spread(self.values)
        return interval.low, interval.high

    @property
    def decides(self) -> bool:
        """Whether the claim's verdict depends on it; the second column is for information."""
        return self.verdict is not None and self.column == "held"

    def second_column(self) -> Figure:
        """The same figure in the second column."""
        return replace(self, column="own")

    def unless_too_small(self, too_small: str | None) -> Figure:
        """The same figure, without a verdict of its own if the set-up is ``too_small`` for it."""
        if too_small is None or self.verdict is None:
            return self
        return replace(self, verdict=SMALL, too_small=too_small)

    def to_json(self) -> dict[str, Any]:
        """The figure as ``--json`` prints it."""
        return {
            "what": self.what,
            "column": self.column,
            "mean": self.mean,
            "interval_90": list(self.interval),
            "values": list(self.values),
            "wanted": self.wanted,
            "verdict": self.verdict,
            "too_small": self.too_small,
        }


def shown(what: str, values: Iterable[float]) -> Figure:
    """A figure for information: it decides nothing."""
    return Figure(what=what, values=tuple(values))


def above(what: str, values: Iterable[float], bound: float) -> Figure:
    """A figure that the claim wants above ``bound``."""
    measured = tuple(values)
    low, high = interval_90(measured)
    verdict = HOLDS if low > bound else FAILS if high < bound else OPEN
    return Figure(what=what, values=measured, wanted=f"above {bound:g}", verdict=verdict)


def below(what: str, values: Iterable[float], bound: float) -> Figure:
    """A figure that the claim wants below ``bound``."""
    measured = tuple(values)
    low, high = interval_90(measured)
    verdict = HOLDS if high < bound else FAILS if low > bound else OPEN
    return Figure(what=what, values=measured, wanted=f"below {bound:g}", verdict=verdict)


def near_zero(what: str, values: Iterable[float], mean: float, interval: float) -> Figure:
    """A difference that the claim wants within ``mean`` of 0, its interval within ``interval``.

    It does not hold when the whole interval is farther away than ``mean``.
    """
    measured = tuple(values)
    low, high = interval_90(measured)
    near = abs(statistics.fmean(measured)) < mean and -interval < low and high < interval
    verdict = HOLDS if near else FAILS if low > mean or high < -mean else OPEN
    wanted = f"within {mean:g} of 0, its interval within {interval:g}"
    return Figure(what=what, values=measured, wanted=wanted, verdict=verdict)


def always(what: str, values: Iterable[bool]) -> Figure:
    """Something that the claim wants in every run; one run without it is enough to fail."""
    measured = tuple(float(value) for value in values)
    interval_90(measured)  # raises ValueError for too few values
    verdict = HOLDS if all(measured) else FAILS
    return Figure(what=what, values=measured, wanted="1 in every run", verdict=verdict)


def combine(figures: Iterable[Figure]) -> str:
    """The verdict of a claim: it fails if one deciding figure fails, and holds if all hold.

    If the set-up is too small to decide one figure, the claim is too small to tell.

    >>> combine([above("a", [2.0, 2.1, 2.2], 1.0), below("b", [2.0, 2.1, 2.2], 1.0)])
    'does not hold'
    """
    verdicts = [figure.verdict for figure in figures if figure.decides]
    for verdict in (SMALL, FAILS):
        if verdict in verdicts:
            return verdict
    return HOLDS if verdicts and set(verdicts) == {HOLDS} else OPEN
