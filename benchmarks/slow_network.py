"""Write the tables of docs/slow-network.md: training over links that are really slow.

    python benchmarks/slow_network.py [table] [far] [groups] [predict] [--seeds 1,2,3]

``table``: the time to an accuracy of 0.80 at 100 Mbit/s, of every method, of torch's own ways, and
of torchft and hivemind where they are installed. ``far``: the same, and 50 ms from host to host.
``groups``: the same of some ways, with two workers on each of two hosts. ``predict``: the
throughput that the simulator predicts at 100 Mbit/s and 1 Gbit/s, and the measured one. Without a
name, all. ``--out`` caches the outcome of each run, which is not made again. Needs Linux, and root
or a kernel that lets users make namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from methods_table import replace_table
from slow_training import (
    DDP,
    OTHERS,
    PLAIN,
    PROBES,
    Evaluation,
    Job,
    Outcome,
    measure,
    run_job,
    simulate_job,
)

from paceline.lab.network.hosts import HostNetwork, payload_rate, why_no_hosts
from paceline.record.folder import provenance
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.strategies import STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "slow-network.md"
WORKERS, TARGET = 4, 0.80
LAYERED = "layered(group_size=1)"
"""Its communicators are on the hosts of their groups: one for each worker."""
METHODS = [LAYERED if method == "layered" else method for method in STRATEGIES]
PREDICTED = {"allreduce": 48, "sasgd": 192, "gossip": 48, "downpour": 32}
"""The methods whose throughput is predicted, and how many steps each worker makes."""
RATES = {100: 1, 1000: 3}
"""The rates, in Mbit/s, for which it is predicted, and how many times as many steps are made."""
REPEATS = 3


class Table(NamedTuple):
    """A table of times to accuracy.

    Attributes:
        marker: where it stands on the page.
        ways: of training.
        hosts: how many, for four workers.
        delay_ms: from host to host.
    """

    marker: str
    ways: Sequence[str]
    hosts: int = WORKERS
    delay_ms: float = 0.0


TABLES = {
    "table": Table("time to accuracy", [*METHODS, *OTHERS]),
    "far": Table("time to accuracy, 50 ms", [*METHODS, *OTHERS], delay_ms=50),
    "groups": Table(
        "time to accuracy, two hosts", ["allreduce", "layered(group_size=2)", DDP], hosts=2
    ),
}
RATE_MBIT = 100


class JobCache:
    """The outcomes of jobs in a file, one line each; the key is everything that decides them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "outcomes.jsonl"
        self._known: dict[str, Outcome] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                entry = json.loads(line)
                outcome = entry["outcome"]
                outcome["evaluations"] = [Evaluation(*e) for e in outcome["evaluations"]]
                self._known[entry["key"]] = Outcome(**outcome)

    def outcome(self, network: HostNetwork, job: Job) -> Outcome:
        """The outcome of a job; runs the job unless the outcome is known."""
        line = {"rate_mbit": network.rate_mbit, "delay_ms": network.delay_ms}
        config = {**asdict(job), **line}
        key = json.dumps(config | provenance()["versions"], sort_keys=True)
        if key not in self._known:
            outcome = self._known[key] = run_job(network, job)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "outcome": asdict(outcome)}) + "\n")
            last = {"evaluations": outcome.evaluations[-1:]}
            print(config, asdict(outcome) | last, file=sys.stderr)
        return self._known[key]


# Time to accuracy --------------------------------------------------------------------------------


def time_to_accuracy(cache: JobCache, table: Table, seeds: list[int], epochs: int) -> list[str]:
    """The table of ways of training, run in a random order for each seed."""
    ways = [way for way in table.ways if find_spec(OTHERS.get(way, "paceline")) is not None]
    outcomes_by_way: dict[str, list[Outcome]] = {way: [] for way in ways}
    with HostNetwork(table.hosts, rate_mbit=RATE_MBIT, delay_ms=table.delay_ms) as network:
        for seed in seeds:
            for way in random.Random(seed).sample(ways, len(ways)):
                job = Job(way=way, workers=WORKERS, hosts=table.hosts, seed=seed, epochs=epochs)
                outcomes_by_way[way].append(cache.outcome(network, job))
    return lines_of(outcomes_by_way)


def lines_of(outcomes_by_way: dict[str, list[Outcome]]) -> list[str]:
    """The rows of the table, the fastest way to the target first."""
    ddp_s = mean([outcome.seconds_to(TARGET) for outcome in outcomes_by_way[DDP]])
    head = (
        f"| way | ranks | seconds to {TARGET:.2f} | over torch DDP | final accuracy"
        " | samples/s | payload | on the wire |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    times_by_way = {way: times_of(outcomes) for way, outcomes in outcomes_by_way.items()}
    for way in sorted(times_by_way, key=lambda way: mean(times_by_way[way]) or float("inf")):
        outcomes, times = outcomes_by_way[way], times_by_way[way]
        ratio = f"{mean(times) / ddp_s:.2f}" if mean(times) and ddp_s else "-"
        sent = mean([outcome.bytes_sent for outcome in outcomes])
        wire = mean([outcome.wire_bytes for outcome in outcomes])
        speed = statistics.mean(outcome.samples_per_s for outcome in outcomes)
        accuracies = [outcome.evaluations[-1].accuracy for outcome in outcomes]
        lines.append(
            f"| {name_of(way)} | {Job(way=way, workers=WORKERS).ranks} | {span(times, '.1f')} |"
            f" {ratio} | {span(accuracies, '.3f')} | {speed:,.0f} |"
            f" {megabytes(sent)} | {megabytes(wire)} |"
        )
    return lines


def times_of(outcomes: list[Outcome]) -> list[float | None]:
    return [outcome.seconds_to(TARGET) for outcome in outcomes]


def name_of(way: str) -> str:
    return way if way in OTHERS else f"`{way}`"


def mean(values: list[Any]) -> float | None:
    """The mean; None if one value is None."""
    return None if None in values else statistics.mean(values)


def span(values: list[Any], form: str) -> str:
    """Mean and range; if a value is None, how often the target was reached."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return f"not reached ({len(known)} of {len(values)})"
    limits = f" ({min(known):{form}} to {max(known):{form}})" if len(known) > 1 else ""
    return f"{statistics.mean(known):{form}}{limits}"


def megabytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.0f} MB"


# Prediction --------------------------------------------------------------------------------------


def predictions(rate_mbit: float) -> list[str]:
    """Predict the throughput of some methods, then measure it, several times over."""
    jobs = {
        way: Job(way=way, workers=WORKERS, steps=RATES[rate_mbit] * steps, evaluates=False)
        for way, steps in (PREDICTED | {PLAIN: 96}).items()
    }
    costs, expected, measured = [], defaultdict(list), defaultdict(list)
    with HostNetwork(PROBES, rate_mbit=rate_mbit) as network:
        for repeat in range(REPEATS):
            latencies, plain = measure(network), run_job(network, jobs[PLAIN])
            costs.append((*latencies, WORKERS * plain.seconds / plain.steps))
            for way in PREDICTED:
                cluster = cluster_of(rate_mbit, *costs[-1], jobs[way].strategy.synchronous)
                expected[way].append(simulate_job(cluster, jobs[way]).samples_per_s)
            for way in random.Random(repeat).sample([*PREDICTED], len(PREDICTED)):
                measured[way].append(run_job(network, jobs[way]).samples_per_s)
                print(way, expected[way][-1], measured[way][-1], file=sys.stderr)
    message_s, all_reduce_s, step_s = (statistics.median(each) for each in zip(*costs, strict=True))
    head = (
        f"Given to the simulator (medians): {message_s * 1e3:.1f} ms for a message,"
        f" {hop_s(all_reduce_s) * 1e3:.1f} ms for a hop of an all-reduce,"
        f" {payload_rate(rate_mbit) / 1e6:.1f} MB/s, {step_s * 1e3:.1f} ms for a step."
    )
    rows = [row_of(way, expected[way], measured[way]) for way in PREDICTED]
    return [head, "", *prediction_lines(rows)]


def hop_s(all_reduce_s: float) -> float:
    """The latency of a hop: a small all-reduce among four ranks takes the simulator four hops."""
    return all_reduce_s / 4


def cluster_of(
    rate_mbit: float, message_s: float, all_reduce_s: float, step_s: float, collective: bool
) -> Cluster:
    """The simulated hosts: the link's rate without headers, measured latency and step time."""
    latency_s = hop_s(all_reduce_s) if collective else message_s
    return Cluster(
        name=f"tbf-{rate_mbit:g}",
        network=Link(latency_s=latency_s, bytes_per_s=payload_rate(rate_mbit)),
        compute=Compute(step_s=step_s),
        registrar=0,
    )


def row_of(way: str, expected: list[float], measured: list[float]) -> dict[str, Any]:
    """A row of medians over repeats; each prediction is compared with its own measurement."""
    errors = [p / m - 1 for p, m in zip(expected, measured, strict=True)]
    median = statistics.median(measured)
    return {
        "what": f"`{way}`",
        "predicted": statistics.median(expected),
        "measured": median,
        "error": statistics.median(errors),
        "spread": (max(measured) - min(measured)) / 2 / median,
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
    every = [*TABLES, "predict"]
    parser.add_argument("tables", nargs="*", default=every, help=f"of {', '.join(every)}")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/slow-network"))
    options = parser.parse_args()
    if unknown := set(options.tables) - set(every):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(every)}")
    if reason := why_no_hosts():
        sys.exit(f"slow_network.py: {reason}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of addresses without a host name
    os.environ.setdefault("RUST_LOG", "error")  # torchft tells of every step
    cache, seeds = JobCache(options.out), [int(seed) for seed in options.seeds.split(",")]
    for name in options.tables:
        if name in TABLES:
            write(TABLES[name].marker, time_to_accuracy(cache, TABLES[name], seeds, options.epochs))
        else:
            for rate_mbit in RATES:
                write(f"prediction, {rate_mbit} Mbit/s", predictions(rate_mbit))


def write(marker: str, lines: list[str]) -> None:
    """Print a table, and put it into its place on the page."""
    print("\n".join(lines), flush=True)
    replace_table(marker, lines, PAGE)


if __name__ == "__main__":
    main()
