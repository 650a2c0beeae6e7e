"""Write the tables of docs/papers.md with ``paceline papers``, for three seeds.

    python benchmarks/papers_table.py

Runs are cached in ``runs/papers-SEED``, so that it continues where it was stopped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"
SEEDS = (0, 1, 2)


def verdicts(seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline", "papers", "--json", "--seed", str(seed)]
    process = subprocess.run(
        [*command, "--out", f"runs/papers-{seed}"], stdout=subprocess.PIPE, text=True, check=True
    )
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


def verdict_table(reports: list[dict[str, Any]]) -> list[str]:
    head = " | ".join(f"seed {report['seed']}" for report in reports)
    lines = [
        f"| claim | source | {head} | can the set-up decide it? |",
        "|---|---|" + "---|" * (len(reports) + 1),
    ]
    for claims in zip(*(report["claims"] for report in reports), strict=True):
        cells = " | ".join(claim["verdict"] for claim in claims)
        first = claims[0]
        cells = f"{cells} | {first['decides']}"
        lines.append(f"| `{first['id']}` | {first['source']} | {cells} |")
    return [*lines, "", f"Learning rates: SHA-256 `{reports[0]['rates_sha256']}`."]


def figure_table(report: dict[str, Any]) -> list[str]:
    lines = ["| claim | figure | mean (90 % interval) | wanted | |", "|---|---|---|---|---|"]
    for claim in report["claims"]:
        for figure in claim["figures"]:
            if figure["verdict"] is None:
                continue
            low, high = figure["interval_90"]
            rates = "" if figure["column"] == "held" else "; own rates"
            lines.append(
                f"| `{claim['id']}` | {figure['what']}{rates} | {figure['mean']:.3g}"
                f" ({low:.3g} to {high:.3g}) | {figure['wanted']} | {figure['verdict']} |"
            )
    return lines


def replace_table(name: str, lines: list[str]) -> None:
    """Replace the lines between the two comments of a table."""
    table = "\n".join(lines)
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    page = PAGE.read_text()
    PAGE.write_text(re.sub(pattern, rf"\g<1>{table}\n\g<2>", page, count=1, flags=re.DOTALL))


def main() -> None:
    reports = [verdicts(seed) for seed in SEEDS]
    replace_table("verdicts", verdict_table(reports))
    replace_table("figures", figure_table(reports[0]))


if __name__ == "__main__":
    main()
