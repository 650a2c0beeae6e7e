"""Cyclic updates with a dynamic delay (Hu et al., PRCV 2018): equal accuracy, in less time?"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.lab.papers.claim import NEEDS, Claim, Runs, Scope, Trials
from paceline.lab.papers.clusters import CONTENDED, without_network
from paceline.lab.papers.curves import final_accuracy, mean_lead, speedup
from paceline.lab.papers.verdict import Figure, above, near_zero, shown
from paceline.sim.cluster import Cluster
from paceline.strategies import make_strategy

PAPER = "Dynamic-delay cyclic updates (Hu et al., PRCV 2018)"
WORKERS = 8
FREE = without_network(CONTENDED)
DYNAMIC = {"mean": "cyclic", "sum": "cyclic-sum"}
"""The methods by scale: a worker pushes the mean or the sum of its accumulated gradients."""


def runs_on(scope: Scope, cluster: Cluster, task: str, seeds: int) -> Trials:
    """The dynamic form at both scales, the fixed one, and synchronous SGD by an all-reduce."""
    return {
        (cluster.name, task, name, seed): scope.trial(task, name, WORKERS, seed, cluster=cluster)
        for name in (*DYNAMIC.values(), "cyclic-fixed", "allreduce")
        for seed in scope.seeds(seeds)
    }


class SameAccuracy(Claim):
    """The accuracy of the dynamic delay, after the same number of samples."""

    id = "cyclic-same-accuracy"
    paper = PAPER
    claim = """
        Dynamic delay reaches the accuracy of synchronous and of fixed cyclic updates, after
        the same number of samples.
    """
    source = "abstract"
    setup = """
        cyclic(form=gradient), the paper's own, with max_accumulated 4 and either scale, with
        max_accumulated 1 (fixed), and allreduce; 8 workers of speeds 1, 1, 1/2 and 1/4, batches
        of 16, plain SGD, each at its own rate from the sweep; 5 seeds. The accuracy is that of
        the last record.
    """
    rule = """
        For each scale and each of the two others, the difference of the accuracies is
        within 0.01 of 0 in the mean and its interval within 0.02; it does not hold where
        the whole interval is farther than 0.01 from 0.
    """
    needs = NEEDS
    because = """
        Of the same samples the dynamic form makes up to 4 times fewer updates than the fixed one,
        each as old (7 updates): it needs more samples.
    """
    others = ("allreduce", "cyclic-fixed")

    def trials(self, scope: Scope) -> Trials:
        plans = [runs_on(scope, CONTENDED, task, 5) for task in scope.tasks]
        return {key: trial for plan in plans for key, trial in plan.items()}

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        where = CONTENDED.name
        for task in scope.tasks:
            for name in (*DYNAMIC.values(), *self.others):
                yield shown(
                    f"{task}: accuracy of {name}", runs.map(final_accuracy, where, task, name)
                )
            for scale, name in DYNAMIC.items():
                for other in self.others:
                    pairs = list(runs.pairs((where, task, name), (where, task, other)))
                    results = [result for pair in pairs for result in pair]
                    small = scope.too_small(task, (name, other), WORKERS, "held", results)
                    gaps = [final_accuracy(ours) - final_accuracy(theirs) for ours, theirs in pairs]
                    what = f"{task}: accuracy of dynamic ({scale}) less that of {other}"
                    yield near_zero(what, gaps, 0.01, 0.02).unless_too_small(small)


class Faster(Claim):
    """The time that the dynamic delay takes to reach an accuracy."""

    id = "cyclic-faster"
    paper = PAPER
    claim = """
        Dynamic delay reaches that accuracy sooner than synchronous and fixed cyclic updates
        where pushes contend for the server's link and workers differ by 2 to 4 times.
    """
    source = "abstract"
    setup = """
        The runs of cyclic-same-accuracy, on 1 Gbit/s Ethernet, and synchronous SGD through
        the server (ssp with bound 0, at 1/8 of the rate of allreduce: the same steps, but
        every worker pushes to the server and waits for all); shown beside: synchronous SGD
        by an all-reduce, which has no server's link to contend for; and all of it on links
        without cost (3 seeds).
    """
    rule = """
        For each scale, the time of synchronous SGD through the server, and that of the
        fixed form, over that of the dynamic form, to an accuracy that both reach (the lower
        of their best, of means of three records), is above 1.05. Shown beside: the lead in
        accuracy, in the mean over the time that both runs have.
    """
    needs = NEEDS
    decisive = ("ssp", "cyclic-fixed")

    def trials(self, scope: Scope) -> Trials:
        plans: Trials = {}
        for task in scope.tasks:
            plans |= runs_on(scope, CONTENDED, task, 5)
            plans |= runs_on(scope, FREE, task, 3)
            for seed in scope.seeds(5):
                plans[CONTENDED.name, task, "ssp", seed] = scope.trial(
                    task,
                    "allreduce",
                    WORKERS,
                    seed,
                    cluster=CONTENDED,
                    factor=1 / WORKERS,
                    strategy=make_strategy("ssp(bound=0)"),
                )
        return plans

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for task in scope.tasks:
            for scale in DYNAMIC:
                for other in (*self.decisive, "allreduce"):
                    yield from self._compare(scope, runs, CONTENDED, task, scale, other)
                for other in ("cyclic-fixed", "allreduce"):
                    yield from self._compare(scope, runs, FREE, task, scale, other)

    def _compare(
        self, scope: Scope, runs: Runs, cluster: Cluster, task: str, scale: str, other: str
    ) -> Iterator[Figure]:
        ours, theirs = (cluster.name, task, DYNAMIC[scale]), (cluster.name, task, other)
        pairs = list(runs.pairs(ours, theirs))
        times = [speedup(*pair) for pair in pairs]
        what = f"{task}, {cluster.name}: time of {other} over dynamic ({scale})"
        decides = cluster is CONTENDED and other in self.decisive
        names = (DYNAMIC[scale], "allreduce" if other == "ssp" else other)
        results = [result for pair in pairs for result in pair]
        small = scope.too_small(task, names, WORKERS, "held", results)
        yield above(what, times, 1.05).unless_too_small(small) if decides else shown(what, times)
        leads = [mean_lead(*pair) for pair in pairs]
        yield shown(
            f"{task}, {cluster.name}: lead of dynamic ({scale}) over {other} in time", leads
        )
