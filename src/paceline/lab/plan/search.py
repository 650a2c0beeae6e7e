"""Try many ways to train in virtual time, and the good ones with more seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.comm.membership import MOST_SUCCESSORS
from paceline.common.faults import Fault, kill
from paceline.common.reference import Reference
from paceline.common.seeds import stream
from paceline.lab.plan.estimate import Candidate, Estimate, Goal
from paceline.lab.stats import Spread, ratio
from paceline.lab.trials import Trial, TrialOutcome, run_trials
from paceline.sim.cluster import Cluster
from paceline.strategies import STRATEGIES, make_strategy

INTERVALS = (4, 16)
"""With methods that have an interval, these are tried beside the default."""
KEPT = 1.5
"""With one seed, whoever takes more than so many times the best time, and cost, is ruled out."""
FAILURES = 20
"""At most so many failures of a worker are drawn."""
RESTARTS = 10**6

OnDone = Callable[[Candidate, TrialOutcome], None]


def default_specs() -> Iterator[str]:
    """All methods, and those with an interval in several forms."""
    for name in STRATEGIES:
        yield name
        default = vars(make_strategy(name)).get("interval")
        if default is not None:
            yield from (f"{name}(interval={i})" for i in INTERVALS if i != default)


@dataclass
class Search:
    """The simulations of a plan.

    Args:
        goal: what the plan is for.
        cluster: where the runs would be.
        train, arguments: what they train.
        seeds: of the simulations; the first one rules out what is far from the best.
    """

    goal: Goal
    cluster: Cluster
    train: Reference
    arguments: Mapping[str, Any]
    seeds: Sequence[int]

    def run(self, candidates: Sequence[Candidate], on_done: OnDone) -> list[Estimate]:
        """An estimate of each candidate, the best one first."""
        estimates = [Estimate(each, self.goal, self.cluster) for each in candidates]
        self._simulate(estimates, self.seeds[:1], on_done)
        while less_sure := [e for e in near_best(estimates) if len(e.outcomes) < len(self.seeds)]:
            self._simulate(less_sure, self.seeds[1:], on_done)
        return sorted(estimates, key=order)

    def _simulate(
        self, estimates: Sequence[Estimate], seeds: Sequence[int], on_done: OnDone
    ) -> None:
        jobs = [(estimate, seed) for estimate in estimates for seed in seeds]
        jobs.sort(key=lambda job: -job[0].candidate.workers)  # those take longest

        def done(index: int, outcome: TrialOutcome) -> None:
            estimate, seed = jobs[index]
            estimate.outcomes[seed] = outcome
            on_done(estimate.candidate, outcome)

        run_trials([self.trial(e.candidate, seed) for e, seed in jobs], on_done=done)

    def trial(self, candidate: Candidate, seed: int) -> Trial:
        """The simulation of a candidate with a seed."""
        trial = Trial(
            strategy=candidate.strategy,
            workers=candidate.workers,
            cluster=self.cluster,
            seed=seed,
            arguments=self.arguments,
            train=self.train,
        )
        if self.goal.mtbf_s is None:
            return trial
        restarts = RESTARTS if candidate.strategy.takes_workers_in else 0
        faults = tuple(failures(candidate, self.goal.mtbf_s, seed))
        return replace(trial, faults=faults, on_loss="continue", max_restarts=restarts)


def failures(candidate: Candidate, mtbf_s: float, seed: int) -> Iterator[Fault]:
    """Failures of each process at random times, as often as ``mtbf_s`` says; the same for a seed.

    A server or communicator has at most :data:`MOST_SUCCESSORS`.
    """
    for rank in range(candidate.ranks):
        random, at_s = stream(seed, "failures", rank), 0.0
        count = FAILURES if rank < candidate.workers else MOST_SUCCESSORS
        for gap_s in random.exponential(mtbf_s, count):
            at_s += float(gap_s)
            yield kill(rank=rank).at(seconds=at_s)


def near_best(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those that are not ruled out: near the best one in time, or in cost."""
    return [
        estimate
        for estimate in estimates
        if any(_is_near(value, estimate, estimates) for value in (_time, _cost))
    ]


def _is_near(
    value: Callable[[Estimate], float | None], estimate: Estimate, others: Sequence[Estimate]
) -> bool:
    own, known = value(estimate), [each for other in others if (each := value(other)) is not None]
    return own is not None and own <= KEPT * min(known)


def order(estimate: Estimate) -> tuple[bool, float, float]:
    """The best one first: those that reach the target, by time, then by cost."""
    seconds, cost = _time(estimate), _cost(estimate)
    return seconds is None, seconds or 0.0, cost or 0.0


def _time(estimate: Estimate) -> float | None:
    return None if estimate.seconds is None else estimate.seconds.mean


def _cost(estimate: Estimate) -> float | None:
    return None if estimate.cost is None else estimate.cost.mean


def lead(first: Estimate, second: Estimate) -> Spread:
    """How many times faster the first one is, over the seeds that both have."""
    seeds = [seed for seed in first.times if seed in second.times]
    return ratio([second.times[s] for s in seeds], [first.times[s] for s in seeds])
