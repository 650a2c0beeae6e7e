"""The places from which observers see a run: its mailboxes, its transports, its strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.comm.base import Factor, Work
from paceline.comm.metered import MeteredTransport
from paceline.errors import PacelineError
from paceline.record.trace import Trace
from paceline.sim.inbox import Inbox, Message
from paceline.sim.world import Collective, SimulatedTransport, World

if TYPE_CHECKING:
    from paceline.lab.faulttest.schedule import Schedule
    from paceline.training.session import Session

MOST_OPERATIONS = 20_000
"""What no run of a fault test needs, unless it goes round in circles."""


class Violation(PacelineError):
    """A law that does not hold in a run; ``law`` is its name."""

    def __init__(self, law: str, text: str) -> None:
        self.law = law
        super().__init__(f"{law}: {text}")


class Scene:
    """One run as its observers see it.

    Attributes:
        schedule: what is run.
        world: where.
        sites: how often what happened that a good test should have seen.
        begun: the ranks that have got their state, each with its life.
        workers: each rank as it is in its present life.
        transports: all of them, those of earlier lives too.
        finished: the model of each worker that has come to its end.
        too_late: the workers that came, or came back, when all was over.
    """

    def __init__(self, schedule: Schedule, world: World) -> None:
        self.schedule, self.world = schedule, world
        self.sites: Counter[str] = Counter()
        self.begun: set[tuple[int, int]] = set()
        self.workers: dict[int, Session] = {}
        self.transports: list[WatchedTransport] = []
        self.finished: dict[int, Tensor] = {}
        self.too_late: set[int] = set()
        self.observers: list[Observer] = []
        self.operations = 0

    def life(self, rank: int) -> int:
        """Which life of ``rank`` this is."""
        return self.world.reborn.get(rank, 1)

    def is_over(self, rank: int, life: int) -> bool:
        """Whether that life of ``rank`` was lost."""
        gone = rank in self.world.departed and rank in self.world.lost
        return gone or self.life(rank) != life

    def check(self, holds: bool, law: str, text: Callable[[], str] | str) -> None:
        """Say that ``law`` is broken, unless it holds."""
        if not holds:
            told = text if isinstance(text, str) else text()
            raise Violation(law, f"{told} (at {self.world.calendar.now_s:.6f} s)")

    def reduced(self, collective: Collective) -> None:
        """Hear that a collective has its result."""
        for observer in self.observers:
            observer.reduced(collective)

    def came_too_late(self, rank: int) -> None:
        """Hear that a worker has ended without training; there must be no other any more."""
        others = [r for r in self.world.alive() if r < self.schedule.workers and r != rank]
        self.check(not others, "liveness", f"rank {rank} gave up while {others} were there")
        self.sites["came too late"] += 1
        self.too_late.add(rank)

    def acted(self) -> None:
        """Hear that a rank did something: those who look at everything look now."""
        self.operations += 1
        self.check(self.operations < MOST_OPERATIONS, "liveness", "the run goes round in circles")
        for observer in self.observers:
            observer.looked()


class Observer:
    """One law, or a few that belong together; it hears what happens and says when one is broken."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.world, self.schedule = scene, scene.world, scene.schedule

    def watches(self) -> bool:
        """Whether it has anything to say of this run."""
        return True

    def attach(self, session: Session) -> None:
        """Hear of a rank, before it does anything; and again of each later life of it."""

    def looked(self) -> None:
        """Look at everything, after a rank did something."""

    def posted(self, src: int, dst: int, tag: int, x: Tensor) -> None:
        """Hear that a message was left in a mailbox."""

    def took(self, rank: int, src: int, tag: int, x: Tensor) -> None:
        """Hear that a message was taken."""

    def published(self, rank: int, version: int, x: Tensor) -> None:
        """Hear that a window was written."""

    def peeked(self, rank: int, src: int, version: int, x: Tensor) -> None:
        """Hear that a window was read."""

    def drew(self, rank: int, queue: int, epoch: int, number: int) -> None:
        """Hear that a batch was given out."""

    def used(self, rank: int, queue: int, epoch: int, number: int) -> None:
        """Hear that a batch was made use of."""

    def reduced(self, collective: Collective) -> None:
        """Hear that a collective has its result."""

    def ended(self) -> None:
        """Look at the whole run, which has come to its end."""


def close(x: Tensor, y: Tensor, slack: float = 1e-9) -> bool:
    """Whether two short vectors are the same but for rounding; quicker than torch's own."""
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    return all(abs(a - b) <= slack * (1e-3 + abs(b)) for a, b in pairs)


def around(target: Any, name: str, act: Callable[..., Any]) -> None:
    """Have ``act(inner, ...)`` called in place of a method of one object."""
    setattr(target, name, partial(act, getattr(target, name)))


class WatchedInbox(Inbox):
    """A mailbox that counts what comes and goes, and knows which life sent what."""

    def __init__(self, scene: Scene, owner: int) -> None:
        super().__init__()
        self._scene, self._owner = scene, owner
        self._known: dict[Message, int] = {}
        self.sent = self.delivered = self.dropped = 0

    def add(self, message: Message) -> None:
        if message not in self._known:
            self._known[message] = self._scene.life(message.src)
            self.sent += message.x.nbytes
        super().add(message)

    def remove(self, message: Message) -> None:
        super().remove(message)
        sent_by, src = self._known.pop(message), message.src
        self.delivered += message.x.nbytes
        self._scene.check(
            sent_by == self._scene.life(src),
            "fence",
            lambda: (
                f"rank {self._owner} took a message of life {sent_by} of rank {src},"
                f" which is in life {self._scene.life(src)}"
            ),
        )

    def withdraw(self, src: int, posted: bool = False) -> None:
        known, sent, dropped = dict(self._known), self.sent, self.dropped
        super().withdraw(src, posted)  # which empties the box, and fills it again
        gone = known.keys() - self._known.keys()
        self._known = {message: known[message] for message in self._known}
        self.sent, self.dropped = sent, dropped + sum(message.x.nbytes for message in gone)

    def clear(self) -> None:
        super().clear()
        self.dropped += sum(message.x.nbytes for message in self._known)
        self._known.clear()

    @property
    def in_flight(self) -> int:
        """The bytes that are in it, or on their way to it."""
        queues = (queue for senders in self._queues.values() for queue in senders.values())
        return sum(message.x.nbytes for queue in queues for message in queue)


class WatchedTransport(MeteredTransport):
    """A metered transport whose every call is heard by the observers."""

    def __init__(self, inner: SimulatedTransport, trace: Trace, scene: Scene) -> None:
        super().__init__(inner, trace)
        self._scene, self._world = scene, inner.world
        self.to_nobody = self.by_message = 0

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        sent = super().start_send(x, dst, tag)
        self.by_message += x.nbytes
        self.to_nobody += x.nbytes if dst in self._world.departed else 0
        self._scene.acted()
        return sent

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        left = super().post(x, dst, tag)
        if left:
            self.by_message += x.nbytes
            for observer in self._scene.observers:
                observer.posted(self.rank, dst, tag, x)
        else:
            self._scene.sites["post refused"] += 1
        self._scene.acted()
        return left

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        src, x = super().take(like, sources, tag, op, watch)
        self._took(src, tag, x)
        return src, x

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        message = super().take_now(like, sources, tag)
        if message is not None:
            self._took(message[0], tag, message[1])
        return message

    def _took(self, src: int, tag: int, x: Tensor) -> None:
        for observer in self._scene.observers:
            observer.took(self.rank, src, tag, x)
        self._scene.acted()

    def publish(self, x: Tensor) -> int:
        version = super().publish(x)
        for observer in self._scene.observers:
            observer.published(self.rank, version, x)
        self._scene.acted()
        return version

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        seen = super().peek(src, like)
        if seen is not None:
            for observer in self._scene.observers:
                observer.peeked(self.rank, src, *seen)
        self._scene.acted()
        return seen

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> int:
        self._scene.acted()
        return super().all_reduce(x, weight, members, factor)

    def ticket(self, queue: int, epoch: int) -> int | None:
        number = super().ticket(queue, epoch)
        if number is not None:
            for observer in self._scene.observers:
                observer.drew(self.rank, queue, epoch, number)
        self._scene.acted()
        return number

    def done_with(self, queue: int, epoch: int, number: int) -> None:
        super().done_with(queue, epoch, number)
        for observer in self._scene.observers:
            observer.used(self.rank, queue, epoch, number)
