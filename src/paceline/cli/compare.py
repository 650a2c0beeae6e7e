"""``paceline compare``: strategies, workers and clusters side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.capacity import check_real_workers, check_virtual_workers
from paceline.cli.screen import Screen, number, seconds, size
from paceline.cli.task import Task
from paceline.cli.train import Job
from paceline.errors import UsageError, unknown
from paceline.options import field_types
from paceline.strategies import STRATEGIES, make_strategy
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.results import Result
    from paceline.sim.cluster import Cluster

TARGET = 0.8
"""The accuracy of the built-in task that a comparison takes the time to."""


@dataclass(kw_only=True)
class Comparison:
    """Runs to make, one after the other, each from the same seed."""

    task: Task
    strategies: dict[str, Strategy]
    workers: list[int]
    clusters: list[Cluster]
    target: float | None
    seed: int
    out: Path
    transport: str | None = None
    device: str = "cpu"
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, screen: Screen) -> None:
        """Make the runs, and say how each of them went."""
        plan = list(self._plan())
        for count, (spec, strategy, workers, cluster) in enumerate(plan, 1):
            where = f", {cluster.name}" if cluster else ""
            screen.say(f"[{count}/{len(plan)}] {spec}, {workers} workers{where}")
            result = self._run(screen, strategy, workers, cluster, self.out / f"{count:02d}")
            self.rows.append(self._row(spec, workers, cluster, result))

    def _plan(self) -> Iterator[tuple[str, Strategy, int, Cluster | None]]:
        for cluster in self._places():
            for workers in self.workers:
                for spec, strategy in self.strategies.items():
                    yield spec, strategy, workers, cluster

    def _places(self) -> Sequence[Cluster | None]:
        return self.clusters or [None]

    def _run(
        self, screen: Screen, strategy: Strategy, workers: int, cluster: Cluster | None, out: Path
    ) -> Result:
        job = Job(task=self.task, strategy=strategy, seed=self.seed, out=out)
        if cluster is not None:
            return job.simulate(screen, workers, cluster)
        result = job.run(screen, workers, self.transport, self.device)
        assert result is not None, "a comparison starts its own processes"
        return result

    def _row(
        self, spec: str, workers: int, cluster: Cluster | None, result: Result
    ) -> dict[str, Any]:
        to_target = None if self.target is None else result.seconds_to(self.target)
        return {
            **result.to_json(),
            "strategy": spec,
            "workers": workers,
            "cluster": cluster.name if cluster else None,
            "target": self.target,
            "seconds_to_target": to_target,
        }

    def show(self, screen: Screen) -> None:
        """Show the table, and what it says in a sentence."""
        clock = "virtual time" if self.clusters else "time"
        columns = ["strategy", "workers", "accuracy"]
        if self.target is not None:
            columns.append(f"{self.target:g} after")
        columns += [clock, "waiting", "sent"]
        if len(self.clusters) > 1:
            columns.insert(1, "cluster")
        screen.table(columns, [self._cells(row) for row in self.rows])
        for sentence in self._sentences():
            screen.say(sentence)

    def _cells(self, row: dict[str, Any]) -> list[str]:
        cells = [row["strategy"], str(row["workers"]), number(row["accuracy"])]
        if self.target is not None:
            cells.append(seconds(row["seconds_to_target"]) if row["seconds_to_target"] else "never")
        total_s = row["virtual_seconds"] if self.clusters else row["seconds"]
        cells += [seconds(total_s), f"{row['wait_share']:.0%}", size(row["bytes_sent"])]
        if len(self.clusters) > 1:
            cells.insert(1, row["cluster"])
        return cells

    def _sentences(self) -> Iterator[str]:
        """For each set-up: who was there first, and by how much."""
        for cluster in self._places():
            for workers in self.workers:
                name = cluster.name if cluster else None
                rows = [r for r in self.rows if (r["workers"], r["cluster"]) == (workers, name)]
                reached = [row for row in rows if row["seconds_to_target"]]
                reached.sort(key=lambda row: row["seconds_to_target"])
                if len(reached) > 1:
                    yield _verdict(reached, workers, name)


def _verdict(reached: Sequence[dict[str, Any]], workers: int, cluster: str | None) -> str:
    first, last = reached[0], reached[-1]
    times = last["seconds_to_target"] / first["seconds_to_target"]
    place = f" on {cluster}" if cluster else ""
    return (
        f"{workers} workers{place}: {first['strategy']} is at accuracy {first['target']:g} first,"
        f" {times:.1f} times sooner than {last['strategy']}."
    )


def split_specs(texts: Sequence[str]) -> list[str]:
    """Specifications that were repeated, or separated by commas outside of brackets.

    >>> split_specs(["allreduce,sasgd(interval=8, warmup=2)", "sasgd"])
    ['allreduce', 'sasgd(interval=8, warmup=2)', 'sasgd']
    """
    parts = [part for text in texts for part in re.split(r",(?![^(]*\))", text)]
    return [part.strip() for part in parts if part.strip()]


def strategies_of(specs: Sequence[str], settings: dict[str, Any]) -> dict[str, Strategy]:
    """Strategies by specification; each setting goes to those that have it."""
    chosen: dict[str, Strategy] = {}
    used: set[str] = set()
    available: set[str] = set()
    for spec in split_specs(specs) or list(STRATEGIES):
        names = field_types(type(make_strategy(spec)))
        mine = {name: value for name, value in settings.items() if name in names}
        chosen[spec] = make_strategy(spec, mine)
        used |= set(mine)
        available |= set(names)
    for name in settings:
        if name not in used:
            raise unknown("option", name, available)
    return chosen


def workers_of(texts: Sequence[str], *, virtual: bool) -> list[int]:
    """Numbers of workers, each of which this machine can hold."""
    counts = []
    for text in split_specs(texts):
        try:
            count = int(text)
        except ValueError:
            raise UsageError(f"workers ({text}) must be a whole number") from None
        (check_virtual_workers if virtual else check_real_workers)(count)
        counts.append(count)
    return counts
