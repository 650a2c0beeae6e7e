"""Write the table of docs/faults.md: every case of the drill, on real processes.

    python benchmarks/drill_table.py [FILE]

Runs ``paceline drill --json``, or reads its output from FILE, and writes the table. The output of
``paceline drill --hosts 3 --json`` goes to docs/clusters.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from methods_table import replace_table

from paceline.lab.drill.scenario import load_scenarios

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
HOSTS_PAGE = PAGE.with_name("clusters.md")


def table_row(row: dict[str, Any]) -> str:
    """A row of the drill's output as a row of the table."""
    cells = [
        f"`{row['method']}`",
        row["happened"],
        "" if row["noticed_s"] is None else f"{row['noticed_s']:.2f} s",
        "" if row["gap_s"] is None else f"{row['gap_s']:.2f} s",
        "" if row["throughput"] is None else f"{row['throughput']:.2f}",
        accuracy(row),
        row["outcome"],
    ]
    return f"| {' | '.join(cells)} |"


def accuracy(row: dict[str, Any]) -> str:
    """The accuracy of the run, and that of undisturbed runs."""
    if row["accuracy"] is None:
        return ""
    mean, deviation = row["undisturbed"]
    return f"{row['accuracy']:.3f} ({mean:.3f} ± {deviation:.3f})"


def main() -> None:
    if len(sys.argv) > 1:
        text = Path(sys.argv[1]).read_text(encoding="utf-8")
    else:
        command = [sys.executable, "-m", "paceline", "drill", "--json"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    outcome = json.loads(text.splitlines()[-1])
    lines = [f"{outcome['passed']} of {len(outcome['rows'])} passed.", ""]
    for case, scenario in load_scenarios().items():
        rows = [table_row(row) for row in outcome["rows"] if row["case"] == case]
        if not rows:
            continue
        lines += [f"**{case}**: {scenario.about} ({', '.join(scenario.ids)})", ""]
        lines += [
            "| method | what happened | noticed after | longest gap of a survivor |"
            " throughput after / before | accuracy (undisturbed) | outcome |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [*rows, ""]
    many = any(row.get("hosts", 1) > 1 for row in outcome["rows"])
    replace_table("drill", lines, HOSTS_PAGE if many else PAGE)


if __name__ == "__main__":
    main()
