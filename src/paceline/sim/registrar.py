"""The registrar of a simulated run over many hosts, on one of the nodes.

To draw a batch takes a request and a reply. A rank that is cut off from the registrar counts as
stopped after a second, and is lost after ``dead_s``: it stops acting then. When the link works
again it comes back, as one that was frozen does.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from paceline.comm.hosts.registrar import QUIET_S
from paceline.errors import LeftBehind
from paceline.sim.rank import SimulatedRank

if TYPE_CHECKING:
    from paceline.sim.world import World


class SimulatedRegistrar:
    """What ranks ask of the registrar, and whom it loses.

    Args:
        world: its ranks.
        nodes: the node of each rank, and last that of the registrar.

    Attributes:
        quiet: the workers that have been cut off for a second.
    """

    def __init__(self, world: World, nodes: list[int]) -> None:
        self._world, self._nodes = world, nodes
        self._number = len(nodes) - 1  # among the ranks, for the network
        self.quiet: set[int] = set()

    def _uncut_s(self, rank: int) -> float:
        """The time from which ``rank`` reaches the registrar; infinite if never."""
        world = self._world
        return world.network.outages.uncut_s(world.calendar.now_s, (rank, self._number))

    def answer(self, own: SimulatedRank) -> None:
        """Let the time pass in which a rank asks the registrar and has its reply."""
        if own.charged:
            network = self._world.network
            asked_s = network.request(self._uncut_s(own.rank), own.rank, self._number)
            own.wait_until(network.request(asked_s, self._number, own.rank), "the registrar")
            own.check()

    def await_link(self, own: SimulatedRank) -> None:
        """Wait until a rank that was left behind reaches the registrar."""
        uncut_s = self._uncut_s(own.rank)
        if uncut_s > self._world.calendar.now_s:
            if uncut_s < math.inf:
                own.baton.wake(own.rank, uncut_s)
            own.wait("the registrar", (), lambda: None, patient=True)

    def move_here(self, rank: int) -> None:
        """Move a rank that is started again to this node, if its own is cut off."""
        if self._uncut_s(rank) > self._world.calendar.now_s:
            self._nodes[rank] = self._nodes[self._number]
            self._hear(rank)
            self._world.baton.share_cores_of(rank, self._number)

    # Who is lost ---------------------------------------------------------------------------------

    def watch_links(self, begin_s: float) -> None:
        """Look at a rank whenever it is cut off."""
        world = self._world
        for rank in range(world.size):
            for cut_s in world.network.outages.cut_at_s((rank, self._number)):
                world.calendar.call(max(begin_s, cut_s), partial(self._on_cut, rank))

    def _on_cut(self, rank: int) -> None:
        world, uncut_s = self._world, self._uncut_s(rank)
        calendar, dead_s = world.calendar, world.limits.dead_s
        for after_s, act in ((min(QUIET_S, dead_s), self._miss), (dead_s, self._strike_off)):
            if uncut_s > calendar.now_s + after_s:
                calendar.call(calendar.now_s + after_s, partial(act, rank))

    def _miss(self, rank: int) -> None:
        """Count a rank as stopped until it is heard again."""
        world, uncut_s = self._world, self._uncut_s(rank)
        if uncut_s <= world.calendar.now_s or not world.is_worker(rank):
            return
        self.quiet.add(rank)
        world.see_stopped()
        world.fail_hopeless_waits(rank)
        if uncut_s < math.inf:
            world.calendar.call(uncut_s, partial(self._hear, rank))

    def _hear(self, rank: int) -> None:
        self.quiet.discard(rank)
        self._world.see_stopped()

    def _strike_off(self, rank: int) -> None:
        """Lose a rank of which nothing was heard, if something was heard of another."""
        world, now_s = self._world, self._world.calendar.now_s
        if now_s < world.joined_late.get(rank, 0.0) or self._uncut_s(rank) <= now_s:
            return
        if all(self._uncut_s(other) > now_s for other in world.alive()):
            return
        world.leave_behind(rank, f"nothing was heard of it for {world.limits.dead_s:g} s")
        if rank in world.behind and world.baton.ranks[rank].wait is not None:
            world.baton.interrupt(rank, LeftBehind())
