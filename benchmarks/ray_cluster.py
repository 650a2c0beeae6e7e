"""Lose a node of a Ray cluster in the middle of a run: what is noticed when, and what it costs.

    python benchmarks/ray_cluster.py

Each Ray node is a host of its own, made of namespaces, so that all of its processes can be killed
at once, without a goodbye. Needs Ray (``paceline[ray]``).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline import Worker
from paceline.lab.drill.impact import measure_impact
from paceline.lab.network.hosts import HostNetwork
from paceline.lab.tasks import fashion

NODES, CPUS = 3, 4
PORT, FILES = 6379, "/mnt"
STORE_BYTES = 80_000_000
"""Ray wants an object store of about this size; Paceline does not use it."""


class RayCluster:
    """Ray nodes on hosts of their own, as a context manager.

    Args:
        nodes: how many there are; the first is the head.
        cpus: how many CPUs Ray believes each has.
        spare: how many more hosts there are, on which :meth:`add` makes nodes.
    """

    def __init__(self, nodes: int, cpus: int, spare: int = 0) -> None:
        self.nodes, self.cpus = nodes, cpus
        self._network = HostNetwork(nodes + spare)
        self._exits = ExitStack()

    def __enter__(self) -> RayCluster:
        with ExitStack() as exits:
            self._logs = Path(exits.enter_context(tempfile.TemporaryDirectory()))
            exits.enter_context(self._network)
            for node in range(self.nodes):
                self.add(node)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def popen(self, node: int, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on a node; drivers find the cluster there."""
        address = f"{self._network.address(0)}:{PORT}"
        environment = {**os.environ, "RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0"}
        environment["RAY_raylet_start_wait_time_s"] = "120"  # a busy machine takes its time
        environment.pop("PYTHONPATH", None)
        how = {"stderr": subprocess.STDOUT, "text": True, **options}
        return self._network.popen(node, command, env=environment, **how)

    def add(self, node: int) -> None:
        """Start Ray on a host, and wait until it is a node of the cluster."""
        # Ray's files end with the host; the paths of its sockets must be short.
        self._network.run(node, "mount", "-t", "tmpfs", "tmpfs", FILES)
        own = self._network.address(node)
        line = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
        line += [f"--node-ip-address={own}", f"--num-cpus={self.cpus}", "--disable-usage-stats"]
        line += [f"--object-store-memory={STORE_BYTES}"]
        if node == 0:
            line += ["--head", f"--port={PORT}", f"--temp-dir={FILES}/ray"]
            line += ["--include-dashboard=false"]
        else:
            line += [f"--address={self._network.address(0)}:{PORT}"]
        log = self._logs / f"{node}.log"
        with log.open("w") as stdout:
            process = self.popen(node, *line, stdout=stdout)
        while "Ray runtime started" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(f"Ray did not start on node {node}: {log.read_text()}")
            time.sleep(0.05)

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once, without a goodbye."""
        self._network.kill_host(node)


def train(worker: Worker, **arguments: Any) -> None:
    """The built-in task; it logs what the clock of all namespaces shows, beside the run's own."""
    worker.log(monotonic_s=time.monotonic())
    fashion.train(worker, **arguments)


def measure(strategy: str, workers: int, steps: int) -> dict[str, Any]:
    """Kill the last of three nodes after the first epoch of a run; return what happened."""
    with RayCluster(NODES, CPUS) as cluster, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        line = [*("run", __file__, "--on", "ray", "-w", str(workers), "-s", strategy)]
        line += ["--max-restarts", str(workers), "--steps", str(steps), "--out", str(out)]
        paceline = str(Path(sys.executable).with_name("paceline"))
        run = cluster.popen(0, paceline, *line, stdout=subprocess.PIPE)
        while not any("accuracy" in record for record in _records(out / "metrics.jsonl")):
            if run.poll() is not None:
                break
            time.sleep(0.05)
        killed_s = time.monotonic()
        cluster.kill(NODES - 1)
        printed, _ = run.communicate()
        if run.returncode:
            raise RuntimeError(
                f"{shlex.join(line)} ended with exit code {run.returncode}: {printed}"
            )
        return {"strategy": strategy, "workers": workers, "exit": run.returncode} | _figures(
            out, killed_s
        )


def _figures(out: Path, killed_s: float) -> dict[str, Any]:
    result = json.loads((out / "result.json").read_text())
    events = result["events"]
    first = next(r for r in _records(out / "metrics.jsonl") if "monotonic_s" in r)
    fault_s = killed_s - (first["monotonic_s"] - first["t"])
    lost = sorted({event["rank"] for event in events if event["event"] == "lost"})
    harm = [{"event": "stopped", "rank": rank, "t": fault_s} for rank in lost]
    impact = measure_impact(out, [*harm, *events], lost)
    back = [e["t"] - fault_s for e in events if e["event"] in ("joined", "succeeded")]
    return {
        "lost": lost,
        "noticed_s": impact.notice_s,
        "restarted_s": [e["t"] - fault_s for e in events if e["event"] == "restarted"],
        "back_s": back,
        "gap_s": impact.gap_s,
        "accuracy": [r["accuracy"] for r in _records(out / "metrics.jsonl") if "accuracy" in r][-1],
    }


def _records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of records."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="of each worker")
    steps = parser.parse_args().steps
    for strategy, workers in (("gossip", 6), ("downpour", 5)):
        print(json.dumps(measure(strategy, workers, steps)), flush=True)
