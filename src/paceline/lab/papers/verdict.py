"""Figures with their spread, and the rule that makes a verdict of them.

Every rule is the same: the 90 % interval of a figure over seeds lies on the claim's side of a
bound, or on the other side, or the bound lies in it. The bounds stand in the claims' files. A
figure that the set-up cannot decide is too small to tell, wherever its interval lies.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.common.stats import spread

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
SMALL = "too small to tell"
VERDICTS = (HOLDS, FAILS, OPEN, SMALL)
LEAST_SEEDS = 3


def interval_90(values: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the mean, by Student's t.

    >>> low, high = interval_90([1.0, 2.0, 3.0])
    >>> round(low, 3), round(high, 3)
    (0.314, 3.686)
    """
    if len(values) < LEAST_SEEDS:
        raise ValueError(f"{len(values)} values, where an interval needs {LEAST_SEEDS}")
    found = spread(values)
    return found.low, found.high


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number measured with several seeds; one that decides has a ``wanted`` and a ``verdict``.

    Attributes:
        what: the number, in words.
        values: one a seed.
        wanted: the rule, in words; None where the figure decides nothing.
        verdict: what the rule says.
        column: ``held`` for learning rates chosen at 8 workers, ``own`` for those of each count.
        too_small: why the set-up cannot decide it, and what would; None where it can.
    """

    what: str
    values: tuple[float, ...]
    wanted: str | None = None
    verdict: str | None = None
    column: str = "held"
    too_small: str | None = None

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the mean, 90 %."""
        return interval_90(self.values)

    @property
    def decides(self) -> bool:
        """Whether the claim's verdict hangs on it: second columns are shown beside it."""
        return self.verdict is not None and self.column == "held"

    def beside(self) -> Figure:
        """The same figure in the second column."""
        return replace(self, column="own")

    def unless(self, too_small: str | None) -> Figure:
        """The same figure, which decides nothing if the set-up is ``too_small`` for it."""
        if too_small is None or self.verdict is None:
            return self
        return replace(self, verdict=SMALL, too_small=too_small)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
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
    """A figure that decides nothing."""
    return Figure(what=what, values=tuple(values))


def above(what: str, values: Iterable[float], bound: float) -> Figure:
    """A figure that the claim wants above ``bound``."""
    taken = tuple(values)
    low, high = interval_90(taken)
    verdict = HOLDS if low > bound else FAILS if high < bound else OPEN
    return Figure(what=what, values=taken, wanted=f"above {bound:g}", verdict=verdict)


def below(what: str, values: Iterable[float], bound: float) -> Figure:
    """A figure that the claim wants below ``bound``."""
    taken = tuple(values)
    low, high = interval_90(taken)
    verdict = HOLDS if high < bound else FAILS if low > bound else OPEN
    return Figure(what=what, values=taken, wanted=f"below {bound:g}", verdict=verdict)


def near_zero(what: str, values: Iterable[float], mean: float, interval: float) -> Figure:
    """A difference that the claim wants within ``mean`` of 0, its interval within ``interval``.

    It does not hold when the whole interval is farther away than ``mean``.
    """
    taken = tuple(values)
    low, high = interval_90(taken)
    near = abs(statistics.fmean(taken)) < mean and -interval < low and high < interval
    verdict = HOLDS if near else FAILS if low > mean or high < -mean else OPEN
    wanted = f"within {mean:g} of 0, its interval within {interval:g}"
    return Figure(what=what, values=taken, wanted=wanted, verdict=verdict)


def always(what: str, values: Iterable[bool]) -> Figure:
    """Something that the claim wants in every run; one run without it is enough to fail."""
    taken = tuple(float(value) for value in values)
    interval_90(taken)  # refuses too few
    verdict = HOLDS if all(taken) else FAILS
    return Figure(what=what, values=taken, wanted="1 in every run", verdict=verdict)


def combine(figures: Iterable[Figure]) -> str:
    """The verdict of a claim: one figure that fails, fails it; it holds when all of them do.

    A claim of which the set-up cannot decide a part is too small to tell, whatever the others say.

    >>> combine([above("a", [2.0, 2.1, 2.2], 1.0), below("b", [2.0, 2.1, 2.2], 1.0)])
    'does not hold'
    """
    verdicts = [figure.verdict for figure in figures if figure.decides]
    for verdict in (SMALL, FAILS):
        if verdict in verdicts:
            return verdict
    return HOLDS if verdicts and set(verdicts) == {HOLDS} else OPEN
