"""Three ways to sum vectors between hosts, all in the order of the members.

*Whole*: every vector goes to every member, and each member sums them all. One message each way, so
it is for small vectors, and for two members on two hosts.

*Slices*: each member gets one slice of every vector, sums it, and sends the sum to the others.

*Chain*: each member adds its vector to the sum that it gets from the member before it. The last one
has the whole sum, which goes back along the chain. A cable carries a vector once in each direction
between two hosts, and twice where there are more, however many members share it.

Large vectors travel in chunks: one is summed, and its sum is on its way, while the next ones come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.comm.hosts.link import host_copy

if TYPE_CHECKING:
    from paceline.comm.hosts.collectives import Participant

CHUNK_BYTES = 1 << 16
"""The bytes of a chunk: few, so that others get their first one soon, but worth a message."""
NEAR_CHUNK_BYTES = 1 << 20
"""The same among members of one host: they hand them over faster than a message is made."""


def chain_is_shorter(hosts: Sequence[str]) -> bool:
    """Whether a chain carries less over the busiest cable than slices; the host of each member.

    >>> chain_is_shorter(["a", "a", "b", "b"]), chain_is_shorter(["a", "b", "c", "d"])
    (True, False)

    A chain that comes to a host twice carries more.

    >>> chain_is_shorter(["a", "b", "a", "b"])
    False
    """
    blocks = [len([*block]) for _, block in groupby(hosts)]
    if len(blocks) == 1 or len(blocks) != len(set(hosts)):
        return False
    size = len(hosts)
    slices = max(2 * block * (size - block) / size for block in blocks)
    return (1 if len(blocks) == 2 else 2) < slices


def chunks_of(numel: int, itemsize: int, start: int = 0, near: bool = False) -> list[range]:
    """The chunks of a part of a vector.

    >>> chunks_of(40_000, itemsize=4, start=100)
    [range(100, 16484), range(16484, 32868), range(32868, 40100)]
    """
    most, stop = (NEAR_CHUNK_BYTES if near else CHUNK_BYTES) // itemsize, start + numel
    return [range(at, min(at + most, stop)) for at in range(start, stop, most)]


def sum_whole(part: Participant, x: Tensor) -> Tensor | None:
    """Sum vectors that every member has whole.

    What is sent is a copy: ``x`` takes the sum when others may still read it.
    """
    vector = host_copy(x).view(-1)
    for rank in part.others:
        part.send(rank, 0, vector if part.arrival.weight else vector[:0])
    contributors = part.meet()
    if not contributors or not x.numel():
        return None
    part.await_members(lambda: _missing(part, contributors, 0))
    return _sum(part, contributors, vector, 0)


def sum_slices(part: Participant, x: Tensor) -> Tensor | None:
    """Sum one slice of all vectors, and get the sums of the other slices."""
    part.announce(x)
    contributors = part.meet()
    return _Slices(part, _in_host(x), contributors).run() if contributors else None


class _Slices:
    """This member's part in an exchange of slices.

    It has yet to sum the chunks in ``own``. All members begin with the next one in their order, so
    that each hears of one at a time.
    """

    def __init__(self, part: Participant, vector: Tensor, contributors: Sequence[int]) -> None:
        self._part, self._vector, self._result = part, vector, torch.empty_like(vector)
        self._contributors, self._out = contributors, part.outbound()
        members, size = part.members, len(part.members)
        edges = [len(vector) * index // size for index in range(size + 1)]
        self._slices = {
            rank: chunks_of(stop - start, vector.element_size(), start, part.all_near)
            for rank, start, stop in zip(members, edges, edges[1:], strict=False)
        }
        self._own = deque(self._slices[part.rank])
        own = members.index(part.rank)
        self._turns = [*members[own + 1 :], *members[:own]]

    def run(self) -> Tensor:
        """Send slices of this vector, sum those that come, and send the sums."""
        if self._part.arrival.weight:
            self._send_slices()
        while self._own or not self._out.is_empty:
            self._out.send()
            if self._own and not self._missing_pieces():
                self._sum_next()
            else:
                self._part.await_members(self._missing)
        for rank in self._part.others:
            for chunk in self._slices[rank]:
                self._result[chunk.start : chunk.stop] = self._take_sum(rank, chunk.start)
        return self._result

    def _send_slices(self) -> None:
        for number in range(max(map(len, self._slices.values()))):
            for rank in self._turns:
                for chunk in self._slices[rank][number:][:1]:
                    self._out.put(rank, chunk.start, self._vector[chunk.start : chunk.stop])

    def _missing(self) -> list[int]:
        """The members that are waited for; none, if something can be done."""
        pieces = self._missing_pieces() if self._own else []
        if self._out.can_send or (self._own and not pieces):
            return []
        return [*pieces, *self._out.awaited]

    def _missing_pieces(self) -> list[int]:
        return _missing(self._part, self._contributors, self._own[0].start)

    def _sum_next(self) -> None:
        chunk = self._own.popleft()
        own = self._vector[chunk.start : chunk.stop]
        total = _sum(self._part, self._contributors, own, chunk.start)
        self._result[chunk.start : chunk.stop] = total
        for rank in self._turns:
            self._out.put(rank, chunk.start, total, summed=True)

    def _take_sum(self, rank: int, start: int) -> Tensor:
        sums = self._part.operation.sums
        self._part.await_members(lambda: [] if (rank, start) in sums else [rank])
        self._out.send()  # it learns from what has arrived
        return sums.pop((rank, start))


def sum_along(part: Participant, x: Tensor) -> Tensor | None:
    """Pass sums along the chain of the members, and the whole sum back."""
    part.announce(x)
    contributors = part.meet()
    return _Chain(part, _in_host(x), contributors).run() if contributors else None


class _Chain:
    """This member's place in a chain.

    ``before`` is the member whose sums it adds to, if there is one; ``after`` gets the result. It
    has yet to add to the chunks in ``ahead``, and to get the whole sum of those in ``back``.
    """

    def __init__(self, part: Participant, vector: Tensor, contributors: Sequence[int]) -> None:
        self._part, self._vector, self._result = part, vector, torch.empty_like(vector)
        self._pieces, self._sums = part.operation.pieces, part.operation.sums
        self._out = part.outbound()
        members, own = part.members, part.members.index(part.rank)
        first = members.index(contributors[0])
        self._before = members[own - 1] if own > first else None
        self._previous = members[own - 1] if own > 0 else None
        self._after = members[own + 1] if own + 1 < len(members) else None
        chunks = chunks_of(len(vector), vector.element_size())
        self._ahead = deque(chunks if own >= first else [])
        self._back = deque(chunks if self._after is not None else [])

    def run(self) -> Tensor:
        """Pass on whatever comes, until the whole sum has come."""
        while self._ahead or self._back or not self._out.is_empty:
            self._out.send()
            if self._can_add():
                self._add()
            elif self._can_finish():
                total = self._sums.pop(self._wanted_back())
                self._finish(self._back.popleft(), total)
            else:
                self._part.await_members(self._missing)
        return self._result

    def _can_add(self) -> bool:
        return bool(self._ahead) and (self._before is None or self._wanted_ahead() in self._pieces)

    def _can_finish(self) -> bool:
        return bool(self._back) and self._wanted_back() in self._sums

    def _missing(self) -> list[int]:
        """The members that are waited for; none, if something can be done."""
        if self._out.can_send or self._can_add() or self._can_finish():
            return []
        ahead = [self._wanted_ahead()] if self._ahead else []
        back = [self._wanted_back()] if self._back else []
        return [*(rank for rank, _ in (*ahead, *back)), *self._out.awaited]

    def _wanted_ahead(self) -> tuple[int, int]:
        assert self._before is not None
        return self._before, self._ahead[0].start

    def _wanted_back(self) -> tuple[int, int]:
        assert self._after is not None
        return self._after, self._back[0].start

    def _add(self) -> None:
        """Add to the next chunk of the sum of those before, and pass it on."""
        chunk = self._ahead.popleft()
        own = self._vector[chunk.start : chunk.stop]
        if self._before is None:
            total = own if self._after is not None else own.clone()
        else:
            total = self._pieces.pop((self._before, chunk.start))
            if self._part.arrival.weight:
                total += own
        if self._after is None:
            self._finish(chunk, self._part.scale(total))
        else:
            self._out.put(self._after, chunk.start, total)

    def _finish(self, chunk: range, total: Tensor) -> None:
        self._result[chunk.start : chunk.stop] = total
        if self._previous is not None:
            self._out.put(self._previous, chunk.start, total, summed=True)


def _in_host(x: Tensor) -> Tensor:
    """A vector in the memory of the host; not a copy, if it is there."""
    return x.detach().cpu().contiguous().view(-1)


def _missing(part: Participant, contributors: Sequence[int], start: int) -> list[int]:
    """The other members whose part of a vector is not here."""
    pieces = part.operation.pieces
    return [rank for rank in contributors if rank != part.rank and (rank, start) not in pieces]


def _sum(part: Participant, contributors: Sequence[int], own: Tensor, start: int) -> Tensor:
    """Sum one part of all vectors, in the order of the members."""
    pieces = part.operation.pieces
    parts = [own if rank == part.rank else pieces.pop((rank, start)) for rank in contributors]
    total = parts[0].clone() if parts[0] is own else parts[0]
    for more in parts[1:]:
        total += more
    return part.scale(total)
