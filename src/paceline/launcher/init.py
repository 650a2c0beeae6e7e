"""A rank in a process that another launcher started (torchrun, mpirun, srun, Ray), or alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.comm.launchers import Launched, launched
from paceline.comm.limits import Limits
from paceline.comm.metered import MeteredPorts
from paceline.comm.ports import Ports
from paceline.common.generators import seed_user_generators
from paceline.common.reference import Reference, find, in_whole_script
from paceline.errors import (
    CommTimeout,
    NotLaunched,
    NotSaved,
    PeerLost,
    RunLost,
    ServingDone,
    UsageError,
    name_ranks,
)
from paceline.launcher.rank import noting_origin
from paceline.launcher.script import ScriptWorker
from paceline.launcher.spec import InitSpec, takes
from paceline.launcher.transports import connect_under_launcher
from paceline.record.folder import RankFiles, check_out, claim, write_result
from paceline.record.result import Metric, Result, RunRecorder, Summary, print_event
from paceline.strategies import strategy_name, strategy_spec
from paceline.strategies.base import workers_in
from paceline.training.session import Listener, Session
from paceline.training.summary import summary_of
from paceline.training.worker import Worker, current_worker, forget_worker


@takes(InitSpec)
def init(spec: InitSpec) -> ScriptWorker:
    """The worker of a plain script, under torchrun, mpirun, srun, Ray, or alone.

    The launcher's environment variables give this process its rank; without them it is the only
    worker. A server or communicator serves, and its process ends in ``worker.setup``. When a rank
    is lost, all others end with exit code 3 and a message that names it; over ``hosts``, those of
    an asynchronous method go on. Strategy and seed must be the same on every rank. ``out`` gets
    this rank's trace and metrics, and rank 0's model.

    In ``with pl.init() as worker:`` the end of the block ends the run. After the plain call
    ``worker = pl.init()``, ``worker.finish()`` ends it, or the end of the script. A script that
    ends by an error, or by ``sys.exit`` with a code other than 0, gives the run up.

    In a script that ``paceline run`` starts as a whole, this is the worker of that run, whose
    options are those of the command.

    Raises:
        NotSaved: the model could not be written to ``out``; at the end of the run.
    """
    worker = current_worker()
    if worker is None or (worker.finished and not in_whole_script.get()):
        run = _run(spec)
        return ScriptWorker(run.__enter__(), run, watches=True)
    if in_whole_script.get() and not isinstance(worker, ScriptWorker):
        return ScriptWorker.of(worker)
    raise UsageError(
        "pl.init must be called once in a run: there is a worker already; use that, or call its"
        " finish() first"
    )


@contextmanager
def _run(spec: InitSpec) -> Iterator[Session]:
    """The run of a plain script, and this process's place in it."""
    with _exit_when_lost():
        claimed = spec.out if launched().rank == 0 else None  # no other rank starts without rank 0
        with claim(claimed), _joined(spec) as session:
            yield session


@contextmanager
def _exit_when_lost() -> Iterator[None]:
    """End this process with a message and an exit code when a rank was lost."""
    try:
        yield
    except (PeerLost, CommTimeout, NotLaunched) as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        print(f"paceline: {error}{notes}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


@contextmanager
def _joined(spec: InitSpec) -> Iterator[Session]:
    """The session of this process; see :func:`init`."""
    if spec.out is not None:
        check_out(spec.out)
    process = launched()
    workers = workers_in(spec.method, process.size) if process.size > 1 else 1
    elastic = spec.transport == "hosts" and not spec.method.synchronous
    try:
        ports = _connect(process, spec, workers, elastic)
    except RunLost as end:
        raise end.loss from None
    spec.check_global_batch(workers)
    files = RankFiles(spec.out, ports.rank, trace=spec.trace)

    def log(record: Metric) -> None:
        files.metric(record)
        if spec.on_metric is not None:
            spec.on_metric(record)

    seed_user_generators(spec.seed, ports.rank)

    session = Session(
        MeteredPorts(ports, files.trace),
        spec.method,
        workers=workers,
        seed=spec.seed,
        device=spec.device_of(process.local_rank),
        listener=Listener(metric=log, event=print_event),
        elastic=elastic,
        global_batch=spec.global_batch,
        by_speed=spec.by_speed,
    )
    try:
        with noting_origin(session):
            try:
                yield session
                session.finish()
                model_error = files.save_answer(session.model) if session.leads else None
                _tell_losses(session)
            except ServingDone:
                ports.close()
                raise SystemExit(0) from None
            ports.close()
            if model_error is not None:
                raise NotSaved(spec.out, model_error)
    finally:
        forget_worker()
        ports.give_up()
        files.close()


def _connect(process: Launched, spec: InitSpec, workers: int, elastic: bool) -> Ports:
    """Connect this process to the others, over the transport that was chosen."""
    limits = spec.limits or Limits()
    if spec.transport == "hosts" and process.size > 1:
        from paceline.launcher.own_registrar import connect_beside_registrar

        file = None if spec.token_file is None else Path(spec.token_file)
        return connect_beside_registrar(process, limits, file, workers=workers, elastic=elastic)
    return connect_under_launcher(process, limits, spec.rank_order)


def _tell_losses(session: Session) -> None:
    """Say without whom the run has ended; one rank says it for all."""
    if session.leads and (lost := session.all_ranks.members.view().lost):
        print(
            f"paceline: the run went on without {name_ranks(sorted(lost))}",
            file=sys.stderr,
            flush=True,
        )


def train_launched(
    train: Reference, spec: InitSpec, *, workers: int | None, arguments: Mapping[str, Any]
) -> Result | None:
    """Run ``train(worker)`` in this process of another launcher; rank 0 returns the result."""
    program = find(train)
    recorder, began_s = RunRecorder(None, spec.on_metric), time.monotonic()
    not_saved = None
    try:
        with _joined(replace(spec, on_metric=recorder.metric)) as session:
            if workers not in (None, session.size):
                rule = f"must be {session.size}, as the launcher says"
                raise UsageError(f"workers ({workers}) {rule}")
            program(Worker(session), **arguments)
            session.finish()
            summaries = gather_summaries(session)
    except NotSaved as error:
        not_saved = error
    if session.rank != 0:
        return None
    result = recorder.result(
        strategy_name(session.strategy),
        summaries,
        workers=session.size,
        began_s=began_s,
        synchronous=session.strategy.synchronous,
        seed=spec.seed,
        out=None if spec.out is None else str(spec.out),
    )
    if spec.out is not None:
        config = {
            "world": "launched",
            "train": train,
            "strategy": repr(session.strategy),
            "spec": strategy_spec(session.strategy),
            "workers": session.size,
            "seed": spec.seed,
            "global_batch": spec.global_batch,
            "batch": spec.batch,
            "arguments": dict(arguments),
        }
        write_result(Path(spec.out), result.to_record(), config)
    if not_saved is not None:
        raise not_saved
    return result


def gather_summaries(session: Session) -> list[Summary]:
    """The summaries of all workers; every worker must call this."""
    import torch

    own = summary_of(session).numbers()
    table = torch.zeros(session.size, len(own), dtype=torch.float64)
    table[session.rank] = torch.tensor(own)
    session.measuring().all_reduce(table)
    return [Summary.from_numbers(row) for row in table.tolist()]
