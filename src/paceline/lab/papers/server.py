"""Parameter servers: Downpour's largest stable learning rate, and the limit of one link."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from paceline.lab.papers.claim import TRAIN, Claim, Runs, Scope, Trials, task_arguments
from paceline.lab.papers.clusters import ETHERNET, PARAMETERS
from paceline.lab.papers.sasgd import PAPER as SASGD
from paceline.lab.papers.sasgd import TICK, seconds
from paceline.lab.papers.verdict import Figure, above, below, shown
from paceline.lab.trials import Trial
from paceline.record.result import Result
from paceline.sim.cluster import load_cluster
from paceline.strategies import make_strategy

GRID = tuple(0.02 * 2**power for power in range(8))


class StableRate(Claim):
    """The largest learning rate at which Downpour still learns."""

    id = "downpour-lr"
    paper = SASGD
    claim = """
        Asynchronous SGD's stable learning rate shrinks with the number of learners.
    """
    source = "abstract"
    setup = """
        downpour (a push and a fetch after every batch of 16) for one epoch at the rates
        0.02 to 2.56 by factors of 2, at 1, 4 and 16 learners, 3 seeds. A rate is stable if
        at it and all smaller ones the last test loss is below 0.9 times that of a guess.
    """
    rule = """
        The exponent of the stable rate in the number of learners (slope of its logarithm,
        least squares) is below -0.25; 1/p would be -1.
    """
    counts = (1, 4, 16)

    def trials(self, scope: Scope) -> Trials:
        return {
            (task, workers, lr, seed): Trial(
                train=TRAIN,
                strategy=make_strategy("downpour"),
                workers=workers,
                cluster=load_cluster("ethernet-1g"),
                seed=seed,
                arguments={**task_arguments(task, workers), "epochs": 1, "lr": lr},
            )
            for task in scope.tasks
            for workers in self.counts
            for lr in GRID
            for seed in scope.seeds(3)
        }

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for task in scope.tasks:
            stable = {workers: self._stable(scope, runs, task, workers) for workers in self.counts}
            for workers, rates in stable.items():
                yield shown(f"{task}: largest stable rate, {workers} learners", rates)
            logs = [math.log2(workers) for workers in self.counts]
            slopes = [
                float(np.polyfit(logs, np.log2(rates), 1)[0])
                for rates in zip(*stable.values(), strict=True)
            ]
            yield below(f"{task}: exponent of the stable rate in the learners", slopes, -0.25)

    def _stable(self, scope: Scope, runs: Runs, task: str, workers: int) -> list[float]:
        """The largest stable rate of each seed; half the smallest rate if none is stable."""
        largest = [GRID[0] / 2] * len(scope.seeds(3))
        stable = [True] * len(largest)
        guess = math.log(10)
        for lr in GRID:
            for index, result in enumerate(runs.of(task, workers, lr)):
                stable[index] = stable[index] and (result.loss or math.inf) < 0.9 * guess
                if stable[index]:
                    largest[index] = lr
        return largest


class Contention(Claim):
    """How many workers the link of one server can serve."""

    id = "ps-contention"
    paper = "Gossiping SGD (Jin, Yuan, Iandola, Keutzer, 2016)"
    claim = """
        A parameter server's link limits asynchronous training as workers grow; shards and
        gossip lift the limit.
    """
    source = "abstract"
    setup = """
        downpour with one server, with 4 shards on nodes of their own, and gossip, an
        exchange after each batch of 5.8 ms (+-5 %), a model of 102 thousand parameters on 1
        Gbit/s Ethernet, 24 steps a worker, at 2, 8 and 32 workers; time alone; 3 seeds.
    """
    rule = """
        From 8 to 32 workers the throughput of one server grows below 1.5 times (4 would be
        perfect); at 32, that of 4 shards and that of gossip are above 1.5 times that of one
        server.
    """
    steps = 24
    methods: ClassVar[dict[str, str]] = {
        "one server": "downpour",
        "4 shards": "downpour(shards=4)",
        "gossip": "gossip",
    }

    def trials(self, scope: Scope) -> Trials:
        return {
            (name, workers, seed): Trial(
                train=TICK,
                strategy=make_strategy(spec),
                workers=workers,
                cluster=ETHERNET,
                seed=seed,
                arguments={"steps": self.steps, "parameters": PARAMETERS},
            )
            for name, spec in self.methods.items()
            for workers in (2, 8, 32)
            for seed in scope.seeds(3)
        }

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        speed = {
            (name, workers): runs.map(throughput, name, workers)
            for name in self.methods
            for workers in (2, 8, 32)
        }
        for (name, workers), values in speed.items():
            yield shown(f"batches a second, {name}, {workers} workers", values)
        growth = [
            b / a for a, b in zip(speed["one server", 8], speed["one server", 32], strict=True)
        ]
        yield below("growth of one server's throughput from 8 to 32 workers", growth, 1.5)
        for name in ("4 shards", "gossip"):
            ratios = [b / a for a, b in zip(speed["one server", 32], speed[name, 32], strict=True)]
            yield above(f"throughput of {name} over one server, 32 workers", ratios, 1.5)


def throughput(result: Result) -> float:
    """The steps of all workers per second."""
    return result.steps / seconds(result)
