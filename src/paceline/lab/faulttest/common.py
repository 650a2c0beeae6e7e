"""The laws of every method: members, messages, windows, batches, and the end of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.comm.ports import MAILBOX_CAPACITY, Published
from paceline.lab.faulttest.payload import Size, payload
from paceline.lab.faulttest.training import EPOCHS
from paceline.lab.faulttest.watched import Observer, WatchedInbox, around
from paceline.sim.collectives import Collective
from paceline.strategies.served import RoleStrategy, ServerStrategy
from paceline.strategies.toolbox.guard import is_sound
from paceline.training.session import Session

Batch = tuple[int, int, int]


class MemberViews(Observer):
    """The membership number never falls; all see the same members; each member has its state."""

    number = 0

    def attach(self, session: Session) -> None:
        around(session.all_ranks.members, "alive", lambda inner: self._asked(session, inner()))
        around(session.ports.members, "announce_ready", lambda inner: self._arrived(session, inner))
        begins = ["join", *(["succeed"] if isinstance(session.strategy, RoleStrategy) else [])]
        for name in begins:
            around(session.strategy, name, lambda inner, *x: self._joined(session, inner, *x))
        if not session.late:
            self.scene.begun.add((session.rank, 1))

    def after_operation(self) -> None:
        number = self.world.membership
        self.scene.check(number >= self.number, "membership", f"{number} after {self.number}")
        self.number = number

    def _asked(self, session: Session, seen: tuple[int, ...]) -> tuple[int, ...]:
        """A rank that has not announced itself yet counts itself as a member; nobody else does."""
        alive = {*self.world.alive(), session.rank}
        self.scene.check(
            {*seen, session.rank} == alive,
            "members",
            lambda: f"rank {session.rank} sees {seen}; alive are {sorted(alive)}",
        )
        taken_in = self.world.rosters[True][1].joined if True in self.world.rosters else ()
        for rank in seen:
            self.scene.check(
                rank == session.rank
                or rank in taken_in  # it gets its state in the collective that comes next
                or (rank, self.scene.incarnation(rank)) in self.scene.begun,
                "members",
                f"rank {rank} is a member without a state",
            )
        return seen

    def _joined(self, session: Session, inner: Any, *x: Tensor) -> Any:
        result = inner(*x)
        self.scene.begun.add((session.rank, self.scene.incarnation(session.rank)))
        return result

    def _arrived(self, session: Session, inner: Any) -> None:
        me = (session.rank, self.scene.incarnation(session.rank))
        self.scene.check(
            me in self.scene.begun, "members", f"rank {session.rank} arrives without a state"
        )
        inner()
        alive = session.rank in self.world.alive()
        self.scene.check(alive, "members", f"rank {session.rank} has arrived, and is no member")
        self.scene.sites["arrived late"] += 1


class Messages(Observer):
    """Each byte that is sent is delivered, dropped with a lost rank, or still in flight.

    No mailbox holds more messages than its capacity.
    """

    def posted(self, src: int, dst: int, tag: int, x: Tensor) -> None:
        waiting = self.world.inboxes[dst].posted_by(src)
        self.scene.check(
            waiting <= MAILBOX_CAPACITY,
            "room",
            f"{waiting} posts of rank {src} wait for rank {dst}",
        )

    def ended(self) -> None:
        boxes: list[Any] = self.world.inboxes
        sent = sum(ports.mail.by_message for ports in self.scene.ports)
        unaddressed = sum(ports.mail.to_nobody for ports in self.scene.ports)
        added = sum(box.sent for box in boxes)
        self.scene.check(
            sent == added + unaddressed,
            "bytes",
            f"{sent} sent, {added} added to inboxes, {unaddressed} to departed ranks",
        )
        for rank, box in enumerate(boxes):
            assert isinstance(box, WatchedInbox)
            self.scene.check(
                box.sent == box.delivered + box.dropped + box.in_flight,
                "bytes",
                f"to rank {rank}: {box.sent} sent, {box.delivered} delivered,"
                f" {box.dropped} dropped, {box.in_flight} in flight",
            )


class WindowVersions(Observer):
    """A window's versions count up; a reader sees what was published, and never goes back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._versions: dict[int, int] = {}
        self._written: dict[tuple[int, int], Published] = {}
        self._read: dict[tuple[int, int], int] = {}

    def published(self, rank: int, published: Published) -> None:
        version = published.version
        before = self._versions.get(rank, 0)
        self.scene.check(
            version == before + 1, "versions", f"rank {rank} published {version} after {before}"
        )
        self._versions[rank] = version
        self._written[rank, version] = published._replace(x=published.x.clone())

    def peeked(self, rank: int, src: int, seen: Published) -> None:
        version = seen.version
        before = self._read.get((rank, src), 0)
        self.scene.check(
            version >= before,
            "versions",
            f"rank {rank} read version {version} of rank {src} after {before}",
        )
        self._read[rank, src] = version
        self.scene.check(
            torch.equal(seen.x, self._written[src, version].x)
            and seen.header == self._written[src, version].header,
            "windows",
            f"rank {rank} read something else than version {version} of rank {src}",
        )


class BatchDelivery(Observer):
    """A batch is given out once, and again only if its holder was lost before it used the batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._holder: dict[Batch, tuple[int, int]] = {}
        self._done: set[Batch] = set()

    def drew(self, rank: int, queue: int, epoch: int, number: int) -> None:
        batch = (queue, epoch, number)
        self.scene.check(
            batch not in self._done, "batches", f"{batch} was given to rank {rank} after its use"
        )
        if batch in self._holder:
            holder = self._holder[batch]
            self.scene.check(
                self.scene.was_lost(*holder),
                "batches",
                f"{batch} was given to rank {rank} while rank {holder[0]} had it",
            )
            self.scene.sites["batch given again"] += 1
        self._holder[batch] = (rank, self.scene.incarnation(rank))

    def used(self, rank: int, queue: int, epoch: int, number: int) -> None:
        batch = (queue, epoch, number)
        if self._holder.get(batch) == (rank, self.scene.incarnation(rank)):
            self._done.add(batch)

    def ended(self) -> None:
        for batch, holder in self._holder.items():
            self.scene.check(
                batch in self._done or self.scene.was_lost(*holder),
                "batches",
                f"{batch} was given to rank {holder[0]}, which lives, and was not used",
            )
            self.scene.check(
                batch in self._done or batch in self.world.batches.returned,
                "batches",
                f"{batch} was not used, and was not reported as lost",
            )
        for epoch in range(EPOCHS if self._holder else 0):
            numbers = sorted(number for _, e, number in self._holder if e == epoch)
            self.scene.check(
                numbers == list(range(len(numbers))) and len(numbers) > 0,
                "batches",
                f"epoch {epoch} gave out the numbers {numbers}",
            )


class Sums(Observer):
    """A collective sums the weights, and the finite vectors, of all members with a weight."""

    def reduced(self, collective: Collective) -> None:
        parts = [collective.inputs[m] for m in collective.members if collective.inputs[m][1]]
        self.scene.check(
            collective.total.weight == sum(weight for _, weight in parts),
            "sums",
            "the weights do not add up",
        )
        for rank in collective.members:
            x = collective.inputs[rank][0]
            if x.dtype.is_floating_point and collective.inputs[rank][1]:
                self.scene.check(
                    bool(torch.isfinite(x).all()), "finite", f"rank {rank} contributes {x.tolist()}"
                )


class FiniteValues(Observer):
    """Vectors that are not finite, or that exploded, are never shared; the guard counts them."""

    def published(self, rank: int, published: Published) -> None:
        x = published.x
        strategy: Any = self.scene.workers[rank].strategy
        is_server = rank >= self.schedule.workers and isinstance(strategy, ServerStrategy)
        self._check_finite(strategy.server.shard if is_server else x, f"rank {rank} publishes")

    def posted(self, src: int, dst: int, tag: int, x: Tensor) -> None:
        self._check_finite(x, f"rank {src} sends rank {dst}")

    def _check_finite(self, x: Tensor, action: str) -> None:
        if x.dtype.is_floating_point:
            self.scene.check(is_sound(x), "finite", lambda: f"{action} {x.tolist()}")

    def ended(self) -> None:
        schedule = self.schedule
        if schedule.bad_rank is None or schedule.faults or schedule.workers == 1:
            return
        session = self.scene.workers[schedule.bad_rank]
        assert session.stepper is not None
        bad = [step for step in schedule.bad_steps if step < session.stepper.steps]
        dropped = session.strategy.guard.dropped[session.rank]
        self.scene.check(
            dropped >= len(bad), "bad gradients are counted", f"{dropped} of {len(bad)} are"
        )


class Completion(Observer):
    """Every worker that is not lost finishes with a finite model, and leaks nothing."""

    def attach(self, session: Session) -> None:
        if session.rank < session.size:
            around(session, "finish", lambda inner: self._finish(session, inner))

    def _finish(self, session: Session, inner: Any) -> None:
        inner()
        assert session.stepper is not None
        spans = session.stepper.replica.flat.spans  # flat.x has gaps between them in a solo run
        x = torch.cat([span.parameter.detach().reshape(-1) for span in spans])
        self.scene.finished[session.rank] = x
        self.scene.check(
            bool(torch.isfinite(x).all()),
            "finite",
            f"rank {session.rank} ends with {x.tolist()}",
        )

    def ended(self) -> None:
        world, scene = self.world, self.scene
        for rank in range(self.schedule.workers):
            scene.check(
                rank in scene.finished or rank in world.lost or rank in scene.too_late,
                "liveness",
                f"rank {rank} was not lost, and has not finished",
            )
        waiting = world.loss_checks or world.receivers
        scene.check(not waiting, "leftovers", "a rank still waits")
        for rank, batches in world.batches.in_hand.items():
            scene.check(not batches, "leftovers", f"rank {rank} still has {batches}")


class StepCounts(Observer):
    """A worker that was neither lost nor too late makes all of its steps."""

    def ended(self) -> None:
        if self.schedule.data != "steps":
            return
        for rank, session in self.scene.workers.items():
            undisturbed = rank not in self.world.lost and rank not in self.scene.too_late
            if rank < self.schedule.workers and undisturbed:
                assert session.stepper is not None
                steps, expected = session.stepper.steps, self.schedule.steps_of(rank)
                if session.growth is not None and session.late:
                    expected = max(steps, expected)  # those of the others count for a newcomer
                self.scene.check(steps == expected, "steps", f"rank {rank} made {steps}")


class Traffic(Observer):
    """A run without faults sends as many bytes as the method's formula says."""

    def watches(self) -> bool:
        schedule = self.schedule
        calm = not schedule.faults and schedule.bad_rank is None
        calm = calm and schedule.checkpoint_steps is None  # calls to servers add messages
        equal = schedule.data == "steps" and not schedule.uneven and calm
        # SASGD switches its form when the learning rate changes.
        steady = schedule.name != "sasgd" or not schedule.falling
        return equal and steady and schedule.workers > 1

    def ended(self) -> None:
        session = self.scene.workers[0]
        nbytes = self.scene.finished[0].nbytes
        run = Size(self.schedule.steps, nbytes, self.schedule.workers)
        told = payload(session.strategy, run)
        sent = sum(ports.recorder.meter.bytes_sent for ports in self.scene.ports)
        if told is not None:
            self.scene.check(sent == told, "bytes", f"{sent} sent, by the formula {told}")
