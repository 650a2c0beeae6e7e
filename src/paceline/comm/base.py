"""The contract between strategies and the world: :class:`Comm`, and what a world must offer.

A strategy sees a :class:`Comm` and nothing else. ``Comm`` is written once, on top of the few
primitives of a :class:`Transport`; a transport is one of the worlds that a run can live in
(simulated, shared memory, torch.distributed). ``docs/comm-contract.md`` tells it in full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.comm.ranks import Gone, Others, Ranks, everyone, ranks
from paceline.errors import MessageMismatch, PeerLost, PeersGone, UsageError

if TYPE_CHECKING:
    from torch import Tensor

Factor = Callable[[int], float]
T = TypeVar("T")

CHANGE_S = 30.0
"""How long a rank that finds all others lost waits for one of them to come back."""
SHELVES = 2
"""How many vectors a rank can shelve beside what it publishes and keeps."""
MAILBOX_CAPACITY = 2
"""How many posted messages of one sender a mailbox holds before ``post`` answers False."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a rank waits for another before it says so, and before it gives up.

    Args:
        dead_s: a peer whose process is stopped for this long is lost (a dead one is lost at once).
        start_s: how long ranks of torch.distributed wait at the start for those that never come.
        progress_limit_s: the longest wait for a peer that is alive but busy.
        notice_s: after this long, a wait says on standard error whom it waits for.
    """

    dead_s: float = 5.0
    start_s: float = 300.0
    progress_limit_s: float = 600.0
    notice_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("dead_s", "start_s", "progress_limit_s", "notice_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} ({getattr(self, name)}) must be above 0")


class Work(ABC):
    """Something started and not yet finished; it owns its tensor until :meth:`wait`."""

    @abstractmethod
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once. Never waits itself."""

    @abstractmethod
    def wait(self) -> int:
        """Wait for the end; of an all-reduce, return the sum of the weights."""


class Call(NamedTuple):
    """A call to a meeting.

    Attributes:
        number: of the call, from 1; 0: none was made.
        step: after which step of its own a worker comes, or after the first one past it.
        stop: whether the run ends there.
        lives: the life of each rank that is called; 0 of one that is not.
    """

    number: int = 0
    step: int = 0
    stop: bool = False
    lives: tuple[int, ...] = ()


class Transport(ABC):
    """The primitives of one world, seen from one rank; ranks here are those of the whole world."""

    rank: int
    size: int

    @abstractmethod
    def alive(self) -> tuple[int, ...]:
        """The ranks that have neither died nor left, this one included."""

    def starters(self) -> tuple[int, ...]:
        """The ranks that are here from the beginning; others come later."""
        return tuple(range(self.size))

    # Members that come and go: where a world does not know of any, these tell of one life.

    late: bool = False
    """Whether this rank has come, or come again, after the beginning."""

    def membership(self) -> int:
        """A number that grows whenever a rank comes, goes or is lost."""
        return 0

    def life(self, rank: int) -> int:
        """Which life of ``rank`` this is, from 1: it grows when a lost one comes again."""
        return 1

    def last_members(self) -> tuple[tuple[int, int], ...]:
        """The members, each with its life, as they were when the first rank asked this."""
        return tuple((rank, 1) for rank in range(self.size))

    def lost_life(self, rank: int) -> int:
        """Which life of ``rank`` was the last to end: this one, or the one before."""
        return 1

    def lost(self) -> frozenset[int]:
        """The ranks that have died, or were stopped for too long, and have not come again."""
        return frozenset()

    def left(self) -> frozenset[int]:
        """The ranks that have come to their end."""
        return frozenset()

    def stopped(self) -> frozenset[int]:
        """The ranks that are stopped now, for however short a time: not lost, but out of date."""
        return frozenset()

    def retired(self) -> frozenset[int]:
        """The workers that have come to the end of their data: see :meth:`retire`."""
        return frozenset()

    def stop_all(self) -> None:
        """Have every worker come to its end; see :meth:`stopping`."""
        self._stopping = True

    def stopping(self) -> bool:
        """Whether a rank has called :meth:`stop_all`. Never waits."""
        return self._stopping

    _stopping = False

    def arrived(self) -> None:  # noqa: B027 - only who comes late has to say so
        """Say that this rank, which came late, has its state: from now on it is a member."""

    def rejoin(self) -> None:
        """Begin another life, after the others have gone on without this rank."""
        raise UsageError(f"{type(self).__name__} does not take a rank back")

    def inherited(self, like: Tensor, rank: int) -> tuple[int, Tensor] | None:
        """What ``rank``, in whichever life, last published, and its version."""
        return None

    def keep(self, x: Tensor) -> None:  # noqa: B027 - likewise
        """Put a copy of ``x`` where only a later life of this rank finds it."""

    def kept(self) -> Tensor | None:
        """What an earlier life of this rank has kept last."""
        return None

    def shelve(self, x: Tensor, shelf: int) -> None:  # noqa: B027 - likewise
        """Put a copy of ``x`` on one of this rank's shelves, for others to see."""

    def shelved(self, rank: int, shelf: int) -> Tensor | None:
        """What ``rank``, in whichever life, has put on that shelf last."""
        return None

    def await_return(self, rank: int, life: int) -> None:
        """Wait until a successor of that life of ``rank`` is here."""
        raise PeerLost(rank, "the wait for a successor", "nobody can follow it", 0.0)

    def await_change(self, seconds: float) -> bool:
        """Wait until a rank has come or gone; False when none has after so long."""
        return False

    def done_with(self, queue: int, epoch: int, number: int) -> None:  # noqa: B027 - likewise
        """Say that a batch has been made use of: it is not to be given out again."""

    def batches_lost(self) -> int:
        """How many batches were taken back from lost ranks, and not drawn again."""
        return 0

    # Meetings, in which all ranks stand still at once: for checkpoints.

    meets: bool = False
    """Whether this world has meetings."""

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        """Call all members to a meeting: workers, after their first step from ``step`` on.

        Meetings up to the number ``over`` are given up, if they are not held by now. Nothing is
        done when there was another call after the one of number ``known``.
        """
        raise UsageError(f"{type(self).__name__} has no meetings")

    def called(self) -> Call:
        """The last call."""
        return Call()

    def meet(self, number: int, members: Sequence[int], lives: Sequence[int]) -> bool:
        """Wait until all ``members`` have come to a meeting.

        False when one of the ``lives`` that it needs is over, or the meeting was given up; 0 stands
        for a rank that it does not need.
        """
        raise UsageError(f"{type(self).__name__} has no meetings")

    def retire(self) -> None:  # noqa: B027 - a world of one rank has nobody to tell
        """Say that this worker has come to the end of its data.

        It takes part in the last collectives of all workers, comes to no meeting any more, and
        answers no message until then.
        """

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        """What is on its way to this rank, and what it shows.

        With what all ranks share, unless ``without`` is None: it names the ranks that are not
        saved, so that batches that they have in hand are given out again.
        """
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 - likewise
        """Take up what :meth:`snapshot` gave."""

    @contextmanager
    def free(self) -> Iterator[None]:
        """Inside, nothing of what this rank does counts, or takes virtual time."""
        yield

    @abstractmethod
    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        """Offer ``x`` to ``dst``; the work is done when ``dst`` has taken it."""

    @abstractmethod
    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        """Leave a copy of ``x`` in the mailbox of ``dst``; False when it is full or gone."""

    @abstractmethod
    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        """Wait for a message of any of ``sources`` and take it.

        Gives up when all of them are gone; with ``watch``, when one of them is that has left
        no message: a :class:`~paceline.errors.PeerLost` then names it.
        """

    @abstractmethod
    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        """Take a message that has arrived, if there is one."""

    @abstractmethod
    def publish(self, x: Tensor) -> int:
        """Put a copy of ``x`` into this rank's window; return its version, from 1."""

    @abstractmethod
    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        """Copy what ``src`` last published, and its version; None before the first."""

    @abstractmethod
    def start_all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> Work:
        """Start to sum ``x`` over ``members``; see :meth:`Comm.all_reduce`."""

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> int:
        """The same, and wait for it."""
        return self.start_all_reduce(x, weight, members, factor).wait()

    @abstractmethod
    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        """Give every member the ``x`` of ``src``."""

    @abstractmethod
    def ticket(self, queue: int, epoch: int) -> int | None:
        """Draw the next number of a counter that all ranks share; see :meth:`Comm.ticket`."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on this world's clock, which never goes back."""

    @abstractmethod
    def allocate(self, numel: int, like: Tensor) -> Tensor:
        """A zeroed vector of ``like``'s dtype and device, where this world reduces it best."""

    def compute(self, seconds: float) -> None:  # noqa: B027 - real time passes by itself
        """Let computing time pass; only a virtual clock needs to be told."""

    def charge_gather(self, nbytes: int) -> None:  # noqa: B027 - likewise
        """Let the time pass that it takes to gather gradients of ``nbytes`` into one vector."""

    def serves(self) -> None:  # noqa: B027 - likewise
        """Hear that this rank is a server: all that its core does is in :meth:`charge_update`."""

    def charge_update(self, nbytes: int) -> None:  # noqa: B027 - likewise
        """Let the time pass that a server takes to apply an update of ``nbytes``."""

    def know_model(self, nbytes: int, tensors: int) -> float:
        """Hear how large the model is; what its bytes count for, where it stands for another."""
        return 1.0

    def step_begins(self, step: int) -> None:  # noqa: B027 - only a simulator injects faults
        """Hear that the optimizer's step number ``step`` begins."""

    def resume(self) -> None:  # noqa: B027 - only ranks that share a process have to
        """Make ready for the user's code: it runs next, with this rank's random generators."""

    def uncharged(self) -> Transport:
        """The same place for what only measures the run: where time is virtual, it takes none."""
        return self

    def first_loss(self, error: PeerLost) -> PeerLost:
        """The loss that an error came of, where the first one ends the run: of the same, or it."""
        return error

    def give_up(self) -> None:  # noqa: B027 - only where threads of this rank look after others
        """Hear that this rank ends by an error, without :meth:`close`."""

    @abstractmethod
    def close(self) -> None:
        """Leave: peers see this rank as gone, not as lost. Idempotent."""


class Comm:
    """Who is here, and how to talk to them: all that a strategy knows of the world.

    Vectors are contiguous tensors. ``tag`` keeps messages of different meaning apart; between
    two ranks and within a tag, messages keep their order.

    Args:
        transport: the world that this rank is in.
        members: the ranks of a group; all, when not given.
        elastic: whether collectives go on among those that are left when a member is lost.

    Attributes:
        meetings: how many collectives this rank has taken part in here.
    """

    def __init__(
        self,
        transport: Transport,
        members: Sequence[int] | None = None,
        elastic: bool = False,
    ) -> None:
        self.transport, self.elastic = transport, elastic
        self.members = everyone(transport.size) if members is None else ranks(tuple(members))
        self.rank = self.members.places[transport.rank]
        self.size = len(self.members)
        self._seen: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._window: Any = None
        self._gone = Gone(transport.life)
        late = transport.late  # whose loss came before this rank did is not told to it
        self._lives = {rank: transport.life(rank) for rank in self.members} if late else {}
        self._membership = -1
        self._waiting: dict[int, tuple[int, int, Tensor | None]] = {}
        self._left_out: frozenset[tuple[int, int]] = frozenset()
        self.meetings = 0
        self._others = Others(self.members, transport.rank)

    def alive(self) -> tuple[int, ...]:
        """The ranks that have neither died nor left, this one included."""
        alive = self.transport.alive()
        if self._seen is None or self._seen[0] is not alive:
            here = set(alive)
            members = tuple(rank for rank, world in enumerate(self.members) if world in here)
            self._seen = (alive, ranks(members))
        return self._seen[1]

    def starters(self) -> tuple[int, ...]:
        """The ranks that are here from the beginning; others come later."""
        first = set(self.transport.starters())
        return tuple(rank for rank, world in enumerate(self.members) if world in first)

    def uncharged(self) -> Comm:
        """The same for what only looks at the run: it counts nowhere, and takes no virtual time."""
        return Comm(self.transport.uncharged(), self.members, self.elastic)

    # Two-sided -----------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Send ``x``; return when ``dst`` has taken it. Never rely on buffering."""
        self.transport.start_send(_vector(x), self._peer(dst), tag).wait()

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Tensor:
        """Wait for a message from ``src`` that has the size and dtype of ``like``."""
        return self.transport.take(
            like, (self._peer(src),), tag, f"recv from rank {self._peer(src)}"
        )[1]

    def recv_any(self, like: Tensor, tag: int = 0) -> tuple[int, Tensor]:
        """Wait for a message from anyone: ``(src, x)``.

        Raises:
            PeersGone: every other rank has left, and nothing is left to take.
        """
        src, x = self.transport.take(like, self._others, tag, "recv_any")
        return self.members.places[src], x

    def recv_or_loss(self, like: Tensor, tag: int = 0) -> tuple[int, Tensor | None]:
        """As :meth:`recv_any`; and once for each rank that died or left, ``(rank, None)``.

        What a rank sent before it went comes first, and what it says in its next life afterwards.
        """
        if (rank := self._unheard_loss()) is not None:
            return self.members.places[rank], None
        src, life, x = self._waiting.pop(tag, (-1, 0, None))
        if x is not None and self.transport.life(src) == life:
            return self.members.places[src], x
        sources = Others(self.members, self.transport.rank, self._gone)
        if not sources:
            raise PeersGone
        try:
            src, x = self.transport.take(like, sources, tag, "recv_any", watch=True)
        except PeerLost as lost:
            self._gone.add(lost.rank, self.transport.lost_life(lost.rank))
            return self.members.places[lost.rank], None
        if (life := self.transport.life(src)) > self._lives.get(src, 1):
            self._waiting[tag] = src, life, x  # that it was lost meanwhile is to be heard first
            return self.recv_or_loss(like, tag)
        return self.members.places[src], x

    def _unheard_loss(self) -> int | None:
        """A member that was lost and has come again before anybody heard of the loss."""
        membership = self.transport.membership()
        if membership == self._membership:
            return None
        for rank in Others(self.members, self.transport.rank):
            life = self.transport.life(rank)
            if life > self._lives.get(rank, 1):
                self._lives[rank] = life
                if self._gone.last(rank) < life - 1:
                    return rank
        self._membership = membership
        return None

    def exchange(self, x: Tensor, dst: int, src: int, tag: int = 0) -> Tensor:
        """Send to ``dst`` while receiving from ``src``: the idiom of rings and pairs."""
        sending = self.transport.start_send(_vector(x), self._peer(dst), tag)
        received = self.recv(x, src, tag)
        sending.wait()
        return received

    # One-sided -----------------------------------------------------------------------------------

    def post(self, x: Tensor, dst: int, tag: int = 0) -> bool:
        """Leave a copy of ``x`` for ``dst`` and go on; False when its mailbox is full or gone."""
        return self.transport.post(_vector(x), self._peer(dst), tag)

    def poll(self, like: Tensor, tag: int = 0) -> list[tuple[int, Tensor]]:
        """Take all that has arrived, as ``[(src, x)]``. Never waits."""
        taken = []
        while (message := self.transport.take_now(like, self._others, tag)) is not None:
            taken.append((self.members.places[message[0]], message[1]))
        return taken

    def publish(self, x: Tensor) -> int:
        """Let peers read a copy of ``x``; return its version, from 1.

        Size and dtype are those of the first time.
        """
        vector = _vector(x)
        shape = (vector.numel(), vector.dtype)
        if self._window not in (None, shape):
            raise MessageMismatch(
                f"publish of {shape[0]} x {shape[1]}: the window holds {self._window[0]} x"
                f" {self._window[1]}, as it was published first"
            )
        self._window = shape
        return self.transport.publish(vector)

    def peek(self, src: int, like: Tensor | None = None) -> tuple[int, Tensor] | None:
        """What ``src`` last published, whole, and its version; None before the first.

        With ``like``, a vector of another size or dtype is refused.
        """
        return self.transport.peek(self._peer(src), like)

    # Members that come and go --------------------------------------------------------------------

    def life(self, rank: int) -> int:
        """Which life of ``rank`` this is, from 1: it grows when one that was lost comes again."""
        return self.transport.life(self.members[rank])

    def lost(self) -> frozenset[int]:
        """The ranks that have died, or were stopped for too long, and have not come again."""
        gone = self.transport.lost()
        return frozenset(rank for rank, world in enumerate(self.members) if world in gone)

    def last_members(self) -> list[tuple[int, int]]:
        """The members, each with its life, as they were when the first rank asked this.

        They are the same for whoever asks, and so can meet.
        """
        places = self.members.places
        members = self.transport.last_members()
        return [(places[rank], life) for rank, life in members if rank in places]

    def stopped(self) -> frozenset[int]:
        """The ranks that are stopped now: not lost yet, but what they have shown grows old."""
        now = self.transport.stopped()
        return frozenset(self.members.places[rank] for rank in now if rank in self.members)

    def retired(self) -> frozenset[int]:
        """The workers that have come to the end of their data and wait for the others."""
        retired = self.transport.retired()
        return frozenset(self.members.places[rank] for rank in retired if rank in self.members)

    def left(self) -> frozenset[int]:
        """The ranks that have come to their end."""
        left = self.transport.left()
        return frozenset(rank for rank, world in enumerate(self.members) if world in left)

    def lost_life(self, rank: int) -> int:
        """Which life of ``rank`` was the last to end: this one, or the one before."""
        return self.transport.lost_life(self.members[rank])

    def await_return(self, rank: int, life: int) -> None:
        """Wait until a later life of ``rank`` than this is a member."""
        self.transport.await_return(self.members[rank], life)

    def await_change(self, error: Exception) -> None:
        """Wait until a rank has come or gone; raise ``error`` when none does for a long time."""
        if not self.transport.await_change(CHANGE_S):
            raise PeerLost(self.members, "joining", "nobody is left", CHANGE_S) from error

    def inherited(self, like: Tensor, rank: int) -> Tensor | None:
        """What ``rank`` has published last, if need be in an earlier life; None: nothing ever."""
        left = self.transport.inherited(_vector(like), self.members[rank])
        return None if left is None else left[1]

    def keep(self, x: Tensor) -> None:
        """Keep a copy of ``x`` for a later life of this rank; size and dtype never change."""
        self.transport.keep(_vector(x))

    def kept(self) -> Tensor | None:
        """What an earlier life of this rank has kept last."""
        return self.transport.kept()

    def shelve(self, x: Tensor, shelf: int) -> None:
        """Let others see a copy of ``x``, also when this rank is gone; its size never changes.

        Shelves 0 and 1 are the worker's own, for what the model holds beside its parameters.
        """
        self.transport.shelve(_vector(x), shelf)

    def shelved(self, rank: int, shelf: int) -> Tensor | None:
        """What ``rank`` has put on that shelf last, if need be in an earlier life."""
        return self.transport.shelved(self.members[rank], shelf)

    # Collectives ---------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, weight: int = 1, factor: Factor | None = None) -> int:
        """Sum ``x`` over the ranks in rank order, in place; return the sum of the weights.

        With the default weight the answer is the number of contributors: divide by it, never by
        ``size``. A rank with weight 0 hands in nothing and still receives the sum; when nobody
        hands in anything, ``x`` stays as it is.

        Args:
            x: this rank's vector, and afterwards the sum.
            weight: what this rank's contribution counts for.
            factor: given the sum of the weights, what to multiply the sum by on the way; a mean is
                ``factor=lambda total: 1 / total``. It must be the same function on every rank.
        """
        _check_weight(weight)
        vector = _vector(x)
        return self._together(lambda here: self.transport.all_reduce(vector, weight, here, factor))

    def _together(self, act: Callable[[tuple[int, ...]], T], needed: int = -1) -> T:
        """Let the members act together; if this is elastic, those that are left of them.

        Only who is missed is left out, so that all survivors come to the same group. A vector is
        as it was when an operation has failed, and so it is done again, unless who is lost was
        ``needed``.
        """
        while True:
            try:
                outcome = act(self._present())
            except PeerLost as lost:
                if not self.elastic or needed in lost.ranks:
                    raise
                life = self.transport.lost_life
                self._left_out |= {(rank, life(rank)) for rank in lost.ranks}
            else:
                self.meetings += 1
                return outcome

    def _present(self) -> Ranks:
        """The members without those that were missed, unless they have come again."""
        if not self._left_out:
            return self.members
        life = self.transport.life
        return ranks(tuple(r for r in self.members if (r, life(r)) not in self._left_out))

    def present(self) -> tuple[int, ...]:
        """Who took part in the last collective; the same on all who did."""
        if not self._left_out:
            return everyone(self.size)
        return tuple(self.members.places[rank] for rank in self._present())

    def start_all_reduce(self, x: Tensor, weight: int = 1, factor: Factor | None = None) -> Work:
        """Start :meth:`all_reduce`; ``x`` belongs to the work until its ``wait``."""
        _check_weight(weight)
        return self.transport.start_all_reduce(_vector(x), weight, self.members, factor)

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Make ``x`` equal to that of ``src`` on every rank."""
        source, vector = self._peer(src, may_be_self=True), _vector(x)
        self._together(lambda here: self.transport.broadcast(vector, source, here), source)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        import torch

        self.all_reduce(torch.empty(0))

    def group(self, ranks: Sequence[int], strict: bool = False) -> Comm:
        """The same contract among some of the ranks, which it counts from 0 in their order.

        A ``strict`` one never goes on by itself without a lost member: the caller is told.
        """
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UsageError(f"group {tuple(ranks)} must hold rank {self.rank}, and each rank once")
        elastic = self.elastic and not strict
        return Comm(self.transport, [self.members[rank] for rank in ranks], elastic)

    # Clock and data ------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on this world's clock."""
        return self.transport.now()

    def compute(self, seconds: float) -> None:
        """Let ``seconds`` of computing pass on a virtual clock; free on a real one."""
        self.transport.compute(seconds)

    def serves(self) -> None:
        """Say that this rank is a server: all of its work is in :meth:`charge_update`."""
        self.transport.serves()

    def charge_update(self, nbytes: int) -> None:
        """Let the time pass that a server takes to apply an update; free on a real clock."""
        self.transport.charge_update(nbytes)

    def done_with(self, queue: int, epoch: int, number: int) -> None:
        """Say that a batch was made use of. Those of a rank that is lost before are drawn again."""
        self.transport.done_with(queue, epoch, number)

    def ticket(self, queue: int, epoch: int) -> int | None:
        """Draw the next number, from 0, of the counter ``queue`` in ``epoch``.

        Every number is drawn once, by one rank. None when others are in a later epoch already:
        a rank moves on only when it found this one exhausted.
        """
        return self.transport.ticket(queue, epoch)

    # Helpers -------------------------------------------------------------------------------------

    def _peer(self, rank: int, may_be_self: bool = False) -> int:
        if not 0 <= rank < self.size or (rank == self.rank and not may_be_self):
            others = f"0 to {self.size - 1}" + ("" if may_be_self else f", not {self.rank} itself")
            raise UsageError(f"peer ({rank}) must be a rank of this group: {others}")
        return self.members[rank]


def _vector(x: Tensor) -> Tensor:
    """``x`` as a vector of the same memory."""
    if x.dtype not in _known_dtypes:
        _check_dtype(x.dtype)
    if x.dim() == 1 and x.is_contiguous() and not x.requires_grad:
        return x
    if not x.is_contiguous():
        raise UsageError(f"a message must be a contiguous tensor, got strides {x.stride()}")
    return x.detach().view(-1)


def _check_weight(weight: int) -> None:
    if weight < 0:
        raise UsageError(f"weight ({weight}) must be at least 0")


_known_dtypes: set[Any] = set()


def _check_dtype(dtype: Any) -> None:
    from paceline.comm.dtypes import DTYPES

    _known_dtypes.update(DTYPES)
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UsageError(f"a message must not be of {dtype}, but one of {names}")


def check_fit(like: Tensor, numel: int, dtype: Any, src: int, tag: int) -> None:
    """Refuse a message that is not what the receiver asked for, before memory is taken for it."""
    if (numel, dtype) != (like.numel(), like.dtype):
        raise MessageMismatch(
            f"message from rank {src} with tag {tag} holds {numel} x {dtype},"
            f" expected {like.numel()} x {like.dtype}"
        )
