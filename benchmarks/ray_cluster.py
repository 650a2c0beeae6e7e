"""Lose a node of a Ray cluster in the middle of a run: what is noticed when, and what it costs.

    python benchmarks/ray_cluster.py

Each Ray node is a host of its own: a network namespace and a process namespace, so that all of its
processes can be killed at once, without a goodbye. Needs root and Ray (``paceline[ray]``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from namespaces import SlowNetwork

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

    def inside(self, node: int, *command: str, **how: object) -> subprocess.Popen[str]:
        """Start a command on the network of a node, with pipes for what it prints."""
        environment = {**os.environ, "RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.Popen(
            ["nsenter", f"--net={self._network.path(node)}", "--", *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **how,  # type: ignore[call-overload]
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


def events(out: Path) -> list[dict[str, object]]:
    """What the launcher has recorded so far."""
    path = out / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    pass
