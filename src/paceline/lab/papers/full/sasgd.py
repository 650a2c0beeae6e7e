"""SASGD at its scale: three intervals, with and without momentum."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.lab.papers import sasgd
from paceline.lab.papers.curves import ANSWER, mean_accuracy
from paceline.lab.papers.full.claim import FullClaim, FullRuns, Panel, ruled, shown_only
from paceline.lab.papers.full.setup import MOMENTUM, Way
from paceline.lab.papers.verdict import Figure, above
from paceline.record.result import Result

COUNTS, INTERVAL, OTHERS = (8, 16), 10, (1, 50)
OURS = "sasgd"
RIVALS = ("downpour", "easgd")
TEXTS = {
    OURS: "sasgd(interval={0})",
    "downpour": "downpour(push_interval={0}, fetch_interval={0})",
    "easgd": "easgd(interval={0})",
}


def way(name: str, interval: int, workers: int, momentum: float) -> Way:
    """A method at an interval."""
    return Way(TEXTS[name].format(interval), workers, momentum)


def ways_of(interval: int) -> tuple[Way, ...]:
    """All methods at an interval."""
    return tuple(
        way(name, interval, workers, momentum)
        for momentum in (MOMENTUM, 0.0)
        for workers in COUNTS
        for name in TEXTS
    )


class Convergence(FullClaim):
    """The accuracy of SASGD per epoch, compared with Downpour and EAMSGD."""

    id, paper, claim = sasgd.Convergence.id, sasgd.PAPER, sasgd.Convergence.claim
    source = sasgd.Convergence.source
    setup = """
        sasgd, downpour and easgd, all with interval 10, at 8 and 16 learners, with momentum 0.9
        (EAMSGD) and without; shown beside: intervals 1 and 50. Each with decay 0.0005, the same
        warm-up and drops, and the best of its own rates there; 10 Gbit/s Ethernet; 3 seeds.
        Accuracy per epoch is the mean of the test accuracy over the run, at equal numbers of
        samples. One learner is plain SGD under each method: the gap is 0 there.
    """
    rule = """
        The gap to each rival at 8 and at 16 learners is above 0.01, and it grows by more
        than 0.0025 with each doubling from 1 to 16 (least squares).
    """
    ways = ways_of(INTERVAL)
    beside = tuple(each for interval in OTHERS for each in ways_of(interval))

    def judge(self, runs: FullRuns) -> Iterator[Figure]:
        for momentum in (MOMENTUM, 0.0):
            for name in TEXTS:
                for workers in COUNTS:
                    what = f"accuracy per epoch of {name}, {workers} learners, momentum {momentum}"
                    one = way(name, INTERVAL, workers, momentum)
                    yield from runs.show(what, mean_accuracy, one)
            for rival in RIVALS:
                yield from self._gaps(runs, rival, INTERVAL, momentum)
                for interval in OTHERS:
                    yield from shown_only(self._gaps(runs, rival, interval, momentum))

    def _gaps(self, runs: FullRuns, rival: str, interval: int, momentum: float) -> Iterator[Figure]:
        where = f"over {rival}, interval {interval}, momentum {momentum}"
        gaps: list[dict[int, float]] = []
        for workers in COUNTS:
            ours, theirs = (way(name, interval, workers, momentum) for name in (OURS, rival))
            pairs = runs.pairs(ours, theirs)
            gaps.append({seed: lead(*pair) for seed, pair in pairs.items()})
            what = f"lead {where}, {workers} learners"
            yield from ruled(above, what, gaps[-1].values(), 0.01, of=pairs)
        slopes = [growth([gap[seed] for gap in gaps]) for seed in set.intersection(*map(set, gaps))]
        what = f"growth of the lead {where} by doubling"
        yield from ruled(above, what, slopes, 0.0025, of=pairs)

    def panels(self, runs: FullRuns) -> Iterator[Panel]:
        for momentum in (MOMENTUM, 0.0):
            for workers in COUNTS:
                lines = {
                    f"{name}, interval {interval}": runs.line(
                        way(name, interval, workers, momentum), ANSWER
                    )
                    for interval in (INTERVAL, *OTHERS)
                    for name in TEXTS
                }
                title = f"{workers} learners, momentum {momentum:g}"
                yield Panel(title=title, x="epochs", y="accuracy", lines=lines)


def lead(ours: Result, theirs: Result) -> float:
    """The lead in accuracy per epoch."""
    return mean_accuracy(ours) - mean_accuracy(theirs)


def growth(leads: Sequence[float]) -> float:
    """By how much the lead grows with each doubling, from none at one learner.

    >>> round(growth([0.3, 0.4]), 3)
    0.1
    """
    doublings = [0.0, *map(math.log2, COUNTS)]
    return float(np.polyfit(doublings, [0.0, *leads], 1)[0])
