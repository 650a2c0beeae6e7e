"""Who may talk to whom: pure functions on integers.

``neighbours(name, place, size)`` gives the places that ``place`` may pick among ``size`` peers in
a row. Strategies count places among those alive, so that a ring closes again when one is gone.
"""

from __future__ import annotations

from typing import Literal

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


def groups(members: int, group_size: int) -> list[range]:
    """Consecutive groups of ``group_size``; the last one is as small as it must be.

    >>> groups(8, 4), groups(5, 2)
    ([range(0, 4), range(4, 8)], [range(0, 2), range(2, 4), range(4, 5)])
    """
    return [range(i, min(i + group_size, members)) for i in range(0, members, group_size)]
