"""What the ports of one simulated rank share: its debt of time, and how it waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.comm.ports import Lost
from paceline.errors import LeftBehind, PeerLost
from paceline.sim.cluster import Link

if TYPE_CHECKING:
    from paceline.sim.world import World

Vigil = Callable[[], BaseException | None]
"""Asked whenever a rank departs: the error of a wait that cannot end any more, or None."""


class SimulatedRank:
    """One rank in a :class:`World`.

    Attributes:
        charged: whether what this rank does takes virtual time.
        works: whether its core handles vectors; a server's work is charged as updates instead.
        owed_s: computing time that has not passed yet. It passes before the rank does anything
            that others can see.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.baton, self.calendar = world.baton, world.calendar
        self.charged = self.works = True
        self.owed_s = 0.0

    # Time ----------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        """Let the time pass that this rank owes."""
        self.baton.check(self.rank)
        if self.owed_s > 0:
            self.baton.sleep(self.rank, self.take_debt())

    def take_debt(self) -> float:
        """The time that this rank owes; whoever takes it lets it pass."""
        owed_s, self.owed_s = self.owed_s, 0.0
        return owed_s

    def check(self) -> None:
        """Let the time pass, and find out whether the others have gone on without this rank."""
        self.pass_time()
        if self.rank in self.world.behind:
            raise LeftBehind

    def compute(self, seconds: float) -> None:
        """Owe computing time."""
        self.owed_s += seconds
        if self.world.shares_cores:  # how long it takes is known only when it is over
            self.pass_time()

    def charge(self, work: Link, nbytes: int) -> None:
        """Owe the time that this rank's core takes to handle a vector."""
        if self.charged and self.works:
            self.compute(self.world.network.work_s(work, nbytes))

    # Waiting -------------------------------------------------------------------------------------

    def wait(
        self,
        op: str,
        peers: Iterable[int],
        vigil: Vigil,
        patient: bool = False,
        after_s: float = 0.0,
    ) -> None:
        """Wait to be woken; ``vigil`` says, whenever a rank departs, whether to give up."""
        if (error := vigil()) is not None:
            raise error
        self.world.vigils[self.rank] = vigil
        start_s = self.calendar.now_s + after_s
        try:
            self.baton.wait(self.rank, op, peers, patient, after_s)
        except PeerLost as lost:
            waited_s = self.calendar.now_s - start_s
            raise PeerLost(lost.ranks, lost.op, lost.reason, waited_s) from None
        finally:
            self.world.vigils.pop(self.rank, None)

    def wait_for_members(self, op: str, peers: Iterable[int], patient: bool = False) -> None:
        """Wait until the members change."""
        self.world.awaiting.add(self.rank)
        try:
            self.wait(op, peers, lambda: None, patient)
        finally:
            self.world.awaiting.discard(self.rank)

    def wait_until(self, time_s: float, op: str, peer: int) -> None:
        """Wait for a moment, which may never come."""
        if time_s > self.calendar.now_s:
            if time_s < math.inf:
                self.baton.wake(self.rank, time_s)
            else:
                self.baton.stalled = True
            self.wait(op, (peer,), lambda: None)

    def carry(self, src: int, nbytes: int, op: str) -> None:
        """Wait while a message comes from ``src``, once the link is up."""
        network = self.world.network
        self.wait_until(network.whole_s(self.calendar.now_s, (src, self.rank)), op, src)
        there_s = network.transfer(self.calendar.now_s, src, self.rank, nbytes)
        self.wait_until(there_s, op, src)

    def loss(self, peers: Sequence[int], op: str) -> PeerLost | None:
        """The error of a wait for ``peers``, when none of them is there any more."""
        departed = self.world.departed
        if any(peer not in departed for peer in peers):
            return None
        return PeerLost(peers, op, departed[peers[0]], 0.0)


def as_value(lost: PeerLost) -> Lost:
    """A loss as the result of an operation."""
    return Lost(tuple(lost.ranks), lost.op, lost.reason, lost.waited_s)
