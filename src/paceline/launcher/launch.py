"""Real processes on this host: :func:`launch` starts them, and :func:`train_rank` runs in each."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from paceline.checkpoint.store import Saved
from paceline.comm.launchers import launched
from paceline.comm.membership import MembershipPolicy
from paceline.comm.metered import MeteredPorts
from paceline.comm.ports import Ports
from paceline.common.generators import seed_user_generators
from paceline.common.reference import Reference, find, plain_json, refer_to
from paceline.errors import UsageError
from paceline.launcher.checkpoints import CheckpointCoordinator
from paceline.launcher.fault_clock import FaultClock
from paceline.launcher.rank import delivered, run_rank
from paceline.launcher.rank_process import Channel, Message, refuse_in_rank
from paceline.launcher.signals import ASK, Stop
from paceline.launcher.spec import LaunchSpec, OnDevice, takes
from paceline.launcher.supervisor import run_ranks, threads_per_rank
from paceline.launcher.transports import TRANSPORTS
from paceline.launcher.typed_in import reference_of
from paceline.record.delivery import Delivery, parts_of
from paceline.record.folder import MODEL, RankFiles, claim
from paceline.record.result import Result, RunRecorder, Summary
from paceline.strategies import strategy_name, strategy_spec
from paceline.strategies.base import homes_of
from paceline.strategies.packing import pack_strategy, unpack_strategy
from paceline.training.checkpointing import CheckpointParticipant, Plan, Stopped
from paceline.training.session import Listener, Session
from paceline.training.summary import summary_of

STOPPED: Message = {"stopped": True}
"""What a rank returns when it ended after a final checkpoint."""
_MUST_MATCH = ("train", "workers", "seed", "global_batch", "batch", "device", "arguments")
"""What must be the same when a run resumes from a checkpoint."""


@takes(LaunchSpec)
def launch(spec: LaunchSpec) -> Result:
    """Run ``train(worker)`` in real processes on this host.

    Raises:
        WorkerFailed: ``train`` raised on a rank; the message holds that rank's traceback.
        PeerLost: a rank died, or was stopped for longer than ``limits.dead_s``.
        Interrupted: a signal ended the run, after a final checkpoint if checkpoints are on.
    """
    began_s = time.monotonic()
    refuse_in_rank()
    _refuse_under_launcher()
    with claim(spec.out), reference_of(spec) as train:
        return _launch(spec, train, began_s)


def _launch(spec: LaunchSpec, train: Reference, began_s: float) -> Result:
    policy, checkpoints, hosts = spec.policy(), spec.checkpoints(), spec.many_hosts
    common = _config_of_ranks(spec, train, policy)
    must_match = {name: common[name] for name in _MUST_MATCH}
    checkpoints.prepare({"strategy": repr(spec.method), **must_match}, spec.size)
    common["checkpoints"] = asdict(checkpoints.plan) if checkpoints.plan else None
    recorder = RunRecorder(spec.out, spec.on_metric, spec.on_progress, spec.loggers)
    checkpoints.follow(recorder)
    if not spec.trace:
        recorder.no_trace()
    recorder.write_config(_config(spec, policy, common))
    delivery = Delivery(spec.workers, spec.folder and spec.folder / MODEL)
    handlers = _handlers(recorder, checkpoints, delivery)
    try:
        with Stop(checkpoints.on) as stop:
            returned = run_ranks(
                refer_to(train_rank),
                [common] * spec.size,
                transport=spec.world,
                limits=spec.limits,
                on_message=lambda rank, message: handlers[message["kind"]](message["record"]),
                policy=policy if TRANSPORTS[spec.world].survives_losses else None,
                faults=[*spec.faults, *checkpoints.late_joiners(policy)],
                away=[*checkpoints.away(policy), *spec.waiting],
                folder=spec.folder,
                stop=stop,
                start_s=checkpoints.start_s,
                device=spec.shared_device,
                hosts=hosts,
                homes=homes_of(spec.method, spec.workers)[: spec.size],
            )
    finally:
        recorder.close(ranks=spec.size)
    if STOPPED in returned:
        raise stop.error(checkpoints.how_to_resume())
    delivery.end()
    result = recorder.result(
        strategy_name(spec.method),
        [Summary(**summary) for summary in returned if summary is not None],
        workers=spec.workers,
        began_s=began_s,
        synchronous=spec.method.synchronous,
        seed=spec.seed,
        **checkpoints.facts(),
    )
    return result.with_delivery(delivery)


def _config_of_ranks(spec: LaunchSpec, train: Reference, policy: MembershipPolicy) -> Message:
    """The configuration that every rank gets."""
    return {
        "train": train,
        "strategy": pack_strategy(spec.method),
        "workers": spec.workers,
        "seed": spec.seed,
        "global_batch": spec.global_batch,
        "batch": spec.batch,
        "device": spec.device,
        "arguments": plain_json("arguments", dict(spec.arguments or {})),
        "out": None if spec.out is None else str(spec.out),
        "trace": spec.trace,
        "elastic": policy.goes_on and TRANSPORTS[spec.world].survives_losses,
        "faults": [asdict(fault) for fault in spec.faults],
    }


def _config(spec: LaunchSpec, policy: MembershipPolicy, common: Message) -> Message:
    """The configuration of the run, for its folder."""
    return {
        "world": spec.world,
        **common,
        "strategy": repr(spec.method),
        "method": common["strategy"],
        "spec": strategy_spec(spec.method),
        "synchronous": spec.method.synchronous,
        "on_loss": policy.on_loss,
        "max_restarts": spec.max_restarts,
        "threads": threads_per_rank(spec.size),
    }


def _handlers(
    recorder: RunRecorder, checkpoints: CheckpointCoordinator, delivery: Delivery
) -> dict[str, Callable[[Message], None]]:
    """The handler of each kind of message that ranks send."""
    return {
        "metric": recorder.metric,
        "event": recorder.event,
        "no_trace": lambda record: recorder.no_trace(record["reason"]),
        "progress": recorder.progress,
        "saved": lambda record: checkpoints.add_report(Saved(**record)),
        "delivered": delivery.take,
    }


def train_rank(ports: Ports, channel: Channel, argument: Message) -> Message:
    """The program of each launched rank."""
    files = RankFiles(
        argument["out"],
        ports.rank,
        append=ports.members.late,
        trace=argument["trace"],
        on_no_trace=lambda text: channel.report("no_trace", {"reason": text}),
    )
    checkpointing = _participant(argument["checkpoints"], channel)
    seed_user_generators(argument["seed"], ports.rank)
    clock = FaultClock(
        argument["faults"], ports, channel, lambda: files.trace.flush() if files.trace else None
    )
    session = Session(
        MeteredPorts(ports, files.trace, clock),
        unpack_strategy(argument["strategy"]),
        workers=argument["workers"],
        seed=argument["seed"],
        device=OnDevice(device=argument["device"]).device_of(ports.rank),
        listener=Listener(
            metric=partial(channel.report, "metric"),
            progress=partial(channel.report, "progress"),
            event=partial(channel.report, "event"),
            ready=partial(channel.send, {"kind": "ready"}),
        ),
        elastic=argument["elastic"],
        checkpointing=checkpointing,
        global_batch=argument["global_batch"],
        by_speed=argument["batch"] is not None,
    )
    try:
        returned = run_rank(session, find(argument["train"]), argument["arguments"])
        model_error = files.save_answer(session.model) if session.leads else None
        for what, content in delivered(session, returned, argument["out"]):
            for part in parts_of(what, session.rank, content):
                channel.report("delivered", part)
    except Stopped:
        return STOPPED
    finally:
        files.close()
    return asdict(summary_of(session, model_error))


def _participant(plan: Message | None, channel: Channel) -> CheckpointParticipant | None:
    """The participant that saves a launched rank's state; signals request a final checkpoint.

    SIGTERM does too, because it may be sent to all processes of a job at once.
    """
    if plan is None:
        return None
    checkpointing = CheckpointParticipant(
        Plan(**plan), lambda saved: channel.report("saved", asdict(saved))
    )
    for number in (ASK, signal.SIGTERM):
        signal.signal(number, lambda number, frame: checkpointing.ask_to_stop())
    return checkpointing


def _refuse_under_launcher() -> None:
    """Refuse to launch in each process of another launcher: that would start many runs at once."""
    size = launched().size
    if size > 1:
        raise UsageError(
            f"pl.launch must not be called under another launcher, which started {size} processes:"
            " use pl.init instead, or start the script without that launcher"
        )
