"""The sweep of learning rates: a grid, widened where the best lies at its edge.

Each arm is one way to train, of which only the rate is open. All rates are tried with the first of
three seeds; those that come within :data:`FAR` of the best are tried with the other two. The
highest mean accuracy wins, of equals the smaller rate. While it lies at an edge of what was tried,
the next rate beyond it is tried as well. The seeds are used for nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError
from paceline.lab.trials import Outcome, Trial, run_trials

SEEDS = (1001, 1002, 1003)
GRID = tuple(0.005 * 2**power for power in range(8))
"""0.005 to 0.64: by factors of 2 up to 0.8."""
FAR = 0.1
"""A rate whose accuracy with the first seed is so much below the best is not tried further."""

MakeTrial = Callable[[float, int], Trial]
"""The run of an arm at a rate, with a seed."""


@dataclass
class Arm:
    """One way to train: how a run of it is made, and what has been found so far."""

    name: str
    trial: MakeTrial
    grid: Sequence[float] = GRID
    found: dict[float, list[float]] = field(default_factory=dict)

    def wanted(self) -> list[tuple[float, int]]:
        """The rates and seeds to be tried next; none, when the best is known."""
        fresh = [rate for rate in self.grid if rate not in self.found]
        if fresh:
            return [(rate, SEEDS[0]) for rate in fresh]
        best = max(values[0] for values in self.found.values())
        near = [rate for rate, values in self.found.items() if best - values[0] <= FAR]
        short = [rate for rate in near if len(self.found[rate]) < len(SEEDS)]
        if short:
            return [(rate, seed) for rate in short for seed in SEEDS[1:]]
        beyond = self._beyond()
        return [] if beyond is None else [(beyond, SEEDS[0])]

    def _beyond(self) -> float | None:
        """The next rate, when the best lies at an edge."""
        edges = {min(self.found): min(self.found) / 2, max(self.found): max(self.found) * 2}
        return edges.get(self.best)

    @property
    def best(self) -> float:
        """The rate of the highest mean accuracy, of those that were tried with every seed."""
        whole = {r: v for r, v in sorted(self.found.items()) if len(v) == len(SEEDS)}
        return max(whole, key=lambda rate: round(statistics.fmean(whole[rate]), 4))

    def take(self, rate: float, accuracy: float) -> None:
        """Note what came of a run."""
        self.found.setdefault(rate, []).append(accuracy)

    def table(self) -> dict[str, list[float]]:
        """What was found, for a file."""
        return {f"{rate:g}": values for rate, values in sorted(self.found.items())}


def sweep(
    arms: Sequence[Arm],
    *,
    folder: Path | None,
    processes: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Find the best rate of each arm; ``folder`` keeps the runs, so that a sweep can go on.

    Raises:
        PacelineError: a run failed for another reason than its rate.
    """
    while jobs := [(arm, *wanted) for arm in arms for wanted in arm.wanted()]:
        say(f"{len(jobs)} runs to make for {len({arm.name for arm, *_ in jobs})} arms")
        trials = [arm.trial(rate, seed) for arm, rate, seed in jobs]

        def heard(place: int, outcome: Outcome) -> None:
            arm, rate, seed = jobs[place]
            say(f"  {arm.name}, lr {rate:g}, seed {seed}: {accuracy_of(outcome):.3f}")

        outcomes = run_trials(trials, folder=folder, processes=processes, on_done=heard)
        for (arm, rate, _), outcome in zip(jobs, outcomes, strict=True):
            arm.take(rate, accuracy_of(outcome))


def accuracy_of(outcome: Outcome) -> float:
    """The accuracy that a run ended with; a run that failed is an error."""
    if outcome.result is None:
        raise PacelineError(f"a run of the sweep failed: {outcome.error}")
    return float(outcome.result.accuracy or 0.0)
