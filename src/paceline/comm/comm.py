"""What a strategy sees of the world: :class:`Comm`, written once on top of a world's ports.

``docs/comm-contract.md`` has the contract in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.comm.ports import (
    PUBLISHED,
    SAVED,
    SHELF,
    Factor,
    Lost,
    Message,
    Ports,
    Published,
    Total,
)
from paceline.comm.ranks import Gone, Others, Ranks, everyone, ranks
from paceline.errors import MessageMismatch, PeerLost, PeersGone, UsageError

if TYPE_CHECKING:
    from torch import Tensor

CHANGE_S = 30.0
"""How long a rank that finds all others lost waits for one of them to come back."""


class Comm:
    """Who is here, and how to talk to them: all that a strategy knows of the world.

    Vectors are contiguous tensors. ``tag`` keeps messages of different meaning apart; between
    two ranks and within a tag, messages keep their order. A ``header`` of bytes travels beside the
    vector of a message.

    Args:
        ports: this rank's place in the world.
        members: the ranks of a group; all, when not given.
        elastic: whether collectives go on among those that are left when a member is lost.

    Attributes:
        clock: the world's clock.
        rank: this rank, within the group.
        size: how many ranks the group has.
        collectives_done: how many collectives this rank has taken part in here.
    """

    def __init__(
        self, ports: Ports, members: Sequence[int] | None = None, elastic: bool = False
    ) -> None:
        self.ports, self.elastic, self.clock = ports, elastic, ports.clock
        self.members = everyone(ports.size) if members is None else ranks(tuple(members))
        self.rank = self.members.index_of[ports.rank]
        self.size = len(self.members)
        self.collectives_done = 0
        self._mail, self._world = ports.mail, ports.members
        self._all_reduce = ports.collectives.all_reduce
        self._others = Others(self.members, ports.rank)
        self._alive: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._window: tuple[int, Any] | None = None
        self._gone = Gone(self._world.incarnation)
        # A late joiner starts from the current incarnations: losses before it joined must not be
        # reported to it.
        known = self.members if self._world.late else ()
        self._incarnations = {rank: self._world.incarnation(rank) for rank in known}
        self._version = -1
        self._early: dict[int, tuple[int, Message]] = {}
        self._left_out: frozenset[tuple[int, int]] = frozenset()

    def off_meter(self) -> Comm:
        """The same for what only measures the run: nothing counts, and no virtual time passes."""
        return Comm(self.ports.off_meter(), self.members, self.elastic)

    def group(self, ranks: Sequence[int], strict: bool = False) -> Comm:
        """The same contract among some of the ranks, which it counts from 0 in their order.

        A ``strict`` one never goes on by itself without a lost member: the caller gets the error.
        """
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UsageError(f"group {tuple(ranks)} must hold rank {self.rank}, and each rank once")
        elastic = self.elastic and not strict
        return Comm(self.ports, [self.members[rank] for rank in ranks], elastic)

    # Two-sided -----------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, tag: int = 0, header: bytes = b"") -> None:
        """Send ``x``; return when ``dst`` has taken it. Never rely on buffering."""
        _raise(self._mail.start_send(_vector(x), self._peer(dst), tag, header).wait())

    def recv(self, like: Tensor, src: int, tag: int = 0) -> Tensor:
        """Wait for a message from ``src`` that has the size and dtype of ``like``."""
        return _raise(self.receive(like, src, tag)).x

    def receive(self, like: Tensor, src: int, tag: int = 0) -> Message | Lost:
        """As :meth:`recv`, with its header; the loss of ``src`` is returned, not raised."""
        peer = self._peer(src)
        got = self._mail.receive(like, (peer,), tag, f"recv from rank {peer}")
        return got if isinstance(got, Lost) else got._replace(src=src)

    def receive_any(self, like: Tensor, tag: int = 0) -> Message | Lost:
        """Wait for a message from anyone; and return once each rank that died or departed.

        What a rank sent before it went comes first, then its loss, then what its next incarnation
        says.

        Raises:
            PeersGone: every other rank is gone, and nothing is left to take.
        """
        index_of = self.members.index_of
        if (rank := self._unreported_loss()) is not None:
            return Lost((index_of[rank],), "receive_any", "it was lost, and has come again")
        incarnation, early = self._early.pop(tag, (0, None))
        if early is not None and self._world.incarnation(early.src) == incarnation:
            return early._replace(src=index_of[early.src])
        sources = Others(self.members, self.ports.rank, self._gone)
        if not sources:
            raise PeersGone
        got = self._mail.receive(like, sources, tag, "receive_any", any_loss=True)
        if isinstance(got, Lost):
            self._gone.add(got.rank, self._world.view().last_ended(got.rank))
            return got._replace(ranks=(index_of[got.rank],))
        if (incarnation := self._world.incarnation(got.src)) > self._incarnations.get(got.src, 1):
            self._early[tag] = incarnation, got  # the loss of its predecessor comes first
            return self.receive_any(like, tag)
        return got._replace(src=index_of[got.src])

    def _unreported_loss(self) -> int | None:
        """A member that was lost and has come again before its loss was returned."""
        version = self._world.view().version
        if version == self._version:
            return None
        for rank in self._others:
            incarnation = self._world.incarnation(rank)
            if incarnation > self._incarnations.get(rank, 1):
                self._incarnations[rank] = incarnation
                if self._gone.last(rank) < incarnation - 1:
                    return rank
        self._version = version
        return None

    def exchange(self, x: Tensor, dst: int, src: int, tag: int = 0) -> Tensor:
        """Send to ``dst`` while receiving from ``src``: the idiom of rings and pairs."""
        sending = self._mail.start_send(_vector(x), self._peer(dst), tag, b"")
        received = self.recv(x, src, tag)
        _raise(sending.wait())
        return received

    # One-sided -----------------------------------------------------------------------------------

    def post(self, x: Tensor, dst: int, tag: int = 0, header: bytes = b"") -> bool:
        """Leave a copy of ``x`` for ``dst`` and go on; False when its mailbox is full or gone."""
        return self._mail.post(_vector(x), self._peer(dst), tag, header)

    def poll(self, like: Tensor, tag: int = 0) -> list[Message]:
        """Take all messages that have arrived. Never waits."""
        messages = []
        while (message := self._mail.try_receive(like, self._others, tag)) is not None:
            messages.append(message._replace(src=self.members.index_of[message.src]))
        return messages

    def publish(self, x: Tensor, header: bytes = b"") -> int:
        """Let peers read a copy of ``x``; return its version, from 1.

        Sizes and dtype are those of the first time.
        """
        vector = _vector(x)
        shape = (vector.numel(), vector.dtype)
        if self._window not in (None, shape):
            raise MessageMismatch(
                f"publish of {shape[0]} x {shape[1]}: the window holds {self._window[0]} x"
                f" {self._window[1]}, as it was published first"
            )
        self._window = shape
        return self._mail.publish(vector, header)

    def peek(self, src: int, like: Tensor | None = None) -> Published | None:
        """What ``src`` last published, whole, and its version; None before the first.

        With ``like``, a vector of another size or dtype is refused.
        """
        return self._mail.peek(self._peer(src), like)

    # Windows that outlive their rank -------------------------------------------------------------

    def last_published(self, like: Tensor, rank: int) -> Published | None:
        """What any incarnation of ``rank`` published last; None when none ever did."""
        return self._mail.peek(self.members[rank], _vector(like), PUBLISHED, gone=True)

    def save_for_successor(self, x: Tensor) -> None:
        """Leave a copy of ``x`` for the next incarnation of this rank; its size never changes."""
        self._mail.publish(_vector(x), window=SAVED)

    def saved_by_predecessor(self) -> Tensor | None:
        """What an earlier incarnation of this rank saved last."""
        saved = self._mail.peek(self.ports.rank, None, SAVED, gone=True)
        return None if saved is None else saved.x

    def shelve(self, x: Tensor, shelf: int) -> None:
        """Let others read a copy of ``x``, also when this rank is gone; its size never changes.

        Shelves 0 and 1 are the worker's own, for what the model holds beside its parameters.
        """
        self._mail.publish(_vector(x), window=SHELF + shelf)

    def shelved(self, rank: int, shelf: int) -> Tensor | None:
        """What any incarnation of ``rank`` put on that shelf last."""
        left = self._mail.peek(self.members[rank], None, SHELF + shelf, gone=True)
        return None if left is None else left.x

    # Members -------------------------------------------------------------------------------------

    def alive(self) -> tuple[int, ...]:
        """The ranks that have neither died nor departed, this one included."""
        alive = self._world.alive()
        if self._alive is None or self._alive[0] is not alive:
            here = set(alive)
            members = tuple(rank for rank, world in enumerate(self.members) if world in here)
            self._alive = (alive, ranks(members))
        return self._alive[1]

    def starters(self) -> tuple[int, ...]:
        """The ranks that are here from the beginning; others come later."""
        return tuple(sorted(self._own(frozenset(self._world.starters))))

    def incarnation(self, rank: int) -> int:
        """Which incarnation of ``rank`` this is, from 1: it grows when a lost rank comes again."""
        return self._world.incarnation(self.members[rank])

    def last_ended(self, rank: int) -> int:
        """The last incarnation of ``rank`` that ended: the present one, or the one before."""
        return self._world.view().last_ended(self.members[rank])

    def lost(self) -> frozenset[int]:
        """The ranks that died, or were stopped for too long, and have not come again."""
        return self._own(self._world.view().lost)

    def departed(self) -> frozenset[int]:
        """The ranks that came to their end."""
        return self._own(self._world.view().departed)

    def stopped(self) -> frozenset[int]:
        """The ranks that are stopped now: not lost yet, but what they published is old."""
        return self._own(self._world.view().stopped)

    def finished(self) -> frozenset[int]:
        """The workers that have come to the end of their data and wait for the others."""
        return self._own(self.ports.queue.finished())

    def final_roster(self) -> list[tuple[int, int]]:
        """The members, each with its incarnation, as they were when the first rank asked this.

        All who ask get the same, and so can act together.
        """
        index_of = self.members.index_of
        return [(index_of[r], number) for r, number in self._world.final_roster() if r in index_of]

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        """Wait until a later incarnation of ``rank`` than this is a member."""
        self._world.wait_for_successor(self.members[rank], incarnation)

    def wait_for_change(self, error: Exception) -> None:
        """Wait until a rank has come or gone; raise ``error`` when none does for a long time."""
        if not self._world.wait_for_change(CHANGE_S):
            raise PeerLost(self.members, "joining", "nobody is left", CHANGE_S) from error

    def _own(self, world: frozenset[int]) -> frozenset[int]:
        """Those of the world's ranks that are in this group, as it counts them."""
        index_of = self.members.index_of
        return frozenset(index_of[rank] for rank in world if rank in index_of)

    # Collectives ---------------------------------------------------------------------------------

    def all_reduce(
        self, x: Tensor, weight: int = 1, factor: Factor | None = None, flags: int = 0
    ) -> Total:
        """Sum ``x`` over the ranks in rank order, in place; return the sum of the weights.

        With the default weight that is the number of contributors: divide by it, never by
        ``size``. A rank with weight 0 hands in nothing and still receives the sum; when nobody
        hands in anything, ``x`` stays as it is.

        Args:
            x: this rank's vector, and afterwards the sum.
            weight: what this rank's contribution counts for.
            factor: given the sum of the weights, what to multiply the sum by on the way; a mean is
                ``factor=lambda total: 1 / total``. It must be the same function on every rank.
            flags: bits that all ranks learn of: the answer has those of all, or-ed.
        """
        if weight < 0:
            raise UsageError(f"weight ({weight}) must be at least 0")
        vector = _vector(x)
        while True:
            try:
                total = self._all_reduce(vector, weight, self._present(), factor, flags)
            except PeerLost as lost:
                self._leave_out(lost)
            else:
                self.collectives_done += 1
                return total

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Make ``x`` equal to that of ``src`` on every rank."""
        source, vector = self._peer(src, may_be_self=True), _vector(x)
        while True:
            try:
                self.ports.collectives.broadcast(vector, source, self._present())
            except PeerLost as lost:
                self._leave_out(lost, source)
            else:
                self.collectives_done += 1
                return

    def barrier(self) -> None:
        """Wait until every rank is here."""
        import torch

        self.all_reduce(torch.empty(0))

    def present(self) -> tuple[int, ...]:
        """Who took part in the last collective; the same on all who did."""
        if not self._left_out:
            return everyone(self.size)
        return tuple(self.members.index_of[rank] for rank in self._present())

    def _leave_out(self, lost: PeerLost, needed: int = -1) -> None:
        """Go on without the ranks that a collective missed; raise if that must not be.

        Only a rank that the operation missed is left out, so that all survivors come to the same
        group. A vector is as it was when an operation has failed, so that it can be done again.
        """
        if not self.elastic or needed in lost.ranks:
            raise lost
        ended = self._world.view().last_ended
        self._left_out |= {(rank, ended(rank)) for rank in lost.ranks}

    def _present(self) -> Ranks:
        """The members without those that were missed, unless they have come again."""
        if not self._left_out:
            return self.members
        number = self._world.incarnation
        return ranks(tuple(r for r in self.members if (r, number(r)) not in self._left_out))

    def _peer(self, rank: int, may_be_self: bool = False) -> int:
        if not 0 <= rank < self.size or (rank == self.rank and not may_be_self):
            others = f"0 to {self.size - 1}" + ("" if may_be_self else f", not {self.rank} itself")
            raise UsageError(f"peer ({rank}) must be a rank of this group: {others}")
        return self.members[rank]


M = TypeVar("M")


def _raise(outcome: M | Lost) -> M:
    """The outcome, for a caller who cannot go on without the peer."""
    if isinstance(outcome, Lost):
        raise outcome.error
    return outcome


def _vector(x: Tensor) -> Tensor:
    """``x`` as a vector of the same memory."""
    if x.dtype not in _known_dtypes:
        _check_dtype(x.dtype)
    if x.dim() == 1 and x.is_contiguous() and not x.requires_grad:
        return x
    if not x.is_contiguous():
        raise UsageError(f"a message must be a contiguous tensor, got strides {x.stride()}")
    return x.detach().view(-1)


_known_dtypes: set[Any] = set()


def _check_dtype(dtype: Any) -> None:
    from paceline.comm.dtypes import DTYPES

    _known_dtypes.update(DTYPES)
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UsageError(f"a message must not be of {dtype}, but one of {names}")
