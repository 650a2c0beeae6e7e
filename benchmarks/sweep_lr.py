"""Record the learning rate of each method on the built-in task: a sweep at 8 virtual workers.

    python benchmarks/sweep_lr.py [--models mlp,cnn] [--strategies sasgd] [--start 0.01]

The sweep is that of :mod:`paceline.lab.sweep`, from three rates around ``--start``. It writes
``src/paceline/lab/tasks/learning_rates.json``, from which the task takes its defaults. The claims
of the papers have rates of their own: ``paceline papers --sweep``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.lab.sweep import SEEDS, Arm, sweep
from paceline.lab.tasks.recipe import EPOCHS, RATES
from paceline.lab.trials import Trial
from paceline.record.folder import provenance
from paceline.sim.cluster import load_cluster
from paceline.strategies import STRATEGIES, make_strategy

SAME = {"layered": "allreduce"}
"""Methods that make the same steps as another method share its rate."""
WORKERS, CLUSTER = 8, "ethernet-10g"


def arm(strategy: str, model: str, start: float) -> Arm:
    def trial(rate: float, seed: int) -> Trial:
        return Trial(
            strategy=make_strategy(strategy),
            workers=WORKERS,
            cluster=load_cluster(CLUSTER),
            seed=seed,
            arguments={"model": model, "lr": rate},
        )

    return Arm(f"{model} {strategy}", trial, (start / 2, start, start * 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,cnn")
    names = [name for name in STRATEGIES if name not in SAME]
    parser.add_argument("--strategies", default=",".join(names))
    parser.add_argument("--start", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    options = parser.parse_args()
    for model in options.models.split(","):
        arms = {name: arm(name, model, options.start) for name in options.strategies.split(",")}
        sweep(list(arms.values()), folder=options.out, say=lambda text: print(text, flush=True))
        for strategy, swept in arms.items():
            write_rate(strategy, model, swept)


def write_rate(strategy: str, model: str, swept: Arm) -> None:
    record = json.loads(RATES.read_text())
    for name in [strategy, *(name for name, same in SAME.items() if same == strategy)]:
        record["rates"].setdefault(model, {})[name] = swept.best
    record.setdefault("accuracy", {}).setdefault(model, {})[strategy] = swept.table()
    setup = {"workers": WORKERS, "seeds": SEEDS, "epochs": EPOCHS, "cluster": CLUSTER}
    record["sweep"] = {**setup, "versions": provenance()["versions"]}
    RATES.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
