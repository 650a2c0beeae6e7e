"""Collectives in shared memory.

An all-reduce has two fences. A rank arrives by naming its vector. When all have arrived, each rank
sums one slice over all vectors, in rank order, block by block. Where the loss of a rank ends the
run, it writes the sum back into that slice of every vector while it is still in the core's cache;
when all have finished, every vector is complete. Where the others go on, it writes the sum into
memory of its own, and when all have finished, each rank copies the slices of all: a copy more, but
vectors are intact until then, so that the survivors can do it again among themselves.

Where the vectors are on a device, each rank stages a copy of its own before it arrives, and sums
all copies itself when all are still there: that costs one wait for the device, not two.

A rank that dies has either finished or not, and every survivor sees the same. One that is stopped
for too long is killed first: what it has done is then final.

Training repeats the same few operations on the same vectors, so what can be known of them once
(views, blocks, indices of words) is kept in the :class:`SharedGroup`.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm.dtypes import DTYPES
from paceline.comm.ports import Collectives, Factor, Total
from paceline.comm.shared.layout import AHEAD, ENTRY_WORDS, MAX_GROUPS
from paceline.comm.shared.members import SharedMembers
from paceline.comm.shared.regions import Region, Regions
from paceline.errors import MessageMismatch, UsageError

BLOCK = 1 << 15
"""Elements summed at a time: small enough for a block of each vector to stay in a core's cache."""
_ARRIVED, _FINISHED, _RELEASED = 0, 1, 2
_ALL_REDUCE, _BROADCAST = 1, 2
_OPS = {_ALL_REDUCE: "all_reduce", _BROADCAST: "broadcast"}
_KEPT_PLANS = 8


class Arrival(NamedTuple):
    """What one member brings to a collective."""

    op: int
    numel: int
    dtype: int
    weight: int
    place: int
    sum_place: int
    flags: int

    def __str__(self) -> str:
        return f"{_OPS[self.op]} of {self.numel} x {DTYPES[self.dtype]}"


class Block(NamedTuple):
    """A piece of a rank's slice: what is added, where the sum goes, and where that is copied.

    ``scratch`` is for sums on the way, where the last one goes into one of the inputs.
    """

    inputs: list[Any]
    out: Any
    scratch: Any
    others: list[Any]


class SumPlan(NamedTuple):
    """What a rank does in an all-reduce of known vectors.

    Attributes:
        blocks: pieces of its slice.
        copies: of each slice, where it is to go at the end and where its sum is.
    """

    blocks: list[Block]
    copies: list[tuple[Any, Any]]


class SharedGroup:
    """This rank's part in the collectives of one set of members, in one incarnation of each."""

    def __init__(
        self, members: SharedMembers, regions: Regions, incarnations: dict[int, int]
    ) -> None:
        self.incarnations = incarnations
        self._shared, self._members, self._regions = members.shared, members, regions
        ranks, slot, layout = (*incarnations,), self._slot(), members.shared.layout
        self._ranks, self._own = ranks, ranks.index(members.shared.rank)
        lines = {rank: layout.group(rank, slot) for rank in ranks}
        self._phases = [{rank: line + phase for rank, line in lines.items()} for phase in range(3)]
        self._entries = [
            [layout.entry(rank, slot, number) for rank in ranks] for number in range(AHEAD)
        ]
        self._number, self._completed, self._op = 0, 0, _ALL_REDUCE
        self._plans: list[tuple[list[Arrival], SumPlan]] = []
        self._sums: list[Region | None] = [None] * AHEAD
        self._stages: list[Region | None] = [None] * AHEAD
        self._expected: tuple[int, tuple[int, int, int]] | None = None

    def _slot(self) -> int:
        """The index of this group in the directory; the first member to come enters it."""
        words, directory = self._shared.words, self._shared.layout.directory
        identity = repr(((*self.incarnations,), [*self.incarnations.values()])).encode()
        key = int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest(), "big") + 1
        with self._shared.locked(directory):
            for slot in range(MAX_GROUPS):
                if words[directory + slot] in (0, key):
                    words[directory + slot] = key
                    return slot
        raise UsageError(f"a run must not use more than {MAX_GROUPS} groups")

    def all_reduce(self, x: Tensor, weight: int, factor: Factor | None, flags: int) -> Total:
        """Sum ``x`` over the members whose weight is not 0."""
        self._begin(_ALL_REDUCE)
        if self._shared.places.device_for(x) is not None:
            return self._sum_on_device(x, weight, factor, flags)
        region = self._regions.place(x)
        entries = self._arrive(x, weight, region, flags)
        total, all_flags = _total(entries)
        plan = self._plan(entries) if total and x.numel() else _NO_PLAN
        scale = 1.0 if factor is None or not plan.blocks else factor(total)
        for inputs, out, scratch, others in plan.blocks:
            _sum(inputs, scratch, out)
            if scale != 1.0:
                out *= scale
            for other in others:
                other[...] = out
        self._meet(_FINISHED)
        for part, its in plan.copies:
            part[...] = its
        if plan is not _NO_PLAN and region.nbytes:
            x.copy_(self._shared.places.tensor(region.place, x.numel(), x.dtype))
        self._regions.give_back(region)
        self._announce(_RELEASED)
        return Total(total, all_flags)

    def _sum_on_device(self, x: Tensor, weight: int, factor: Factor | None, flags: int) -> Total:
        """Sum the copies that all members have staged; the device does so behind this call."""
        entries = self._arrive(x, weight, self._stage(x), flags)
        self._meet(_FINISHED)  # one that has died since it arrived counts for nobody
        total, all_flags = _total(entries)
        inputs = [self._vector(entry) for entry in entries if entry.weight]
        if inputs:
            _sum(inputs, x, x)
            if factor is not None and (scale := factor(total)) != 1.0:
                x.mul_(scale)
        self._release_later()
        return Total(total, all_flags)

    def broadcast(self, x: Tensor, src: int) -> None:
        """Take the input of one member."""
        self._begin(_BROADCAST)
        source = self._ranks.index(src)
        on_device = self._shared.places.device_for(x) is not None
        if self._own != source:
            region = Region(0)
        else:
            region = self._stage(x) if on_device else self._regions.place(x)
        entries = self._arrive(x, 1, region)
        if self._own != source:
            x.copy_(self._vector(entries[source]))
        if on_device:
            self._release_later()
            return
        self._meet(_FINISHED)
        self._regions.give_back(region)
        self._announce(_RELEASED)

    def retire(self, here: list[int]) -> None:
        """Take back what this rank has staged, once all that are ``here`` have read it."""
        for stage in filter(None, self._stages):
            stage.receipts = tuple(self._phases[_RELEASED][rank] for rank in here)
            stage.sequence = self._completed
            self._regions.lend(stage)
        self._stages = [None] * AHEAD

    # The fences ----------------------------------------------------------------------------------

    def _begin(self, op: int) -> None:
        """Begin a collective; the memory of the one before the last one is free now."""
        self._op = op
        self._number += 1
        self._await(_RELEASED, self._number - AHEAD)

    def _arrive(self, x: Tensor, weight: int, region: Region, flags: int = 0) -> list[Arrival]:
        """Name this rank's vector, and wait for the others; return what each of them brought."""
        indices, op = self._entries[self._number % AHEAD], self._op
        in_arena = op == _ALL_REDUCE and self._shared.places.device_for(x) is None
        part_bytes = -(-x.numel() // len(self._ranks)) * x.element_size()
        sum_place = self._reserve(part_bytes).place if in_arena else 0
        dtype = DTYPES.index(x.dtype)
        entry = Arrival(op, x.numel(), dtype, weight, region.place, sum_place, flags)
        words = self._shared.words
        words.write(indices[self._own], entry)
        self._shared.places.finish()
        self._shared.deferred.settle(wait=True)
        self._meet(_ARRIVED)
        entries = [Arrival(*words.read(index, ENTRY_WORDS)) for index in indices]
        for rank, its in zip(self._ranks, entries, strict=True):
            if its[:3] != entry[:3]:
                raise MessageMismatch(
                    f"rank {rank} calls {its} where rank {self._shared.rank} calls {entry}"
                )
        return entries

    def _reserve(self, nbytes: int) -> Region:
        """Memory for this rank's part of a sum, which is read until all have released it."""
        if not self._shared.elastic:
            return Region(0)
        kept = self._sums[self._number % AHEAD]
        if kept is None or kept.nbytes < nbytes:
            kept = self._sums[self._number % AHEAD] = self._regions.borrow(nbytes)
        return kept

    def _stage(self, x: Tensor) -> Region:
        """A copy of ``x`` that members read until all have released it."""
        kept = self._stages[self._number % AHEAD]
        if kept is not None and self._expected == (self._number, _identity(x)):
            return kept
        if kept is None or kept.nbytes < x.nbytes:
            kept = self._stages[self._number % AHEAD] = self._regions.borrow(x.nbytes, x)
        self._shared.places.write(kept.spot, x)
        return kept

    def expect(self, x: Tensor) -> None:
        """Stage ``x`` for the next collective already, if the last ones were like it."""
        number, words = self._number + 1, self._shared.words
        kept = self._stages[number % AHEAD]
        free = all(words[i] >= number - AHEAD for i in self._phases[_RELEASED].values())
        if kept is not None and free and kept.nbytes == x.nbytes:
            self._shared.places.write(kept.spot, x)
            self._expected = number, _identity(x)

    def _vector(self, entry: Arrival) -> Tensor:
        return self._shared.places.tensor(entry.place, entry.numel, DTYPES[entry.dtype])

    def _meet(self, phase: int) -> None:
        self._announce(phase)
        self._await(phase, self._number)

    def _announce(self, phase: int) -> None:
        self._shared.words.announce(self._phases[phase][self._shared.rank], self._number)

    def _release_later(self) -> None:
        """Release the collective when the device has read what it needs of it."""
        self._completed = self._number
        mark = self._shared.places.mark_device()
        index = self._phases[_RELEASED][self._shared.rank]
        self._shared.deferred.announce(index, self._number, mark)

    def _await(self, phase: int, number: int) -> None:
        op = _OPS[self._op]
        self._members.await_words(self._phases[phase], number, op, self.incarnations)

    # Sums ----------------------------------------------------------------------------------------

    def _plan(self, entries: list[Arrival]) -> SumPlan:
        """How to sum these vectors; kept for the next time."""
        for known, plan in self._plans:
            if known == entries:
                return plan
        plan = self._make_plan(entries)
        self._plans = [(entries, plan), *self._plans[: _KEPT_PLANS - 1]]
        return plan

    def _make_plan(self, entries: list[Arrival]) -> SumPlan:
        arena, size = self._shared.places.arena, len(self._ranks)
        numel, dtype = entries[0].numel, DTYPES[entries[0].dtype]
        vectors = [arena.array(entry.place, numel, dtype) for entry in entries]
        inputs = [v for v, entry in zip(vectors, entries, strict=True) if entry.weight]
        edges = [rank * numel // size for rank in range(size + 1)]
        slices = [slice(*pair) for pair in pairwise(edges)]
        mine, own = slices[self._own], vectors[self._own]
        parts = [slice(i, min(i + BLOCK, mine.stop)) for i in range(mine.start, mine.stop, BLOCK)]
        if self._shared.elastic:
            sums = [
                arena.array(entry.sum_place, part.stop - part.start, dtype)
                for entry, part in zip(entries, slices, strict=True)
            ]
            total = sums[self._own]
            outs = scratches = [total[i : i + BLOCK] for i in range(0, len(total), BLOCK)]
            others, copies = [], [(own[part], its) for part, its in zip(slices, sums, strict=True)]
        else:
            outs, scratch = [own[part] for part in parts], _like(own, BLOCK)
            scratches = [scratch[: len(out)] for out in outs]
            others, copies = [v for v in vectors if v is not own], []
        blocks = [
            Block([v[part] for v in inputs], out, scratch, [v[part] for v in others])
            for part, out, scratch in zip(parts, outs, scratches, strict=True)
        ]
        return SumPlan(blocks, copies)


class SharedCollectives(Collectives):
    """The collectives of one rank."""

    def __init__(self, members: SharedMembers, regions: Regions) -> None:
        self._members, self._regions = members, regions
        self._groups: dict[tuple[int, ...], SharedGroup] = {}
        self._last: SharedGroup | None = None

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        return self._group(members).all_reduce(x, weight, factor, flags)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        self._group(members).broadcast(x, src)

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        places = self._members.shared.places
        kept = places.segments is not None and places.segments.device == like.device
        if kept or like.device.type != "cpu":  # a collective copies it
            return like.new_zeros(numel)
        return places.arena.new_tensor(numel, like.dtype)

    def expect(self, x: Tensor) -> None:
        if self._last is not None and self._members.shared.places.device_for(x) is not None:
            self._last.expect(x)

    def _group(self, ranks: tuple[int, ...]) -> SharedGroup:
        members = self._members
        members.check()
        group, incarnations = self._groups.get(ranks), members.ready(ranks)
        if group is None or group.incarnations != incarnations:
            self._retire_old()
            group = SharedGroup(members, self._regions, incarnations)
            self._groups[ranks] = group
        self._last = group
        return group

    def _retire_old(self) -> None:
        """Take back the memory of groups that can meet no more: one of their members has ended."""
        for ranks, group in self._groups.items():
            here = [rank for rank in ranks if self._is_here(rank, group.incarnations[rank])]
            if len(here) < len(ranks):
                group.retire(here)

    def _is_here(self, rank: int, incarnation: int) -> bool:
        members = self._members
        return members.incarnation(rank) == incarnation and not members.has_ended(rank)


_NO_PLAN = SumPlan([], [])


def _identity(x: Tensor) -> tuple[int, int, int]:
    """Where a vector lies, and how often it was changed."""
    return x.data_ptr(), x.numel(), x._version


def _total(entries: list[Arrival]) -> Total:
    weight, flags = 0, 0
    for entry in entries:
        weight += entry.weight
        flags |= entry.flags
    return Total(weight, flags)


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
