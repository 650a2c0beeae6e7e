"""The simulated world: all ranks in one process, on a virtual clock.

:class:`World` is what the ranks share; :class:`SimulatedPorts` are the ports of one rank. Exactly
one rank runs at a time (see :mod:`paceline.sim.kernel`), so nothing here needs a lock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch

from paceline.comm.batches import SharedBatches
from paceline.comm.limits import Limits
from paceline.comm.membership import MembershipPolicy
from paceline.comm.ports import Call, Ports, Published, Roster, View
from paceline.comm.ranks import ranks
from paceline.common.faults import LINK_KINDS, Fault, rank_of
from paceline.common.one_core import on_one_core
from paceline.common.seeds import user_seed
from paceline.errors import LeftBehind, PeerLost
from paceline.sim.batching.rows import Rows
from paceline.sim.clock import SimulatedClock
from paceline.sim.cluster import Cluster
from paceline.sim.collectives import Collective, SimulatedCollectives, SimulatedGroup
from paceline.sim.compute import Costs
from paceline.sim.generators import Generators
from paceline.sim.inbox import Inbox
from paceline.sim.kernel import Baton, Calendar, Killed
from paceline.sim.mail import SimulatedMail
from paceline.sim.members import FINISHED, SimulatedMembers
from paceline.sim.network import Network
from paceline.sim.queue import SimulatedQueue
from paceline.sim.rank import LossCheck, SimulatedRank
from paceline.sim.registrar import SimulatedRegistrar
from paceline.sim.rendezvous import SimulatedRendezvous
from paceline.sim.resident import Resident

RESTART_AFTER_S = 1.0
"""The virtual time between the death of a rank and its restart."""


class World:
    """Everything that the ranks of one simulation share.

    Args:
        cluster: what the ranks run on.
        size: the number of ranks.
        seed: of all random numbers.
        limits: how long ranks wait for each other.
        faults: the faults to inject.
        homes: for each rank, the rank whose node it shares.
        losses: whether a loss ends the run, and which ranks restart; without it, the others
            continue.
        on_event: called when a rank is lost, stopped or slowed.
        start_s: the time at which the clock starts.
        device: where the ranks compute.
        away: ranks that were lost before the run, and do not start.

    Attributes:
        rejoined: the incarnation of each rank that has rejoined or restarted.
        awaiting: the ranks that wait for a change of the members or of the rendezvous.
        waiting: the late joiners that wait to be taken in.
        resident: what the ranks read on their device; None on the CPU.
        rosters: of both kinds, the last one that a rank asked for, and its number.
        keep_promises: whether no rank that was parked has communicated before its step.
        rows: what the workers have, as rows of matrices; None where each has memory of its own.
        on_reduced: called with each collective when it has its result and still has its inputs.
    """

    def __init__(
        self,
        cluster: Cluster,
        size: int,
        *,
        seed: int,
        limits: Limits,
        faults: Sequence[Fault],
        homes: Sequence[int] | None = None,
        losses: MembershipPolicy | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        start_s: float = 0.0,
        device: str = "cpu",
        away: Sequence[int] = (),
    ) -> None:
        self.away = frozenset(away)
        self.size, self.limits = size, limits
        nodes = [cluster.node(rank) for rank in homes or range(size)]
        if cluster.registrar is not None:
            nodes.append(cluster.registrar)
        self.calendar = Calendar(start_s)
        self.baton = Baton(self.calendar, size, limits.progress_limit_s)
        self.network = Network(cluster, faults, nodes)
        self.handling = cluster.handling
        self.shares_cores = cluster.cores > 0
        if self.shares_cores:
            self.baton.share_cores(nodes, cluster.cores)
        self.costs = [Costs(cluster, rank, seed) for rank in range(size)]
        self._device = torch.device(device)
        self.resident = None if device == "cpu" else Resident(self._device)
        seeds = [user_seed(seed, rank) for rank in range(size + 1)]
        self.generators = Generators(seeds, self._device)
        self.inboxes = [Inbox() for _ in range(size)]
        self.offered_to: defaultdict[int, set[int]] = defaultdict(set)
        self.windows: dict[tuple[int, int], Published] = {}
        self.batches = SharedBatches()
        self.groups: defaultdict[tuple[Any, ...], SimulatedGroup] = defaultdict(SimulatedGroup)
        self.departed: dict[int, str] = dict.fromkeys(sorted(away), "it was lost before the run")
        self.behind: set[int] = set()
        self.frozen: frozenset[int] = frozenset()
        self.membership = 0
        self.final_roster: tuple[tuple[int, int], ...] | None = None
        self.rosters: dict[bool, tuple[int, Roster]] = {}
        self.waiting: set[int] = set()
        self.rejoined: dict[int, int] = {}
        self.registrar = None if cluster.registrar is None else SimulatedRegistrar(self, nodes)
        self._losses, self._on_event = losses, on_event
        self.call = Call()
        self.present_at: dict[int, set[int]] = {}
        self.finished: frozenset[int] = frozenset()
        self.rendezvous_over, self.given_up = False, 0
        self.closed = False
        self.loss_checks: dict[int, LossCheck] = {}
        self.awaiting: set[int] = set()
        self.receivers: dict[int, tuple[Sequence[int], int]] = {}
        joins = {rank_of(f): f.at_s or 0.0 for f in faults if f.kind == "join"}
        killed = {rank_of(f): f.at_s or 0.0 for f in faults if f.kind == "kill"}
        self.joined_late = {r: at_s for r, at_s in joins.items() if at_s < killed.get(r, math.inf)}
        self._returns = {r: at_s for r, at_s in joins.items() if r not in self.joined_late}
        self.joining = set(self.joined_late)
        self.arrivals: list[tuple[float, int]] = []
        self._faults = [f for f in faults if f.kind not in ("join", *LINK_KINDS)]
        self.has_step_faults = any(fault.at_step is not None for fault in faults)
        self._lost: set[int] = {*away}
        self._alive: tuple[int, ...] | None = None
        self._view: View | None = None
        self._view_until_s = math.inf
        self.keep_promises = True
        self.rows: Rows | None = None
        self.on_reduced: Callable[[Collective], None] | None = None

    def run(self, body: Callable[[SimulatedPorts], None]) -> None:
        """Run ``body`` on every rank until the simulation ends."""

        def on_rank(rank: int) -> None:
            torch.set_num_threads(1)
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while rank not in self.away:
                try:
                    ports = SimulatedPorts(SimulatedRank(self, rank))
                    ports.clock.switch_in()
                    body(ports)
                    ports.close()
                    return
                except Killed:
                    self._revive(rank)

        begin_s = self.calendar.now_s
        for fault in self._faults:
            if fault.at_step is None and (fault.at_s or 0.0) >= begin_s:
                self.calendar.call(fault.at_s or 0.0, partial(self.inject, fault))
        if self.registrar is not None:
            self.registrar.watch_links(begin_s)
        threads = torch.get_num_threads()
        try:
            with self.generators, on_one_core(for_good=self._device.type == "cuda"):
                starts = (self.joined_late.get(rank, 0.0) for rank in range(self.size))
                self.baton.run(on_rank, [max(begin_s, start_s) for start_s in starts])
        finally:
            torch.set_num_threads(threads)
        lost = sorted(self._lost - self.away)
        if lost and self._losses is not None and not self._losses.goes_on:
            why = {self.departed.get(rank, "it died") for rank in lost}
            raise PeerLost(lost, "the run", "; ".join(sorted(why)), 0.0)

    def _revive(self, rank: int) -> None:
        """Restart a killed rank if a fault or the policy asks for it; otherwise end its thread."""
        if self.baton.failure is not None:
            raise Killed
        if rank in self._returns:
            after_s = max(0.0, self._returns.pop(rank) - self.calendar.now_s)
        elif self._losses is not None and self._losses.restarts(rank):
            after_s = RESTART_AFTER_S
        else:
            raise Killed
        if self.registrar is not None:
            self.registrar.move_here(rank)
        self.baton.revive(rank, after_s)
        self.enter(rank)

    def enter(self, rank: int) -> None:
        """Begin the next incarnation of ``rank``; it is a member once it has announced itself."""
        for inbox in self.inboxes:  # messages of an earlier incarnation must not be received
            inbox.withdraw(rank, posted=True)
        self.fail_hopeless_waits(rank)
        self.rejoined[rank] = self.rejoined.get(rank, 1) + 1
        self.departed.pop(rank, None)
        self.behind.discard(rank)
        self.joining.add(rank)
        self.batches.in_hand[rank].clear()
        self.finished -= {rank}
        self.changed()

    def arrive(self, rank: int) -> None:
        """Make ``rank``, which joins late or again, a member."""
        if rank in self.joining:
            self.joining.discard(rank)
            self.waiting.discard(rank)
            self.arrivals.append((self.calendar.now_s, rank))
            self.changed()

    def changed(self) -> None:
        """Record that the members have changed, and wake the ranks that wait for that."""
        self.membership += 1
        self._alive = self._view = None
        self.wake_awaiting()

    def wake_awaiting(self) -> None:
        """Wake every rank in ``awaiting``: it checks its condition again."""
        for waiting in list(self.awaiting):
            self.end_wait(waiting)

    def alive(self) -> tuple[int, ...]:
        """The members: ranks that have joined, and have neither departed nor been lost."""
        if self._alive is None:
            absent = self.departed.keys() | self.joining
            self._alive = ranks(tuple(r for r in range(self.size) if r not in absent))
        return self._alive

    def is_worker(self, rank: int) -> bool:
        """Whether ``rank`` trains; all ranks do in a world without a policy."""
        return self._losses is None or rank < self._losses.workers

    def see_stopped(self) -> None:
        """Let all ranks see who counts as stopped now."""
        self._view = None

    def view(self) -> View:
        """The members, incarnations and losses, as every rank sees them."""
        now_s = self.calendar.now_s
        if self._view is None or now_s >= self._view_until_s:
            later = {rank: at_s for rank, at_s in self.joined_late.items() if at_s > now_s}
            self._view_until_s = min(later.values(), default=math.inf)
            number = self.rejoined.get
            incarnations = [0 if r in later else number(r, 1) for r in range(self.size)]
            lost = frozenset(rank for rank in self._lost if rank in self.departed)
            departed = frozenset(r for r, why in self.departed.items() if why == FINISHED)
            stopped = self.frozen | (self.registrar.quiet if self.registrar else frozenset())
            self._view = View(self.membership, incarnations, lost, departed, stopped)
        return self._view

    def incarnation(self, rank: int) -> int:
        """The current incarnation of ``rank``; 0 before a late joiner has started."""
        return self.view().incarnations[rank]

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that died, or were frozen for too long."""
        return tuple(sorted(self._lost))

    # Faults --------------------------------------------------------------------------------------

    def faults_at(self, rank: int, step: int) -> list[Fault]:
        """The faults due before step ``step`` of ``rank``; only its first incarnation has any."""
        if rank in self.rejoined:
            return []
        return [fault for fault in self._faults if fault.rank == rank and fault.at_step == step]

    def inject(self, fault: Fault) -> None:
        """Inject ``fault`` now, if its rank has started and not departed."""
        rank = rank_of(fault)
        if rank in self.departed or self.calendar.now_s < self.joined_late.get(rank, 0.0):
            return
        if fault.kind == "kill":
            self.baton.interrupt(rank, Killed())
            self._lose(rank, "it died")
        elif fault.kind == "freeze":
            self._freeze(fault)
        elif fault.kind == "slow":
            self._slow(fault)

    def _freeze(self, fault: Fault) -> None:
        rank, since_s = rank_of(fault), self.calendar.now_s
        self.baton.freeze(rank)
        self.frozen |= {rank}
        self.see_stopped()
        self.report("stopped", rank)

        def declare_lost() -> None:
            if self.baton.ranks[rank].frozen_since_s == since_s:
                self.leave_behind(rank, f"it has been stopped for {self.limits.dead_s:g} s")

        self.calendar.call(since_s + self.limits.dead_s, declare_lost)
        if fault.for_s is not None:
            self.calendar.call(since_s + fault.for_s, lambda: self._thaw(rank))

    def _thaw(self, rank: int) -> None:
        self.baton.thaw(rank)
        self.frozen -= {rank}
        self.see_stopped()
        if rank in self.behind and self.baton.ranks[rank].wait is not None:
            self.baton.interrupt(rank, LeftBehind())

    def leave_behind(self, rank: int, reason: str) -> None:
        """Declare a rank lost that may act again later."""
        if rank in self.departed:
            return
        self.behind.add(rank)
        for inbox in self.inboxes:
            inbox.withdraw(rank, posted=True)
        self._lose(rank, reason)
        if self._losses is not None and not self._losses.may_rejoin(rank):
            self.end(rank)

    def end(self, rank: int) -> None:
        """Kill ``rank`` if it was left behind: it must not rejoin once others work without it."""
        if rank in self.behind:
            self.behind.discard(rank)
            self.baton.interrupt(rank, Killed())

    def _slow(self, fault: Fault) -> None:
        assert fault.factor is not None
        costs, factor = self.costs[rank_of(fault)], fault.factor
        costs.slowdown *= factor
        self.report("slowed", rank_of(fault))
        if fault.for_s is not None:

            def restore() -> None:
                costs.slowdown /= factor

            self.calendar.call(self.calendar.now_s + fault.for_s, restore)

    def _lose(self, rank: int, reason: str) -> None:
        self._lost.add(rank)
        self.report("lost", rank, reason=reason)
        self.batches.take_back(rank)
        self.joining.discard(rank)
        self.waiting.discard(rank)
        self.depart(rank, reason)
        if self._losses is not None and self._losses.ends_at_once:
            lost = PeerLost([rank], "the run", reason, 0.0)
            self.calendar.call(self.calendar.now_s, lambda: self.baton.abort(lost))

    def report(self, event: str, rank: int, **facts: Any) -> None:
        """Report an event of ``rank`` to ``on_event``."""
        if self._on_event is not None:
            t = self.calendar.now_s
            self._on_event({"t": t, "event": event, "rank": rank, **facts})

    def later(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call ``callback`` at ``time_s``, which may be infinite."""
        if time_s < math.inf:
            self.calendar.call(time_s, callback)
        else:
            self.baton.stalled = True

    def end_wait(self, rank: int) -> None:
        """Wake ``rank``: its wait has succeeded, and a later departure must not fail it."""
        self.loss_checks.pop(rank, None)
        self.baton.wake(rank)

    def depart(self, rank: int, reason: str) -> None:
        """Remove ``rank`` from the members, and fail the waits that can no longer end."""
        if rank in self.departed:
            return
        self.departed[rank] = reason
        self.changed()
        self.inboxes[rank].clear()
        for dst in self.offered_to.pop(rank, ()):
            self.inboxes[dst].withdraw(rank)
        self.fail_hopeless_waits(rank)
        if len(self.departed) == self.size:  # no run is left to rejoin
            for left_behind in [*self.behind]:
                self.end(left_behind)

    def fail_hopeless_waits(self, rank: int) -> None:
        """Fail the waits of ranks other than ``rank`` that can no longer end."""
        for waiting, loss_check in list(self.loss_checks.items()):
            if waiting != rank and (error := loss_check()) is not None:
                self.baton.interrupt(waiting, error)


class SimulatedPorts(Ports):
    """The ports of one simulated rank."""

    mail: SimulatedMail
    clock: SimulatedClock

    def __init__(self, own: SimulatedRank) -> None:
        self.own, self.world = own, own.world
        mail, members = SimulatedMail(own), SimulatedMembers(own)
        super().__init__(
            own.rank,
            own.world.size,
            mail,
            SimulatedCollectives(own),
            members,
            SimulatedQueue(own),
            SimulatedClock(own),
            SimulatedRendezvous(own, members, mail),
        )

    def off_meter(self) -> SimulatedPorts:
        self.own.pass_time()
        free = copy(self.own)
        free.charged = False
        return SimulatedPorts(free)

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        """Inside this context, no action of this rank takes virtual time."""
        before, self.own.charged = self.own.charged, False
        try:
            yield
        finally:
            self.own.charged = before

    def close(self) -> None:
        self.own.pass_time()
        self.own.baton.await_parked(self.rank)
        self.world.depart(self.rank, FINISHED)
