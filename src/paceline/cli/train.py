"""Runs as the commands make them: real or virtual, shown while they go on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.capacity import check_real_workers, check_virtual_workers
from paceline.cli.screen import Screen
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


def default_transport() -> str:
    """Shared memory where there is one; elsewhere gloo."""
    return "shared_memory" if sys.platform == "linux" else "distributed"


def real(
    screen: Screen,
    task: Task,
    strategy: Strategy,
    *,
    workers: int | None,
    seed: int,
    out: Path | None,
    transport: str | None,
    device: str,
) -> Result | None:
    """Run in real processes: those of a launcher, of which this is one, or some of our own."""
    world = launched_rank_and_size()[1]
    count = (world if world > 1 else 2) if workers is None else workers
    check_real_workers(count)
    chosen = transport or default_transport()
    one_of("transport", chosen, TRANSPORTS)
    check_device(device)
    if world > 1:
        return _attend(screen, task, strategy, workers, seed, out, device)
    folder = choose_out(out, f"{strategy_name(strategy)}-{count}")
    Nursery.warm_up()
    from paceline.run import launch

    with screen.watch(task.arguments.get("steps")) as watch:
        return launch(
            task.reference,
            workers=count,
            strategy=strategy,
            transport=chosen,
            device=device,
            seed=seed,
            arguments=task.arguments,
            out=folder,
            on_metric=watch.metric,
            on_progress=watch.progress,
        )


def _attend(
    screen: Screen,
    task: Task,
    strategy: Strategy,
    workers: int | None,
    seed: int,
    out: Path | None,
    device: str,
) -> Result | None:
    """This process's part in the run of a launcher; the result on rank 0."""
    from paceline.reference import find
    from paceline.run import attend

    with screen.watch(task.arguments.get("steps")) as watch:
        return attend(
            find(task.reference),
            strategy=strategy,
            workers=workers,
            device=device,
            seed=seed,
            arguments=task.arguments,
            out=out,
            on_metric=watch.metric,
        )


def virtual(
    screen: Screen,
    task: Task,
    strategy: Strategy,
    *,
    workers: int,
    seed: int,
    out: Path | None,
    cluster: Cluster,
) -> Result:
    """Run on a simulated cluster."""
    check_virtual_workers(workers)
    folder = choose_out(out, f"sim-{strategy_name(strategy)}-{workers}")
    from paceline.reference import find
    from paceline.run import simulate

    try:
        train = find(task.reference)
    except Exception as error:
        raise WorkerFailed.of(0, error) from None
    with screen.watch(task.arguments.get("steps")) as watch:
        return simulate(
            train,
            workers=workers,
            strategy=strategy,
            cluster=cluster,
            seed=seed,
            arguments=task.arguments,
            out=folder,
            on_metric=watch.metric,
            on_progress=watch.progress,
        )
