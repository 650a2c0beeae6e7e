"""How a run starts: :func:`launch` real processes, :func:`simulate` them, or :func:`init` one.

The same ``train(worker)`` function goes into all three.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from paceline.comm.base import Limits
from paceline.comm.metered import MeteredTransport
from paceline.comm.simulated import SimulatedTransport, World
from paceline.checkpoint import save_tensors
from paceline.errors import PacelineError, UsageError, WorkerFailed
from paceline.folder import RunFolder
from paceline.options import at_least
from paceline.results import Result, Summary, last_logged, totals
from paceline.sim.cluster import Cluster, load_cluster
from paceline.sim.faults import Fault
from paceline.strategies import make_strategy, strategy_name
from paceline.strategies.base import Strategy
from paceline.trace import Trace
from paceline.worker import Metric, Served, Worker

Train = Callable[..., None]
OnMetric = Callable[[Metric], None]
MAX_VIRTUAL_WORKERS = 20_000


def simulate(
    train: Train,
    *,
    workers: int = 4,
    strategy: str | Strategy = "allreduce",
    cluster: str | PathLike[str] | Cluster = "ethernet-10g",
    seed: int = 0,
    faults: Sequence[Fault] = (),
    limits: Limits | None = None,
    arguments: Mapping[str, Any] | None = None,
    out: str | PathLike[str] | None = None,
    on_metric: OnMetric | None = None,
) -> Result:
    """Run ``train(worker)`` on simulated workers, in virtual time; a function of its arguments.

    Args:
        train: the training function; called once for each worker.
        workers: how many; servers and communicators of the strategy come on top.
        strategy: a name, a name with options, or an object.
        cluster: a preset's name, a TOML file, or a :class:`~paceline.sim.cluster.Cluster`.
        seed: of everything random in the run.
        faults: what goes wrong, beside what the cluster says.
        limits: how long workers wait for each other, in virtual time.
        arguments: more keyword arguments for ``train``.
        out: a folder for configuration, metrics, trace and model.
        on_metric: called with each record of ``worker.log`` as it comes.
    """
    began = time.perf_counter()
    prototype = make_strategy(strategy)
    check_workers(workers, MAX_VIRTUAL_WORKERS)
    place = load_cluster(cluster)
    size = ranks_for(prototype, workers)
    all_faults = [*place.faults, *faults]
    check_faults(all_faults, size, prototype)
    folder = RunFolder(out) if out is not None else None
    world = World(place, size, seed=seed, limits=limits or Limits(), faults=all_faults)
    trace = Trace(folder.trace if folder else None)
    metrics: list[Metric] = []
    summaries: list[Summary] = []
    first_step = time.perf_counter()

    def report(record: Metric) -> None:
        metrics.append(record)
        if folder is not None:
            folder.metric(record)
        if on_metric is not None:
            on_metric(record)

    def body(transport: SimulatedTransport) -> None:
        worker = Worker(
            MeteredTransport(transport, trace),
            make_strategy(prototype),
            workers=workers,
            seed=seed,
            costs=world.costs[transport.rank],
            report=report,
        )
        run_worker(worker, train, arguments or {})
        summaries.append(Summary.of(worker))
        if folder is not None and worker.rank == 0:
            save_answer(worker, folder)

    if folder is not None:
        folder.write_config({"world": "simulated", "workers": workers, "seed": seed,
            "strategy": repr(prototype), "cluster": place, "arguments": dict(arguments or {})})
    try:
        world.run(body)
    finally:
        trace_hash = trace.close()
        if folder is not None:
            folder.close()
    return Result(
        strategy=strategy_name(prototype),
        workers=workers,
        seed=seed,
        **totals(summaries),
        loss=last_logged(metrics, "loss"),
        accuracy=last_logged(metrics, "accuracy"),
        seconds=time.perf_counter() - first_step,
        startup_seconds=first_step - began,
        virtual_seconds=world.calendar.now_s,
        wire_bytes=round(world.network.wire_bytes),
        staleness_mean=0.0 if prototype.synchronous else None,
        staleness_max=0 if prototype.synchronous else None,
        trace_hash=trace_hash,
        lost_workers=len(world.lost),
        joined_workers=len(world.joined_late),
        out=str(folder.path) if folder else None,
        metrics=metrics,
    )


def run_worker(worker: Worker, train: Train, arguments: Mapping[str, Any]) -> None:
    """Train and finish; a rank that serves ends in ``worker.setup``."""
    try:
        train(worker, **arguments)
        worker.finish()
    except Served:
        pass
    except PacelineError as error:
        error.add_note(f"on rank {worker.rank} at {worker.comm.now():.6f} s")
        raise
    except Exception as error:
        summary = f"{type(error).__name__}: {error} (at {worker.comm.now():.6f} s)"
        raise WorkerFailed(worker.rank, summary) from error


def save_answer(worker: Worker, folder: RunFolder) -> None:
    """Write the model that the run ends with."""
    if worker.model is not None:
        save_tensors(worker.model.state_dict(), folder.model)


def ranks_for(strategy: Strategy, workers: int) -> int:
    """How many ranks so many workers need; a single one needs no other."""
    return len(strategy.roles(workers)) if workers > 1 else 1


def check_workers(workers: int, limit: int) -> None:
    """Refuse a number of workers that is no use, or more than this machine could hold."""
    at_least("workers", workers, 1)
    if workers > limit:
        raise UsageError(f"workers ({workers}) must be at most {limit} here")


def check_faults(faults: Sequence[Fault], size: int, strategy: Strategy) -> None:
    """Refuse faults of ranks that do not exist, and members that the method cannot take in."""
    for fault in faults:
        if fault.rank >= size:
            raise UsageError(f"{fault.kind}: rank ({fault.rank}) must be below {size}")
        if fault.kind == "join" and strategy.synchronous:
            name = strategy_name(strategy)
            raise UsageError(f"join: {name} is synchronous and takes no worker in mid-run")
