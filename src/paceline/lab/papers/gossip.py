"""Gossiping SGD (Jin, Yuan, Iandola, Keutzer, 2016): few nodes, many nodes, and nodes that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.common.faults import Fault, kill, slow
from paceline.lab.papers.claim import NEEDS, Claim, Runs, Scope, Trials
from paceline.lab.papers.curves import ANSWER, REPLICA, final_accuracy, mean_accuracy, speedup
from paceline.lab.papers.sasgd import seconds
from paceline.lab.papers.verdict import Figure, above, always, below, shown
from paceline.record.result import Result

PAPER = "Gossiping SGD (Jin, Yuan, Iandola, Keutzer, 2016)"
RIVALS = ("gossip", "easgd")
METRICS = {"mean model": ANSWER, "single worker": REPLICA}


class Small(Claim):
    """Few nodes: do asynchronous methods converge faster?"""

    id = "gossip-small"
    paper = PAPER
    claim = """
        Up to about 32 nodes gossip and elastic averaging converge faster than all-reduce:
        per epoch and in time, at two step sizes, by the mean model and by a single worker.
    """
    source = "abstract"
    setup = """
        gossip (pull, every step), easgd (interval 4) and allreduce at 8 and 32 nodes on 1
        Gbit/s Ethernet, batches of 16 a node, plain SGD, at each method's rate from the
        sweep and at a quarter of it; 3 seeds. The mean model of easgd is its center. Second
        column: rates swept at 32 nodes.
    """
    rule = """
        For each method, number of nodes, step size, and for mean model and single worker:
        the accuracy per epoch (mean over the run, at equal samples) less that of allreduce
        is above 0, and the time of allreduce over its own, to an accuracy that both reach
        (the lower of their best, of means of three records), is above 1.05.
    """
    needs = NEEDS
    because = """
        It is the mean model that leads: a single worker carries the noise of its own batches. And
        at 32 nodes the link of the one server holds elastic averaging back (ps-contention).
    """
    counts, factors = (8, 32), {"the rate": 1.0, "a quarter of it": 0.25}

    def trials(self, scope: Scope) -> Trials:
        held: Trials = {
            (task, "held", name, workers, size, seed): scope.trial(
                task, name, workers, seed, factor=factor
            )
            for task in scope.tasks
            for name in ("allreduce", *RIVALS)
            for workers in self.counts
            for size, factor in self.factors.items()
            for seed in scope.seeds(3)
        }
        own: Trials = {
            (task, "own", name, 32, "the rate", seed): scope.trial(
                task, name, 32, seed, column="own"
            )
            for task in scope.tasks
            for name in ("allreduce", *RIVALS)
            for seed in scope.seeds(3)
        }
        return held | own

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for task in scope.tasks:
            for rival in RIVALS:
                for workers in self.counts:
                    for size in self.factors:
                        yield from self._compare(scope, runs, (task, "held"), rival, workers, size)
                for figure in self._compare(scope, runs, (task, "own"), rival, 32, "the rate"):
                    yield figure.second_column()

    def _compare(
        self, scope: Scope, runs: Runs, start: tuple[str, str], rival: str, workers: int, size: str
    ) -> Iterator[Figure]:
        pairs = list(
            runs.pairs((*start, rival, workers, size), (*start, "allreduce", workers, size))
        )
        task, column = start
        results = [result for pair in pairs for result in pair]
        small = scope.too_small(task, ("allreduce", rival), workers, column, results)
        for words, metric in METRICS.items():
            where = f"{start[0]}: {rival}, {workers} nodes, {size}, {words}"
            leads = [
                mean_accuracy(ours, metric) - mean_accuracy(theirs, metric)
                for ours, theirs in pairs
            ]
            yield above(f"{where}: lead per epoch", leads, 0.0).unless_too_small(small)
            times = [speedup(ours, theirs, metric) for ours, theirs in pairs]
            yield above(f"{where}: times sooner", times, 1.05).unless_too_small(small)


class Large(Claim):
    """A hundred nodes: does all-reduce scale better?"""

    id = "gossip-large"
    paper = PAPER
    claim = """
        Towards 100 nodes all-reduce scales better than gossip and elastic averaging.
    """
    source = "abstract"
    setup = """
        allreduce, gossip (pull, every step) and easgd (interval 4) at 100 nodes on 1 Gbit/s
        Ethernet, batches of 8 a node, plain SGD, each at its rate from the sweep at 8
        workers; 3 seeds. Second column: rates swept at 100.
    """
    rule = """
        After the same number of samples the accuracy of allreduce less that of each other's
        answer is above 0.01. The single worker, and times, are shown.
    """
    needs = NEEDS
    nodes = 100

    def trials(self, scope: Scope) -> Trials:
        return {
            (task, column, name, seed): scope.trial(task, name, self.nodes, seed, column=column)
            for task in scope.tasks
            for column in ("held", "own")
            for name in ("allreduce", *RIVALS)
            for seed in scope.seeds(3)
        }

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for task in scope.tasks:
            for column in ("held", "own"):
                for figure in self._figures(scope, runs, task, column):
                    yield figure if column == "held" else figure.second_column()

    def _figures(self, scope: Scope, runs: Runs, task: str, column: str) -> Iterator[Figure]:
        for name in ("allreduce", *RIVALS):
            yield shown(f"{task}: accuracy of {name}", runs.map(final_accuracy, task, column, name))
        for rival in RIVALS:
            pairs = list(runs.pairs((task, column, "allreduce"), (task, column, rival)))
            results = [result for pair in pairs for result in pair]
            small = scope.too_small(task, ("allreduce", rival), self.nodes, column, results)
            for words, metric in METRICS.items():
                leads = [
                    final_accuracy(ours, metric) - final_accuracy(theirs, metric)
                    for ours, theirs in pairs
                ]
                what = f"{task}: lead of allreduce over {rival}, {words}"
                decides = metric == ANSWER
                yield (
                    above(what, leads, 0.01).unless_too_small(small)
                    if decides
                    else shown(what, leads)
                )
            times = [speedup(ours, theirs) for ours, theirs in pairs]
            yield shown(f"{task}: time of {rival} over that of allreduce", times)


FAULTS: dict[str, tuple[Fault, ...]] = {
    "none": (),
    "killed": (kill(rank=3).at(step=20),),
    "slow": (slow(rank=3, factor=4.0).at(step=0),),
}


class Faults(Claim):
    """A worker that fails, and one that lags."""

    id = "gossip-faults"
    paper = PAPER
    claim = """
        A failing worker stops all-reduce (without recovery) and a lagging one slows it to
        its pace; gossip goes on.
    """
    source = "abstract"
    setup = """
        allreduce and gossip at 8 workers on 10 Gbit/s Ethernet, two epochs; worker 3 is
        killed before its step 20, or takes 4 times as long from the beginning; 3 seeds.
    """
    rule = """
        Every run of allreduce with a killed worker ends in an error, and every one of
        gossip goes on to the end, its accuracy less that of the run without a fault above
        -0.05. With the slow worker the run takes above 3 times as long under allreduce and
        below 1.5 times under gossip.
    """

    def trials(self, scope: Scope) -> Trials:
        plan: Trials = {}
        for name in ("allreduce", "gossip"):
            for fault, faults in FAULTS.items():
                for seed in scope.seeds(3):
                    task = scope.tasks[0]
                    trial = scope.trial(task, name, 8, seed, cluster="ethernet-10g", faults=faults)
                    plan[name, fault, seed] = replace(
                        trial, arguments={**trial.arguments, "epochs": 2}
                    )
        return plan

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        stopped = [
            o.error is not None and "rank 3" in o.error
            for o in runs.outcomes("allreduce", "killed")
        ]
        yield always("allreduce, a worker killed: the run ends and names it", stopped)
        survived = [
            o.result is not None and o.result.lost_workers == 1
            for o in runs.outcomes("gossip", "killed")
        ]
        yield always("gossip, a worker killed: the run goes on to its end", survived)
        if all(survived):
            pairs = runs.pairs(("gossip", "killed"), ("gossip", "none"))
            losses = [final_accuracy(killed) - final_accuracy(calm) for killed, calm in pairs]
            yield above(
                "gossip, a worker killed: accuracy less that without a fault", losses, -0.05
            )
        times = {name: list(self._slowdown(runs, name)) for name in ("allreduce", "gossip")}
        yield above("allreduce, a worker 4 times slower: how much longer", times["allreduce"], 3.0)
        yield below("gossip, a worker 4 times slower: how much longer", times["gossip"], 1.5)

    def _slowdown(self, runs: Runs, name: str) -> Iterator[float]:
        slowed: Result
        undisturbed: Result
        for slowed, undisturbed in runs.pairs((name, "slow"), (name, "none")):
            yield seconds(slowed) / seconds(undisturbed)
