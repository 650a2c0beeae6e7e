"""Links that are cut or degraded for a while, and how they delay messages and collectives.

All outages are known before a run begins, so the arrival of a message is computed when it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from paceline.common.faults import LINK_KINDS, Fault

NodeOf = Callable[[int], int]


class Outage:
    """A time in which links have only ``share`` of their bandwidth; 0 when they are cut."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self.share = fault, fault.factor or 0.0
        self.start_s = fault.at_s or 0.0
        self.end_s = math.inf if fault.for_s is None else self.start_s + fault.for_s

    def between(self, members: Sequence[int], node: NodeOf) -> list[int]:
        """Those of ``members`` whose link to another member it affects."""
        if self._fault.node is not None:
            return self._between_nodes(members, node)
        ends = [rank for rank in (self._fault.rank, self._fault.peer) if rank is not None]
        return ends if len(members) > 1 and all(rank in members for rank in ends) else []

    def _between_nodes(self, members: Sequence[int], node: NodeOf) -> list[int]:
        here, there = self._fault.node, self._fault.peer
        inside = [member for member in members if node(member) == here]
        outside = [m for m in members if node(m) != here and there in (None, node(m))]
        if not inside or not outside:
            return []
        return inside if there is None else sorted(inside + outside)


class Outages:
    """The outages of a run."""

    def __init__(self, faults: Iterable[Fault], node: NodeOf) -> None:
        self._all = [Outage(fault) for fault in faults if fault.kind in LINK_KINDS]
        self._node = node

    def __bool__(self) -> bool:
        return bool(self._all)

    def uncut_s(self, now_s: float, members: Sequence[int]) -> float:
        """The time from which on no link between ``members`` is cut; infinite if never."""
        if not self._all:
            return now_s
        cuts = [o for o in self._among(members) if o.share == 0]
        while on := [o.end_s for o in cuts if o.start_s <= now_s < o.end_s]:
            now_s = max(on)
        return now_s

    def cut_at_s(self, members: Sequence[int]) -> list[float]:
        """The times at which a link between ``members`` is cut."""
        return sorted({o.start_s for o in self._among(members) if o.share == 0})

    def passage(
        self, start_s: float, seconds: float, members: Sequence[int]
    ) -> tuple[float, float]:
        """When a transfer of ``seconds`` on undisturbed links ends, and how long bytes moved.

        It stops while a link is cut; otherwise it runs at the lowest share of the links.
        """
        if not self._all:
            return start_s + seconds, seconds
        among = self._among(members)
        time_s, moving_s = start_s, 0.0
        while True:
            share = min((o.share for o in among if o.start_s <= time_s < o.end_s), default=1.0)
            edges = (edge_s for o in among for edge_s in (o.start_s, o.end_s) if edge_s > time_s)
            span_s = min(edges, default=math.inf) - time_s
            if share and seconds <= share * span_s:
                return time_s + seconds / share, moving_s + seconds / share
            if span_s == math.inf:
                return math.inf, moving_s
            seconds -= share * span_s
            moving_s += span_s if share else 0.0
            time_s += span_s

    def affected(self, now_s: float, members: Sequence[int]) -> list[int]:
        """Those of ``members`` whose links are cut or degraded now."""
        on = (o for o in self._all if o.start_s <= now_s < o.end_s)
        return sorted({rank for o in on for rank in o.between(members, self._node)})

    def _among(self, members: Sequence[int]) -> list[Outage]:
        return [outage for outage in self._all if outage.between(members, self._node)]
