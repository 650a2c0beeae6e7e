"""Simulated ranks in virtual time: :func:`simulate` runs all of them in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from paceline.comm.limits import Limits
from paceline.comm.membership import MembershipPolicy
from paceline.comm.metered import MeteredPorts
from paceline.common.reference import Reference, find, refer_or_name
from paceline.errors import PacelineError, UsageError, WorkerFailed
from paceline.launcher.checkpoints import CheckpointCoordinator
from paceline.launcher.rank import delivered, run_rank
from paceline.launcher.spec import SimulationSpec, Train, takes
from paceline.record.delivery import Delivery
from paceline.record.folder import MODEL, TRACE, RecordedRun, claim, save_answer
from paceline.record.result import Result, RunRecorder, Summary
from paceline.record.trace import Trace
from paceline.sim.models import stands_for_note
from paceline.sim.rank import SimulatedRank
from paceline.sim.replay import Replay
from paceline.sim.world import SimulatedPorts, World
from paceline.strategies import make_strategy, strategy_name, strategy_spec
from paceline.strategies.base import homes_of
from paceline.training.checkpointing import CheckpointParticipant
from paceline.training.session import Listener, Session
from paceline.training.summary import summary_of

if TYPE_CHECKING:
    from paceline.sim.batching.batching import Batching, Repeating


@takes(SimulationSpec)
def simulate(spec: SimulationSpec) -> Result:
    """Run ``train(worker)`` on simulated workers in virtual time; same arguments, same result.

    Raises:
        WorkerFailed: ``train`` raised on a rank.
        PeerLost: a rank that others needed was killed, or frozen for too long.
        Deadlock: every rank was waiting.
        PacelineError: a replay departed from the recorded run.
    """
    began_s = time.monotonic()
    with claim(spec.out):
        result = _simulate(spec, began_s)
    if spec.one_device != "cpu":
        gc.collect()  # what is left refers to itself, and to much of the device's memory
    return result


def _simulate(spec: SimulationSpec, began_s: float) -> Result:
    same = {"workers": spec.workers, "strategy": repr(spec.method), "seed": spec.seed}
    same |= {"arguments": dict(spec.arguments or {}), "global_batch": spec.global_batch}
    same |= {"batch": spec.batch}
    if spec.by_speed and spec.replay is not None:
        raise UsageError("replay must not be used with batch (by-speed): a trace has no speeds")
    record = _open_replay(spec, same)
    # a recorded run that finished has continued after its losses
    policy = spec.policy("continue" if record is not None and record.lost else None)
    train = _find_train(spec.train) if isinstance(spec.train, dict) else spec.train
    checkpoints = spec.checkpoints()
    if checkpoints.on and record is not None:
        raise UsageError("replay must not be used with checkpoints")
    cluster = asdict(spec.loaded_cluster)
    recorded = {**same, "train": refer_or_name(spec.train), "cluster": cluster}
    checkpoints.prepare(recorded, spec.size)
    recorder = RunRecorder(spec.out, spec.on_metric, spec.on_progress, spec.loggers)
    checkpoints.follow(recorder)
    world = World(
        spec.loaded_cluster,
        spec.size,
        seed=spec.seed,
        limits=spec.limits or Limits(),
        faults=[*spec.all_faults, *checkpoints.late_joiners(policy)],
        away=checkpoints.away(policy),
        homes=homes_of(spec.method, spec.workers)[: spec.size],
        losses=policy,
        on_event=recorder.event,
        start_s=checkpoints.start_s,
        device=spec.one_device,
    )
    recorder.write_config({"world": "simulated", **same, **_config(spec, policy)})
    file = spec.folder / TRACE if spec.folder and spec.trace else None
    batching = _batching(spec, world, recorder)
    if batching is None:
        trace = Trace(file, lambda: world.calendar.now_s)
    else:
        trace = Trace(file, world.baton.earliest_s, place=world.baton.place)
    delivery = Delivery(spec.workers, spec.folder and spec.folder / MODEL)
    ranks = _Ranks(
        spec, train, world, policy, checkpoints, recorder, trace, record, batching, delivery
    )
    try:
        world.run(ranks.run)
    finally:
        if batching is not None:
            batching.close()
        trace_hash = trace.close()
        recorder.close()
    delivery.end()
    result = recorder.result(
        strategy_name(spec.method),
        ranks.summaries,
        workers=spec.workers,
        began_s=began_s,
        synchronous=spec.method.synchronous,
        seed=spec.seed,
        virtual_seconds=world.calendar.now_s,
        wire_bytes=round(world.network.wire_bytes),
        trace_hash=trace_hash,
        as_model=spec.loaded_cluster.stands_for.model if spec.loaded_cluster.stands_for else None,
        batched=None if batching is None else batching.facts(),
        **checkpoints.facts(),
    )
    return result.with_delivery(delivery)


@dataclass
class _Ranks:
    """The program of every simulated rank, and their summaries."""

    spec: SimulationSpec
    train: Train
    world: World
    policy: MembershipPolicy
    checkpoints: CheckpointCoordinator
    recorder: RunRecorder
    trace: Trace
    record: Replay | None
    batching: Batching | None
    delivery: Delivery
    summaries: list[Summary] = field(default_factory=list)

    def run(self, ports: SimulatedPorts) -> None:
        """Train on one rank."""
        metering = self.record.follow if self.record else MeteredPorts
        metered = metering(ports, self.trace)
        session = self._session(metered, ports.own)
        try:
            returned = run_rank(session, self.train, self.spec.arguments or {})
        except PacelineError:
            raise
        except Exception as error:
            error.add_note(f"at {session.clock.now():.6f} s of virtual time")
            raise WorkerFailed.of(session.rank, error) from None
        folder = self.spec.folder
        model_error = save_answer(session.model, folder, self.trace) if session.leads else None
        self.summaries.append(summary_of(session, model_error))
        for what, content in delivered(session, returned, folder):
            self.delivery.put(what, session.rank, content)
        metered.close()

    def _session(self, ports: MeteredPorts, own: SimulatedRank) -> Session:
        rank, enroll = own.rank, None
        if self.batching is not None and rank < self.spec.workers:
            enroll = partial(self.batching.enroll, rank, own.park)
        plan, add_report = self.checkpoints.plan, self.checkpoints.add_report
        participant = CheckpointParticipant(plan, add_report) if plan is not None else None
        return Session(
            ports,
            make_strategy(self.spec.method),
            workers=self.spec.workers,
            seed=self.spec.seed,
            device=self.spec.one_device,
            resident=self.world.resident,
            costs=self.world.costs[rank],
            listener=Listener(
                metric=self.recorder.metric,
                progress=self.recorder.progress,
                event=self.recorder.event,
            ),
            elastic=self.policy.goes_on,
            checkpointing=participant,
            global_batch=self.spec.global_batch,
            by_speed=self.spec.by_speed,
            enroll=enroll,
        )


def _batching(spec: SimulationSpec, world: World, recorder: RunRecorder) -> Batching | None:
    """What computes the gradients of many workers together, if that is wanted."""
    if spec.batched == "off":
        return None
    import torch

    from paceline.sim.batching.batching import Batching

    def tell(why: str) -> None:
        t = world.calendar.now_s
        recorder.event({"t": t, "event": "one_by_one", "rank": 0, "why": why})

    repeating = _repeating(spec)
    if repeating is not None:
        world.rows = repeating.rows
    device = torch.device(spec.one_device)
    batching = Batching(spec.batched, world.generators, world.size, tell, device, repeating)
    world.baton.compute_together(batching.compute, not spec.method.synchronous)
    if spec.why_one_by_one is not None:
        batching.stop(spec.why_one_by_one)
    return batching


def _repeating(spec: SimulationSpec) -> Repeating | None:
    """How joint computations are repeated without the host: on a GPU, by graphs of it."""
    if spec.one_device == "cpu":
        return None
    import torch

    from paceline.sim.batching.batching import AT_MOST, LEAST, Repeating
    from paceline.sim.batching.graphs import CudaGraphs
    from paceline.sim.batching.rows import Rows

    at_most = min(AT_MOST, max(LEAST, spec.workers // 2))
    return Repeating(CudaGraphs(torch.device(spec.one_device)), Rows(spec.workers), at_most)


def _config(spec: SimulationSpec, policy: MembershipPolicy) -> dict[str, Any]:
    """The configuration of the run, for its folder."""
    model = spec.loaded_cluster.stands_for
    return {
        "spec": strategy_spec(spec.method),
        "synchronous": spec.method.synchronous,
        "train": refer_or_name(spec.train),
        "cluster": asdict(spec.loaded_cluster),
        "as_model": stands_for_note(model.model) if model else None,
        "faults": [asdict(fault) for fault in spec.faults],
        "on_loss": policy.on_loss,
        "max_restarts": spec.max_restarts,
        "device": spec.device,
        "replay": None if spec.replay is None else str(spec.replay),
    }


def _find_train(train: Reference) -> Train:
    """The training function of a reference."""
    try:
        program = find(train)
    except Exception as error:
        raise WorkerFailed.of(0, error) from None
    if not callable(program):
        raise UsageError(f"train ({train}) must be a function")
    return cast(Train, program)


def _open_replay(spec: SimulationSpec, same: Mapping[str, Any]) -> Replay | None:
    """The recorded run to follow; refuses one that differs in what must be the ``same``."""
    if spec.replay is None:
        return None
    if spec.all_faults:
        raise UsageError("replay must not be used with faults, here or in the cluster's file")
    run = RecordedRun(spec.replay)
    run.check(spec.out, **same)
    return Replay(run.trace, run.lost(), run.config["workers"])
