"""Make the tables of docs/slow-network.md: training over links that are really slow.

    python benchmarks/slow_network.py [table] [predict] [--models mlp] [--seeds 1,2,3]

``table``: the time to an accuracy of 0.80 at 100 Mbit/s, of every method and of torch's own.
``predict``: the throughput that the simulator predicts at 100 Mbit/s and 1 Gbit/s, and what is
measured. Without a name, both. Each run is kept in ``--out`` as soon as it is over, and not made
again. Needs root, on Linux: ranks run in network namespaces with rate-limited links.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from methods_table import put
from namespaces import SlowNetwork, payload_rate, why_not
from slow_training import (
    DDP,
    PLAIN,
    TORCH,
    Job,
    Look,
    Outcome,
    measure,
    run_job,
    simulate_job,
)

from paceline.record.folder import provenance
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.strategies import STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "slow-network.md"
WORKERS, TARGET = 4, 0.80
WAYS = [*STRATEGIES, *TORCH]
TABLE_BITS_PER_S = 100e6
PREDICTED = {"allreduce": 48, "sasgd": 192, "gossip": 48, "downpour": 32}
"""The methods whose throughput is predicted, and for how many steps of each worker they run."""
RATES = {100e6: 1, 1e9: 3}
"""The links for which it is predicted, and how many times as many steps they make."""
REPEATS = 3


class Book:
    """The outcomes so far, a line each, by what decides them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "outcomes.jsonl"
        self._known: dict[str, Outcome] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                told = json.loads(line)
                outcome = told["outcome"]
                outcome["looks"] = [Look(*look) for look in outcome["looks"]]
                self._known[told["key"]] = Outcome(**outcome)

    def outcome(self, network: SlowNetwork, job: Job, repeat: int = 0) -> Outcome:
        """What came of a job, which is run unless that is known."""
        what = {**asdict(job), "bits_per_s": network.bits_per_s, "repeat": repeat}
        key = json.dumps(what | provenance()["versions"], sort_keys=True)
        if key not in self._known:
            outcome = self._known[key] = run_job(network, job)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "outcome": asdict(outcome)}) + "\n")
            print(what, asdict(outcome) | {"looks": outcome.looks[-1:]}, file=sys.stderr)
        return self._known[key]


# Time to accuracy --------------------------------------------------------------------------------


def time_to_accuracy(book: Book, model: str, seeds: list[int], epochs: int) -> list[str]:
    """The table of all ways of training, in an order drawn anew for each seed."""
    found: dict[str, list[Outcome]] = {way: [] for way in WAYS}
    ranks = max(Job(way=way, workers=WORKERS).ranks for way in WAYS)
    with SlowNetwork(ranks, TABLE_BITS_PER_S) as network:
        for seed in seeds:
            for way in random.Random(seed).sample(WAYS, len(WAYS)):
                job = Job(way=way, model=model, workers=WORKERS, seed=seed, epochs=epochs)
                found[way].append(book.outcome(network, job))
    return lines_of(found)


def lines_of(found: dict[str, list[Outcome]]) -> list[str]:
    """The rows, the quickest way to the target first."""
    beside = mean([outcome.seconds_to(TARGET) for outcome in found[DDP]])
    head = (
        f"| way | ranks | seconds to {TARGET:.2f} | beside torch DDP | accuracy at the end"
        " | samples/s | handed in | on the wire |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for way in sorted(found, key=lambda way: mean(times_of(found[way])) or float("inf")):
        outcomes, times = found[way], times_of(found[way])
        ratio = f"{mean(times) / beside:.2f}" if mean(times) and beside else "-"
        sent = mean([outcome.bytes_sent for outcome in outcomes])
        wire = mean([outcome.wire_bytes for outcome in outcomes])
        speed = statistics.mean(outcome.samples_per_s for outcome in outcomes)
        lines.append(
            f"| {name_of(way)} | {Job(way=way, workers=WORKERS).ranks} | {span(times, '.1f')} |"
            f" {ratio} | {span([o.looks[-1].accuracy for o in outcomes], '.3f')} | {speed:,.0f} |"
            f" {megabytes(sent)} | {megabytes(wire)} |"
        )
    return lines


def times_of(outcomes: list[Outcome]) -> list[float | None]:
    return [outcome.seconds_to(TARGET) for outcome in outcomes]


def name_of(way: str) -> str:
    return way if way in TORCH else f"`{way}`"


def mean(values: list[Any]) -> float | None:
    """The mean, if all are known."""
    return None if None in values else statistics.mean(values)


def span(values: list[Any], form: str) -> str:
    """Mean and range; how often it was reached, where it was not always."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"not reached ({len(known)} of {len(values)})"
    ends = f" ({min(known):{form}} to {max(known):{form}})" if len(known) > 1 else ""
    return f"{statistics.mean(known):{form}}{ends}"


def megabytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.0f} MB"


# Prediction --------------------------------------------------------------------------------------


def predictions(bits_per_s: float) -> list[str]:
    """Predict the throughput of some methods, then measure it, several times over."""
    jobs = {
        way: Job(way=way, workers=WORKERS, steps=RATES[bits_per_s] * steps, looks=False)
        for way, steps in (PREDICTED | {PLAIN: 96}).items()
    }
    told, expected, measured = [], defaultdict(list), defaultdict(list)
    with SlowNetwork(max(job.ranks for job in jobs.values()), bits_per_s) as network:
        for repeat in range(REPEATS):
            latencies, plain = measure(network), run_job(network, jobs[PLAIN])
            told.append((*latencies, WORKERS * plain.seconds / plain.steps))
            for way in PREDICTED:
                cluster = cluster_of(bits_per_s, *told[-1], jobs[way].strategy.synchronous)
                expected[way].append(simulate_job(cluster, jobs[way]).samples_per_s)
            for way in random.Random(repeat).sample([*PREDICTED], len(PREDICTED)):
                measured[way].append(run_job(network, jobs[way]).samples_per_s)
                print(way, expected[way][-1], measured[way][-1], file=sys.stderr)
    message_s, all_reduce_s, step_s = (statistics.median(one) for one in zip(*told, strict=True))
    head = (
        f"Told to the simulator (medians): {message_s * 1e3:.1f} ms for a message,"
        f" {hop_s(all_reduce_s) * 1e3:.1f} ms for a hop of an all-reduce,"
        f" {payload_rate(bits_per_s) / 1e6:.1f} MB/s, {step_s * 1e3:.1f} ms for a step."
    )
    rows = [row_of(way, expected[way], measured[way]) for way in PREDICTED]
    return [head, "", *prediction_lines(rows)]


def hop_s(all_reduce_s: float) -> float:
    """A hop of an all-reduce: one of four ranks that is all latency takes the simulator four."""
    return all_reduce_s / 4


def cluster_of(
    bits_per_s: float, message_s: float, all_reduce_s: float, step_s: float, collective: bool
) -> Cluster:
    """What the simulator is told: the link's rate less headers, measured latency and step time."""
    latency_s = hop_s(all_reduce_s) if collective else message_s
    return Cluster(
        name=f"tbf-{bits_per_s / 1e6:g}",
        network=Link(latency_s=latency_s, bytes_per_s=payload_rate(bits_per_s)),
        compute=Compute(step_s=step_s),
    )


def row_of(way: str, expected: list[float], measured: list[float]) -> dict[str, Any]:
    """Medians over the repeats; the error is that of each prediction beside its own measurement."""
    errors = [one / other - 1 for one, other in zip(expected, measured, strict=True)]
    middle = statistics.median(measured)
    return {
        "what": f"`{way}`",
        "predicted": statistics.median(expected),
        "measured": middle,
        "error": statistics.median(errors),
        "spread": (max(measured) - min(measured)) / 2 / middle,
    }


def prediction_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| method | predicted samples/s | measured | error | run-to-run spread | within the goal |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        within = abs(row["error"]) <= max(0.15, 2 * row["spread"])
        lines.append(
            f"| {row['what']} | {row['predicted']:,.0f} | {row['measured']:,.0f} |"
            f" {row['error']:+.0%} | ±{row['spread']:.0%} | {'yes' if within else 'no'} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["table", "predict"])
    parser.add_argument("--models", default="mlp")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/slow-network"))
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"slow_network.py: {reason}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # names of hosts that have none
    book = Book(options.out)
    if "table" in options.what:
        for model in options.models.split(","):
            seeds = [int(seed) for seed in options.seeds.split(",")]
            lines = time_to_accuracy(book, model, seeds, options.epochs)
            print("\n".join(lines), flush=True)
            put(f"time to accuracy, {model}", lines, PAGE)
    if "predict" in options.what:
        for bits_per_s in RATES:
            lines = predictions(bits_per_s)
            print("\n".join(lines), flush=True)
            put(f"prediction, {bits_per_s / 1e6:g} Mbit/s", lines, PAGE)


if __name__ == "__main__":
    main()
