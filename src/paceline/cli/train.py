"""Runs as the commands make them: real or virtual, shown while they go on."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.capacity import check_real_workers, check_virtual_workers
from paceline.cli.screen import Screen, Watch
from paceline.cli.task import Task, check_device, choose_out
from paceline.errors import WorkerFailed
from paceline.launched import launched_rank_and_size
from paceline.options import one_of
from paceline.processes import TRANSPORTS, Nursery
from paceline.strategies import strategy_name

if TYPE_CHECKING:
    from paceline.results import Result
    from paceline.sim.cluster import Cluster
    from paceline.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train and how, wherever it runs."""

    task: Task
    strategy: Strategy
    seed: int
    out: Path | None

    def run(
        self, screen: Screen, workers: int | None, transport: str | None, device: str
    ) -> Result | None:
        """Run in real processes: those of a launcher, of which this is one, or some of our own.

        The result; None on the ranks of a launcher other than 0.
        """
        world = launched_rank_and_size()[1]
        count = (world if world > 1 else 2) if workers is None else workers
        check_real_workers(count)
        chosen = transport or _default_transport()
        one_of("transport", chosen, TRANSPORTS)
        check_device(device)
        if world > 1:
            return self._attend(screen, workers, device)
        folder = choose_out(self.out, f"{strategy_name(self.strategy)}-{count}")
        Nursery.warm_up()
        from paceline.run import launch

        with self._watched(screen) as watch:
            return launch(
                self.task.reference,
                workers=count,
                transport=chosen,
                device=device,
                out=folder,
                on_progress=watch.progress,
                **self._common(watch),
            )

    def _attend(self, screen: Screen, workers: int | None, device: str) -> Result | None:
        from paceline.reference import find
        from paceline.run import attend

        with self._watched(screen) as watch:
            train = find(self.task.reference)
            return attend(
                train, workers=workers, device=device, out=self.out, **self._common(watch)
            )

    def simulate(self, screen: Screen, workers: int, cluster: Cluster) -> Result:
        """Run on a simulated cluster."""
        check_virtual_workers(workers)
        folder = choose_out(self.out, f"sim-{strategy_name(self.strategy)}-{workers}")
        from paceline.reference import find
        from paceline.run import simulate

        try:
            train = find(self.task.reference)
        except Exception as error:
            raise WorkerFailed.of(0, error) from None
        with self._watched(screen) as watch:
            return simulate(
                train,
                workers=workers,
                cluster=cluster,
                out=folder,
                on_progress=watch.progress,
                **self._common(watch),
            )

    def _watched(self, screen: Screen) -> AbstractContextManager[Watch]:
        return screen.watch(self.task.arguments.get("steps"))

    def _common(self, watch: Watch) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "seed": self.seed,
            "arguments": self.task.arguments,
            "on_metric": watch.metric,
        }


def _default_transport() -> str:
    """Shared memory where there is one; elsewhere gloo."""
    return "shared_memory" if sys.platform == "linux" else "distributed"
