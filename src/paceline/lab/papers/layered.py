"""Layered SGD (Yu, Flynn, Yoo, D'Imperio, 2019): equal to synchronous SGD, and scaling better."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import ClassVar

from paceline.lab.papers.claim import Claim, Runs, Scope, Trials
from paceline.lab.papers.clusters import AUTHORS, LOADERS, as_resnet50
from paceline.lab.papers.sasgd import TICK
from paceline.lab.papers.verdict import Figure, above, below, shown
from paceline.lab.trials import Trial
from paceline.record.result import Result
from paceline.sim.cluster import load_cluster
from paceline.strategies import make_strategy

PAPER = "Layered SGD (Yu, Flynn, Yoo, D'Imperio, 2019)"
TRAIL = {"module": "paceline.lab.papers.training", "name": "trail"}


class Equal(Claim):
    """Whether layered SGD makes the steps of synchronous SGD."""

    id = "layered-equal"
    paper = PAPER
    claim = """
        Layered SGD is synchronous SGD, step for step.
    """
    source = "abstract"
    setup = """
        allreduce and layered at 8 workers in groups of 1, 2, 4 and 8: a small network in
        double precision with momentum, weight decay and a learning rate that changes at
        each of 30 steps; 3 seeds. After every step the parameters are compared along 8
        random directions, relative to their norm.
    """
    rule = """
        The largest difference of all steps is below 1e-10 for each size of group (different
        orders of summation differ by about 1e-15).
    """
    sizes, workers = (1, 2, 4, 8), 8

    def trials(self, scope: Scope) -> Trials:
        methods = {"allreduce": "allreduce"} | {
            f"groups of {size}": f"layered(group_size={size})" for size in self.sizes
        }
        return {
            (name, seed): Trial(
                train=TRAIL,
                strategy=make_strategy(spec),
                workers=self.workers,
                cluster=load_cluster("two-tier-256"),
                seed=seed,
                arguments={"steps": 30, "batch_size": 8},
            )
            for name, spec in methods.items()
            for seed in scope.seeds(3)
        }

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for size in self.sizes:
            pairs = runs.pairs((f"groups of {size}",), ("allreduce",))
            worst = [largest_difference(ours, theirs) for ours, theirs in pairs]
            yield below(f"largest difference over 30 steps, groups of {size}", worst, 1e-10)


def largest_difference(one: Result, other: Result) -> float:
    """The largest difference between two trails, relative to the norm of the parameters."""
    return max(
        float(abs(mine[name] - theirs[name]) / theirs["norm"])
        for mine, theirs in zip(one.metrics, other.metrics, strict=True)
        for name in mine
        if name.startswith("view_")
    )


class Scaling(Claim):
    """How well layered SGD scales, compared with conventional synchronous SGD."""

    id = "layered-scaling"
    paper = PAPER
    claim = """
        On a two-tier cluster, while loading a batch takes longer than the reduction between
        groups, layered SGD's efficiency at 8 to 256 workers is above that of conventional
        SGD. (About 93 against 64 % at 256 is reported; not verified.)
    """
    source = "abstract"
    setup = """
        layered (groups of 4) and allreduce at 8, 64 and 256 workers, 4 to a node: 10 GB/s
        inside, 10 Gbit/s and 20 us between. Bytes and tensors of ResNet-50; times assumed: 1.5
        s to compute a batch (+-5 %), 1.0 s to load it. Collectives as in the authors' code: a
        blocking ring for each of the 161 tensors. 5 steps, time alone, 3 seeds. Efficiency is
        the pace of a worker over that of a single one with the same loader. Shown beside, at
        256 workers: one fused ring, and either with a loader that prefetches.
    """
    rule = """
        At each number of workers the efficiency of layered less that of allreduce is above
        0.01.
    """
    methods: ClassVar[dict[str, str]] = {
        "layered": "layered(group_size=4)",
        "allreduce": "allreduce",
    }

    def trials(self, scope: Scope) -> Trials:
        plan: Trials = {}
        for seed in scope.seeds(3):
            for loader in LOADERS:
                plan[loader, "allreduce", 1, seed] = self._trial(loader, "allreduce", 1, seed)
                for name, spec in self.methods.items():
                    for workers in self._counts(loader):
                        trial = self._trial(loader, spec, workers, seed)
                        plan[loader, name, workers, seed] = trial
        return plan

    def _trial(self, loader: str, spec: str, workers: int, seed: int) -> Trial:
        return Trial(
            train=TICK,
            strategy=make_strategy(spec),
            workers=workers,
            cluster=as_resnet50(loader),
            seed=seed,
            arguments={"steps": 5, "parameters": 1_000},
        )

    def judge(self, scope: Scope, runs: Runs) -> Iterator[Figure]:
        for loader in LOADERS:
            for workers in self._counts(loader):
                efficiencies = {
                    name: efficiency(runs, loader, name, workers) for name in self.methods
                }
                for name, values in efficiencies.items():
                    yield shown(f"{loader}: efficiency of {name}, {workers} workers", values)
                pairs = zip(efficiencies["layered"], efficiencies["allreduce"], strict=True)
                gains = [layered - plain for layered, plain in pairs]
                what = f"{loader}: efficiency gained, {workers} workers"
                decides = loader == AUTHORS
                yield above(what, gains, 0.01) if decides else shown(what, gains)

    def _counts(self, loader: str) -> tuple[int, ...]:
        return (8, 64, 256) if loader == AUTHORS else (256,)


def efficiency(runs: Runs, loader: str, name: str, workers: int) -> list[float]:
    """The speed of a worker relative to that of a worker alone."""
    pairs = runs.pairs((loader, "allreduce", 1), (loader, name, workers))
    return [step_s(alone) / step_s(together) for alone, together in pairs]


def step_s(result: Result) -> float:
    """The mean time from one step of a worker to its next, over all workers."""
    times: dict[int, list[float]] = {}
    for record in result.metrics:
        times.setdefault(record["rank"], []).append(record["t"])
    return fmean((steps[-1] - steps[0]) / (len(steps) - 1) for steps in times.values())
