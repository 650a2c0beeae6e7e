"""What the ports of one simulated rank share: the time that it owes, and how it waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from paceline.errors import LeftBehind, PeerLost
from paceline.sim.cluster import Link

if TYPE_CHECKING:
    from paceline.sim.world import World

LossCheck = Callable[[], BaseException | None]
"""Called whenever a rank departs: the error of a wait that can no longer end, or None."""


class SimulatedRank:
    """One rank in a :class:`World`.

    Attributes:
        charged: whether the actions of this rank take virtual time.
        works: whether handling vectors takes time on its core; False for a server, whose work is
            charged as updates.
        owed_s: computing time that has not passed yet. It passes before the rank does anything
            that others can see.
        promised_s: when it was parked, it was expected to do nothing that others can see before.
        kept: whether it has kept that up to now, at least once.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.baton, self.calendar = world.baton, world.calendar
        self.charged = self.works = True
        self.owed_s = 0.0
        self.promised_s: float | None = None
        self.kept = False

    # Time ----------------------------------------------------------------------------------------

    def pass_time(self) -> None:
        """Let the owed time pass."""
        self.baton.check(self.rank)
        if self.owed_s > 0:
            self.baton.sleep(self.rank, self.settle_debt())
        else:
            self.catch_up()

    def catch_up(self) -> None:
        """Act in the calendar's present, with no time left to pass."""
        self._end_promise()
        self.baton.catch_up(self.rank)

    def now_s(self) -> float:
        """The time of this rank, with what it owes."""
        return self.baton.now_s(self.rank) + self.owed_s

    def park(self, step_s: float) -> None:
        """Stop until a joint computation is done, before a step that takes at least ``step_s``.

        Others may act up to then, if ranks were seen to make the step before anything else.
        """
        now_s, before_s = self.now_s(), self.promised_s
        self.promised_s = now_s + step_s
        if before_s is not None and now_s < before_s < self.promised_s:  # gradients accumulate
            self.world.keep_promises = False
        trusted = self.kept and self.world.keep_promises
        self.baton.park(self.rank, self.promised_s if trusted else now_s)
        self.world.generators.switch_to(self.rank)

    def _end_promise(self) -> None:
        if self.promised_s is not None:
            self.kept = self.now_s() >= self.promised_s
            self.world.keep_promises &= self.kept
            self.promised_s = None

    def settle_debt(self) -> float:
        """Set the owed time to 0 and return it; the caller must let it pass."""
        self._end_promise()
        owed_s, self.owed_s = self.owed_s, 0.0
        return owed_s

    def check(self) -> None:
        """Let the owed time pass; raise LeftBehind if the others have declared this rank lost."""
        self.pass_time()
        if self.rank in self.world.behind:
            raise LeftBehind

    def check_in_order(self) -> None:
        """Do as :meth:`check`, before an act whose order among those of others counts."""
        self.check()
        self.baton.refuse_late(self.rank)

    def compute(self, seconds: float) -> None:
        """Add computing time to the owed time."""
        self.owed_s += seconds
        if self.world.shares_cores:  # how long it takes depends on the other ranks of the node
            self.pass_time()

    def charge(self, work: Link, nbytes: int) -> None:
        """Add the time that this rank's core takes to handle a vector."""
        if self.charged and self.works:
            self.compute(self.world.network.work_s(work, nbytes))

    # Waiting -------------------------------------------------------------------------------------

    def wait(
        self,
        op: str,
        peers: Iterable[int],
        loss_check: LossCheck,
        patient: bool = False,
        after_s: float = 0.0,
    ) -> None:
        """Wait to be woken, or until ``loss_check`` returns an error after a rank departs."""
        if (error := loss_check()) is not None:
            raise error
        self.world.loss_checks[self.rank] = loss_check
        start_s = self.baton.now_s(self.rank) + after_s
        try:
            self.baton.wait(self.rank, op, peers, patient, after_s)
        except PeerLost as lost:
            waited_s = self.calendar.now_s - start_s
            raise PeerLost(lost.ranks, lost.op, lost.reason, waited_s) from None
        finally:
            self.world.loss_checks.pop(self.rank, None)

    def wait_for_members(self, op: str, peers: Iterable[int], patient: bool = False) -> None:
        """Wait until the members or the rendezvous change."""
        self.world.awaiting.add(self.rank)
        try:
            self.wait(op, peers, lambda: None, patient)
        finally:
            self.world.awaiting.discard(self.rank)

    def wait_until(
        self, time_s: float, op: str, *peers: int, loss_check: LossCheck = lambda: None
    ) -> None:
        """Wait until ``time_s``, which may be infinite."""
        if time_s > self.calendar.now_s:
            if time_s < math.inf:
                self.baton.wake(self.rank, time_s)
            else:
                self.baton.stalled = True
            self.wait(op, peers, loss_check)

    def transfer_from(self, src: int, nbytes: int, op: str) -> None:
        """Wait for the link to be up, then for a transfer from ``src``."""
        network = self.world.network
        uncut_s = network.outages.uncut_s(self.calendar.now_s, (src, self.rank))
        loss_check = partial(self.loss_behind_cut, src, op)
        self.wait_until(uncut_s, op, src, loss_check=loss_check)
        arrival_s = network.transfer(self.calendar.now_s, src, self.rank, nbytes)
        self.wait_until(arrival_s, op, src, loss_check=loss_check)

    def loss_behind_cut(self, src: int, op: str) -> PeerLost | None:
        """The error of a wait for a link that is cut, once the rank behind it is lost."""
        lost = None if self.world.registrar is None else self.loss((src,), op)
        now_s, outages = self.calendar.now_s, self.world.network.outages
        return lost if outages.uncut_s(now_s, (src, self.rank)) > now_s else None

    def loss(self, peers: Sequence[int], op: str) -> PeerLost | None:
        """The error of a wait for ``peers`` if all of them have departed."""
        departed = self.world.departed
        if any(peer not in departed for peer in peers):
            return None
        return PeerLost(peers, op, departed[peers[0]], 0.0)
