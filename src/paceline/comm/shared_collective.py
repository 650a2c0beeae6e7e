"""Collectives in shared memory.

An all-reduce has two fences. A rank arrives by naming its vector. When all have arrived, each rank
sums one slice over all vectors, in rank order, block by block, and writes the sum back into that
slice of every vector while it is still in the core's cache. When all have finished, every vector
is complete: no rank copies more than its own slice, and none waits for a third time.

A rank that dies has either arrived or not, and every survivor sees the same: inputs are intact
until all have arrived.

Training repeats the same few operations on the same vectors, so what can be known of them once
(views, blocks, places of words) is kept in the :class:`Group`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm.base import Factor, Work
from paceline.comm.dtypes import DTYPES
from paceline.comm.shared_memory import AHEAD, BLOCK, ENTRY_WORDS, SharedMemoryTransport
from paceline.errors import MessageMismatch

_ARRIVED, _FINISHED, _RELEASED = 0, 1, 2
_KEPT_PLANS = 8

Entry = list[int]
Plan = list["Block"]


class Block(NamedTuple):
    """A piece of this rank's slice: what is added, where the sum goes, and where it is copied."""

    inputs: list[Any]
    scratch: Any
    own: Any
    others: list[Any]


class Group:
    """This rank's place in the collectives of one set of members."""

    def __init__(
        self, transport: SharedMemoryTransport, members: tuple[int, ...], slot: int
    ) -> None:
        layout = transport.layout
        self.transport, self.members = transport, members
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
        vectors = [arena.array(entry[4], numel, DTYPES[code]) for entry in entries]
        inputs = [v for v, entry in zip(vectors, entries, strict=True) if entry[3]]
        own, scratch = vectors[self.mine], _like(vectors[0], BLOCK)
        others = [v for v in vectors if v is not own]
        first, last = self.mine * numel // size, (self.mine + 1) * numel // size
        parts = [slice(i, min(i + BLOCK, last)) for i in range(first, last, BLOCK)]
        return [
            Block(
                [v[part] for v in inputs],
                scratch[: part.stop - part.start],
                own[part],
                [v[part] for v in others],
            )
            for part in parts
        ]


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
        entry = group.entries[self._number % AHEAD][group.mine]
        dtype, place = DTYPES.index(x.dtype), self._region.place
        self._transport.words.write(entry, (self.code, x.numel(), dtype, weight, place))
        self._announce(_ARRIVED)
        group.under_way.append(self)

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
        self._transport.await_words(self._group.phases[phase], number, self.op)


class AllReduce(Collective):
    """The sum of all inputs whose weight is not 0."""

    op = "all_reduce"
    code = 1

    def __init__(self, group: Group, x: Tensor, weight: int, factor: Factor | None) -> None:
        self._factor = factor
        super().__init__(group, x, weight)

    def act(self, entries: list[Entry]) -> None:
        """Sum this rank's slice of all vectors, and spread the sum over them."""
        if self._total and self._x.numel():
            factor = 1.0 if self._factor is None else self._factor(self._total)
            for inputs, scratch, own, others in self._group.plan(entries):
                _sum(inputs, scratch, own)
                if factor != 1.0:
                    own *= factor
                for other in others:
                    other[...] = own

    def conclude(self, entries: list[Entry]) -> None:
        """Copy the result, unless the vector itself lies in shared memory."""
        if self._total and self._region.nbytes:
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
