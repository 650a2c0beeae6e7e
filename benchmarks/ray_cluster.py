"""Lose a node of a Ray cluster in the middle of a run: what is noticed when, and what it costs.

    python benchmarks/ray_cluster.py

Each Ray node is a host of its own: a network namespace and a process namespace, so that all of its
processes can be killed at once, without a goodbye. Needs root and Ray (``paceline[ray]``).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from namespaces import SlowNetwork

from paceline import Worker
from paceline.lab.drill.impact import measure_impact
from paceline.lab.tasks import fashion

NODES, CPUS = 3, 4
BITS_PER_S = 1e9
PORT = 6379
STORE_BYTES = 80_000_000
"""Ray wants an object store of about this size; Paceline does not use it."""


class RayCluster:
    """Ray nodes in namespaces, as a context manager.

    Args:
        nodes: how many there are; the first is the head.
        cpus: how many CPUs Ray believes each has.
    """

    def __init__(self, nodes: int, cpus: int) -> None:
        self.nodes, self.cpus = nodes, cpus
        self._network = SlowNetwork(nodes, BITS_PER_S)
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._exits = ExitStack()

    def __enter__(self) -> RayCluster:
        with ExitStack() as exits:
            exits.enter_context(self._network)
            # Ray's sockets lie below, and their paths must be short.
            self.folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
            exits.callback(shutil.rmtree, self.folder, ignore_errors=True)
            exits.callback(lambda: [self.kill(node) for node in [*self._running]])
            for node in range(self.nodes):
                self.start(node)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    @property
    def address(self) -> str:
        """Where drivers and nodes find the cluster."""
        return f"{self._network.address(0)}:{PORT}"

    def inside(self, node: int, *command: str, **how: Any) -> subprocess.Popen[str]:
        """Start a command on the network of a node, with pipes for what it prints."""
        environment = {**os.environ, "RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.Popen(
            ["nsenter", f"--net={self._network.path(node)}", "--", *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **how,
        )

    def start(self, node: int) -> None:
        """Start a node, and wait until it is one of the cluster."""
        which = ("--address", self.address)
        if node == 0:
            which = ("--head", f"--port={PORT}", f"--temp-dir={self.folder}")
            which += ("--include-dashboard=false",)
        process = self.inside(
            node,
            *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *(str(Path(sys.executable).with_name("ray")), "start", "--block"),
            *(f"--node-ip-address={self._network.address(node)}", f"--num-cpus={self.cpus}"),
            *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats", *which),
        )
        self._running[node] = process
        assert process.stdout is not None
        said = ""
        while "Ray runtime started" not in said:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"node {node} of Ray did not start: {said}")
            said += line

    def kill(self, node: int) -> None:
        """Kill all processes of a node at once."""
        process = self._running.pop(node)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:  # the first process of a namespace takes all others with it
            os.kill(int(child), signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


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
        run = cluster.inside(0, paceline, *line)
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
        "accuracy": result["final"]["accuracy"],
    }


def _records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of records."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="of each worker")
    steps = parser.parse_args().steps
    for strategy, workers in (("gossip", 6), ("downpour", 5)):
        print(json.dumps(measure(strategy, workers, steps)), flush=True)
