"""Collectives in shared memory.

An all-reduce has two fences. A rank arrives by naming its vector. When all have arrived, each rank
sums one slice over all vectors, in rank order, block by block. Where the loss of a rank ends the
run, it writes the sum back into that slice of every vector while it is still in the core's cache;
when all have finished, every vector is complete. Where the others go on, it writes the sum into
memory of its own, and when all have finished, each rank copies the slices of all: a copy more, but
vectors are intact until then, so that the survivors can do it again among themselves.

A rank that dies has either finished or not, and every survivor sees the same. One that is stopped
for too long is ended first: what it has done is then final.

Training repeats the same few operations on the same vectors, so what can be known of them once
(views, blocks, places of words) is kept in the :class:`Group`.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm.base import Factor, Work
from paceline.comm.dtypes import DTYPES
from paceline.comm.shared.transport import AHEAD, BLOCK, ENTRY_WORDS, Region, SharedMemoryTransport
from paceline.errors import MessageMismatch

_ARRIVED, _FINISHED, _RELEASED = 0, 1, 2
_KEPT_PLANS = 8

Entry = list[int]


class Block(NamedTuple):
    """A piece of a rank's slice: what is added, where the sum goes, and where that is copied.

    ``scratch`` is for sums on the way, where the last one goes into one of the inputs.
    """

    inputs: list[Any]
    out: Any
    scratch: Any
    others: list[Any]


class Plan(NamedTuple):
    """What a rank does in an all-reduce of known vectors.

    Attributes:
        blocks: pieces of its slice.
        copies: of each slice, where it is to go at the end and where its sum is.
    """

    blocks: list[Block]
    copies: list[tuple[Any, Any]]


class Group:
    """This rank's place in the collectives of one set of members."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        members: tuple[int, ...],
        slot: int,
        lives: dict[int, int],
    ) -> None:
        layout = transport.layout
        self.transport, self.members, self.lives = transport, members, lives
        self.mine = members.index(transport.rank)
        lines = {member: layout.group(member, slot) for member in members}
        self.phases = [
            {member: line + phase for member, line in lines.items()} for phase in range(3)
        ]
        self.entries = [
            [layout.entry(member, slot, number) for member in members] for number in range(AHEAD)
        ]
        self.started = 0
        self.under_way: list[Collective] = []
        self._plans: list[tuple[list[Entry], Plan]] = []
        self._sums: list[Region | None] = [None] * AHEAD

    def reserve(self, number: int, nbytes: int) -> Region:
        """Memory for this rank's part of a sum, which is read until all have released it."""
        kept = self._sums[number % AHEAD]
        if kept is None or kept.nbytes < nbytes:
            kept = self._sums[number % AHEAD] = self.transport.borrow(None, nbytes)
        return kept

    def plan(self, entries: list[Entry]) -> Plan:
        """How to sum these vectors; kept for the next time."""
        for known, plan in self._plans:
            if known == entries:
                return plan
        plan = self._make_plan(entries)
        self._plans = [(entries, plan), *self._plans[: _KEPT_PLANS - 1]]
        return plan

    def _make_plan(self, entries: list[Entry]) -> Plan:
        arena, size = self.transport.arena, len(self.members)
        _, numel, code, *_ = entries[0]
        dtype = DTYPES[code]
        vectors = [arena.array(entry[4], numel, dtype) for entry in entries]
        inputs = [v for v, entry in zip(vectors, entries, strict=True) if entry[3]]
        edges = [place * numel // size for place in range(size + 1)]
        slices = [slice(*pair) for pair in pairwise(edges)]
        mine = slices[self.mine]
        parts = [slice(i, min(i + BLOCK, mine.stop)) for i in range(mine.start, mine.stop, BLOCK)]
        own = vectors[self.mine]
        if not self.transport.elastic:
            others, scratch = [v for v in vectors if v is not own], _like(own, BLOCK)
            blocks = [
                Block(
                    [v[part] for v in inputs],
                    own[part],
                    scratch[: part.stop - part.start],
                    [v[part] for v in others],
                )
                for part in parts
            ]
            return Plan(blocks, [])
        sums = [
            arena.array(entry[5], part.stop - part.start, dtype)
            for entry, part in zip(entries, slices, strict=True)
        ]
        out, start = sums[self.mine], mine.start
        places = [out[part.start - start : part.stop - start] for part in parts]
        blocks = [
            Block([v[part] for v in inputs], place, place, [])
            for part, place in zip(parts, places, strict=True)
        ]
        return Plan(blocks, [(own[part], its) for part, its in zip(slices, sums, strict=True)])


class Collective(Work):
    """One operation of a group, from this rank's arrival to its release."""

    op: ClassVar[str]
    code: ClassVar[int]

    def __init__(self, group: Group, x: Tensor, weight: int) -> None:
        self._group, self._x, self._transport = group, x, group.transport
        self._acted = self._over = False
        self._total = 0
        while len(group.under_way) >= AHEAD:
            group.under_way[0].wait()
        group.started += 1
        self._number = group.started
        self._await(_RELEASED, self._number - AHEAD)
        self._region = self._transport.find_place(x) or self._transport.borrow(x)
        self._sum = self.reserve(-(-x.numel() // len(group.members)) * x.element_size())
        entry = group.entries[self._number % AHEAD][group.mine]
        dtype, place = DTYPES.index(x.dtype), self._region.place
        told = (self.code, x.numel(), dtype, weight, place, self._sum.place)
        self._transport.words.write(entry, told)
        self._announce(_ARRIVED)
        group.under_way.append(self)

    def reserve(self, nbytes: int) -> Region:
        """Memory for this rank's part of the outcome."""
        return Region(0)

    @abstractmethod
    def act(self, entries: list[Entry]) -> None:
        """Do this rank's part, now that all have arrived."""

    @abstractmethod
    def conclude(self, entries: list[Entry]) -> None:
        """Take the outcome, now that all have done their part."""

    def done(self) -> bool:
        if not self._over and self._group.under_way[0] is self and self._all_at(_ARRIVED):
            self._act()
            if self._all_at(_FINISHED):
                self._conclude()
        return self._over

    def wait(self) -> int:
        while not self._over:
            oldest = self._group.under_way[0]
            oldest._await(_ARRIVED, oldest._number)
            oldest._act()
            oldest._await(_FINISHED, oldest._number)
            oldest._conclude()
        return self._total

    def _act(self) -> None:
        if not self._acted:
            self._acted = True
            self._entries = self._read_entries()
            self._total = sum(entry[3] for entry in self._entries)
            self.act(self._entries)
            self._announce(_FINISHED)

    def _conclude(self) -> None:
        self.conclude(self._entries)
        self._transport.give_back(self._region)
        self._announce(_RELEASED)
        self._group.under_way.remove(self)
        self._over = True

    def _read_entries(self) -> list[Entry]:
        """What each member brought; refused unless all call the same on the same shape."""
        words, places = self._transport.words, self._group.entries[self._number % AHEAD]
        entries = [words.read(place, ENTRY_WORDS) for place in places]
        mine = entries[self._group.mine]
        for member, entry in zip(self._group.members, entries, strict=True):
            if entry[:3] != mine[:3]:
                raise MessageMismatch(
                    f"rank {member} calls {_describe(entry)} where rank {self._transport.rank}"
                    f" calls {_describe(mine)}"
                )
        return entries

    def _announce(self, phase: int) -> None:
        index = self._group.phases[phase][self._transport.rank]
        self._transport.words.announce(index, self._number)

    def _all_at(self, phase: int) -> bool:
        words = self._transport.words
        return all(words[index] >= self._number for index in self._group.phases[phase].values())

    def _await(self, phase: int, number: int) -> None:
        group = self._group
        self._transport.await_words(group.phases[phase], number, self.op, group.lives)


class AllReduce(Collective):
    """The sum of all inputs whose weight is not 0."""

    op = "all_reduce"
    code = 1

    def __init__(self, group: Group, x: Tensor, weight: int, factor: Factor | None) -> None:
        self._factor = factor
        super().__init__(group, x, weight)

    def reserve(self, nbytes: int) -> Region:
        if not self._transport.elastic:
            return super().reserve(nbytes)
        return self._group.reserve(self._number, nbytes)

    def act(self, entries: list[Entry]) -> None:
        """Sum this rank's slice of all vectors."""
        if self._total and self._x.numel():
            factor = 1.0 if self._factor is None else self._factor(self._total)
            for inputs, out, scratch, others in self._group.plan(entries).blocks:
                _sum(inputs, scratch, out)
                if factor != 1.0:
                    out *= factor
                for other in others:
                    other[...] = out

    def conclude(self, entries: list[Entry]) -> None:
        """Take the slices of all; copy them once more, if the vector is not in shared memory."""
        if self._total and self._x.numel():
            for part, its in self._group.plan(entries).copies:
                part[...] = its
            if self._region.nbytes:
                place, numel, dtype = self._region.place, self._x.numel(), self._x.dtype
                self._x.copy_(self._transport.arena.tensor(place, numel, dtype))


class Broadcast(Collective):
    """Everyone takes the input of one member."""

    op = "broadcast"
    code = 2

    def __init__(self, group: Group, x: Tensor, src: int) -> None:
        self._src = group.members.index(src)
        super().__init__(group, x, 1)

    def act(self, entries: list[Entry]) -> None:
        """Copy the input of the source."""
        if self._group.mine != self._src:
            place = entries[self._src][4]
            self._x.copy_(self._transport.arena.tensor(place, self._x.numel(), self._x.dtype))

    def conclude(self, entries: list[Entry]) -> None:
        """Nothing is left to do."""


def _like(array: Any, size: int) -> Any:
    """Memory of this rank's own, of the array's kind."""
    kind = torch if isinstance(array, Tensor) else np
    return kind.empty(size, dtype=array.dtype)


def _sum(inputs: list[Any], scratch: Any, out: Any) -> None:
    """Add arrays in their order; ``out``, which may be one of them, is written last of all."""
    add = torch.add if isinstance(out, Tensor) else np.add
    total, *rest = inputs
    if not rest:
        out[...] = total
        return
    for x in rest[:-1]:
        total = add(total, x, out=scratch)
    add(total, rest[-1], out=out)


def _describe(entry: Entry) -> str:
    op = {1: "all_reduce", 2: "broadcast"}[entry[0]]
    return f"{op} of {entry[1]} x {DTYPES[entry[2]]}"
