"""Gossiping SGD at its scale: 8, 32 and 128 nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from paceline.lab.papers import gossip
from paceline.lab.papers.curves import REPLICA, final_accuracy, mean_accuracy, speedup
from paceline.lab.papers.full.claim import THE_RATE, FullClaim, FullRuns, Panel, ruled, shown_only
from paceline.lab.papers.full.setup import SMALL, Way
from paceline.lab.papers.gossip import METRICS
from paceline.lab.papers.verdict import Figure, above, shown
from paceline.record.result import Result

LOCKSTEP = "allreduce"
RIVALS = ("gossip", "easgd(interval=10)")
RARE = "gossip(interval=10)"
METHODS = (LOCKSTEP, *RIVALS, RARE)
SETUP = """
    Each with momentum 0.9, decay 0.0005, the same warm-up and drops, and the best of its own rates
    there; 10 Gbit/s Ethernet; 3 seeds.
"""


def ways_of(methods: Sequence[str], counts: Sequence[int]) -> tuple[Way, ...]:
    """These methods at these numbers of nodes."""
    return tuple(Way(method, workers) for workers in counts for method in methods)


def panels_of(runs: FullRuns, counts: Sequence[int]) -> Iterator[Panel]:
    """Accuracy over epochs at each number of nodes, by mean model and single worker."""
    for workers in counts:
        for words, metric in METRICS.items():
            lines = {method: runs.line(Way(method, workers), metric) for method in METHODS}
            yield Panel(title=f"{words}, {workers} nodes", x="epochs", y="accuracy", lines=lines)


class Small(FullClaim):
    """Few nodes: do asynchronous methods converge faster?"""

    id, paper, claim = gossip.Small.id, gossip.PAPER, gossip.Small.claim
    source, rule = gossip.Small.source, gossip.Small.rule
    setup = f"""
        allreduce, gossip (pull, every step) and easgd (interval 10) at 8 and 32 nodes, at the rate
        and at a quarter of it; shown beside: gossip every 10 steps. {SETUP}
    """
    counts = (8, 32)
    ways = ways_of((LOCKSTEP, *RIVALS), counts)
    beside = ways_of((RARE,), counts)
    sizes: ClassVar[Mapping[str, float]] = {THE_RATE: 1.0, "a quarter of it": SMALL}

    def judge(self, runs: FullRuns) -> Iterator[Figure]:
        for workers in self.counts:
            for rival in (*RIVALS, RARE):
                for size in self.sizes:
                    for words in METRICS:
                        figures = self._compare(runs, rival, workers, size, words)
                        yield from shown_only(figures) if rival == RARE else figures

    def _compare(
        self, runs: FullRuns, rival: str, workers: int, size: str, words: str
    ) -> Iterator[Figure]:
        pairs = runs.pairs(Way(rival, workers), Way(LOCKSTEP, workers), self.sizes[size])
        metric, where = METRICS[words], f"{rival}, {workers} nodes, {size}, {words}"
        leads = (
            mean_accuracy(ours, metric) - mean_accuracy(theirs, metric)
            for ours, theirs in pairs.values()
        )
        yield from ruled(above, f"{where}: lead per epoch", leads, 0.0, of=pairs)
        times = (speedup(ours, theirs, metric) for ours, theirs in pairs.values())
        yield from ruled(above, f"{where}: times sooner", times, 1.05, of=pairs)

    def panels(self, runs: FullRuns) -> Iterator[Panel]:
        yield from panels_of(runs, self.counts)


class Large(FullClaim):
    """More than a hundred nodes: does all-reduce scale better?"""

    id, paper, claim = gossip.Large.id, gossip.PAPER, gossip.Large.claim
    source, rule = gossip.Large.source, gossip.Large.rule
    setup = f"""
        allreduce, gossip (pull, every step) and easgd (interval 10) at 128 nodes; shown beside:
        gossip every 10 steps. {SETUP}
    """
    nodes = 128
    ways = ways_of((LOCKSTEP, *RIVALS), (nodes,))
    beside = ways_of((RARE,), (nodes,))

    def judge(self, runs: FullRuns) -> Iterator[Figure]:
        lockstep = Way(LOCKSTEP, self.nodes)
        for method in METHODS:
            way = Way(method, self.nodes)
            yield from runs.show(f"accuracy of {method}", final_accuracy, way)
            yield from runs.show(f"accuracy of one worker of {method}", of_one, way)
            yield from runs.show(f"distance of one worker of {method}", distance, way)
        for rival in RIVALS:
            pairs = runs.pairs(lockstep, Way(rival, self.nodes))
            leads = (ahead(*pair) for pair in pairs.values())
            yield from ruled(above, f"lead of allreduce over {rival}", leads, 0.01, of=pairs)
            if pairs:
                times = (speedup(*pair) for pair in pairs.values())
                yield shown(f"time of {rival} over that of allreduce", times)

    def panels(self, runs: FullRuns) -> Iterator[Panel]:
        yield from panels_of(runs, (self.nodes,))
        lines = {method: runs.line(Way(method, self.nodes), "distance") for method in METHODS}
        title = f"one worker's distance from the mean, {self.nodes} nodes"
        yield Panel(title=title, x="epochs", y="share of its length", lines=lines)


def ahead(ours: Result, theirs: Result) -> float:
    """The lead in accuracy at the end."""
    return final_accuracy(ours) - final_accuracy(theirs)


def of_one(result: Result) -> float:
    """The accuracy of one worker's model at the end."""
    return final_accuracy(result, REPLICA)


def distance(result: Result) -> float:
    """The last distance of one worker's model from the mean, as a share of its length."""
    return float(next(m["distance"] for m in reversed(result.metrics) if "distance" in m))
