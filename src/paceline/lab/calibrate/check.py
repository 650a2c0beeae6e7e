"""Predict the throughput of real runs from a calibration, measure it, and compare."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from paceline.errors import PacelineError
from paceline.lab.calibrate.clock import busy_share
from paceline.lab.calibrate.machine import Calibration, Subject, one_thread_a_rank
from paceline.lab.trials import Trial, run_trials
from paceline.launcher.launch import launch
from paceline.record.result import Result
from paceline.strategies import make_strategy

ALLOWED = 0.15
"""The error that a prediction may have; twice the spread from run to run if that is larger."""


@dataclass(frozen=True)
class Setup:
    """One run to predict and to measure."""

    subject: Subject
    workers: int
    strategy: str

    @property
    def scenario(self) -> str:
        """The set-up without the method: methods are ranked within it."""
        return f"{self.subject.name}, {self.workers} workers"

    @property
    def what(self) -> str:
        """The set-up in words."""
        return f"{self.subject.name}, {self.strategy}, {self.workers} workers"


@dataclass
class Prediction:
    """A prediction and its measurements.

    Attributes:
        predicted: the predicted value.
        measured: the value of each real run.
        busy: the share of the cores that other work used just before each real run.
    """

    predicted: float
    measured: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the measured values."""
        return statistics.median(self.measured)

    @property
    def spread(self) -> float:
        """The standard deviation of the measured values, relative to the median."""
        return statistics.stdev(self.measured) / self.median if len(self.measured) > 1 else 0.0

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measured value."""
        return (self.predicted - self.median) / self.median

    @property
    def within(self) -> bool:
        """Whether the error is at most 15 %, or twice the spread from run to run."""
        return abs(self.error) <= max(ALLOWED, 2 * self.spread)

    def to_json(self) -> dict[str, Any]:
        """The figures as ``--json`` prints them."""
        return {
            "predicted": self.predicted,
            "measured": self.median,
            "error": self.error,
            "spread": self.spread,
            "within": self.within,
            "runs": self.measured,
            "busy": statistics.mean(self.busy) if self.busy else None,
        }

    def same_order(self, other: Prediction) -> bool:
        """Whether the larger of two was predicted to be larger; those within a spread are equal."""
        difference = self.median - other.median
        if abs(difference) <= max(self.spread * self.median, other.spread * other.median):
            return True
        return (self.predicted > other.predicted) == (difference > 0)


@dataclass(kw_only=True)
class Row(Prediction):
    """The throughput of a set-up, in samples per second."""

    setup: Setup

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.setup.what,
            **super().to_json(),
            "model": self.setup.subject.name,
            "strategy": self.setup.strategy,
            "workers": self.setup.workers,
        }


def predict(setups: Sequence[Setup], calibrations: Mapping[str, Calibration]) -> list[Row]:
    """Simulate every set-up, using only the calibration of its script."""
    trials = [
        Trial(
            strategy=make_strategy(setup.strategy),
            workers=setup.workers,
            cluster=calibrations[setup.subject.name].cluster(),
            seed=setup.subject.seed,
            arguments=setup.subject.arguments,
            train=setup.subject.train,
        )
        for setup in setups
    ]
    rows = []
    for setup, outcome in zip(setups, run_trials(trials), strict=True):
        if outcome.result is None:
            raise PacelineError(f"{setup.what}: {outcome.error}")
        rows.append(Row(_throughput(setup, outcome.result), setup=setup))
    return rows


def measure(
    rows: Sequence[Row], repeats: int, on_run: Callable[[Row], None] = lambda row: None
) -> None:
    """Make the real runs, all in turn, ``repeats`` times."""
    with one_thread_a_rank():
        for repeat in range(repeats):
            first = repeat % len(rows)
            for row in [*rows[first:], *rows[:first]]:
                row.busy.append(busy_share())
                row.measured.append(_run(row.setup))
                on_run(row)


def _run(setup: Setup) -> float:
    result = launch(
        setup.subject.train,
        workers=setup.workers,
        strategy=setup.strategy,
        transport=setup.subject.transport,
        device=setup.subject.device,
        seed=setup.subject.seed,
        arguments=setup.subject.arguments,
    )
    return _throughput(setup, result)


def _throughput(setup: Setup, result: Result) -> float:
    if result.samples_per_s is None:
        raise PacelineError(f"{setup.what}: no throughput, a worker must make at least 2 steps")
    return result.samples_per_s


def rank_methods(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each scenario, the methods from fast to slow: predicted, measured, and if both agree.

    The order of two methods whose medians differ by less than their spread does not count.
    """
    scenarios: dict[str, list[Row]] = {}
    for row in rows:
        scenarios.setdefault(row.setup.scenario, []).append(row)
    return [
        {
            "where": scenario,
            "predicted": [r.setup.strategy for r in sorted(own, key=lambda r: -r.predicted)],
            "measured": [r.setup.strategy for r in sorted(own, key=lambda r: -r.median)],
            "right": all(one.same_order(other) for one, other in combinations(own, 2)),
        }
        for scenario, own in scenarios.items()
    ]
