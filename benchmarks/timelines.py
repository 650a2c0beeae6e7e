"""Draw the timelines of docs/timeline.md: a script in real processes, and the same simulated.

    python benchmarks/timelines.py [--script examples/after.py] [--workers 2] [--to 0.2] [--tries 5]

First the script measures a real run with ``allreduce``: how long each worker computed and loaded
before each exchange, and how long an exchange took once all workers were ready. That gives the
cluster file ``here.toml``. Then each method runs in real processes and on that cluster, and both
are drawn together. The runs that are drawn are not the run that was measured. Of several tries of a
real run the shortest counts: other work on the machine disturbed it least.

Last comes the report of the built-in task, with the same network on the same batches, for each
method in both worlds; and a screenshot of it, if Chromium is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from paceline.record.trace import read
from paceline.report.timeline.items import APPLY, COMPUTE, IO, RECEIVE, Step, Stretch
from paceline.report.timeline.traced import TracedRun

ROOT = Path(__file__).parents[1]
METHODS = {"allreduce": "allreduce", "easgd": "easgd(interval=4)"}
WARM_UP = 4
"""The first steps are not measured: torch prepares its kernels in them."""
CLUSTER = """name = "this machine"
about = "this machine, as a run with allreduce found it"
ranks_per_node = 0

[inside]
latency_s = {latency_s:.3g}
bytes_per_s = {bytes_per_s:.4g}

[compute]                    # forward, backward and update of a batch
step_s = {step_s:.5g}
trace = {factors}

[loading]
batch_s = {load_s:.4g}
"""
LATENCY_S = 2e-6


def paceline(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "paceline", *map(str, arguments), "--quiet", "--json"]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    outcome: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return outcome


def real_run(folder: Path, tries: int, *options: object) -> Path:
    """Make some real runs; return the folder of the shortest."""
    runs = [paceline("run", *options, "--out", folder / f"try-{n}") for n in range(tries)]
    return Path(min(runs, key=lambda run: float(run["seconds"]))["out"])


def measure(folder: Path) -> str:
    """The cluster file of this machine, measured from a run with allreduce."""
    own_s: defaultdict[int, list[float]] = defaultdict(list)
    load_s, reduce_s, nbytes = [], [], 0
    run = TracedRun(folder)
    for item in run.items(from_s=0.0, to_s=run.end_s):
        if isinstance(item, Step):
            own_s[item.rank].append(0.0)
        elif isinstance(item, Stretch) and len(own_s[item.rank]) > WARM_UP:
            took_s = item.end_s - item.start_s
            if item.kind in (COMPUTE, APPLY):
                own_s[item.rank][-1] += took_s
            elif item.kind == IO:
                load_s.append(took_s)
            elif item.kind == RECEIVE:
                reduce_s.append(took_s)
    for record in read(folder / "trace.jsonl"):
        nbytes = max(nbytes, record["bytes"] if record["event"] == "all_reduce" else 0)
    steps = [took_s for mine in own_s.values() for took_s in mine[WARM_UP:]]
    step_s = statistics.median(steps)
    return CLUSTER.format(
        latency_s=LATENCY_S,
        bytes_per_s=nbytes / (statistics.mean(reduce_s) - 2 * LATENCY_S),
        step_s=step_s,
        factors=[round(took_s / step_s, 2) for took_s in steps],
        load_s=statistics.mean(load_s),
    )


def report(runs: Path, out: Path, tries: int, workers: int) -> None:
    """Write the report of both methods in both worlds, and a screenshot of its top."""
    folders: list[Path] = []
    for method, strategy in METHODS.items():
        options = ["--strategy", strategy, "--workers", workers, "--model", "mlp", "--epochs", 4]
        folders.append(real_run(runs / f"report-{method}", tries, *options))
        folders.append(runs / f"report-{method}-simulated")
        paceline("sim", *options, "--cluster", out / "here.toml", "--out", folders[-1])
    page = out / "report.html"
    paceline("report", *folders, "--target", 0.8, "--out", page)
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is not None:
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        switches += ["--disable-background-networking", "--disable-component-update"]
        switches += [f"--user-data-dir={runs / 'profile'}", "--window-size=1100,2300"]
        picture = f"--screenshot={page.with_suffix('.png')}"
        quiet = subprocess.DEVNULL
        subprocess.run([browser, *switches, picture, page.as_uri()], check=True, stderr=quiet)
    print(f"report: {page}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path, default=ROOT / "examples" / "after.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--to", type=float, default=0.2, help="seconds to draw")
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "timelines")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    cluster = out / "here.toml"
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name)
        common = [arguments.script.resolve(), "--workers", arguments.workers]
        measured = real_run(runs / "measured", arguments.tries, *common, "--strategy", "allreduce")
        cluster.write_text(measure(measured), encoding="utf-8")
        for method, strategy in METHODS.items():
            options = [*common, "--strategy", strategy, "--seed", 1]
            real, virtual = (
                real_run(runs / method, arguments.tries, *options),
                runs / f"{method}-simulated",
            )
            paceline("sim", *options, "--cluster", cluster, "--out", virtual)
            files = ["--svg", out / f"{method}.svg", "--out", out / f"{method}.json.gz"]
            paceline("timeline", real, virtual, "--to", arguments.to, *files)
            print(f"{method}: {out / method}.svg, .json.gz")
        report(runs, out, arguments.tries, arguments.workers)


if __name__ == "__main__":
    main()
