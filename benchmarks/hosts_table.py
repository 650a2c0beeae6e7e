"""Write the table of docs/clusters.md that says how fast runs over many hosts are.

    python benchmarks/hosts_table.py [FILE]

Runs ``paceline bench hosts --json``, or reads its output from FILE.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from methods_table import replace_table

PAGE = Path(__file__).parents[1] / "docs" / "clusters.md"
ENGINES = {"paceline": "encrypted", "paceline, not encrypted": "not encrypted", "gloo": "gloo"}


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each case, with a column for each engine."""
    cases: dict[tuple[str, str, int], dict[str, str]] = {}
    for row in rows:
        case = row["link"], row["what"], row["bytes"]
        cases.setdefault(case, {})[row["engine"]] = cell(row)
    lines = [
        f"| line | what | bytes | {' | '.join(ENGINES.values())} |",
        f"|---|---|---|{'---|' * len(ENGINES)}",
    ]
    for (link, what, nbytes), cells in cases.items():
        times = " | ".join(cells[engine] for engine in ENGINES)
        lines.append(f"| {link} | {what} | {size(nbytes)} | {times} |")
    return lines


def cell(row: dict[str, Any]) -> str:
    """The median time, and the share of the line or the ratio to gloo where there is one."""
    more = row.get("share_of_line", row.get("ratio_to_gloo"))
    return f"{row['ms']:,.1f} ms" + ("" if more is None else f" ({more:.2f})")


def size(nbytes: int) -> str:
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"


def main() -> None:
    if len(sys.argv) > 1:
        text = Path(sys.argv[1]).read_text(encoding="utf-8")
    else:
        command = [sys.executable, "-m", "paceline", "bench", "hosts", "--json"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    replace_table("speed", table_of(json.loads(text.splitlines()[-1])["rows"]), PAGE)


if __name__ == "__main__":
    main()
