"""How a run starts: :func:`launch` real processes, :func:`simulate` them, or :func:`init` one.

The same ``train(worker)`` function goes into all three.
"""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, cast

from paceline.capacity import check_real_workers, check_virtual_workers
from paceline.checkpoint.store import Saved
from paceline.comm.base import Limits, Transport
from paceline.comm.metered import MeteredTransport
from paceline.comm.replayed import Replay
from paceline.comm.simulated import SimulatedTransport, World
from paceline.errors import (
    CommTimeout,
    NotLaunched,
    NotSaved,
    PacelineError,
    PeerLost,
    RunLost,
    Served,
    UsageError,
    WorkerFailed,
)
from paceline.folder import (
    RankFiles,
    RecordedRun,
    check_out,
    claim,
    save_answer,
    write_result,
)
from paceline.hazards import Hazards
from paceline.keeper import Keeper, Plan, Stopped
from paceline.launched import Launched, launched
from paceline.losses import Losses
from paceline.options import one_of
from paceline.processes import (
    TRANSPORTS,
    Channel,
    Message,
    refuse_in_rank,
    run_ranks,
    threads_per_rank,
)
from paceline.reference import (
    Reference,
    find,
    pack_strategy,
    plain_json,
    refer_to,
    unpack_strategy,
)
from paceline.results import OnMetric, Result, RunBook, Summary, say_event
from paceline.saving import Saving
from paceline.seeds import check_seed, seed_user_generators
from paceline.sim.cluster import Cluster, load_cluster
from paceline.sim.faults import LINK_KINDS, Fault
from paceline.sim.models import as_model as stand_for
from paceline.sim.models import stands_for_note
from paceline.stopping import ASK, Stop
from paceline.strategies import make_strategy, strategy_name, strategy_spec
from paceline.strategies.base import Strategy, workers_in
from paceline.trace import Trace
from paceline.worker import Metric, Worker

Train = Callable[..., None]
P = ParamSpec("P")
STOPPED: Message = {"stopped": True}
"""What a rank returns that has ended after a last checkpoint."""


def _alone_in_out(
    check: Callable[[], None] = lambda: None,
) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Have what starts a run ``check`` first, and have its folder for itself to the end."""

    def wrap(start: Callable[P, Result]) -> Callable[P, Result]:
        @functools.wraps(start)
        def run(*args: P.args, **how: P.kwargs) -> Result:
            check()
            with claim(cast(Any, how.get("out"))):
                return start(*args, **how)

        return run

    return wrap


@_alone_in_out(refuse_in_rank)
def launch(
    train: Train | Reference,
    *,
    workers: int = 2,
    strategy: str | Strategy = "allreduce",
    transport: str = "shared_memory",
    device: str = "cpu",
    seed: int = 0,
    limits: Limits | None = None,
    on_loss: str | None = None,
    max_restarts: int = 0,
    faults: Sequence[Fault] = (),
    arguments: Mapping[str, Any] | None = None,
    out: str | PathLike[str] | None = None,
    on_metric: OnMetric | None = None,
    on_progress: OnMetric | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_minutes: float | None = None,
    keep: int = 2,
    resume: bool = False,
    trace: bool = True,
) -> Result:
    """Run ``train(worker)`` in real processes on this host.

    Args:
        train: the training function, at the top level of a module or script.
        workers: how many; servers and communicators of the strategy come on top.
        strategy: a name, a name with options, or an object.
        transport: ``shared_memory``, or ``distributed`` for gloo and nccl.
        device: ``cpu``, or ``cuda`` to spread the workers over this host's GPUs.
        seed: of everything random in the run.
        limits: how long workers wait for each other.
        on_loss: ``continue`` with the workers that are left when one is lost, or ``stop``; when not
            given, asynchronous methods continue and synchronous ones stop.
        max_restarts: how many lost workers are started again, all together.
        faults: what is done to the processes: to kill, freeze or slow one down, or start it late.
        arguments: more keyword arguments for ``train``; numbers, texts, lists and dicts.
        out: a folder for configuration, metrics, trace and model.
        on_metric: called with each record of ``worker.log`` as it comes.
        on_progress: called a few times a second with rank, steps and progress of a worker.
        checkpoint_steps: save all there is of the run after so many steps of the first worker.
        checkpoint_minutes: save it after so many minutes.
        keep: how many checkpoints are kept.
        resume: go on from the newest checkpoint in ``out`` that is whole, or begin where there is
            none.
        trace: whether to write a trace to ``out``, which replays and timelines are made of.

    Raises:
        WorkerFailed: ``train`` raised on a rank; the message holds that rank's traceback.
        PeerLost: a rank died, or was stopped for longer than ``limits.dead_s``.
        Interrupted: a signal told the run to end; with checkpoints, it has made one.
    """
    began_s = time.monotonic()
    refuse_under_launcher()
    prototype = make_strategy(strategy)
    check_seed(seed)
    check_real_workers(workers, prototype)
    device_of(device, 0)
    size = ranks_for(prototype, workers)
    one_of("transport", transport, TRANSPORTS)
    losses = Losses(prototype, workers, on_loss, max_restarts)
    check_real_losses(losses, on_loss, faults, transport)
    check_faults(faults, Cluster(), size, prototype)
    saving = Saving(
        out, steps=checkpoint_steps, minutes=checkpoint_minutes, keep=keep, resume=resume
    )
    saving.check_strategy(prototype, size, workers)
    if saving.on and transport != "shared_memory":
        raise UsageError(f"transport ({transport}) must be shared_memory for checkpoints")
    common: Message = {
        "train": train if isinstance(train, dict) else refer_to(train),
        "strategy": pack_strategy(prototype),
        "workers": workers,
        "seed": seed,
        "device": device,
        "arguments": plain_json("arguments", dict(arguments or {})),
        "out": None if out is None else str(out),
        "trace": trace,
        "elastic": losses.goes_on and transport == "shared_memory",
        "faults": [asdict(fault) for fault in faults],
    }
    decisive = ("train", "workers", "seed", "device", "arguments")
    saving.prepare({"strategy": repr(prototype), **{name: common[name] for name in decisive}}, size)
    common["checkpoints"] = asdict(saving.plan) if saving.plan else None
    book = RunBook(out, on_metric)
    saving.follow(book)
    if not trace:
        book.no_trace()
    told = {"strategy": repr(prototype), "method": common["strategy"]}
    told["spec"] = strategy_spec(prototype)
    told["on_loss"], told["max_restarts"] = losses.on_loss, max_restarts
    book.write_config({"world": transport, **common, **told, "threads": threads_per_rank(size)})
    hear: dict[str, Callable[[Message], None]] = {
        "metric": book.metric,
        "event": book.event,
        "no_trace": lambda record: book.no_trace(record["reason"]),
        "progress": on_progress or (lambda record: None),
        "saved": lambda record: saving.hear(Saved(**{**record, "ranks": tuple(record["ranks"])})),
    }
    try:
        with Stop(saving.on) as stop:
            returned = run_ranks(
                refer_to(train_rank),
                [common] * size,
                transport=transport,
                limits=limits,
                on_message=lambda rank, message: hear[message["kind"]](message["record"]),
                losses=losses if transport == "shared_memory" else None,
                faults=[*faults, *saving.latecomers],
                folder=None if out is None else Path(out),
                stop=stop,
                start_s=saving.start_s,
            )
    finally:
        book.close(ranks=size)
    if STOPPED in returned:
        raise stop.error(saving.told_of_last())
    summaries = [Summary(**summary) for summary in returned if summary is not None]
    return book.result(
        prototype, summaries, workers=workers, began_s=began_s, seed=seed, **saving.facts()
    )


def train_rank(transport: Transport, channel: Channel, argument: Message) -> Message:
    """The program of a launched rank."""
    files = RankFiles(
        argument["out"],
        transport.rank,
        goes_on=transport.late,
        trace=argument["trace"],
        on_no_trace=lambda why: channel.send({"kind": "no_trace", "record": {"reason": why}}),
    )
    keeper = _keeper_of_rank(argument["checkpoints"], channel)
    seed_user_generators(argument["seed"], transport.rank)
    hazards = Hazards(
        argument["faults"], transport, channel, lambda: files.trace.flush() if files.trace else None
    )
    worker = Worker(
        MeteredTransport(transport, files.trace, hazards),
        unpack_strategy(argument["strategy"]),
        workers=argument["workers"],
        seed=argument["seed"],
        device=device_of(argument["device"], transport.rank),
        report=lambda record: channel.send({"kind": "metric", "record": record}),
        on_progress=lambda record: channel.send({"kind": "progress", "record": record}),
        on_event=lambda record: channel.send({"kind": "event", "record": record}),
        on_ready=lambda: channel.send({"kind": "ready"}),
        elastic=argument["elastic"],
        keeper=keeper,
    )
    try:
        run_worker(worker, find(argument["train"]), argument["arguments"])
        model_error = files.save_answer(worker.model) if worker.leads else None
    except Stopped:
        return STOPPED
    finally:
        files.close()
    return asdict(replace(Summary.of(worker), model_error=model_error))


def _keeper_of_rank(plan: Message | None, channel: Channel) -> Keeper | None:
    """Who keeps the state of a launched rank; signals ask for a last checkpoint.

    SIGTERM as well: it may be sent to all processes of a job at once.
    """
    if plan is None:
        return None
    keeper = Keeper(
        Plan(**plan), lambda saved: channel.send({"kind": "saved", "record": asdict(saved)})
    )
    for number in (ASK, signal.SIGTERM):
        signal.signal(number, lambda number, frame: keeper.ask_to_stop())
    return keeper


@_alone_in_out()
def simulate(
    train: Train | Reference,
    *,
    workers: int = 4,
    strategy: str | Strategy = "allreduce",
    cluster: str | PathLike[str] | Cluster = "ethernet-10g",
    seed: int = 0,
    as_model: str | None = None,
    faults: Sequence[Fault] = (),
    limits: Limits | None = None,
    on_loss: str | None = None,
    max_restarts: int = 0,
    arguments: Mapping[str, Any] | None = None,
    replay: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    on_metric: OnMetric | None = None,
    on_progress: OnMetric | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_minutes: float | None = None,
    keep: int = 2,
    resume: bool = False,
    trace: bool = True,
) -> Result:
    """Run ``train(worker)`` on simulated workers in virtual time: a function of its arguments.

    Args:
        train: the training function; called once for each worker.
        workers: how many; servers and communicators of the strategy come on top.
        strategy: a name, a name with options, or an object.
        cluster: a preset's name, a TOML file, or a :class:`~paceline.sim.cluster.Cluster`.
        seed: of everything random in the run.
        as_model: a model of :mod:`paceline.sim.models` whose bytes and times the run has.
        faults: what goes wrong, beside what the cluster says.
        limits: how long workers wait for each other, in virtual time.
        on_loss: as for :func:`launch`; ``max_restarts`` likewise.
        arguments: more keyword arguments for ``train``.
        replay: the folder of a real run with the same arguments, whose recorded order is followed.
        out: a folder for configuration, metrics, trace and model.
        on_metric: called with each record of ``worker.log`` as it comes.
        on_progress: called a few times a second with rank, steps and progress of a worker.
        checkpoint_steps: as for :func:`launch`; ``keep`` and ``resume`` likewise.
        checkpoint_minutes: likewise, of virtual time.
        trace: as for :func:`launch`.

    Raises:
        WorkerFailed: ``train`` raised on a rank.
        PeerLost: a rank that others needed was killed, or frozen for too long.
        Deadlock: every rank waited for another.
        PacelineError: a replay came to something else than what was recorded.
    """
    began_s = time.monotonic()
    prototype = make_strategy(strategy)
    check_seed(seed)
    check_virtual_workers(workers, prototype)
    place = stand_for(load_cluster(cluster), as_model)
    size = ranks_for(prototype, workers)
    all_faults = [*place.faults, *faults]
    check_faults(all_faults, place, size, prototype)
    same = {"workers": workers, "strategy": repr(prototype), "seed": seed}
    same["arguments"] = dict(arguments or {})
    record = _recorded(replay, out, all_faults, same)
    if record is not None and record.lost:
        on_loss = on_loss or "continue"  # it did, or it would have no answer
    losses = Losses(prototype, workers, on_loss, max_restarts)
    program = _found(train) if isinstance(train, dict) else train  # all is checked by now
    saving = Saving(
        out, steps=checkpoint_steps, minutes=checkpoint_minutes, keep=keep, resume=resume
    )
    saving.check_strategy(prototype, size, workers)
    if saving.on and record is not None:
        raise UsageError("replay must not be used with checkpoints")
    saving.prepare({**same, "train": _told(program), "cluster": asdict(place)}, size)
    book = RunBook(out, on_metric)
    saving.follow(book)
    world = World(
        place,
        size,
        seed=seed,
        limits=limits or Limits(),
        faults=[*all_faults, *saving.latecomers],
        homes=[prototype.home(rank, workers) for rank in range(size)],
        losses=losses,
        on_event=book.event,
        start_s=saving.start_s,
    )
    summaries: list[Summary] = []

    def body(transport: SimulatedTransport) -> None:
        metered = record.follow(transport, notes) if record else MeteredTransport(transport, notes)
        worker = Worker(
            metered,
            make_strategy(prototype),
            workers=workers,
            seed=seed,
            costs=world.costs[transport.rank],
            report=book.metric,
            on_progress=on_progress,
            on_event=book.event,
            elastic=losses.goes_on,
            keeper=Keeper(saving.plan, saving.hear) if saving.plan else None,
        )
        try:
            run_worker(worker, program, arguments or {})
        except PacelineError:
            raise
        except Exception as error:
            error.add_note(f"at {worker.world.now():.6f} s of virtual time")
            raise WorkerFailed.of(worker.rank, error) from None
        summary, folder = Summary.of(worker), book.folder.path if book.folder else None
        model_error = save_answer(worker.model, folder, notes) if worker.leads else None
        summaries.append(replace(summary, model_error=model_error))
        metered.close()

    book.write_config(
        {
            "world": "simulated",
            **same,
            "spec": strategy_spec(prototype),
            "train": _told(program),
            "cluster": asdict(place),
            "as_model": stands_for_note(place.stands_for.model) if place.stands_for else None,
            "faults": [asdict(fault) for fault in faults],
            "on_loss": losses.on_loss,
            "max_restarts": max_restarts,
            "replay": None if replay is None else str(replay),
        }
    )
    file = book.folder.trace if book.folder and trace else None
    notes = Trace(file, lambda: world.calendar.now_s)
    try:
        world.run(body)
    finally:
        trace_hash = notes.close()
        book.close()
    return book.result(
        prototype,
        summaries,
        workers=workers,
        began_s=began_s,
        seed=seed,
        virtual_seconds=world.calendar.now_s,
        wire_bytes=round(world.network.wire_bytes),
        trace_hash=trace_hash,
        as_model=place.stands_for.model if place.stands_for else None,
        **saving.facts(),
    )


def _found(train: Reference) -> Train:
    """The training function that is meant."""
    try:
        program = find(train)
    except Exception as error:
        raise WorkerFailed.of(0, error) from None
    if not callable(program):
        raise UsageError(f"train ({train}) must be a function")
    return cast(Train, program)


def _told(train: Train) -> Reference | str:
    """Where a training function is, for people who read the configuration."""
    try:
        return refer_to(train)
    except UsageError:
        return getattr(train, "__qualname__", repr(train))


def _recorded(
    replay: str | PathLike[str] | None,
    out: str | PathLike[str] | None,
    faults: Sequence[Fault],
    same: Mapping[str, Any],
) -> Replay | None:
    """What is to be followed; refuses a run that is not the ``same``."""
    if replay is None:
        return None
    if faults:
        raise UsageError("replay must not be used with faults, here or in the cluster's file")
    run = RecordedRun(replay)
    run.check(out, **same)
    return Replay(run.trace, run.lost(), run.config["workers"])


def _rank_0_alone_in_out(
    start: Callable[P, AbstractContextManager[Worker]],
) -> Callable[P, AbstractContextManager[Worker]]:
    """Have rank 0 keep other runs out of the folder; without it the other ranks do not begin."""

    @functools.wraps(start)
    @contextmanager
    def run(*args: P.args, **how: P.kwargs) -> Iterator[Worker]:
        out = how.get("out") if launched().rank == 0 else None
        with claim(cast(Any, out)), start(*args, **how) as worker:
            yield worker

    return run


@_rank_0_alone_in_out
@contextmanager
def init(
    *,
    strategy: str | Strategy = "allreduce",
    device: str = "cpu",
    seed: int = 0,
    limits: Limits | None = None,
    rank_order: bool = False,
    out: str | PathLike[str] | None = None,
    on_metric: OnMetric | None = None,
    trace: bool = True,
) -> Iterator[Worker]:
    """The worker of a plain script, under torchrun, mpirun, srun, Ray, or alone.

    The launcher's environment variables say who this process is; without them it is a world of one.
    On leaving the block the worker is finished. A rank that is no worker ends inside it. When a
    rank is lost, all others end, with a sentence that names it and exit code 3.

    Args:
        strategy: a name, a name with options, or an object; the same on every rank.
        device: ``cpu``, or ``cuda`` for the GPU of this process's local rank.
        seed: of everything random in the run; the same on every rank.
        limits: how long workers wait for each other.
        rank_order: sum in rank order, bit for bit as the other transports do; slower.
        out: a folder for this rank's trace and metrics, and rank 0's model.
        on_metric: called with each record of this rank's ``worker.log``.
        trace: whether to write one to ``out``.

    Raises:
        NotSaved: the model could not be written to ``out``.
    """
    with _ending_in_words():
        method = make_strategy(strategy)
        place = _attending(method, device, seed, limits, rank_order, out, on_metric, trace)
        with place as worker:
            yield worker


@contextmanager
def _ending_in_words() -> Iterator[None]:
    """End this process with a sentence, and the code for it, when a rank was lost."""
    try:
        yield
    except (PeerLost, CommTimeout, NotLaunched) as error:
        notes = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        print(f"paceline: {error}{notes}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


@contextmanager
def _attending(
    method: Strategy,
    device: str,
    seed: int,
    limits: Limits | None,
    rank_order: bool,
    out: str | PathLike[str] | None,
    on_metric: OnMetric | None,
    trace: bool,
) -> Iterator[Worker]:
    """The worker of this process; see :func:`init`."""
    check_seed(seed)
    if out is not None:
        check_out(out)
    place = launched()
    try:
        transport = _connect(place, limits or Limits(), rank_order)
    except RunLost as end:
        raise end.loss from None
    workers = workers_in(method, transport.size) if transport.size > 1 else 1
    files = RankFiles(out, transport.rank, trace=trace)
    seed_user_generators(seed, transport.rank)

    def report(record: Metric) -> None:
        files.metric(record)
        if on_metric is not None:
            on_metric(record)

    worker = Worker(
        MeteredTransport(transport, files.trace),
        method,
        workers=workers,
        seed=seed,
        device=device_of(device, place.local_rank),
        report=report,
        on_event=say_event,
    )
    try:
        try:
            yield worker
            worker.finish()
            model_error = files.save_answer(worker.model) if worker.leads else None
        except Served:
            transport.close()
            raise SystemExit(0) from None
        transport.close()
        if model_error is not None:
            raise NotSaved(out, model_error)
    except (RunLost, PeerLost) as error:
        loss = error.loss if isinstance(error, RunLost) else transport.first_loss(error)
        _note(loss, worker)
        raise loss from None
    except PacelineError as error:
        _note(error, worker)
        raise
    finally:
        transport.give_up()
        files.close()


def attend(
    train: Train,
    *,
    workers: int | None = None,
    strategy: str | Strategy = "allreduce",
    device: str = "cpu",
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
    out: str | PathLike[str] | None = None,
    on_metric: OnMetric | None = None,
    trace: bool = True,
) -> Result | None:
    """Run ``train(worker)`` in this process of a launcher's; the result, on rank 0."""
    book, began_s = RunBook(None, on_metric), time.monotonic()
    method, not_saved = make_strategy(strategy), None
    place = _attending(method, device, seed, None, False, out, book.metric, trace)
    try:
        with place as worker:
            if workers not in (None, worker.size):
                raise UsageError(f"workers ({workers}) must be {worker.size}, as the launcher says")
            train(worker, **(arguments or {}))
            worker.finish()
            summaries = gather_summaries(worker)
    except NotSaved as error:
        not_saved = error
    if worker.rank != 0:
        return None
    told = {"strategy": repr(worker.strategy), "spec": strategy_spec(worker.strategy)}
    same = {"workers": worker.size, "seed": seed, "arguments": dict(arguments or {})}
    result = book.result(
        worker.strategy,
        summaries,
        workers=worker.size,
        began_s=began_s,
        seed=seed,
        out=None if out is None else str(out),
    )
    if out is not None:
        config = {"world": "launched", "train": _told(train), **told, **same}
        write_result(Path(out), vars(result), config)
    if not_saved is not None:
        raise not_saved
    return result


def gather_summaries(worker: Worker) -> list[Summary]:
    """The summaries of all workers; each has to ask for them."""
    import torch

    own = Summary.of(worker).numbers()
    table = torch.zeros(worker.size, len(own), dtype=torch.float64)
    table[worker.rank] = torch.tensor(own)
    worker.measuring().all_reduce(table)
    return [Summary.from_numbers(row) for row in table.tolist()]


def _connect(place: Launched, limits: Limits, rank_order: bool) -> Transport:
    from paceline.comm.distributed import connect_launched
    from paceline.comm.solo import SoloTransport

    if place.size == 1:
        return SoloTransport()

    def tell(loss: PeerLost) -> None:
        print(f"paceline: {loss}, on rank {place.rank}", file=sys.stderr, flush=True)

    return connect_launched(place, limits, rank_order=rank_order, tell=tell)


def run_worker(worker: Worker, train: Train, arguments: Mapping[str, Any]) -> None:
    """Train and finish; a rank that serves ends in ``worker.setup``."""
    try:
        train(worker, **arguments)
        worker.finish()
    except Served:
        pass
    except RunLost as end:
        _note(end.loss, worker)
        raise end.loss from None
    except PacelineError as error:
        _note(error, worker)
        raise


def _note(error: PacelineError, worker: Worker) -> None:
    """Say with an error where and when it came about."""
    error.add_note(f"on rank {worker.rank} at {worker.world.now():.6f} s")


def refuse_under_launcher() -> None:
    """Refuse to start processes in each process of another launcher: so many runs, side by side."""
    size = launched().size
    if size > 1:
        raise UsageError(
            f"pl.launch must not be called under a launcher, which has started {size} processes:"
            " use pl.init there, or start the script once"
        )


def ranks_for(strategy: Strategy, workers: int) -> int:
    """How many ranks so many workers need; a single one needs no other."""
    return len(strategy.roles(workers)) if workers > 1 else 1


def device_of(device: str, rank: int) -> str:
    """The device of a rank: ``cuda`` is spread over the GPUs there are."""
    if not device.startswith("cuda"):
        return device
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        raise UsageError(f"device ({device}) needs a GPU that torch can see")
    return f"cuda:{rank % count}" if device == "cuda" else device


def check_real_losses(
    losses: Losses, asked: str | None, faults: Sequence[Fault], transport: str
) -> None:
    """Refuse what this transport cannot do with lost ranks, and what links alone can suffer."""
    wanted = asked == "continue" or losses.max_restarts or faults
    if transport != "shared_memory" and wanted:
        raise UsageError(
            f"transport ({transport}) must be shared_memory to go on without a lost rank, to"
            " restart one, or to inject faults"
        )
    for fault in faults:
        if fault.kind in LINK_KINDS:
            raise UsageError(f"{fault.kind}: the processes of one host have no links to harm")


def check_faults(faults: Sequence[Fault], place: Cluster, size: int, strategy: Strategy) -> None:
    """Refuse faults of ranks that do not exist, and members that the method cannot take in."""
    place.check_faults(faults, size)
    for fault in faults:
        if fault.kind == "join" and strategy.synchronous:
            name = strategy_name(strategy)
            raise UsageError(f"join: {name} is synchronous and takes no worker in mid-run")
