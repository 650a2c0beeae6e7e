"""Make the runs of a plan for real, on this machine, and compare the times to the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from paceline.common.reference import Reference
from paceline.errors import PacelineError
from paceline.lab.calibrate.check import Prediction
from paceline.lab.calibrate.clock import busy_share
from paceline.lab.calibrate.machine import one_thread_a_rank
from paceline.lab.plan.estimate import Candidate, Estimate
from paceline.launcher.launch import launch

CHECKED = 3
"""How many candidates are checked, besides the same number of workers in lockstep."""
LOCKSTEP = "allreduce"


@dataclass(kw_only=True)
class Check(Prediction):
    """The time of a candidate to the target, predicted and measured, in seconds."""

    candidate: Candidate

    def to_json(self) -> dict[str, Any]:
        spec, workers = self.candidate.spec, self.candidate.workers
        return {"strategy": spec, "workers": workers, **super().to_json()}


def to_check(estimates: Sequence[Estimate]) -> list[Estimate]:
    """The best candidates, and lockstep with as many workers as the best has."""
    reached = [estimate for estimate in estimates if estimate.seconds is not None]
    lockstep = [
        estimate
        for estimate in reached[CHECKED:]
        if estimate.candidate.spec == LOCKSTEP
        and estimate.candidate.workers == reached[0].candidate.workers
    ]
    return [*reached[:CHECKED], *lockstep]


def check(
    estimates: Sequence[Estimate],
    train: Reference,
    arguments: Mapping[str, Any],
    seeds: Sequence[int],
    on_run: Callable[[Check], None],
) -> list[Check]:
    """Make the real runs in turn, once for each seed."""
    checks = [
        Check(estimate.seconds.mean, candidate=estimate.candidate)
        for estimate in estimates
        if estimate.seconds is not None
    ]
    target = estimates[0].goal.target
    with one_thread_a_rank():
        for number, seed in enumerate(seeds):
            first = number % len(checks)
            for each in [*checks[first:], *checks[:first]]:
                each.busy.append(busy_share())
                each.measured.append(_seconds(each.candidate, train, arguments, seed, target))
                on_run(each)
    return checks


def _seconds(
    candidate: Candidate, train: Reference, arguments: Mapping[str, Any], seed: int, target: float
) -> float:
    result = launch(
        train,
        workers=candidate.workers,
        strategy=candidate.strategy,
        seed=seed,
        arguments=arguments,
    )
    seconds = result.seconds_to(target)
    if seconds is None:
        raise PacelineError(
            f"{candidate} did not reach accuracy {target:g} in a real run with seed {seed}:"
            f" it ended at {result.accuracy}"
        )
    return seconds


def order_is_right(checks: Sequence[Check]) -> bool:
    """Whether the runs came in the predicted order, where they differ by more than their spread."""
    return all(one.same_order(other) for one, other in combinations(checks, 2))
