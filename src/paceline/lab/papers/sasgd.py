"""SASGD (Cong, Bhardwaj, Feng, ICPP 2017): convergence, communication, rate on a quadratic."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from paceline.lab.papers.claim import NEEDS, Claim, Runs, Scope, Trials
from paceline.lab.papers.clusters import ETHERNET, PARAMETERS, without_network
from paceline.lab.papers.curves import mean_accuracy
from paceline.lab.papers.verdict import Figure, above, below, shown
from paceline.lab.trials import Trial
from paceline.record.result import Result
from paceline.sim.cluster import load_cluster
from paceline.strategies import make_strategy

PAPER = "SASGD (Cong, Bhardwaj, Feng, ICPP 2017)"


class Convergence(Claim):
    """The accuracy of SASGD per epoch, compared with Downpour and EAMSGD."""

    id = "sasgd-convergence"
    paper = PAPER
    claim = """
        At the same interval SASGD's accuracy per epoch is above that of Downpour and
        EAMSGD, and the gap widens with the learners (1 to 16).
    """
    source = "abstract"
    setup = """
        sasgd, downpour and easgd with momentum 0.9 (EAMSGD), all with interval 4, plain SGD
        and batches of 16, at 1, 4 and 16 learners, 3 seeds. Accuracy
        per epoch is the mean of the test accuracy over the run, at equal numbers of
        samples. One learner is plain SGD at the method's rate. Second column: rates swept at each
        count. EAMSGD has momentum here, and SASGD none; the full form gives both the same.
    """
    rule = """
        The gap to each rival at 4 and at 16 learners is above 0.01, and it grows by more
        than 0.0025 with each doubling from 1 to 16 (least squares).
    """
    needs = NEEDS
    rivals = ("downpour", "eamsgd")

    def trials(self, scope: Scope) -> Trials:
        return {
            (task, column, name, workers, seed): scope.trial(
                task, name, workers, seed, column=column
            )
            for task in scope.tasks
            for column in ("held", "own")
            for name in ("sasgd", *self.rivals)
            for workers in self._counts(column)
            for seed in scope.seeds(3)
        }

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for task in scope.tasks:
            for name in ("sasgd", *self.rivals):
                for workers in self._counts("held"):
                    heights = runs.map(mean_accuracy, task, "held", name, workers)
                    yield shown(
                        f"{task}: accuracy per epoch of {name}, {workers} learners", heights
                    )
            for rival in self.rivals:
                yield from self._gaps(scope, runs, task, "held", rival)
                yield from (f.second_column() for f in self._gaps(scope, runs, task, "own", rival))

    def _gaps(
        self, scope: Scope, runs: Runs, task: str, column: str, rival: str
    ) -> Iterator[Figure]:
        counts = self._counts(column)
        gaps, small = {}, None
        for workers in counts:
            names = ("sasgd", rival)
            pairs = list(runs.pairs(*((task, column, name, workers) for name in names)))
            if workers in (4, 16):
                results = [result for pair in pairs for result in pair]
                small = scope.too_small(task, names, workers, column, results)
            gaps[workers] = [mean_accuracy(one) - mean_accuracy(other) for one, other in pairs]
            what = f"{task}: SASGD's lead over {rival}, {workers} learners"
            yield (
                above(what, gaps[workers], 0.01).unless_too_small(small)
                if workers in (4, 16)
                else shown(what, gaps[workers])
            )
        doublings = [math.log2(workers) for workers in counts]
        slopes = [
            float(np.polyfit(doublings, seed, 1)[0]) for seed in zip(*gaps.values(), strict=True)
        ]
        what = f"{task}: growth of the lead over {rival} by doubling"
        yield above(what, slopes, 0.0025).unless_too_small(small)  # by the largest count

    def _counts(self, column: str) -> tuple[int, ...]:
        return (1, 16) if column == "own" else (1, 4, 16)


METHODS = {
    "sasgd": "sasgd(interval={0})",
    "downpour": "downpour(push_interval={0}, fetch_interval={0})",
}
TICK = {"module": "paceline.lab.papers.training", "name": "tick"}


class Communication(Claim):
    """The cost of SASGD's reductions, compared with a parameter server."""

    id = "sasgd-communication"
    paper = PAPER
    claim = """
        Epoch time falls with the interval; global reductions take less communication time
        than a parameter server, the more so the more learners.
    """
    source = "abstract"
    setup = """
        sasgd (reductions) and downpour (one server) at intervals 1, 4 and 16 and at 2, 4 and 16
        learners, a model of 102 thousand parameters on 1 Gbit/s Ethernet, 32 batches of 5.8 ms
        (+-5 %) for each learner; time alone, without gradients; 3 seeds. Communication time is the
        time of a run less that of the same run on a network without cost.
    """
    rule = """
        At each number of learners SASGD's epoch is above 1.02 times longer at interval 1
        than at 4, and at 4 than at 16; at intervals 1 and 4 the server's communication time
        is above 1.05 times that of the reductions, and that factor grows above 1.1 times
        from 2 to 16 learners.
    """
    counts, steps = (2, 4, 16), 32

    def trials(self, scope: Scope) -> Trials:
        free = without_network(ETHERNET)
        compared = [
            (cluster, name, t) for cluster in (ETHERNET, free) for name in METHODS for t in (1, 4)
        ]
        return {
            (cluster.name, name, interval, workers, seed): Trial(
                train=TICK,
                strategy=make_strategy(METHODS[name].format(interval)),
                workers=workers,
                cluster=cluster,
                seed=seed,
                arguments={"steps": self.steps, "parameters": PARAMETERS},
            )
            for cluster, name, interval in [*compared, (ETHERNET, "sasgd", 16)]
            for workers in self.counts
            for seed in scope.seeds(3)
        }

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for workers in self.counts:
            for short, long in ((1, 4), (4, 16)):
                times = [_epoch(runs, "sasgd", t, workers) for t in (short, long)]
                ratios = [a / b for a, b in zip(*times, strict=True)]
                what = f"SASGD's epoch at interval {short} over that at {long}, {workers} learners"
                yield above(what, ratios, 1.02)
        for interval in (1, 4):
            factors = {
                workers: [
                    server / reductions
                    for server, reductions in zip(
                        _communication(runs, "downpour", interval, workers),
                        _communication(runs, "sasgd", interval, workers),
                        strict=True,
                    )
                ]
                for workers in self.counts
            }
            for workers, values in factors.items():
                what = f"server's communication time over the reductions', interval {interval}"
                yield above(f"{what}, {workers} learners", values, 1.05)
            growth = [b / a for a, b in zip(factors[2], factors[16], strict=True)]
            yield above(f"growth of that factor from 2 to 16, interval {interval}", growth, 1.1)


def _epoch(runs: Runs, name: str, interval: int, workers: int, free: bool = False) -> list[float]:
    cluster = (without_network(ETHERNET) if free else ETHERNET).name
    return runs.map(seconds, cluster, name, interval, workers)


def _communication(runs: Runs, name: str, interval: int, workers: int) -> list[float]:
    costly = _epoch(runs, name, interval, workers)
    free = _epoch(runs, name, interval, workers, free=True)
    return [a - b for a, b in zip(costly, free, strict=True)]


def seconds(result: Result) -> float:
    """The virtual time from the first step to the end."""
    assert result.virtual_seconds is not None
    return result.virtual_seconds - result.first_step_s


DESCEND = {"module": "paceline.lab.papers.training", "name": "descend"}
STEADY = math.sqrt(3) - 1
"""The largest y = L * gamma * T that the condition y + y*y/2 <= 1 allows (models averaged)."""


class Rate(Claim):
    """The convergence bound of SASGD, on a quadratic."""

    id = "sasgd-rate"
    paper = PAPER
    claim = """
        The bound 2D/(gamma_p p T K) + L gamma_p s^2 + (gamma L)^2 T s^2/2 on the squared
        gradient holds on a quadratic, and at the step size that its condition allows more
        samples are needed as the interval grows.
    """
    source = "derived"
    setup = """
        sasgd that averages 4 learners on a quadratic of 20 dimensions (L = 1, least
        curvature 0.1, gradient variance s^2 = 1), 256 steps each, at intervals T = 1, 4 and
        16; gamma = 0.732/(L T), the largest that the condition L gamma T + (L gamma T)^2/2
        <= 1 allows; 5 seeds.
    """
    rule = """
        The least squared gradient (the round whose mean over seeds is least) over the bound
        is below 1 at each interval; the samples to 5 % of the first squared gradient are
        above 1.5 times as many at interval 4 as at 1, and at 16 as at 4. Shown beside: the
        same at one step size for all, where averaging commutes with the steps of a
        quadratic and nothing is lost.
    """
    intervals, workers, steps, dimensions, noise = (1, 4, 16), 4, 256, 20, 1.0

    def trials(self, scope: Scope) -> Trials:
        return {
            (allowed, interval, seed): Trial(
                train=DESCEND,
                strategy=make_strategy(f"sasgd(interval={interval})"),
                workers=self.workers,
                cluster=load_cluster("ideal"),
                seed=seed,
                arguments={
                    "steps": self.steps,
                    "lr": STEADY / (interval if allowed else max(self.intervals)),
                    "dimensions": self.dimensions,
                    "noise": self.noise,
                },
            )
            for allowed in (True, False)
            for interval in self.intervals
            for seed in scope.seeds(5)
        }

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for interval in self.intervals:
            squares = np.array([_squares(result) for result in runs.of(True, interval)])
            least = squares[:, squares.mean(axis=0).argmin()] / self.bound(
                interval, squares.shape[1]
            )
            yield below(f"least squared gradient over the bound, interval {interval}", least, 1.0)
        for allowed in (True, False):
            needed = {
                interval: runs.map(self._samples, allowed, interval) for interval in self.intervals
            }
            for short, long in ((1, 4), (4, 16)):
                ratios = [b / a for a, b in zip(needed[short], needed[long], strict=True)]
                what = f"samples needed at interval {long} over those at {short}"
                yield (
                    above(what, ratios, 1.5) if allowed else shown(f"{what}, one step size", ratios)
                )

    def bound(self, interval: int, rounds: int) -> float:
        """The upper bound of the squared gradient after this many rounds."""
        gamma, p = STEADY / interval, self.workers
        start = float(np.linspace(0.1, 1.0, self.dimensions).sum()) / 2
        first = 2 * start / (gamma * interval * rounds)
        return first + gamma / p * self.noise + gamma**2 * interval * self.noise / 2

    def _samples(self, result: Result) -> float:
        """The batches of all learners until the squared gradient falls to 5 % of the first."""
        target = 0.05 * float((np.linspace(0.1, 1.0, self.dimensions) ** 2).sum())
        reached = [m["steps"] for m in result.metrics if m["square"] <= target]
        return float(min(reached, default=self.steps) * self.workers)


def _squares(result: Result) -> list[float]:
    return [record["square"] for record in result.metrics]
