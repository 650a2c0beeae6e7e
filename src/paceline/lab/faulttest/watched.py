"""How observers see a run: they hook into its mailboxes, its transports and its strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.comm.metered import (
    MeteredCollectives,
    MeteredMail,
    MeteredPorts,
    Recorder,
    TracedQueue,
)
from paceline.comm.ports import (
    PUBLISHED,
    Factor,
    Lost,
    Message,
    Published,
    Sending,
    Total,
)
from paceline.errors import PacelineError
from paceline.record.trace import Trace
from paceline.sim.collectives import Collective
from paceline.sim.inbox import Inbox, Letter
from paceline.sim.world import SimulatedPorts, World

if TYPE_CHECKING:
    from paceline.lab.faulttest.schedule import Schedule
    from paceline.training.session import Session

MOST_OPERATIONS = 20_000
"""A run of a fault test that makes more operations than this is taken for an endless loop."""


class Violation(PacelineError):
    """A law did not hold in a run; ``law`` is its name."""

    def __init__(self, law: str, text: str) -> None:
        self.law = law
        super().__init__(f"{law}: {text}")


class Scene:
    """One run as its observers see it.

    Attributes:
        schedule: the run's schedule.
        world: the simulated world that it runs in.
        sites: how often each event happened that a good campaign must have covered.
        begun: (rank, incarnation) of every rank that has its initial state.
        workers: the session of each rank's current incarnation.
        ports: one for each incarnation of each rank.
        finished: the final model of each worker that finished.
        too_late: the workers that joined, or rejoined, after the training had ended.
    """

    def __init__(self, schedule: Schedule, world: World) -> None:
        self.schedule, self.world = schedule, world
        self.sites: Counter[str] = Counter()
        self.begun: set[tuple[int, int]] = set()
        self.workers: dict[int, Session] = {}
        self.ports: list[WatchedPorts] = []
        self.finished: dict[int, Tensor] = {}
        self.too_late: set[int] = set()
        self.observers: list[Observer] = []
        self.operations = 0

    def incarnation(self, rank: int) -> int:
        """The current incarnation of ``rank``, from 1."""
        return self.world.rejoined.get(rank, 1)

    def was_lost(self, rank: int, incarnation: int) -> bool:
        """Whether that incarnation of ``rank`` was lost."""
        lost_for_good = rank in self.world.departed and rank in self.world.lost
        return lost_for_good or self.incarnation(rank) != incarnation

    def check(self, holds: bool, law: str, text: Callable[[], str] | str) -> None:
        """Raise :class:`Violation` unless ``law`` holds."""
        if not holds:
            details = text if isinstance(text, str) else text()
            raise Violation(law, f"{details} (at {self.world.calendar.now_s:.6f} s)")

    def reduced(self, collective: Collective) -> None:
        """Tell the observers that a collective has its result."""
        for observer in self.observers:
            observer.reduced(collective)

    def came_too_late(self, rank: int) -> None:
        """Note that a worker ended without training. No other worker may be alive then."""
        others = [r for r in self.world.alive() if r < self.schedule.workers and r != rank]
        self.check(not others, "liveness", f"rank {rank} gave up while {others} were alive")
        self.sites["came too late"] += 1
        self.too_late.add(rank)

    def acted(self) -> None:
        """Count an operation of a rank, and have the observers look at the whole world."""
        self.operations += 1
        self.check(self.operations < MOST_OPERATIONS, "liveness", "the run is in an endless loop")
        for observer in self.observers:
            observer.after_operation()


class Observer:
    """Checks one law, or a few that belong together, on the events of a run."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world, self.schedule = scene, scene.world, scene.schedule

    def watches(self) -> bool:
        """Whether its laws apply to this run."""
        return True

    def attach(self, session: Session) -> None:
        """Called with each new incarnation of a rank, before it does anything."""

    def after_operation(self) -> None:
        """Called after each operation of any rank, to look at the whole world."""

    def posted(self, src: int, dst: int, tag: int, x: Tensor) -> None:
        """Called when ``src`` has posted a message to ``dst``."""

    def took(self, rank: int, src: int, tag: int, x: Tensor) -> None:
        """Called when ``rank`` has received a message of ``src``."""

    def published(self, rank: int, published: Published) -> None:
        """Called when ``rank`` has written its window."""

    def peeked(self, rank: int, src: int, seen: Published) -> None:
        """Called when ``rank`` has read the window of ``src``."""

    def drew(self, rank: int, queue: int, epoch: int, number: int) -> None:
        """Called when ``rank`` has drawn a batch."""

    def used(self, rank: int, queue: int, epoch: int, number: int) -> None:
        """Called when ``rank`` has trained on a batch."""

    def reduced(self, collective: Collective) -> None:
        """Called when a collective has its result."""

    def ended(self) -> None:
        """Called once, after a run that was not cut short."""


def close(x: Tensor, y: Tensor, slack: float = 1e-9) -> bool:
    """Whether two short vectors are equal up to rounding; faster than ``torch.allclose``."""
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    return all(abs(a - b) <= slack * (1e-3 + abs(b)) for a, b in pairs)


def around(target: Any, name: str, act: Callable[..., Any]) -> None:
    """Replace a method of one object by ``act(inner, ...)``; ``inner`` is the original."""
    setattr(target, name, partial(act, getattr(target, name)))


def when_made(target: Any, name: str, observe: Callable[[Any], None]) -> None:
    """Call ``observe`` with each object that a method of ``target`` makes."""

    def make(inner: Callable[[], Any]) -> Any:
        made = inner()
        observe(made)
        return made

    around(target, name, make)


class WatchedInbox(Inbox):
    """A mailbox that counts bytes, and knows which incarnation sent each message."""

    def __init__(self, scene: Scene, owner: int) -> None:
        super().__init__()
        self._scene, self._owner = scene, owner
        self._known: dict[Letter, int] = {}
        self.sent = self.delivered = self.dropped = 0

    def add(self, message: Letter) -> None:
        if message not in self._known:
            self._known[message] = self._scene.incarnation(message.src)
            self.sent += message.nbytes
        super().add(message)

    def remove(self, message: Letter) -> None:
        super().remove(message)
        sent_by, src = self._known.pop(message), message.src
        self.delivered += message.nbytes
        self._scene.check(
            sent_by == self._scene.incarnation(src),
            "fence",
            lambda: (
                f"rank {self._owner} received a message of incarnation {sent_by} of rank {src},"
                f" which is at incarnation {self._scene.incarnation(src)}"
            ),
        )

    def withdraw(self, src: int, posted: bool = False) -> None:
        known, sent, dropped = dict(self._known), self.sent, self.dropped
        super().withdraw(src, posted)  # it clears the inbox and adds the other messages again
        withdrawn = known.keys() - self._known.keys()
        self._known = {message: known[message] for message in self._known}
        self.sent, self.dropped = sent, dropped + sum(message.nbytes for message in withdrawn)

    def clear(self) -> None:
        super().clear()
        self.dropped += sum(message.nbytes for message in self._known)
        self._known.clear()

    @property
    def in_flight(self) -> int:
        """The bytes of all messages that were not received yet."""
        queues = (queue for senders in self._queues.values() for queue in senders.values())
        return sum(message.nbytes for queue in queues for message in queue)


class WatchedMail(MeteredMail):
    """Metered mail that tells the observers about each call."""

    def __init__(self, inner: SimulatedPorts, recorder: Recorder, scene: Scene) -> None:
        super().__init__(inner.mail, recorder)
        self._rank, self._scene = inner.rank, scene
        self.to_nobody = self.by_message = 0

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Sending:
        sending, nbytes = super().start_send(x, dst, tag, header), x.nbytes + len(header)
        self.by_message += nbytes
        self.to_nobody += nbytes if dst in self._scene.world.departed else 0
        self._scene.acted()
        return sending

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        accepted = super().post(x, dst, tag, header)
        if accepted:
            self.by_message += x.nbytes + len(header)
            for observer in self._scene.observers:
                observer.posted(self._rank, dst, tag, x)
        else:
            self._scene.sites["post refused"] += 1
        self._scene.acted()
        return accepted

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        got = super().receive(like, sources, tag, op, any_loss)
        if not isinstance(got, Lost):
            self._took(got, tag)
        return got

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        message = super().try_receive(like, sources, tag)
        if message is not None:
            self._took(message, tag)
        return message

    def _took(self, message: Message, tag: int) -> None:
        for observer in self._scene.observers:
            observer.took(self._rank, message.src, tag, message.x)
        self._scene.acted()

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        version = super().publish(x, header, window)
        if window == PUBLISHED:
            for observer in self._scene.observers:
                observer.published(self._rank, Published(version, x, header))
            self._scene.acted()
        return version

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        read = super().peek(src, like, window, gone)
        if window == PUBLISHED and not gone:
            if read is not None:
                for observer in self._scene.observers:
                    observer.peeked(self._rank, src, read)
            self._scene.acted()
        return read


class WatchedCollectives(MeteredCollectives):
    """Metered collectives that tell the observers about each call."""

    def __init__(self, inner: SimulatedPorts, recorder: Recorder, scene: Scene) -> None:
        super().__init__(inner.collectives, recorder)
        self._scene = scene

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        self._scene.acted()
        return super().all_reduce(x, weight, members, factor, flags)


class WatchedQueue(TracedQueue):
    """A data queue that tells the observers about each call."""

    def __init__(self, inner: SimulatedPorts, recorder: Recorder, scene: Scene) -> None:
        super().__init__(inner.queue, recorder)
        self._rank, self._scene = inner.rank, scene

    def draw(self, queue: int, epoch: int) -> int | None:
        number = super().draw(queue, epoch)
        if number is not None:
            for observer in self._scene.observers:
                observer.drew(self._rank, queue, epoch, number)
        self._scene.acted()
        return number

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        super().mark_used(queue, epoch, number)
        for observer in self._scene.observers:
            observer.used(self._rank, queue, epoch, number)


class WatchedPorts(MeteredPorts):
    """Metered ports that tell the observers about each call."""

    mail: WatchedMail

    def __init__(self, inner: SimulatedPorts, trace: Trace, scene: Scene) -> None:
        super().__init__(inner, trace)
        self.mail = WatchedMail(inner, self.recorder, scene)
        self.collectives = WatchedCollectives(inner, self.recorder, scene)
        self.queue = WatchedQueue(inner, self.recorder, scene)
