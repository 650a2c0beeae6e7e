"""Sweep the learning rates of the claims: at 8 workers, and at other counts."""

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
    LearningRates,
    method,
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
    processes: int | None = None,
    say: Callable[[str], None],
) -> None:
    """Sweep the rates of ``tasks`` and add them to the file ``path``.

    Args:
        tasks: the tasks to sweep.
        path: the file of learning rates; the rates of other tasks in it are kept.
        folder: caches the runs, so that an interrupted sweep can continue.
        processes: how many runs at a time; by default one per core.
        say: called with a line of text for each finished run.
    """
    for task in tasks:
        held = {name: arm(task, name, HELD_AT) for name in METHODS if name != "sgd"}
        sweep(list(held.values()), folder=folder, processes=processes, say=say)
        own = {
            (name, workers): arm(task, name, workers, rates_around(held, name))
            for name, counts in OWN_COUNTS.items()
            for workers in counts
        }
        sweep(list(own.values()), folder=folder, processes=processes, say=say)
        write_rates(path, task, held, own)


def arm(task: str, name: str, workers: int, grid: Sequence[float] = GRID) -> Arm:
    """The sweep of one method at one number of workers."""

    def trial(rate: float, seed: int) -> Trial:
        return Trial(
            train=TRAIN,
            strategy=method(name),
            workers=workers,
            cluster=cluster_for(name),
            seed=seed,
            arguments={**task_arguments(task, workers), "lr": rate},
        )

    return Arm(f"{task}, {name}, {workers} workers", trial, grid)


def cluster_for(name: str) -> Cluster:
    """The cluster on which a method's claims are tested, and its rates swept."""
    return CONTENDED if name.startswith("cyclic") else load_cluster("ethernet-1g")


def rates_around(held: dict[str, Arm], name: str) -> tuple[float, float, float]:
    """The first rates to try at another count: the best at 8 workers, half and twice that."""
    best = held["allreduce" if name == "sgd" else name].best
    return best / 2, best, best * 2


def write_rates(
    path: Path, task: str, held: dict[str, Arm], own: dict[tuple[str, int], Arm]
) -> None:
    """Write the results of a task to ``path``; keep those of other tasks."""
    record: dict[str, Any] = (
        LearningRates.read(path).record if path.exists() else {"held": {}, "own": {}}
    )
    record["sweep"] = {
        "workers": HELD_AT,
        "seeds": SEEDS,
        "grid": GRID,
        "given_up_below_best": FAR,
        "methods": METHODS,
        "versions": provenance()["versions"],
    }
    record["held"][task] = {name: arm.best for name, arm in held.items()}
    record["own"][task] = {
        name: {str(count): own[name, count].best for count in counts}
        for name, counts in OWN_COUNTS.items()
    }
    record.setdefault("setting", {})[task] = vars(SETTINGS[task])
    record.setdefault("accuracy", {})[task] = {
        **{name: arm.table() for name, arm in held.items()},
        **{f"{name}, {count} workers": arm.table() for (name, count), arm in own.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
