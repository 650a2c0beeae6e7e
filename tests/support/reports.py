"""Made-up runs to report on, without training."""

from __future__ import annotations

import math

from paceline.record.result import Result
from paceline.report.material import Material, Run, Setting

MADE = {"versions": {"paceline": "0", "torch": "1"}, "platform": "a test", "git_revision": None}
CLUSTER = {"name": "lab", "about": "two desks", "network": {"latency_s": 5e-5, "bytes_per_s": 1e8}}


def result(
    method="allreduce", workers=4, seed=0, *, evaluation_s=1.0, evaluations=6, top=0.9, **more
):
    """A run that approaches ``top`` with each evaluation, one every ``evaluation_s`` seconds."""
    metrics = [
        {
            "t": 1.0 + evaluation_s * (i + 1),
            "rank": 0,
            "step": 10 * i,
            "samples": 100 * (i + 1),
            "loss": 1 / (i + 1),
            "accuracy": top * (1 - math.exp(-(i + 1) / 2)) + 0.001 * seed,
            "all_samples": 1000 * (i + 1),
            "all_bytes": 5_000_000 * (i + 1),
        }
        for i in range(evaluations)
    ]
    facts = {
        "strategy": method,
        "workers": workers,
        "seed": seed,
        "steps": 100,
        "samples": 1000,
        "loss": 0.5,
        "accuracy": metrics[-1]["accuracy"] if metrics else None,
        "seconds": 3.0,
        "startup_seconds": 1.0,
        "virtual_seconds": evaluation_s * evaluations,
        "bytes_sent": 5_000_000 * evaluations,
        "wire_bytes": 1,
        "wait_share": 0.25,
        "staleness_mean": 1.5,
        "staleness_max": 3,
        "consensus_distance": 0.02,
        "trace_hash": "0123456789abcdef" * 4,
        "lost_workers": 0,
        "joined_workers": 0,
        "out": None,
        "metrics": metrics,
        "first_step_s": 1.0,
        "worker_seconds": [{"compute": 2.0, "wait": 1.0 + r, "io": 0.5} for r in range(workers)],
        "staleness_counts": [[0, 5], [1, 10], [3, 1]],
        "lr": 0.05,
        "batch_size": 32,
        "epoch_samples": 1000,
    }
    return Result(**{**facts, **more})


def run(method="allreduce", workers=4, seed=0, *, system="lab", error=None, **more):
    """A simulated run."""
    return Run(
        strategy=method,
        setting=Setting(system, workers),
        seed=seed,
        config={
            "cluster": {**CLUSTER, "name": system},
            "arguments": {"epochs": 6},
            "strategy": {"class": {}, "fields": {"interval": 16}},
        },
        made=MADE,
        result=None if error else result(method, workers, seed, **more),
        error=error,
    )


def material(*runs, target=0.7, task="a task", command="paceline compare"):
    """Runs to report on."""
    return Material(task=task, target=target, runs=runs, command=command, made_at="today")
