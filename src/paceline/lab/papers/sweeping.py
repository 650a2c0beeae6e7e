"""The sweep of the claims' learning rates: at 8 workers, and a second column at other counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.lab.papers.claim import TRAIN, task_arguments
from paceline.lab.papers.clusters import CONTENDED
from paceline.lab.papers.rates import (
    HELD_AT,
    METHODS,
    OWN_COUNTS,
    Rates,
    local_momentum,
    method,
    names_for,
)
from paceline.lab.papers.tasks import SETTINGS
from paceline.lab.sweep import FAR, GRID, SEEDS, Arm, sweep
from paceline.lab.trials import Trial
from paceline.record.folder import provenance
from paceline.sim.cluster import Cluster, load_cluster


def make_rates(
    tasks: Sequence[str],
    *,
    path: Path,
    folder: Path,
    data: Path | None,
    processes: int | None = None,
    say: Callable[[str], None],
) -> None:
    """Sweep the rates of ``tasks`` and write them to ``path``, beside those of others.

    Args:
        folder: keeps the runs, so that a sweep that was interrupted goes on.
    """
    for task in tasks:
        held = {name: arm(task, name, HELD_AT, data) for name in names_for(task) if name != "sgd"}
        sweep(list(held.values()), folder=folder, processes=processes, say=say)
        own = {
            (name, workers): arm(task, name, workers, data, around(held, name))
            for name, counts in OWN_COUNTS.items()
            if name in names_for(task)
            for workers in counts
        }
        sweep(list(own.values()), folder=folder, processes=processes, say=say)
        write(path, task, held, own)


def arm(task: str, name: str, workers: int, data: Path | None, grid: Sequence[float] = GRID) -> Arm:
    """One method at one number of workers."""

    def trial(rate: float, seed: int) -> Trial:
        return Trial(
            train=TRAIN,
            strategy=method(name),
            workers=workers,
            cluster=place_of(name),
            seed=seed,
            arguments={
                **task_arguments(task, workers, data),
                **local_momentum(name, workers),
                "lr": rate,
            },
        )

    return Arm(f"{task}, {name}, {workers} workers", trial, grid)


def place_of(name: str) -> Cluster:
    """Where a method is swept: where its claims are tried."""
    return CONTENDED if name.startswith("cyclic") else load_cluster("ethernet-1g")


def around(held: dict[str, Arm], name: str) -> tuple[float, float, float]:
    """The second column starts at the rate of the first, and the next ones on both sides."""
    best = held["allreduce" if name == "sgd" else name].best
    return best / 2, best, best * 2


def write(path: Path, task: str, held: dict[str, Arm], own: dict[tuple[str, int], Arm]) -> None:
    """Write down what was found for a task; leave the others as they are."""
    record: dict[str, Any] = Rates.read(path).record if path.exists() else {"held": {}, "own": {}}
    record["sweep"] = {
        "workers": HELD_AT,
        "seeds": SEEDS,
        "grid": GRID,
        "given_up_below_best": FAR,
        "methods": METHODS,
        "versions": provenance()["versions"],
    }
    record["held"][task] = {name: found.best for name, found in held.items()}
    record["own"][task] = {
        name: {str(count): own[name, count].best for count in counts}
        for name, counts in OWN_COUNTS.items()
        if name in names_for(task)
    }
    record.setdefault("setting", {})[task] = vars(SETTINGS[task])
    record.setdefault("accuracy", {})[task] = {
        **{name: found.table() for name, found in held.items()},
        **{f"{name}, {count} workers": found.table() for (name, count), found in own.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
