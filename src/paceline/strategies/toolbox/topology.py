"""Who may talk to whom: pure functions on integers.

``neighbours(name, place, size)`` gives the places that ``place`` may pick among ``size`` peers in
a row. Strategies count places among those alive, so that a ring closes again when one is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

Topology = Literal["complete", "ring", "exponential"]


def neighbours(topology: Topology, place: int, size: int) -> list[int]:
    """The places that ``place`` may pick, never itself; none in a world of one.

    >>> neighbours("complete", 1, 4), neighbours("ring", 0, 4), neighbours("exponential", 0, 8)
    ([0, 2, 3], [1, 3], [1, 2, 4])
    """
    if topology == "complete":
        return [other for other in range(size) if other != place]
    hops = [1, size - 1] if topology == "ring" else [1 << k for k in range(size.bit_length())]
    found = {(place + hop) % size for hop in hops if 0 < hop < size}
    return sorted(found - {place})


class AllBut(Sequence[int]):
    """All of some ranks but the one at a place: the neighbours in a complete graph, not copied.

    >>> list(AllBut([3, 5, 8], 1)), AllBut([3, 5, 8], 1)[1]
    ([3, 8], 8)
    """

    def __init__(self, peers: Sequence[int], place: int) -> None:
        self._peers, self._place = peers, place

    def __len__(self) -> int:
        return len(self._peers) - 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [*self][index]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._peers[index + (index >= self._place)]


def groups(members: int, group_size: int) -> list[range]:
    """Consecutive groups of ``group_size``; the last one is as small as it must be.

    >>> groups(8, 4), groups(5, 2)
    ([range(0, 4), range(4, 8)], [range(0, 2), range(2, 4), range(4, 5)])
    """
    return [range(i, min(i + group_size, members)) for i in range(0, members, group_size)]
