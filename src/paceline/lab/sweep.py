"""Sweep learning rates over a grid, and widen the grid if the best rate lies at its edge.

An arm is one way to train in which only the rate is open. Each rate is tried with the first of
three seeds; those within :data:`FAR` of the best are tried with the other two. The highest mean
accuracy wins; of equal ones, the smaller rate. While the best rate is the smallest or the largest
that was tried, the next rate beyond it is tried too. The seeds are used for nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError
from paceline.lab.trials import Trial, TrialOutcome, run_trials

SEEDS = (1001, 1002, 1003)
GRID = tuple(0.005 * 2**power for power in range(8))
"""0.005 to 0.64 by factors of 2."""
FAR = 0.1
"""A rate whose first accuracy is this far below the best is not tried with more seeds."""

MakeTrial = Callable[[float, int], Trial]
"""Makes the trial of an arm for a rate and a seed."""


@dataclass
class Arm:
    """One way to train, and the accuracies of each rate tried so far.

    Attributes:
        seeds: of the runs; the first one rules out rates that are far from the best.
        most: how many rates are tried at most, also if the best is at an edge; None: any number.
        factor: between two rates beyond the grid.
    """

    name: str
    trial: MakeTrial
    grid: Sequence[float] = GRID
    accuracies: dict[float, list[float]] = field(default_factory=dict)
    seeds: Sequence[int] = SEEDS
    most: int | None = None
    factor: float = 2.0

    def next_runs(self) -> list[tuple[float, int]]:
        """The rates and seeds to try next; none if the best is known."""
        untried = [rate for rate in self.grid if rate not in self.accuracies]
        if untried:
            return [(rate, self.seeds[0]) for rate in untried]
        best = max(values[0] for values in self.accuracies.values())
        near = [rate for rate, values in self.accuracies.items() if best - values[0] <= FAR]
        incomplete = [rate for rate in near if len(self.accuracies[rate]) < len(self.seeds)]
        if incomplete:
            return [(rate, seed) for rate in incomplete for seed in self.seeds[1:]]
        beyond = None if len(self.accuracies) == self.most else self._beyond_edge()
        return [] if beyond is None else [(beyond, self.seeds[0])]

    def _beyond_edge(self) -> float | None:
        """The next rate to try if the best lies at an edge."""
        edges = {
            min(self.accuracies): min(self.accuracies) / self.factor,
            max(self.accuracies): max(self.accuracies) * self.factor,
        }
        return edges.get(self.best)

    @property
    def best(self) -> float:
        """The rate of the highest mean accuracy among those that were tried with every seed."""
        complete = {r: v for r, v in sorted(self.accuracies.items()) if len(v) == len(self.seeds)}
        return max(complete, key=lambda rate: round(statistics.fmean(complete[rate]), 4))

    def add(self, rate: float, accuracy: float) -> None:
        """Add the accuracy of a run."""
        self.accuracies.setdefault(rate, []).append(accuracy)

    def table(self) -> dict[str, list[float]]:
        """All accuracies by rate, as JSON data."""
        return {f"{rate:g}": values for rate, values in sorted(self.accuracies.items())}


def sweep(
    arms: Sequence[Arm],
    *,
    folder: Path | None,
    processes: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Find the best rate of each arm; ``folder`` caches the runs of an interrupted sweep.

    Raises:
        PacelineError: a run failed for another reason than its rate.
    """
    while jobs := [(arm, *run) for arm in arms for run in arm.next_runs()]:
        say(f"{len(jobs)} runs to make for {len({arm.name for arm, *_ in jobs})} arms")
        trials = [arm.trial(rate, seed) for arm, rate, seed in jobs]

        def on_done(index: int, outcome: TrialOutcome) -> None:
            arm, rate, seed = jobs[index]
            say(f"  {arm.name}, lr {rate:g}, seed {seed}: {accuracy_of(outcome):.3f}")

        outcomes = run_trials(trials, folder=folder, processes=processes, on_done=on_done)
        for (arm, rate, _), outcome in zip(jobs, outcomes, strict=True):
            arm.add(rate, accuracy_of(outcome))


def accuracy_of(outcome: TrialOutcome) -> float:
    """The final accuracy of a run; raises an error if the run failed."""
    if outcome.result is None:
        raise PacelineError(f"a run of the sweep failed: {outcome.error}")
    return float(outcome.result.accuracy or 0.0)
