"""Cyclic updates with a dynamic delay at their scale: 8 workers of three speeds."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.lab.papers import cyclic
from paceline.lab.papers.curves import ANSWER, final_accuracy, mean_lead, speedup
from paceline.lab.papers.full.claim import FullClaim, FullRuns, Panel, ruled, shown_only
from paceline.lab.papers.full.gossip import ahead
from paceline.lab.papers.full.setup import Way
from paceline.lab.papers.rates import METHODS
from paceline.lab.papers.verdict import Figure, above, near_zero, shown

TEXTS = {
    "dynamic": METHODS["cyclic"],
    "fixed": METHODS["cyclic-fixed"],
    "allreduce": "allreduce",
    "ssp": "ssp(bound=0)",
}
WAYS = {name: Way(text, cyclic.WORKERS, contended=True) for name, text in TEXTS.items()}
SETUP = """
    8 workers of speeds 1, 1, 1/2 and 1/4 on 1 Gbit/s Ethernet, each with momentum 0.9, decay
    0.0005, the same warm-up and drops, and the best of its own rates; 3 seeds.
"""


class SameAccuracy(FullClaim):
    """The accuracy of the dynamic delay, after the same number of samples."""

    id, paper, claim = cyclic.SameAccuracy.id, cyclic.PAPER, cyclic.SameAccuracy.claim
    source = cyclic.SameAccuracy.source
    setup = f"""
        cyclic(form=gradient), the paper's own, with max_accumulated 4 and the mean of what is
        accumulated, with max_accumulated 1 (fixed), and allreduce; {SETUP}
    """
    rule = """
        The difference to the accuracy of each of the two others is within 0.01 of 0 in the mean
        and its interval within 0.02; it does not hold where the whole interval is farther than
        0.01 from 0.
    """
    ways = tuple(WAYS[name] for name in ("dynamic", "fixed", "allreduce"))

    def judge(self, runs: FullRuns) -> Iterator[Figure]:
        for name in ("dynamic", "fixed", "allreduce"):
            yield from runs.show(f"accuracy of {name}", final_accuracy, WAYS[name])
        for other in ("allreduce", "fixed"):
            pairs = runs.pairs(WAYS["dynamic"], WAYS[other])
            what = f"accuracy of dynamic less that of {other}"
            gaps = (ahead(*pair) for pair in pairs.values())
            yield from ruled(near_zero, what, gaps, 0.01, 0.02, of=pairs)

    def panels(self, runs: FullRuns) -> Iterator[Panel]:
        lines = {name: runs.line(way, ANSWER) for name, way in WAYS.items()}
        yield Panel(title="after the same samples", x="epochs", y="accuracy", lines=lines)


class Faster(FullClaim):
    """The time that the dynamic delay takes to reach an accuracy."""

    id, paper, claim = cyclic.Faster.id, cyclic.PAPER, cyclic.Faster.claim
    source = cyclic.Faster.source
    setup = f"""
        The runs of cyclic-same-accuracy, and synchronous SGD through the server (ssp with bound
        0); shown beside: synchronous SGD by an all-reduce. {SETUP}
    """
    rule = """
        The time of synchronous SGD through the server, and that of the fixed form, over that of
        the dynamic form, to an accuracy that both reach (the lower of their best, of means of
        three records), is above 1.05. Shown beside: the lead in accuracy, in the mean over the
        time that both runs have.
    """
    ways = tuple(WAYS.values())

    def judge(self, runs: FullRuns) -> Iterator[Figure]:
        for other in ("ssp", "fixed", "allreduce"):
            pairs = runs.pairs(WAYS["dynamic"], WAYS[other])
            times = (speedup(*pair) for pair in pairs.values())
            figures = ruled(above, f"time of {other} over dynamic", times, 1.05, of=pairs)
            yield from shown_only(figures) if other == "allreduce" else figures
            if pairs:
                leads = (mean_lead(*pair) for pair in pairs.values())
                yield shown(f"lead of dynamic over {other} in time", leads)

    def panels(self, runs: FullRuns) -> Iterator[Panel]:
        lines = {name: runs.line(way, ANSWER, "t") for name, way in WAYS.items()}
        yield Panel(title="over time", x="virtual time (s)", y="accuracy", lines=lines)
