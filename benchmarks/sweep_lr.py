"""Record the learning rate of each method on the built-in task: a sweep at 8 virtual workers.

    python benchmarks/sweep_lr.py [--models mlp,cnn] [--strategies sasgd] [--start 0.01]

Three rates by factors of 2 around ``--start``, widened until the best does not lie at an edge, each
train over 3 seeds that nothing else uses; the highest mean accuracy wins, of equals the smaller
rate. The outcome is
``src/paceline/tasks/learning_rates.json``, which the task reads its defaults from.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from paceline.folder import provenance
from paceline.run import simulate
from paceline.strategies import STRATEGIES
from paceline.tasks.fashion import train
from paceline.tasks.recipe import EPOCHS, RATES

SAME = {"layered": "allreduce"}
"""Methods that make the same steps as another one share its rate."""
WORKERS, SEEDS, CLUSTER = 8, (1001, 1002, 1003), "ethernet-10g"


def accuracy(job: tuple[str, str, float, int]) -> float:
    strategy, model, lr, seed = job
    arguments = {"model": model, "lr": lr}
    result = simulate(
        train, workers=WORKERS, strategy=strategy, cluster=CLUSTER, seed=seed, arguments=arguments
    )
    return float(result.accuracy or 0.0)


def sweep(
    pool: ProcessPoolExecutor, strategy: str, model: str, start: float
) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    wanted = [start / 2, start, start * 2]
    while wanted:
        jobs = [(strategy, model, lr, seed) for lr in wanted for seed in SEEDS]
        results = list(pool.map(accuracy, jobs))
        for index, lr in enumerate(wanted):
            found[lr] = results[index * len(SEEDS) : (index + 1) * len(SEEDS)]
            print(f"{model} {strategy} lr {lr:g}: {found[lr]}", flush=True)
        winner = best(found)
        edges = {min(found): min(found) / 2, max(found): max(found) * 2}
        wanted = [edges[winner]] if winner in edges else []
    return found


def best(found: dict[float, list[float]]) -> float:
    return max(sorted(found), key=lambda lr: round(statistics.mean(found[lr]), 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,cnn")
    names = [name for name in STRATEGIES if name not in SAME]
    parser.add_argument("--strategies", default=",".join(names))
    parser.add_argument("--start", type=float, default=0.01)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for model in options.models.split(","):
            for strategy in options.strategies.split(","):
                write_down(strategy, model, sweep(pool, strategy, model, options.start))


def write_down(strategy: str, model: str, found: dict[float, list[float]]) -> None:
    record = json.loads(RATES.read_text())
    for name in [strategy, *(name for name, same in SAME.items() if same == strategy)]:
        record["rates"].setdefault(model, {})[name] = best(found)
    table = {f"{lr:g}": accuracies for lr, accuracies in sorted(found.items())}
    record.setdefault("accuracy", {}).setdefault(model, {})[strategy] = table
    setup = {"workers": WORKERS, "seeds": SEEDS, "epochs": EPOCHS, "cluster": CLUSTER}
    record["sweep"] = {**setup, "versions": provenance()["versions"]}
    RATES.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
