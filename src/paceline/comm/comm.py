"""What a strategy sees of the world: :class:`Comm`, written once on top of a world's ports.

What a Comm does may wait for other ranks; its ``board`` never waits, and its ``members`` say who is
here. ``docs/comm-contract.md`` has the contract in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.comm.ports import (
    NOT_READY,
    PUBLISHED,
    Factor,
    Lost,
    Message,
    Ports,
    Published,
    Total,
    View,
)
from paceline.comm.ranks import Gone, Others, Ranks, everyone
from paceline.comm.ranks import ranks as as_ranks
from paceline.errors import MessageMismatch, PeerLost, PeersGone, UsageError

if TYPE_CHECKING:
    from torch import Tensor

WAITING, CLOSING = 128, 64
"""Flags that a Comm with seats adds to those of an all-reduce: this rank knows of one that waits to
be taken in; this rank has come to its end, and nobody is taken in any more."""
CHANGE_S = 30.0
"""How long a rank that finds all others lost waits for one of them, before it gives up."""


class Seats:
    """Which incarnation of which rank takes part in collectives of a run that grows.

    All members have the same seats, since they change them at the same synchronization. A Comm and
    its groups share them.

    Attributes:
        taken: the incarnation of each rank that has one.
        closing: whether this rank has come to its end.
        version: grows with each change.
    """

    def __init__(self, members: Iterable[tuple[int, int]] = ()) -> None:
        self.taken, self.closing, self.version = dict(members), False, 0

    def fill(self, members: Iterable[tuple[int, int]]) -> None:
        """Have these members from now on."""
        self.taken, self.version = dict(members), self.version + 1


class Comm:
    """Messages and collectives among the ranks of a group, which it counts from 0.

    Vectors are contiguous tensors. ``tag`` keeps messages of different meaning apart; between
    two ranks and within a tag, messages keep their order. A ``header`` of bytes travels beside the
    vector of a message.

    Args:
        ports: this rank's place in the world.
        ranks: the world's ranks that form the group; all, when not given.
        elastic: whether collectives go on among those that are left when a member is lost.
        seats: who takes part in collectives, where that is agreed on; all of the group otherwise.

    Attributes:
        board: what ranks leave for others without waiting for them.
        members: who is here.
        clock: the world's clock.
        rank: this rank, within the group.
        size: how many ranks the group has.
        present: who took part in the last collective; the same on all who did.
        collectives_done: how many collectives this rank has taken part in here.
        someone_waits: whether, by the last all-reduce, a rank is to be taken in; the same on all.
        someone_ends: whether, by the last all-reduce, a rank has come to its end; likewise.
    """

    def __init__(
        self,
        ports: Ports,
        ranks: Sequence[int] | None = None,
        elastic: bool = False,
        seats: Seats | None = None,
    ) -> None:
        self.ports, self.elastic, self.clock = ports, elastic, ports.clock
        self.ranks = everyone(ports.size) if ranks is None else as_ranks(tuple(ranks))
        self.rank = self.ranks.index_of[ports.rank]
        self.size = len(self.ranks)
        self.members = GroupMembers(ports, self.ranks)
        self.board = Board(ports, self.ranks)
        self.present: Sequence[int] = everyone(self.size)
        self._last_members = self.ranks
        self.collectives_done = 0
        self._mail, self._world = ports.mail, ports.members
        self._all_reduce = ports.collectives.all_reduce
        self._others = Others(self.ranks, ports.rank)
        self._gone = Gone(self._world.incarnation)
        # A late joiner starts from the current incarnations: losses before it joined must not be
        # reported to it.
        known = self.ranks if self._world.late else ()
        self._incarnations = {rank: self._world.incarnation(rank) for rank in known}
        self._version = -1
        self._early: dict[int, tuple[int, Message]] = {}
        self._left_out: frozenset[tuple[int, int]] = frozenset()
        self.seats, self._seen = seats, -1
        self.someone_waits = self.someone_ends = False
        if seats is not None:
            self._take_seats(seats)

    def group(
        self, ranks: Sequence[int] | None = None, strict: bool = False, metered: bool = True
    ) -> Comm:
        """The same contract among some of the ranks, which it counts from 0 in their order.

        Args:
            ranks: of the group; all, when not given.
            strict: never go on without a lost member: the caller gets the error.
            metered: whether its messages count and take virtual time; not, where they only
                measure the run.
        """
        members = range(self.size) if ranks is None else ranks
        if self.rank not in members or len(set(members)) != len(members):
            raise UsageError(
                f"group {tuple(members)} must hold rank {self.rank}, and each rank once"
            )
        ports = self.ports if metered else self.ports.off_meter()
        seats = None if strict else self.seats
        ranks = [self.ranks[rank] for rank in members]
        return Comm(ports, ranks, self.elastic and not strict, seats)

    # Messages ------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, tag: int = 0, header: bytes = b"") -> None:
        """Send ``x``; return when ``dst`` has taken it. Never rely on buffering."""
        lost = self._mail.start_send(_vector(x), self._peer(dst), tag, header).wait()
        if lost is not None:
            raise lost.error

    def receive(self, like: Tensor, src: int, tag: int = 0) -> Message | Lost:
        """Wait for a message from ``src`` that has the size and dtype of ``like``.

        The loss of ``src`` is returned in place of a message, and its ``x`` raises.
        """
        peer = self._peer(src)
        return self._mail.receive(like, (peer,), tag, f"receive from rank {peer}")._replace(src=src)

    def receive_any(self, like: Tensor, tag: int = 0) -> Message | Lost:
        """Wait for a message from anyone; and return once each rank that died or departed.

        What a rank sent before it went comes first, then its loss, then what its next incarnation
        says.

        Raises:
            PeersGone: every other rank is gone, and nothing is left to take.
        """
        index_of = self.ranks.index_of
        if (rank := self._unreported_loss()) is not None:
            why = "it was lost, and has come again"
            return Lost((rank,), "receive_any", why, src=index_of[rank])
        incarnation, early = self._early.pop(tag, (0, None))
        if early is not None and self._world.incarnation(early.src) == incarnation:
            return early._replace(src=index_of[early.src])
        sources = Others(self.ranks, self.ports.rank, self._gone)
        if not sources:
            raise PeersGone
        got = self._mail.receive(like, sources, tag, "receive_any", any_loss=True)
        if isinstance(got, Lost):
            rank = got.ranks[0]
            self._gone.add(rank, self._world.view().last_ended(rank))
            return got._replace(src=index_of[rank])
        if (incarnation := self._world.incarnation(got.src)) > self._incarnations.get(got.src, 1):
            self._early[tag] = incarnation, got  # the loss of its predecessor comes first
            return self.receive_any(like, tag)
        return got._replace(src=index_of[got.src])

    def exchange(self, x: Tensor, dst: int, src: int, tag: int = 0) -> Tensor:
        """Send to ``dst`` while receiving from ``src``: the idiom of rings and pairs."""
        sending = self._mail.start_send(_vector(x), self._peer(dst), tag, b"")
        received = self.receive(x, src, tag).x
        if (lost := sending.wait()) is not None:
            raise lost.error
        return received

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
            flags: up to 6 bits that all ranks learn of: the answer has those of all, or-ed.
        """
        if weight < 0:
            raise UsageError(f"weight ({weight}) must be at least 0")
        vector = _vector(x)
        while True:
            members = self._without_missed()
            try:
                total = self._all_reduce(vector, weight, members, factor, flags | self._news())
            except PeerLost as lost:
                self._leave_out(lost)
            else:
                self._took_part(members)
                return self._heard(total)

    def broadcast(self, x: Tensor, src: int = 0) -> None:
        """Make ``x`` equal to that of ``src`` on every rank."""
        source, vector = _rank_of_world(src, self.ranks), _vector(x)
        while True:
            members = self._without_missed()
            try:
                self.ports.collectives.broadcast(vector, source, members)
            except PeerLost as lost:
                self._leave_out(lost, source)
            else:
                self._took_part(members)
                return

    def barrier(self) -> None:
        """Wait until every rank is here."""
        import torch

        self.all_reduce(torch.empty(0))

    def _news(self) -> int:
        """The flags of this Comm itself."""
        if self.seats is None:
            return 0
        return WAITING * self._world.someone_waits() | CLOSING * self.seats.closing

    def _heard(self, total: Total) -> Total:
        """Note what all know now; return the total without these flags."""
        if self.seats is None:
            return total
        self.someone_ends = bool(total.flags & CLOSING)
        self.someone_waits = bool(total.flags & WAITING) and not self.someone_ends
        return total._replace(flags=total.flags & ~(WAITING | CLOSING))

    def admit(self, members: Iterable[tuple[int, int]]) -> None:
        """Go on among these ranks of the world, each with its incarnation.

        All of them must call this between the same two collectives.
        """
        assert self.seats is not None
        self.seats.fill(members)
        self._take_seats(self.seats)
        self.someone_waits = False

    def _take_seats(self, seats: Seats) -> None:
        """Have the members that the seats say, without those that were missed here."""
        taken, self._seen = seats.taken, seats.version
        here = (r for r in self.ranks if r in taken and (r, taken[r]) not in self._left_out)
        self._last_members = as_ranks(tuple(here))
        self.present = tuple(self.ranks.index_of[rank] for rank in self._last_members)

    def _took_part(self, members: Ranks) -> None:
        self.collectives_done += 1
        if members is not self._last_members:
            self._last_members = members
            self.present = tuple(self.ranks.index_of[rank] for rank in members)

    def _leave_out(self, lost: PeerLost, needed: int = -1) -> None:
        """Go on without the ranks that a collective missed; raise if that must not be.

        Only a rank that the operation missed is left out, so that all survivors come to the same
        group. A vector is as it was when an operation has failed, so that it can be done again.
        """
        if not self.elastic or needed in lost.ranks:
            if self.elastic and self.seats is not None:
                self._give_up_seats(lost.ranks, self.seats)
            raise lost
        if self.seats is not None:
            return self._give_up_seats(lost.ranks, self.seats)
        view, new = self._world.view(), lost.reason == NOT_READY
        number = view.incarnations.__getitem__ if new else view.last_ended
        self._left_out |= {(rank, number(rank)) for rank in lost.ranks}

    def _give_up_seats(self, lost: Sequence[int], seats: Seats) -> None:
        self._left_out |= {(rank, seats.taken[rank]) for rank in lost}
        self._take_seats(seats)

    def _without_missed(self) -> Ranks:
        """The members without those that were missed, unless they have come again."""
        if self.seats is not None:
            if self._seen != self.seats.version:
                self._take_seats(self.seats)
            return self._last_members
        if not self._left_out:
            return self.ranks
        number = self._world.incarnation
        return as_ranks(tuple(r for r in self.ranks if (r, number(r)) not in self._left_out))

    def _peer(self, rank: int) -> int:
        return _rank_of_world(rank, self.ranks, self.rank)


class Board:
    """What the ranks of a group leave for others: messages in mailboxes, and vectors in windows.

    Nothing here waits for another rank.
    """

    def __init__(self, ports: Ports, ranks: Ranks) -> None:
        self._mail, self._ranks, self._own = ports.mail, ranks, ranks.index_of[ports.rank]
        self._others = Others(ranks, ports.rank)
        self._shapes: dict[int, tuple[int, Any]] = {}

    def post(self, x: Tensor, dst: int, tag: int = 0, header: bytes = b"") -> bool:
        """Leave a copy of ``x`` for ``dst``; False when its mailbox is full or gone."""
        peer = _rank_of_world(dst, self._ranks, self._own)
        return self._mail.post(_vector(x), peer, tag, header)

    def poll(self, like: Tensor, tag: int = 0) -> list[Message]:
        """Take all messages that have arrived."""
        messages = []
        while (message := self._mail.try_receive(like, self._others, tag)) is not None:
            messages.append(message._replace(src=self._ranks.index_of[message.src]))
        return messages

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        """Let peers read a copy of ``x``; return its version, from 1.

        Each window keeps the size and dtype of what was published first. The window ``SAVED`` is
        for the next incarnation of this rank. Two shelves, from the window ``SHELF`` on, are the
        worker's own, for what the model holds beside its parameters.
        """
        vector = _vector(x)
        shape = (vector.numel(), vector.dtype)
        first = self._shapes.setdefault(window, shape)
        if first != shape:
            raise MessageMismatch(
                f"publish of {shape[0]} x {shape[1]}: the window holds {first[0]} x {first[1]},"
                " as it was published first"
            )
        return self._mail.publish(vector, header, window)

    def peek(
        self, src: int, like: Tensor | None = None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        """What ``src`` last published, whole, and its version; None before the first.

        Also None when ``src`` is no member now, unless ``gone``: then any incarnation of it counts.
        Between hosts also None while ``src`` is a worker that is stopped: it would have to answer.
        With ``like``, a vector of another size or dtype is refused.
        """
        peer = _rank_of_world(src, self._ranks, None if gone else self._own)
        return self._mail.peek(peer, like, window, gone)


class GroupMembers:
    """Who of a group is here; ranks are counted as the group does."""

    def __init__(self, ports: Ports, ranks: Ranks) -> None:
        self._world, self._queue, self._ranks = ports.members, ports.queue, ranks
        self._alive: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def alive(self) -> tuple[int, ...]:
        """The ranks that have neither died nor departed, this one included."""
        alive = self._world.alive()
        if self._alive is None or self._alive[0] is not alive:
            here = set(alive)
            members = tuple(rank for rank, world in enumerate(self._ranks) if world in here)
            self._alive = (alive, as_ranks(members))
        return self._alive[1]

    def starters(self) -> tuple[int, ...]:
        """The ranks that are here from the beginning; others come later."""
        return tuple(sorted(self._own(frozenset(self._world.starters))))

    def incarnation(self, rank: int) -> int:
        """Which incarnation of ``rank`` this is, from 1: it grows when a lost rank comes again."""
        return self._world.incarnation(self._ranks[rank])

    def view(self) -> View:
        """All that is known of the members. Never waits."""
        view = self._world.view()
        if self._ranks is everyone(len(view.incarnations)):
            return view
        lost, departed, stopped = map(self._own, (view.lost, view.departed, view.stopped))
        incarnations = [view.incarnations[rank] for rank in self._ranks]
        return View(view.version, incarnations, lost, departed, stopped)

    def finished(self) -> frozenset[int]:
        """The workers that have come to the end of their data and wait for the others."""
        return self._own(self._queue.finished())

    def final_roster(self) -> list[tuple[int, int]]:
        """The members, each with its incarnation, as they were when the first rank asked this.

        All who ask get the same, and so can act together.
        """
        index_of = self._ranks.index_of
        return [(index_of[r], number) for r, number in self._world.final_roster() if r in index_of]

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        """Wait until a later incarnation of ``rank`` than this is a member."""
        self._world.wait_for_successor(self._ranks[rank], incarnation)

    def wait_for_change(self, error: Exception) -> None:
        """Wait until a rank has come or gone; when none does for long, raise that ``error`` left
        nobody to join."""
        if not self._world.wait_for_change(CHANGE_S):
            raise PeerLost(self._ranks, "joining", "nobody is left", CHANGE_S) from error

    def _own(self, world: frozenset[int]) -> frozenset[int]:
        """Those of the world's ranks that are in this group, as it counts them."""
        index_of = self._ranks.index_of
        return frozenset(index_of[rank] for rank in world if rank in index_of)


def _rank_of_world(rank: int, ranks: Ranks, own: int | None = None) -> int:
    """What the world calls a rank of a group; ``own`` itself is refused."""
    if not 0 <= rank < len(ranks) or rank == own:
        others = f"0 to {len(ranks) - 1}" + ("" if own is None else f", not {own} itself")
        raise UsageError(f"peer ({rank}) must be a rank of this group: {others}")
    return ranks[rank]


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
