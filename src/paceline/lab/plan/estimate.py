"""What a plan asks for, and what simulations say of each way to reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from paceline.lab.stats import Spread, spread
from paceline.lab.trials import TrialOutcome
from paceline.launcher.spec import ranks_for
from paceline.record.result import Result
from paceline.sim.cluster import Cluster
from paceline.sim.compute import Costs
from paceline.strategies.base import Strategy

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a plan is for.

    Attributes:
        target: the accuracy to reach.
        price: of one process for an hour; None: it does not matter.
        mtbf_s: the mean time between two failures of one process; None: none fails.
    """

    target: float
    price: float | None = None
    mtbf_s: float | None = None


@dataclass(frozen=True)
class Candidate:
    """One way to train: a method with its options, and how many workers."""

    spec: str
    strategy: Strategy
    workers: int

    @property
    def ranks(self) -> int:
        """How many processes it takes, servers included."""
        return ranks_for(self.strategy, self.workers)

    def __str__(self) -> str:
        return f"{self.spec} with {self.workers} workers"


@dataclass
class Estimate:
    """What simulations say of a candidate.

    Attributes:
        outcomes: of its simulations, by seed.
    """

    candidate: Candidate
    goal: Goal
    cluster: Cluster
    outcomes: dict[int, TrialOutcome] = field(default_factory=dict)

    @property
    def results(self) -> list[Result]:
        """The results of the simulations that came to their end."""
        return [outcome.result for outcome in self.outcomes.values() if outcome.result is not None]

    @property
    def times(self) -> dict[int, float]:
        """The seconds to the target, for each seed that has reached it."""
        times = {seed: self._time(outcome) for seed, outcome in self.outcomes.items()}
        return {seed: seconds for seed, seconds in times.items() if seconds is not None}

    def _time(self, outcome: TrialOutcome) -> float | None:
        return None if outcome.result is None else outcome.result.seconds_to(self.goal.target)

    @property
    def always(self) -> bool:
        """Whether every simulation reached the target."""
        return bool(self.outcomes) and len(self.times) == len(self.outcomes)

    @property
    def seconds(self) -> Spread | None:
        """The time to the target, with its spread over the seeds; None if one did not reach it."""
        return spread([*self.times.values()]) if self.always else None

    @property
    def cost(self) -> Spread | None:
        """The price of all processes until then."""
        if self.seconds is None or self.goal.price is None:
            return None
        hourly = self.candidate.ranks * self.goal.price / HOUR_S
        mean, low, high, seeds = self.seconds
        return Spread(hourly * mean, hourly * low, hourly * high, seeds)

    @property
    def goodput(self) -> float | None:
        """How many samples count, as a share of what the workers alone would compute.

        None if computing takes no time in the cluster.
        """
        shares = [share for result in self.results if (share := self._goodput(result)) is not None]
        return fmean(shares) if shares else None

    def _goodput(self, result: Result) -> float | None:
        if not result.samples or result.samples_per_s is None:
            return None
        batch, workers = result.samples / result.steps, range(self.candidate.workers)
        steps_s = [Costs(self.cluster, rank, seed=0).usual_s(batch) for rank in workers]
        if not all(steps_s):
            return None
        return result.samples_per_s / sum(batch / seconds for seconds in steps_s)

    def to_json(self) -> Mapping[str, Any]:
        """The row as ``--json`` prints it."""
        return {
            "strategy": self.candidate.spec,
            "workers": self.candidate.workers,
            "processes": self.candidate.ranks,
            "seconds_to_target": _triple(self.seconds),
            "cost": _triple(self.cost),
            "goodput": self.goodput,
            "seeds": len(self.outcomes),
            "reached": len(self.times),
            "lost_workers": fmean([r.lost_workers for r in self.results]) if self.results else None,
            "error": next((o.error for o in self.outcomes.values() if o.error), None),
        }


def _triple(found: Spread | None) -> list[float] | None:
    """The mean and its interval."""
    return None if found is None else [*found[:3]]
