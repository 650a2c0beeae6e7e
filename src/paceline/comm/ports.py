"""What a world offers one of its ranks: six small ports.

A world is where a run lives: simulated, the shared memory of one host, torch.distributed, or one
process alone. Each world implements the ports, one file a port; :class:`~paceline.comm.comm.Comm`
is written once on top of them. Ranks here are those of the whole world.
``docs/comm-contract.md`` has the contract in full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.errors import MessageMismatch, PeerLost

if TYPE_CHECKING:
    from torch import Tensor

Factor = Callable[[int], float]
"""Given the sum of the weights of an all-reduce, what to multiply the sum of the vectors by."""

PUBLISHED, SAVED, SHELF = 0, 1, 2
"""A rank's windows: what peers read, what a successor takes up, and the first of its shelves."""
SHELVES = 2
"""How many shelves a rank has, for vectors that stay readable after it is gone."""
NOT_READY = "it died, and its successor is no member yet"
"""Why a collective misses a rank that has come again and was not taken in."""
MAILBOX_CAPACITY = 2
"""How many posted messages of one sender a mailbox holds before ``post`` returns False."""


class Message(NamedTuple):
    """A message as its receiver has it: a vector, and the header that its sender packed."""

    src: int
    x: Tensor
    header: bytes = b""

    @property
    def nbytes(self) -> int:
        """The bytes that it counts for."""
        return self.x.nbytes + len(self.header)


class Lost(NamedTuple):
    """In place of a message: the ranks that it could have come from are gone.

    Attributes:
        ranks: these, as the whole world counts them.
        src: the first of them, as the Comm counts it that returns this.
    """

    ranks: tuple[int, ...]
    op: str
    reason: str
    waited_s: float = 0.0
    src: int = -1

    @property
    def x(self) -> Tensor:
        """Raises the error, for a caller who cannot go on without the message."""
        raise self.error

    @property
    def error(self) -> PeerLost:
        """The exception for a caller who cannot go on without them."""
        return PeerLost(self.ranks, self.op, self.reason, self.waited_s)


class Published(NamedTuple):
    """What a rank last put into one of its windows; versions count from 1."""

    version: int
    x: Tensor
    header: bytes = b""


class Total(NamedTuple):
    """What an all-reduce returns: the sum of the weights, and the flags of all ranks or-ed."""

    weight: int
    flags: int = 0


class View(NamedTuple):
    """The members of a run as one rank sees them.

    Attributes:
        version: grows whenever a rank comes, goes or is lost.
        incarnations: of each rank, from 1; 0 before a late joiner has come.
        lost: the ranks that died, or were stopped for too long, and have not come again.
        departed: the ranks that came to their end.
        stopped: the ranks that are stopped now: not lost yet, but what they published is old.
    """

    version: int
    incarnations: Sequence[int]
    lost: frozenset[int] = frozenset()
    departed: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()

    def last_ended(self, rank: int) -> int:
        """The last incarnation of ``rank`` that ended: the present one, or the one before."""
        ended = rank in self.lost or rank in self.departed
        return self.incarnations[rank] - (not ended)


class Call(NamedTuple):
    """A call to a rendezvous.

    Attributes:
        number: of the call, from 1; 0: none was made.
        step: a worker comes after its own step of this number, or the first one past it.
        stop: whether the run ends there.
        incarnations: of each rank that is called; 0 for one that is not.
    """

    number: int = 0
    step: int = 0
    stop: bool = False
    incarnations: tuple[int, ...] = ()


class Roster(NamedTuple):
    """Who acts together, as all of them were told.

    Attributes:
        members: each with its incarnation.
        joined: those of them that were taken in.
    """

    members: tuple[tuple[int, int], ...]
    joined: frozenset[int] = frozenset()


class Sending(Protocol):
    """A message that its receiver has not taken yet; it owns its vector until :meth:`wait`."""

    def wait(self) -> Lost | None:
        """Wait until the receiver has taken it; return the loss of the receiver instead."""


class Mail(Protocol):
    """Messages between two ranks, and windows that others read."""

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Sending:
        """Offer a message to ``dst``, which takes it when it asks for it."""

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        """Leave a copy in the mailbox of ``dst``; False when that is full, or ``dst`` is gone."""

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        """Wait for a message of any of ``sources`` and take it.

        Returns ``Lost`` when all of them are gone. With ``any_loss``, returns it as soon as one of
        them is gone and has left no message, and otherwise waits without a limit.
        """

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        """Take a message that has arrived, if there is one."""

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        """Put a copy into one of this rank's windows; return its version."""

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        """Copy what is in a window of ``src``; None when nothing is.

        Also None when ``src`` is no member now, unless ``gone``: then any incarnation of it counts.
        Between hosts also None while ``src`` is a worker that is stopped: it would have to answer.
        """


class Collectives(Protocol):
    """Operations of several ranks at once."""

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        """Sum ``x`` over ``members``, in place; see :meth:`Comm.all_reduce`."""

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        """Give every member the ``x`` of ``src``."""

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        """A zeroed vector of ``like``'s dtype and device, where this world reduces it best."""

    def expect(self, x: Tensor) -> None:
        """Hear that ``x``, as it is now, may be reduced next: a world may begin to copy it."""
        return


class Members(Protocol):
    """Who takes part in the run.

    Attributes:
        late: whether this rank has come, or come again, after the beginning.
        starters: the ranks that are here from the beginning.
    """

    late: bool
    starters: tuple[int, ...]

    def alive(self) -> tuple[int, ...]:
        """The ranks that have neither died nor departed, this one included."""

    def view(self) -> View:
        """All that is known of the members. Never waits."""

    def incarnation(self, rank: int) -> int:
        """``view().incarnations[rank]``, quickly."""

    def final_roster(self) -> tuple[tuple[int, int], ...]:
        """The members, each with its incarnation, as they were when the first rank asked this."""

    def roster(self, number: int, take_in: bool = False) -> Roster | None:
        """The members as they were when the first rank asked for this number.

        With ``take_in``, those who wait to be taken in are members from then on. The numbers of the
        two kinds are apart. None when a rank has asked for a later number of this kind.
        """

    def someone_waits(self) -> bool:
        """Whether a rank waits to be taken in. Never waits."""

    def wait_to_be_taken_in(self, workers: int) -> Roster:
        """Wait until the others have taken this late joiner in; return whom it is now among.

        Raises PeersGone when none of the other ``workers`` is here to do that.
        """

    def wait_for_change(self, seconds: float) -> bool:
        """Wait until a rank has come or gone; False when none has after so long."""

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        """Wait until a later incarnation of ``rank`` is a member."""

    def announce_ready(self) -> None:
        """Say that this late joiner has its state: from now on it is a member."""

    def rejoin(self) -> None:
        """Begin another incarnation, after the others have gone on without this rank."""


class DataQueue(Protocol):
    """The batches of an epoch, each given out once, and the workers that still draw."""

    def draw(self, queue: int, epoch: int) -> int | None:
        """Draw the next batch of ``queue``; None when others are in a later epoch."""

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        """Say that a batch was used: it must not be given out again if this rank is lost."""

    def lost_batches(self) -> int:
        """How many batches were taken back from lost ranks, and not drawn again."""

    def close(self) -> None:
        """Have every worker come to the end of its data."""

    def closed(self) -> bool:
        """Whether a rank has called :meth:`close`. Never waits."""

    def mark_finished(self) -> None:
        """Say that this worker has come to the end of its data.

        From then on it takes part in the last collectives of all workers only: it comes to no
        rendezvous and answers no message.
        """

    def finished(self) -> frozenset[int]:
        """The workers that have come to the end of their data."""


class Clock:
    """Seconds since ``started_s`` on the host's monotonic clock; time passes by itself, unasked.

    Where time is virtual, a world has a clock of its own, and computing costs what it is charged.

    Attributes:
        charged_s: all that :meth:`charge` was given, where it costs anything.
    """

    charged_s = 0.0

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s

    def now(self) -> float:
        """Seconds on this world's clock, which never goes back."""
        return time.monotonic() - self._started_s

    def charge(self, seconds: float) -> None:
        """Let computing time pass."""

    def charge_gather(self, nbytes: int) -> None:
        """Let the time pass that it takes to gather gradients into one vector."""

    def charge_update(self, nbytes: int) -> None:
        """Let the time pass that a server takes to apply an update."""

    def mark_as_server(self) -> None:
        """Say that this rank is a server: :meth:`charge_update` covers all that its core does."""

    def set_model_size(self, nbytes: int, tensors: int) -> float:
        """Say how large the model is; return the factor from real bytes to simulated ones."""
        return 1.0

    def begin_step(self, step: int) -> None:
        """Say that step number ``step`` begins: faults of a schedule strike here."""

    def switch_in(self) -> None:
        """Make ready for the user's code: it runs next, with this rank's random generators."""


class Rendezvous(Protocol):
    """All ranks stand still at once, so that a checkpoint can be made."""

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        """Call all members; workers come after their first step from ``step`` on.

        Every rendezvous up to the number ``over`` is given up. Nothing happens when there was
        another call after the one of number ``known``.
        """

    def last_call(self) -> Call:
        """The last call."""

    def meet(self, number: int, members: Sequence[int], incarnations: Sequence[int]) -> bool:
        """Wait until all ``members`` have come to the rendezvous ``number``.

        False when one of ``incarnations`` has ended, or the rendezvous was given up. An incarnation
        of 0 stands for a rank that is not needed.
        """

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        """What is on its way to this rank, and what it has in its windows.

        With what all ranks share, unless ``without`` is None. It names the ranks that are not
        saved: their batches are given out again.
        """

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`snapshot` returned."""


@dataclass
class Ports:
    """One rank's place in a world. ``rendezvous`` is None where a world has none."""

    rank: int
    size: int
    mail: Mail
    collectives: Collectives
    members: Members
    queue: DataQueue
    clock: Clock
    rendezvous: Rendezvous | None = None

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        """Inside, nothing that this rank does takes virtual time."""
        yield

    def off_meter(self) -> Ports:
        """Ports for what only measures the run: nothing is counted, and no virtual time passes."""
        return self

    def close(self) -> None:
        """Leave: peers see this rank as departed, not as lost. Idempotent."""

    def give_up(self) -> None:
        """End by an error, without :meth:`close`: threads of this rank stop watching others."""

    def first_loss(self, error: PeerLost) -> PeerLost:
        """The loss that ended the run: ``error`` itself, or an earlier one that it came of."""
        return error


def check_fit(like: Tensor, numel: int, dtype: Any, src: int, tag: int) -> None:
    """Refuse a message that is not what the receiver asked for, before memory is taken for it."""
    if (numel, dtype) != (like.numel(), like.dtype):
        raise MessageMismatch(
            f"message from rank {src} with tag {tag} holds {numel} x {dtype},"
            f" expected {like.numel()} x {like.dtype}"
        )
