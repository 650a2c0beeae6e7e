"""Collectives between hosts, in the order of the members: the same bits as in other worlds.

A small vector goes to every other member whole, and each member sums them all. A large one is cut
into slices: each member gets its slice of every vector, sums it, and sends the sum to the others.

The commit point: ``x`` stays as it is until the sum is complete. A member that has all of it has
concluded, and keeps the sum until all have gone on. When a member is lost, each survivor that has
not concluded asks the others. To answer "not concluded" is a promise: from then on it takes the
sum from another survivor or not at all. If one survivor has concluded, all take its sum. If none
has, all raise ``PeerLost``, and can do the operation again among themselves.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.hosts.link import RankLink, Topic, host_copy
from paceline.comm.liveness import TICK_S
from paceline.comm.ports import NOT_READY, Collectives, Factor, Total
from paceline.errors import MessageMismatch, PeerLost

DIRECT_BYTES = 1 << 15
"""A vector of up to so many bytes goes to every member whole."""
_ALL_REDUCE, _BROADCAST = 1, 2
_OPS = {_ALL_REDUCE: "all_reduce", _BROADCAST: "broadcast"}
_ARRIVED, _SUMMED = 0, 1
_NAME = struct.Struct("<8sQ")
_ARRIVAL = struct.Struct("<BBBIQQQ")
_ANSWER = struct.Struct("<?BQQ")

Name = tuple[bytes, int]
"""An operation: its group, and its number among those of the group."""


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
        arrivals: what other members bring, and their vectors, or slices of them.
        sums: slices of the sum that other members have made.
        lost: the members that are lost; once there is one, only another member's sum counts.
        answers: of each survivor that was asked about these: whether it has concluded.
        asked: who has asked about which lost members: it has not concluded.
        concluded: the sum of the weights and the flags, and the sum; None where nobody has one.
        incarnations: of the members, once this rank takes part.
        through: the members that have concluded, as they say to one who leaves.
        leaving: the members, with their incarnations, that wait to hear that of this rank.
    """

    arrivals: dict[int, tuple[Handed, Tensor]] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
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
        taking_part = _Part(self._link, name, incarnations, arrival, factor)
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
        phase, *numbers = _ARRIVAL.unpack_from(meta, _NAME.size)
        arrival, operation = Handed(*numbers), self.operation((group, number))
        vector = body.view(dtype_of(arrival.dtype))
        if phase == _ARRIVED:
            operation.arrivals[src] = arrival, vector
        else:
            operation.sums[src] = vector

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


class _Part:
    """This rank's part in one operation."""

    def __init__(
        self,
        link: RankLink,
        name: Name,
        incarnations: dict[int, int],
        arrival: Handed,
        factor: Factor | None,
    ) -> None:
        self._link, self._name, self._incarnations = link, name, incarnations
        self._arrival, self._factor = arrival, factor
        self._members = members = tuple(incarnations)
        self._own = members.index(link.rank)
        self._others = [rank for rank in members if rank != link.rank]
        self._watch = link.watch(_OPS[arrival.op])

    def run(self, group: HostsCollectives, x: Tensor) -> tuple[Total, Tensor | None]:
        """Take part; return the sum of the weights, and the sum of the vectors if there is one."""
        self._operation = group.operation(self._name)
        self._operation.incarnations = self._incarnations
        with self._link.changed:  # nobody can have concluded without this rank
            if self._find_lost(self._others):
                return self._resolved()
        vector, slices = self._cut(x)
        self._hand_in(vector, slices)
        if not self._await(self._operation.arrivals):
            return self._resolved()
        arrivals = self._arrivals()
        flags = 0
        for arrival in arrivals:
            flags |= arrival.flags
        total = Total(sum(arrival.weight for arrival in arrivals), flags)
        result: Tensor | None = None
        if total.weight and x.numel():
            result = self._sum(vector, slices[self._own], arrivals, total.weight)
            if len(slices[self._own]) < x.numel():
                self._send(_SUMMED, self._others, [result] * len(self._members))
                if not self._await(self._operation.sums):
                    return self._resolved()
                result = self._assemble(result)
        with self._link.changed:
            if not self._operation.lost:
                group.conclude(self._name, total, result)
                return total, result
        return self._resolved()

    def _cut(self, x: Tensor) -> tuple[Tensor, list[range]]:
        """The vector in the host's memory, and the slice of it that each member sums.

        A vector that goes out whole is a copy: ``x`` takes the sum when others may still read it.
        """
        size, numel = len(self._members), x.numel()
        if self._arrival.op == _BROADCAST or size == 2 or x.nbytes <= DIRECT_BYTES:
            return host_copy(x).view(-1), [range(numel)] * size
        ends = [numel * index // size for index in range(size + 1)]
        slices = [range(ends[index], ends[index + 1]) for index in range(size)]
        return x.detach().cpu().contiguous().view(-1), slices

    def _hand_in(self, vector: Tensor, slices: Sequence[range]) -> None:
        parts = [vector[part.start : part.stop] for part in slices]
        if not self._arrival.weight:
            parts = [vector[:0]] * len(slices)
        self._send(_ARRIVED, self._others, parts)

    def _send(self, phase: int, ranks: Sequence[int], parts: Sequence[Tensor]) -> None:
        meta = _NAME.pack(*self._name) + _ARRIVAL.pack(phase, *self._arrival)
        for rank in ranks:
            part = parts[self._members.index(rank)]
            incarnation = self._incarnations[rank]
            self._link.send(rank, Topic.COLLECT, meta, part, incarnation)

    def _arrivals(self) -> list[Handed]:
        """What all members bring, in their order; refuses members that call something else."""
        theirs = self._operation.arrivals
        found = [
            self._arrival if rank == self._link.rank else theirs[rank][0] for rank in self._members
        ]
        for rank, arrival in zip(self._members, found, strict=True):
            if not arrival.fits(self._arrival):
                raise MessageMismatch(
                    f"rank {self._link.rank} calls {self._arrival}"
                    f" where rank {rank} calls {arrival}"
                )
        return found

    def _sum(self, vector: Tensor, own: range, arrivals: list[Handed], weight: int) -> Tensor:
        """Sum this rank's slice over all members, in their order."""
        parts = [
            vector[own.start : own.stop]
            if rank == self._link.rank
            else self._operation.arrivals[rank][1]
            for rank, arrival in zip(self._members, arrivals, strict=True)
            if arrival.weight
        ]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        if self._factor is not None:
            total *= self._factor(weight)
        return total

    def _assemble(self, own: Tensor) -> Tensor:
        sums = self._operation.sums
        return torch.cat([own if r == self._link.rank else sums[r] for r in self._members])

    # Waiting, and losses -------------------------------------------------------------------------

    def _await(self, parts: Mapping[int, object]) -> bool:
        """Wait for a part of every other member; False if one is lost before all have come.

        It may be one whose part has come: others may lack it, and wait in another operation.
        """
        with self._link.changed:
            while not self._operation.lost:
                missing = [rank for rank in self._others if rank not in parts]
                if not missing:
                    return True
                if not self._find_lost(self._others):
                    self._link.changed.wait(TICK_S)
                    self._watch.check_limits(missing)
        return False

    def _find_lost(self, ranks: Sequence[int]) -> frozenset[int]:
        """The members that are lost: these by the roll, others by what a member says."""
        roll, own = self._link.check(), self._incarnations
        gone = {rank for rank in ranks if roll.why_gone(rank, own[rank]) is not None}
        self._operation.lost |= gone
        return self._operation.lost

    def _resolved(self) -> tuple[Total, Tensor | None]:
        """After a loss: take the sum of a survivor that has concluded; else raise the loss."""
        while True:
            with self._link.changed:
                lost = self._operation.lost
                self._operation.answers.clear()
                survivors = [rank for rank in self._others if rank not in lost]
                meta = _NAME.pack(*self._name) + _pack_ranks(lost)
                for rank in survivors:
                    self._link.send(rank, Topic.ASK, meta, None, self._incarnations[rank])
                if self._await_answers(lost, survivors):
                    break
        if self._operation.concluded is not None:
            return self._operation.concluded
        reason = self._await_reason(min(lost))
        self._link.flush()  # this rank may end now, and others must know that it has not concluded
        raise self._watch.lost(sorted(lost), reason)

    def _await_answers(self, lost: frozenset[int], survivors: Sequence[int]) -> bool:
        """Wait until one has concluded, or none of them has; False if another is lost first."""
        operation = self._operation
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
