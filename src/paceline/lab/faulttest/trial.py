"""Run one schedule of the fault tests, with its observers."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from paceline.comm.membership import MembershipPolicy
from paceline.common.faults import LINK_KINDS, Fault
from paceline.errors import PeerLost, summary_of
from paceline.lab.faulttest.common import (
    BatchDelivery,
    Completion,
    FiniteValues,
    MemberViews,
    Messages,
    StepCounts,
    Sums,
    Traffic,
    WindowVersions,
)
from paceline.lab.faulttest.decentralised import Averages
from paceline.lab.faulttest.lockstep import Means, Replicas, SharedData
from paceline.lab.faulttest.power import CheckpointFolder, Image
from paceline.lab.faulttest.schedule import Schedule
from paceline.lab.faulttest.served import Bound, ElasticMoves, Pushes, Tokens
from paceline.lab.faulttest.still import AtRest
from paceline.lab.faulttest.training import train
from paceline.lab.faulttest.watched import (
    Observer,
    Scene,
    Violation,
    WatchedInbox,
    WatchedPorts,
    around,
)
from paceline.launcher.rank import run_rank
from paceline.record.trace import Trace
from paceline.sim.world import SimulatedPorts, World
from paceline.strategies import make_strategy
from paceline.strategies.base import homes_of
from paceline.training.session import Listener, Session

OBSERVERS: tuple[type[Observer], ...] = (
    MemberViews,
    Messages,
    WindowVersions,
    BatchDelivery,
    Sums,
    FiniteValues,
    Completion,
    StepCounts,
    Traffic,
    AtRest,
    Replicas,
    Means,
    SharedData,
    Pushes,
    ElasticMoves,
    Bound,
    Tokens,
    Averages,
)


@dataclass
class RunOutcome:
    """The outcome of a run.

    Attributes:
        violation: the first law that it broke, if any.
        stopped: whether it stopped early because a rank was lost, as its policy demands.
        trace_hash: the hash of its trace.
        seconds: its duration in virtual time.
        ends: the final model of each worker that finished.
        sites: how often each event happened.
        bytes_sent: by all ranks together.
        images: what its disk would hold after a power failure, at a few moments.
        resumed_with: the ranks of the checkpoint that it resumed from, if it did.
    """

    violation: Violation | None = None
    stopped: bool = False
    trace_hash: str = ""
    seconds: float = 0.0
    ends: dict[int, Tensor] = field(default_factory=dict)
    sites: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    images: list[Image] = field(default_factory=list)
    resumed_with: frozenset[int] | None = None


def run(schedule: Schedule) -> RunOutcome:
    """Run ``schedule`` and check all laws."""
    if schedule.checkpoint_steps is None:
        return _run(schedule, None, OBSERVERS)
    with CheckpointFolder(schedule) as folder:
        outcome = _run(schedule, folder, OBSERVERS)
        if outcome.violation is None:
            try:
                outcome.sites["checkpoint looked at"] += folder.check_images()
            except Violation as violation:
                outcome.violation = violation
        outcome.images = [image for image, _ in folder.after_power_failures()]
    return outcome


def resume(schedule: Schedule, image: Image, without_lost: bool = False) -> RunOutcome:
    """Resume a run from the checkpoint in ``image``; those that it lacks join, or stay lost."""
    with CheckpointFolder(schedule, image) as folder:
        policy = NOBODY_JOINS if without_lost else schedule.losses
        outcome = _run(schedule, folder, (Completion,), policy)
        start = folder.coordinator.start
        outcome.sites["resumed"] += start is not None
        outcome.resumed_with = None if start is None else frozenset(start.ranks)
    return outcome


NOBODY_JOINS = MembershipPolicy(True, 1, "continue", 0, takes_in=False)


def _run(
    schedule: Schedule,
    folder: CheckpointFolder | None,
    observers: Sequence[type[Observer]],
    policy: MembershipPolicy | None = None,
) -> RunOutcome:
    method, policy = schedule.method, policy or schedule.losses
    late = [] if folder is None else folder.coordinator.late_joiners(policy)
    world = World(
        schedule.cluster,
        schedule.size,
        seed=schedule.seed,
        limits=schedule.limits,
        faults=[*schedule.script, *late],
        away=[] if folder is None else folder.coordinator.away(policy),
        homes=homes_of(method, schedule.workers)[: schedule.size],
        losses=schedule.losses,
        start_s=0.0 if folder is None else folder.coordinator.start_s,
    )
    scene = Scene(schedule, world)
    world.inboxes = [WatchedInbox(scene, rank) for rank in range(schedule.size)]
    scene.observers = [each for each in (cls(scene) for cls in observers) if each.watches()]
    world.on_reduced = scene.reduced
    around(world, "inject", lambda inner, fault: _inject(scene, inner, fault))
    trace, threads = Trace(clock=lambda: world.calendar.now_s), threading.active_count()
    violation = _train(schedule, scene, trace, folder)
    _note_outages(scene)
    if violation is None:
        violation = _end(scene, threads)
    return RunOutcome(
        violation=violation,
        stopped=scene.sites["stopped"] > 0,
        trace_hash=trace.close(),
        seconds=world.calendar.now_s,
        ends=scene.finished,
        sites=scene.sites,
        bytes_sent=sum(ports.recorder.meter.bytes_sent for ports in scene.ports),
    )


def _train(
    schedule: Schedule, scene: Scene, trace: Trace, folder: CheckpointFolder | None
) -> Violation | None:
    world, elastic = scene.world, schedule.losses.goes_on

    def body(ports: SimulatedPorts) -> None:
        metered = WatchedPorts(ports, trace, scene)
        session = Session(
            metered,
            make_strategy(schedule.method),
            workers=schedule.workers,
            seed=schedule.seed,
            costs=world.costs[ports.rank],
            listener=Listener(event=lambda record: scene.sites.update([record["event"]])),
            elastic=elastic,
            checkpointing=None if folder is None else folder.checkpointing(),
        )
        scene.ports.append(metered)
        scene.workers[session.rank] = session
        for observer in scene.observers:
            observer.attach(session)
        run_rank(session, train, {"schedule": schedule})
        if session.rank < schedule.workers and session.rank not in scene.finished:
            scene.came_too_late(session.rank)
        metered.close()

    try:
        world.run(body)
    except Violation as violation:
        return violation
    except PeerLost as lost:
        if not elastic and set(lost.ranks) <= set(world.lost):
            scene.sites["stopped"] += 1
            return None
        if elastic and set(range(schedule.workers)) <= set(world.lost):
            return None  # all workers were lost: no run can go on without any
        return _ended_early(lost)
    except Exception as error:
        return _ended_early(error)
    return None


def _ended_early(error: Exception) -> Violation:
    """The violation of a run that ended by an error although it had to go on."""
    frames = traceback.extract_tb(error.__traceback__)[-5:]
    where = " > ".join(f"{Path(frame.filename).stem}.{frame.name}" for frame in frames)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return Violation("liveness", f"the run ended by {summary_of(error)}{notes} in {where}")


def _end(scene: Scene, threads: int) -> Violation | None:
    """Check the laws of a finished run.

    A run that had to stop, or whose workers were all set aside, does not have to obey them.
    """
    try:
        leaked = threading.active_count() - threads
        scene.check(leaked == 0, "leftovers", f"{leaked} threads")
        if scene.finished and all(scene.workers[rank].set_aside for rank in scene.finished):
            scene.sites["diverged"] += 1
        complete = not scene.sites["stopped"] and not scene.sites["diverged"]
        for observer in scene.observers if complete else ():
            observer.ended()
    except Violation as violation:
        return violation
    return None


def _note_outages(scene: Scene) -> None:
    """Count the link faults that began before the end: the simulator has no event for them."""
    for fault in scene.schedule.script:
        if fault.kind in LINK_KINDS and (fault.at_s or 0.0) < scene.world.calendar.now_s:
            scene.sites[fault.kind] += 1


def _inject(scene: Scene, inner: object, fault: Fault) -> None:
    assert fault.rank is not None and callable(inner)
    if fault.rank not in scene.world.departed:
        role = "server " if fault.rank >= scene.schedule.workers else ""
        long = fault.for_s is None or fault.for_s > scene.schedule.dead_s
        length = ("long " if long else "short ") if fault.kind == "freeze" else ""
        scene.sites[f"{role}{length}{fault.kind}"] += 1
    inner(fault)
