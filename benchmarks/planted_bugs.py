"""Plant bugs in a copy of the package, and count the seeds that fault testing needs to find each.

    python benchmarks/planted_bugs.py [--seeds N] [--write] [NAME...]

``--write`` puts the table into docs/fault-testing.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLANTED = ROOT / "tests" / "planted"
PAGE = ROOT / "docs" / "fault-testing.md"
BEGIN, END = "<!-- planted bugs -->", "<!-- end of planted bugs -->"


class Bug(NamedTuple):
    """A patch to src/; its first two lines describe the bug and name the methods that have it."""

    path: Path
    description: str
    methods: list[str]


class Find(NamedTuple):
    seeds: int | None
    method: str
    law: str


def bugs(names: list[str]) -> list[Bug]:
    selected = []
    for path in sorted(PLANTED.glob("*.patch")):
        description, methods = path.read_text(encoding="utf-8").splitlines()[:2]
        if not names or any(path.name.startswith(name) for name in names):
            selected.append(Bug(path, description, methods.removeprefix("Methods: ").split()))
    return selected


def plant(bug: Bug, folder: Path) -> Path:
    """Copy src/ into ``folder`` with the bug in it."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with bug.path.open("rb") as patch:
        subprocess.run(["patch", "-p1", "-s", "-d", folder], stdin=patch, check=True)
    return folder / "src"


_TRY = """
import sys
from paceline.lab.faulttest.campaign import try_seeds
import json
found = []
for seed in range(0, int(sys.argv[2]), 5):
    for method in sys.argv[1].split():
        answer = json.loads(try_seeds(json.dumps([method, seed, 5])))
        found += answer["failures"]
    if found:
        break
print(json.dumps(found))
"""


def find(bug: Bug, seeds: int) -> Find:
    """How many seeds of a method it took to find the bug, and the law that broke first."""
    with tempfile.TemporaryDirectory() as folder:
        source, existing = plant(bug, Path(folder)), filter(None, [os.environ.get("PYTHONPATH")])
        process = subprocess.run(
            [sys.executable, "-c", _TRY, " ".join(bug.methods), str(seeds)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *existing])},
            capture_output=True,
            text=True,
            check=True,
        )
    failures = json.loads(process.stdout.splitlines()[-1])
    if not failures:
        return Find(None, "", "")
    first = min(failures, key=lambda failure: failure["seed"])
    return Find(first["seed"] + 1, first["method"], first["law"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    rows = ["| bug | seeds | method | law that was broken |", "|---|---|---|---|"]
    missed = 0
    for bug in bugs(arguments.names):
        result = find(bug, arguments.seeds)
        missed += result.seeds is None
        needed = "not found" if result.seeds is None else str(result.seeds)
        rows.append(f"| {bug.description} | {needed} | {result.method} | {result.law} |")
        print(f"{bug.path.stem:<34}{needed:>10}  {result.method:<12}{result.law}", flush=True)
    if arguments.write:
        table = f"{BEGIN}\n\n" + "\n".join(rows) + f"\n\n{END}"
        page = re.sub(f"{BEGIN}.*{END}", lambda _: table, PAGE.read_text("utf-8"), flags=re.S)
        PAGE.write_text(page, encoding="utf-8")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
