"""Write the tables of docs/methods.md with ``paceline compare``: all methods, three seeds.

    python benchmarks/methods_table.py [virtual] [real] [slow]

``virtual``: 16 simulated workers; ``real``: 4 processes of this machine; both with the built-in
network and its recipe. ``slow``: how much of the throughput of 7 workers remains when an eighth,
4 or 10 times slower, is added. Without a name, all three; each takes a few minutes.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.strategies import STRATEGIES

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
SEEDS = (1, 2, 3)
SLOWNESS = (4, 10)
ONE_SLOW = """
about = "eight workers on 10 Gbit/s Ethernet, the last one {factor} times slower"

[network]
latency_s = 2e-5
bytes_per_s = 1.25e9

[compute]
step_s = 1e-3
sample_s = 3e-4
spread = 0.05
slow = {{ 7 = {factor}.0 }}
"""
Row = dict[str, Any]


def compare(*options: str) -> list[Row]:
    command = [sys.executable, "-m", "paceline", "compare", "--json", "--quiet", *options]
    with tempfile.TemporaryDirectory() as out:
        process = subprocess.run(
            [*command, "--out", out], stdout=subprocess.PIPE, text=True, check=True
        )
    rows: list[Row] = json.loads(process.stdout.splitlines()[-1])["rows"]
    return rows


def over_seeds(*options: str) -> dict[str, list[Row]]:
    """The rows of each method, one per seed."""
    rows_by_method: dict[str, list[Row]] = {}
    for seed in SEEDS:
        for row in compare("--seed", str(seed), *options):
            rows_by_method.setdefault(row["strategy"], []).append(row)
            print(seed, row["strategy"], row["accuracy"], file=sys.stderr, flush=True)
    return rows_by_method


def accuracy_table(rows_by_method: dict[str, list[Row]]) -> list[str]:
    head = "| method | accuracy | sent | staleness, mean (max) | consensus distance | waiting |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, rows in rows_by_method.items():
        accuracies = [row["accuracy"] for row in rows]
        spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
        stale = f"{mean_of(rows, 'staleness_mean'):.1f} ({max_of(rows, 'staleness_max'):.0f})"
        lines.append(
            f"| `{name}` | {statistics.mean(accuracies):.3f} ({spread}) |"
            f" {mean_of(rows, 'bytes_sent') / 1e6:,.0f} MB | {stale} |"
            f" {mean_of(rows, 'consensus_distance'):.3f} | {mean_of(rows, 'wait_share'):.0%} |"
        )
    return lines


def slow_table() -> list[str]:
    methods = [*STRATEGIES, "cyclic(max_accumulated=1)"]
    options = ["--model", "mlp", "--epochs", "3", "--batch-size", "16", "-s", ",".join(methods)]
    runs = [compare("-w", "7", "-c", "ethernet-10g", *options)]
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "one-slow.toml"
        for factor in SLOWNESS:
            cluster.write_text(ONE_SLOW.format(factor=factor))
            runs.append(compare("-w", "8", "-c", str(cluster), *options))
    slower = "".join(f" {factor} times slower (kept) |" for factor in SLOWNESS)
    lines = [f"| method | samples/s of 7 |{slower}", "|---|---|" + "---|" * len(SLOWNESS)]
    for rows in zip(*runs, strict=True):
        alone, *with_slow = [row["samples"] / row["virtual_seconds"] for row in rows]
        kept = "".join(f" {speed:,.0f} ({speed / alone:.2f}) |" for speed in with_slow)
        lines.append(f"| `{rows[0]['strategy']}` | {alone:,.0f} |{kept}")
    return lines


def mean_of(rows: list[Row], key: str) -> float:
    return statistics.mean(row[key] or 0.0 for row in rows)


def max_of(rows: list[Row], key: str) -> float:
    return max(row[key] or 0.0 for row in rows)


def replace_table(name: str, lines: list[str], page: Path = PAGE) -> None:
    """Replace the lines between the two comments of a table."""
    table = "\n".join(lines)
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    text, replaced = re.subn(
        pattern, rf"\g<1>{table}\n\g<2>", page.read_text(), count=1, flags=re.DOTALL
    )
    if not replaced:
        raise SystemExit(f"{page} has no comment <!-- {name} -->")
    page.write_text(text)


def main() -> None:
    tables = sys.argv[1:] or ["virtual", "real", "slow"]
    if "virtual" in tables:
        replace_table("virtual", accuracy_table(over_seeds("-w", "16")))
    if "real" in tables:
        replace_table("real", accuracy_table(over_seeds("-w", "4", "--real")))
    if "slow" in tables:
        replace_table("slow", slow_table())


if __name__ == "__main__":
    main()
