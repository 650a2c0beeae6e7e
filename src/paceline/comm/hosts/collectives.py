"""Collectives between hosts, in the order of the members: the same bits as in other worlds.

:mod:`~paceline.comm.hosts.ways` has the ways in which vectors are summed.

The commit point: ``x`` stays as it is until the sum is complete. A member that has all of it has
concluded, and keeps the sum until all have gone on. When a member is lost, each survivor that has
not concluded asks the others. To answer "not concluded" is a promise: from then on it takes the
sum from another survivor or not at all. If one survivor has concluded, all take its sum. If none
has, all raise ``PeerLost``, and can do the operation again among themselves.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.hosts.link import RankLink, Receipt, Topic
from paceline.comm.hosts.outbound import Allowance, Outbound
from paceline.comm.hosts.ways import chain_is_shorter, sum_along, sum_slices, sum_whole
from paceline.comm.liveness import TICK_S
from paceline.comm.ports import NOT_READY, Collectives, Factor, Total
from paceline.errors import MessageMismatch, PeerLost

WHOLE_BYTES = 1 << 15
"""A vector of up to so many bytes goes to every member whole."""
_ALL_REDUCE, _BROADCAST = 1, 2
_OPS = {_ALL_REDUCE: "all_reduce", _BROADCAST: "broadcast"}
_ARRIVED, _SUMMED = 0, 1
_NAME = struct.Struct("<8sQ")
_ARRIVAL = struct.Struct("<BQBBIQQQ")
_ANSWER = struct.Struct("<?BQQ")

Name = tuple[bytes, int]
"""An operation: its group, and its number among those of the group."""
Pieces = dict[tuple[int, int], Tensor]
"""Parts of vectors, by the member that sent them and the element that they begin at."""


class MemberLost(Exception):
    """A member is lost: from now on, only another member's sum counts."""


class Handed(NamedTuple):
    """What one member brings to a collective, beside its vector."""

    op: int
    dtype: int
    src: int
    numel: int
    weight: int
    flags: int

    def fits(self, other: Handed) -> bool:
        """Whether two members call the same."""
        return self[:4] == other[:4]

    def __str__(self) -> str:
        return f"{_OPS.get(self.op, self.op)} of {self.numel} x {dtype_of(self.dtype)}"


@dataclass
class Operation:
    """One collective as a member knows it, maybe before it takes part itself.

    Attributes:
        arrivals: what other members bring.
        pieces: parts of their vectors, or of the sum of some of them.
        sums: parts of the sum of all.
        lost: the members that are lost; once there is one, only another member's sum counts.
        answers: of each survivor that was asked about these: whether it has concluded.
        asked: who has asked about which lost members: it has not concluded.
        concluded: the sum of the weights and the flags, and the sum; None where nobody has one.
        incarnations: of the members, once this rank takes part.
        through: the members that have concluded, as they say to one who leaves.
        leaving: the members, with their incarnations, that wait to hear that of this rank.
    """

    arrivals: dict[int, Handed] = field(default_factory=dict)
    pieces: Pieces = field(default_factory=dict)
    sums: Pieces = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    answers: dict[int, bool] = field(default_factory=dict)
    asked: set[tuple[int, frozenset[int]]] = field(default_factory=set)
    concluded: tuple[Total, Tensor | None] | None = None
    incarnations: dict[int, int] = field(default_factory=dict)
    through: set[int] = field(default_factory=set)
    leaving: set[tuple[int, int]] = field(default_factory=set)


class HostsCollectives(Collectives):
    """The collectives of one rank."""

    def __init__(self, link: RankLink) -> None:
        self._link, self._rank = link, link.rank
        self._operations: dict[Name, Operation] = {}
        self._numbers: dict[bytes, int] = {}
        self.allowance = Allowance()
        link.handlers[Topic.COLLECT] = self._on_part
        link.handlers[Topic.ASK] = self._on_ask
        link.handlers[Topic.ANSWER] = self._on_answer
        link.handlers[Topic.THROUGH] = self._on_through

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        arrival = Handed(_ALL_REDUCE, DTYPES.index(x.dtype), 0, x.numel(), weight, flags)
        return self._run(x, arrival, members, factor)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        weight = int(src == self._rank)
        arrival = Handed(_BROADCAST, DTYPES.index(x.dtype), src, x.numel(), weight, 0)
        self._run(x, arrival, members, None)

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return like.new_zeros(numel)

    def _run(
        self, x: Tensor, arrival: Handed, members: tuple[int, ...], factor: Factor | None
    ) -> Total:
        roll = self._link.check()
        if new := [rank for rank in roll.not_ready(members) if rank != self._rank]:
            raise PeerLost(new, "a collective", NOT_READY, 0.0)
        incarnations = {rank: roll.incarnation(rank) for rank in members}
        name = self._begin(incarnations)
        taking_part = Participant(self._link, name, incarnations, arrival, factor)
        total, result = taking_part.run(self, x)
        if result is not None:
            x.copy_(result.view_as(x))
        return total

    def _begin(self, incarnations: Mapping[int, int]) -> Name:
        """Name the next operation of a group: its members, in one incarnation of each."""
        group = hashlib.blake2b(repr(incarnations).encode(), digest_size=8).digest()
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        # All members have contributed to the last operation, so all have concluded the one before.
        with self._link.changed:
            self._operations.pop((group, number - 2), None)
        return group, number

    def operation(self, name: Name) -> Operation:
        """An operation; a new one, if nobody has told of it yet."""
        return self._operations.setdefault(name, Operation())

    def conclude(self, name: Name, total: Total, result: Tensor | None) -> None:
        """Conclude an operation; tell those who wait for that before they leave."""
        operation = self.operation(name)
        operation.concluded = total, result
        for rank, incarnation in sorted(operation.leaving):
            self._tell_through(name, rank, incarnation)

    # What others say -----------------------------------------------------------------------------

    def _on_part(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        group, number = _NAME.unpack_from(meta)
        phase, start, *numbers = _ARRIVAL.unpack_from(meta, _NAME.size)
        arrival, operation = Handed(*numbers), self.operation((group, number))
        found = operation.sums if phase == _SUMMED else operation.pieces
        found[src, start] = body.view(dtype_of(arrival.dtype))
        operation.arrivals[src] = arrival

    def _on_ask(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        """Answer whether this rank has concluded; if not, promise not to do so by itself."""
        name, lost = _NAME.unpack_from(meta), _unpack_ranks(meta[_NAME.size :])
        operation = self.operation(name)
        operation.asked.add((src, lost))
        answer = _NAME.pack(*name)
        result: Tensor | None = None
        if operation.concluded is None:
            operation.lost |= lost
            answer += _ANSWER.pack(False, 0, 0, 0)
        else:
            total, result = operation.concluded
            code = 0 if result is None else DTYPES.index(result.dtype)
            answer += _ANSWER.pack(True, code, total.weight, total.flags)
        self._link.send(src, Topic.ANSWER, answer + _pack_ranks(lost), result, incarnation)

    def _on_answer(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        operation = self.operation(_NAME.unpack_from(meta))
        concluded, code, weight, flags = _ANSWER.unpack_from(meta, _NAME.size)
        lost = _unpack_ranks(meta[_NAME.size + _ANSWER.size :])
        if lost != operation.lost or src in operation.lost:
            return  # an answer to an earlier question
        operation.answers[src] = concluded
        if concluded and operation.concluded is None:
            result = body.view(dtype_of(code)) if len(body) else None
            self.conclude(_NAME.unpack_from(meta), Total(weight, flags), result)

    # Before a rank leaves ------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until no other member needs a sum of this rank to conclude."""
        watch = self._link.watch("the end of the last collectives")
        with self._link.changed:
            waiting = {
                name: dict(operation.incarnations)
                for name, operation in self._operations.items()
                if operation.concluded is not None and self._numbers.get(name[0]) == name[1]
            }
            for name, members in waiting.items():
                query = _NAME.pack(*name) + b"?"
                for rank, incarnation in members.items():
                    if rank != self._rank:
                        self._link.send(rank, Topic.THROUGH, query, incarnation=incarnation)
            while waiting:
                roll = self._link.check()
                for name, members in [*waiting.items()]:
                    through = {*self._operations[name].through, self._rank}
                    for rank, incarnation in [*members.items()]:
                        if rank in through or roll.why_gone(rank, incarnation) is not None:
                            del members[rank]
                    if not members:
                        del waiting[name]
                if waiting:
                    self._link.changed.wait(TICK_S)
                    watch.check_limits([*next(iter(waiting.values()))])

    def _on_through(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        """Say that this rank has concluded, once it has; or hear that another has."""
        name, text = _NAME.unpack_from(meta), meta[_NAME.size :]
        operation = self.operation(name)
        if text != b"?":
            operation.through.add(src)
        elif operation.concluded is not None or self._numbers.get(name[0], 0) > name[1]:
            self._tell_through(name, src, incarnation)
        else:
            operation.leaving.add((src, incarnation))

    def _tell_through(self, name: Name, rank: int, incarnation: int) -> None:
        text = _NAME.pack(*name) + b"!"
        self._link.send(rank, Topic.THROUGH, text, incarnation=incarnation)


class Participant:
    """This rank's part in one operation.

    Attributes:
        rank: this rank.
        members, others: all members in their order, and those but this rank.
        arrival: what this rank brings.
        operation: what it knows of the operation.
    """

    def __init__(
        self,
        link: RankLink,
        name: Name,
        incarnations: dict[int, int],
        arrival: Handed,
        factor: Factor | None,
    ) -> None:
        self._link, self._name, self._incarnations = link, name, incarnations
        self.rank, self.members, self.arrival = link.rank, tuple(incarnations), arrival
        self.others = [rank for rank in self.members if rank != link.rank]
        self.operation = Operation()
        self._factor, self._total = factor, Total(0)
        self._allowance, self._hosts = Allowance(), dict[int, str]()
        self._watch = link.watch(_OPS[arrival.op])

    def run(self, group: HostsCollectives, x: Tensor) -> tuple[Total, Tensor | None]:
        """Take part; return the sum of the weights, and the sum of the vectors if there is one."""
        self.operation, self._allowance = group.operation(self._name), group.allowance
        self.operation.incarnations = self._incarnations
        try:
            result = self._sum(x)
            with self._link.changed:
                if not self.operation.lost:
                    group.conclude(self._name, self._total, result)
                    return self._total, result
        except MemberLost:
            pass
        return self._resolved()

    def _sum(self, x: Tensor) -> Tensor | None:
        with self._link.changed:  # nobody can have concluded without this rank
            if self._find_lost(self.others):
                raise MemberLost
        if self.arrival.op == _BROADCAST or x.nbytes <= WHOLE_BYTES:
            return sum_whole(self, x)
        self._find_hosts()
        if len(self.members) == 2 and not self.all_near:
            return sum_whole(self, x)
        is_chain = chain_is_shorter([*self._hosts.values()])
        return sum_along(self, x) if is_chain else sum_slices(self, x)

    def _find_hosts(self) -> None:
        """Find the host of each member, once all have come: all must choose the same way."""
        numbers = self._incarnations

        def missing() -> list[int]:
            entries = self._link.check().entries
            return [rank for rank in self.others if entries[rank].incarnation != numbers[rank]]

        self.await_members(missing)
        entries = self._link.check().entries
        self._hosts = {rank: entries[rank].host for rank in self.members}

    # Sending -------------------------------------------------------------------------------------

    def announce(self, x: Tensor) -> None:
        """Tell all others what this rank brings, before any part of it."""
        for rank in self.others:
            self.send(rank, x.numel(), x.new_empty(0, device="cpu"))

    def send(self, rank: int, start: int, piece: Tensor, summed: bool = False) -> Receipt:
        """Send a part of a vector, or of the sum of all; it must not change before it arrives."""
        phase = _SUMMED if summed else _ARRIVED
        meta = _NAME.pack(*self._name) + _ARRIVAL.pack(phase, start, *self.arrival)
        incarnation = self._incarnations[rank]
        return self._link.send(rank, Topic.COLLECT, meta, piece, incarnation)

    def outbound(self) -> Outbound:
        """What sends the parts of large vectors."""
        return Outbound(self, self._allowance)

    @property
    def all_near(self) -> bool:
        """Whether all members are on one host."""
        return len(set(self._hosts.values())) == 1

    def is_near(self, rank: int) -> bool:
        """Whether a member is on the host of this rank."""
        return self._hosts[rank] == self._hosts[self.rank]

    def now_s(self) -> float:
        """The time."""
        return self._link.wire.now_s()

    # Receiving -----------------------------------------------------------------------------------

    def meet(self) -> list[int]:
        """Wait until all others have said what they bring; return who contributes.

        Raises:
            MessageMismatch: a member calls something else.
        """
        theirs = self.operation.arrivals
        self.await_members(lambda: [rank for rank in self.others if rank not in theirs])
        arrivals = {rank: theirs.get(rank, self.arrival) for rank in self.members}
        flags = 0
        for rank, arrival in arrivals.items():
            flags |= arrival.flags
            if not arrival.fits(self.arrival):
                raise MessageMismatch(
                    f"rank {self.rank} calls {self.arrival} where rank {rank} calls {arrival}"
                )
        self._total = Total(sum(arrival.weight for arrival in arrivals.values()), flags)
        return [rank for rank, arrival in arrivals.items() if arrival.weight]

    def scale(self, total: Tensor) -> Tensor:
        """Multiply a part of the sum by what the caller wants."""
        if self._factor is not None:
            total *= self._factor(self._total.weight)
        return total

    # Waiting, and losses -------------------------------------------------------------------------

    def await_members(self, missing: Callable[[], list[int]]) -> None:
        """Wait until no member is missing.

        Raises:
            MemberLost: a member is lost. It may be one whose part has come: others may lack it,
                and wait in another operation.
        """
        with self._link.changed:
            while not self.operation.lost:
                ranks = missing()
                if not ranks:
                    return
                if not self._find_lost(self.others):
                    self._link.changed.wait(TICK_S)
                    self._watch.check_limits(ranks)
        raise MemberLost

    def _find_lost(self, ranks: Sequence[int]) -> frozenset[int]:
        """The members that are lost: these by the roll, others by what a member says."""
        roll, own = self._link.check(), self._incarnations
        gone = {rank for rank in ranks if roll.why_gone(rank, own[rank]) is not None}
        self.operation.lost |= gone
        return self.operation.lost

    def _resolved(self) -> tuple[Total, Tensor | None]:
        """After a loss: take the sum of a survivor that has concluded; else raise the loss."""
        while True:
            with self._link.changed:
                lost = self.operation.lost
                self.operation.answers.clear()
                survivors = [rank for rank in self.others if rank not in lost]
                meta = _NAME.pack(*self._name) + _pack_ranks(lost)
                for rank in survivors:
                    self._link.send(rank, Topic.ASK, meta, None, self._incarnations[rank])
                if self._await_answers(lost, survivors):
                    break
        if self.operation.concluded is not None:
            return self.operation.concluded
        reason = self._await_reason(min(lost))
        self._link.flush()  # this rank may end now, and others must know that it has not concluded
        raise self._watch.lost(sorted(lost), reason)

    def _await_answers(self, lost: frozenset[int], survivors: Sequence[int]) -> bool:
        """Wait until one has concluded, or none of them has; False if another is lost first."""
        operation = self.operation
        while operation.concluded is None:
            missing = [
                rank
                for rank in survivors
                if rank not in operation.answers and (rank, lost) not in operation.asked
            ]
            if not missing:
                return True
            if self._find_lost(missing) != lost:
                return False
            self._link.changed.wait(TICK_S)
            self._watch.check_limits(missing)
        return True

    def _await_reason(self, rank: int) -> str:
        """Wait until the registrar has told this rank, too, of a loss that others know of."""
        with self._link.changed:
            while True:
                reason = self._link.check().why_gone(rank, self._incarnations[rank])
                if reason is not None:
                    return reason
                self._link.changed.wait(TICK_S)
                self._watch.check_limits([rank])


def _pack_ranks(ranks: frozenset[int]) -> bytes:
    return struct.pack(f"<{len(ranks)}I", *sorted(ranks))


def _unpack_ranks(packed: bytes) -> frozenset[int]:
    return frozenset(struct.unpack(f"<{len(packed) // 4}I", packed))
