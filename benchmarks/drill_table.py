"""Make the table of docs/faults.md: every case of the drill, on real processes.

    python benchmarks/drill_table.py [FILE]

runs ``paceline drill --json``, or takes its outcome from FILE, and writes the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from methods_table import put

from paceline.drill.scenario import load_scenarios

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"


def line(finding: dict[str, Any]) -> str:
    """A finding as a row."""
    look = finding["look"]
    cells = [
        f"`{finding['method']}`",
        finding["happened"],
        "" if look["notice_s"] is None else f"{look['notice_s']:.2f} s",
        "" if look["gap_s"] is None else f"{look['gap_s']:.2f} s",
        "" if look["throughput"] is None else f"{look['throughput']:.2f}",
        accuracy(finding),
        finding["outcome"],
    ]
    return f"| {' | '.join(cells)} |"


def accuracy(finding: dict[str, Any]) -> str:
    """That of the run, and those of undisturbed ones."""
    if finding["accuracy"] is None:
        return ""
    mean, deviation = finding["undisturbed"]
    return f"{finding['accuracy']:.3f} ({mean:.3f} ± {deviation:.3f})"


def main() -> None:
    if len(sys.argv) > 1:
        text = Path(sys.argv[1]).read_text(encoding="utf-8")
    else:
        words = [sys.executable, "-m", "paceline", "drill", "--json"]
        text = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout
    outcome = json.loads(text.splitlines()[-1])
    lines = [f"{outcome['passed']} of {len(outcome['findings'])} passed.", ""]
    for case, scenario in load_scenarios().items():
        rows = [line(finding) for finding in outcome["findings"] if finding["case"] == case]
        if not rows:
            continue
        lines += [f"**{case}**: {scenario.about} ({', '.join(scenario.ids)})", ""]
        lines += [
            "| method | what happened | noticed after | longest gap of a survivor |"
            " throughput after / before | accuracy (undisturbed) | outcome |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [*rows, ""]
    put("drill", lines, PAGE)


if __name__ == "__main__":
    main()
