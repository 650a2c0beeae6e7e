"""The simulated world: all ranks in one process, on a virtual clock.

:class:`World` is what the ranks share, :class:`SimulatedTransport` one rank's view of it. Exactly
one rank runs at a time (see :mod:`paceline.sim.kernel`), so nothing here needs a lock.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.comm.base import (
    MAILBOX_CAPACITY,
    Call,
    Factor,
    Limits,
    Transport,
    Work,
    check_fit,
)
from paceline.comm.membership import MembershipPolicy
from paceline.comm.ranks import ranks
from paceline.common.faults import LINK_KINDS, Fault, rank_of
from paceline.common.one_core import on_one_core
from paceline.common.seeds import user_seed
from paceline.errors import LeftBehind, MessageMismatch, PeerLost, PeersGone
from paceline.sim.cluster import Cluster, Link
from paceline.sim.compute import Costs
from paceline.sim.generators import Generators
from paceline.sim.inbox import Inbox, Message
from paceline.sim.kernel import Baton, Calendar, Killed
from paceline.sim.network import Network

Vigil = Callable[[], BaseException | None]
Window = tuple[int, Tensor]
Batch = tuple[int, int, int]


FINISHED = "it has finished"
REVIVED_AFTER_S = 1.0
"""How long it takes in virtual time until a dead rank is started again."""


class World:
    """Everything that the ranks of one simulation share.

    Args:
        cluster: what the ranks run on.
        size: how many there are.
        seed: of all that is random.
        limits: how long ranks wait for each other.
        faults: what goes wrong.
        homes: beside whom each rank lives.
        losses: what comes of the loss of a rank; without it, the others go on.
        on_event: hears what happens to ranks.
        start_s: the time that its clock begins at.

    Attributes:
        on_reduced: called with each collective when its result is there, and its inputs still are.
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
    ) -> None:
        self.size, self.limits = size, limits
        nodes = [cluster.node(rank) for rank in homes or range(size)]
        self.calendar = Calendar(start_s)
        self.baton = Baton(self.calendar, size, limits.progress_limit_s)
        self.network = Network(cluster, faults, nodes)
        self.handling = cluster.handling
        self.shares_cores = cluster.cores > 0
        if self.shares_cores:
            self.baton.share_cores(nodes, cluster.cores)
        self.costs = [Costs(cluster, rank, seed) for rank in range(size)]
        self.generators = Generators([user_seed(seed, rank) for rank in range(size)])
        self.inboxes = [Inbox() for _ in range(size)]
        self.offered_to: defaultdict[int, set[int]] = defaultdict(set)
        self.windows: list[Window | None] = [None] * size
        self.kept: dict[int, Tensor] = {}
        self.shelves: dict[tuple[int, int], Tensor] = {}
        self.queues: dict[int, list[int]] = {}
        self.in_hand: list[set[Batch]] = [set() for _ in range(size)]
        self.returned: list[Batch] = []
        self.groups: dict[tuple[Any, ...], Group] = {}
        self.departed: dict[int, str] = {}
        self.behind: set[int] = set()
        self.frozen: frozenset[int] = frozenset()
        self.membership = 0
        self.last_members: tuple[tuple[int, int], ...] | None = None
        self.reborn: dict[int, int] = {}
        self._losses, self._on_event = losses, on_event
        self.call = Call()
        self.meetings: dict[int, set[int]] = {}
        self.retired: frozenset[int] = frozenset()
        self.meetings_over, self.given_up = False, 0
        self.stopping = False
        self.vigils: dict[int, Vigil] = {}
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
        self._lost: set[int] = set()
        self._alive: tuple[int, ...] | None = None
        self.on_reduced: Callable[[Collective], None] | None = None

    def run(self, body: Callable[[SimulatedTransport], None]) -> None:
        """Run ``body`` on every rank to the end of the simulation."""

        def on_rank(rank: int) -> None:
            torch.set_num_threads(1)
            while True:
                try:
                    transport = SimulatedTransport(self, rank)
                    transport.resume()
                    body(transport)
                    transport.close()
                    return
                except Killed:
                    self._revive(rank)

        begin_s = self.calendar.now_s
        for fault in self._faults:
            if fault.at_step is None and (fault.at_s or 0.0) >= begin_s:
                self.calendar.call(fault.at_s or 0.0, partial(self.inject, fault))
        threads = torch.get_num_threads()
        try:
            with self.generators, on_one_core():
                starts = (self.joined_late.get(rank, 0.0) for rank in range(self.size))
                self.baton.run(on_rank, [max(begin_s, start_s) for start_s in starts])
        finally:
            torch.set_num_threads(threads)
        if self._lost and self._losses is not None and not self._losses.goes_on:
            why = {self.departed.get(rank, "it died") for rank in self._lost}
            raise PeerLost(self.lost, "the run", "; ".join(sorted(why)), 0.0)

    def _revive(self, rank: int) -> None:
        """Start a dead rank again, if that is due; otherwise end its thread."""
        if self.baton.failure is not None:
            raise Killed
        if rank in self._returns:
            after_s = max(0.0, self._returns.pop(rank) - self.calendar.now_s)
        elif self._losses is not None and self._losses.restarts(rank):
            after_s = REVIVED_AFTER_S
        else:
            raise Killed
        self.baton.revive(rank, after_s)
        self.enter(rank)

    def enter(self, rank: int) -> None:
        """Begin another life of ``rank``; it is not a member before it has its state."""
        for inbox in self.inboxes:  # what an earlier life has sent does not count any more
            inbox.withdraw(rank, posted=True)
        self.give_up_waits(rank)
        self.reborn[rank] = self.reborn.get(rank, 1) + 1
        self.departed.pop(rank, None)
        self.behind.discard(rank)
        self.joining.add(rank)
        self.in_hand[rank].clear()
        self.retired -= {rank}
        self.changed()

    def arrive(self, rank: int) -> None:
        """Make ``rank``, which has come late, a member."""
        if rank in self.joining:
            self.joining.discard(rank)
            self.arrivals.append((self.calendar.now_s, rank))
            self.changed()

    def changed(self) -> None:
        """Hear that the members have changed: those who wait for one look again."""
        self.membership += 1
        self._alive = None
        self.look_again()

    def look_again(self) -> None:
        """Wake those who wait for others to come."""
        for waiting in list(self.awaiting):
            self.end_wait(waiting)

    def alive(self) -> tuple[int, ...]:
        """The ranks that have come and have a state, and have neither left nor died."""
        if self._alive is None:
            away = self.joining
            here = (r for r in range(self.size) if r not in self.departed and r not in away)
            self._alive = ranks(tuple(here))
        return self._alive

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that died, or were frozen for too long."""
        return tuple(sorted(self._lost))

    # Faults --------------------------------------------------------------------------------------

    def faults_at(self, rank: int, step: int) -> list[Fault]:
        """The faults that befall ``rank`` before its own step ``step``, in its first life."""
        if rank in self.reborn:
            return []
        return [fault for fault in self._faults if fault.rank == rank and fault.at_step == step]

    def inject(self, fault: Fault) -> None:
        """Let ``fault`` happen now, if its rank is there."""
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
        self.tell("stopped", rank)

        def give_up() -> None:
            if self.baton.ranks[rank].frozen_since_s == since_s:
                self.behind.add(rank)
                for inbox in self.inboxes:
                    inbox.withdraw(rank, posted=True)
                self._lose(rank, f"it has been stopped for {self.limits.dead_s:g} s")
                if self._losses is not None and not self._losses.comes_back(rank):
                    self.end(rank)

        self.calendar.call(since_s + self.limits.dead_s, give_up)
        if fault.for_s is not None:
            self.calendar.call(since_s + fault.for_s, lambda: self._thaw(rank))

    def _thaw(self, rank: int) -> None:
        self.baton.thaw(rank)
        self.frozen -= {rank}
        if rank in self.behind and self.baton.ranks[rank].wait is not None:
            self.baton.interrupt(rank, LeftBehind())

    def end(self, rank: int) -> None:
        """End a rank that was left behind and has not come back, before others work without it."""
        if rank in self.behind:
            self.behind.discard(rank)
            self.baton.interrupt(rank, Killed())

    def _slow(self, fault: Fault) -> None:
        assert fault.factor is not None
        costs, factor = self.costs[rank_of(fault)], fault.factor
        costs.slowdown *= factor
        self.tell("slowed", rank_of(fault))
        if fault.for_s is not None:

            def restore() -> None:
                costs.slowdown /= factor

            self.calendar.call(self.calendar.now_s + fault.for_s, restore)

    def _lose(self, rank: int, reason: str) -> None:
        self._lost.add(rank)
        self.tell("lost", rank, reason=reason)
        self.returned += sorted(self.in_hand[rank])
        self.in_hand[rank].clear()
        self.joining.discard(rank)
        self.depart(rank, reason)
        if self._losses is not None and self._losses.ends_at_once:
            lost = PeerLost([rank], "the run", reason, 0.0)
            self.calendar.call(self.calendar.now_s, lambda: self.baton.abort(lost))

    def tell(self, event: str, rank: int, **facts: Any) -> None:
        """Say what has happened to a rank."""
        if self._on_event is not None:
            t = self.calendar.now_s
            self._on_event({"t": t, "event": event, "rank": rank, **facts})

    def later(self, time_s: float, callback: Callable[[], None]) -> None:
        """Have ``callback`` run at ``time_s``, which may be never."""
        if time_s < math.inf:
            self.calendar.call(time_s, callback)
        else:
            self.baton.stalled = True

    def end_wait(self, rank: int) -> None:
        """Wake ``rank``: what it waited for is there, and nobody's departure can undo that."""
        self.vigils.pop(rank, None)
        self.baton.wake(rank)

    def depart(self, rank: int, reason: str) -> None:
        """Take ``rank`` out, and tell those whose wait can no longer end."""
        if rank in self.departed:
            return
        self.departed[rank] = reason
        self.changed()
        self.inboxes[rank].clear()
        for dst in self.offered_to.pop(rank, ()):
            self.inboxes[dst].withdraw(rank)
        self.give_up_waits(rank)
        if len(self.departed) == self.size:  # nobody is left whom they could come back to
            for left in [*self.behind]:
                self.end(left)

    def give_up_waits(self, rank: int) -> None:
        """End the waits of others that cannot come to an end any more."""
        for waiting, vigil in list(self.vigils.items()):
            if waiting != rank and (error := vigil()) is not None:
                self.baton.interrupt(waiting, error)


class Offer(Work):
    """A message that its sender holds until it is taken."""

    def __init__(self, transport: SimulatedTransport, message: Message, dst: int) -> None:
        self._transport, self._message, self._dst = transport, message, dst

    def done(self) -> bool:
        self._transport.pass_time()
        return self._message.taken

    def wait(self) -> int:
        if not self._message.taken:
            op = f"send to rank {self._dst}"
            self._message.awaited = True
            self._transport.wait(op, (self._dst,), lambda: self._transport.loss([self._dst], op))
        return 1


class Group:
    """Members that call collectives together, and those that they have not ended yet."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.open: dict[int, Collective] = {}


class Collective:
    """One operation among the members of a group; ``inputs`` are their vectors and weights."""

    def __init__(
        self,
        world: World,
        op: str,
        members: tuple[int, ...],
        x: Tensor,
        factor: Factor | None,
        charged: bool,
        first: int,
    ) -> None:
        self._first = first
        self.op, self.members, self._factor, self._charged = op, members, factor, charged
        self._shape = (op, x.numel(), x.dtype)
        self.total = 0
        self.result: Tensor | None = None
        self.done = self._combined = False
        self._world = world
        self.inputs: dict[int, tuple[Tensor, int]] = {}
        self._waiting: set[int] = set()
        self._cut_off: list[int] = []
        self._left = len(members)

    def __iter__(self) -> Iterator[int]:
        """Those who are waited for: who is missing, else who is behind bad links, else all."""
        missing = [m for m in self.members if m not in self.inputs]
        return iter(missing or self._cut_off or self.members)

    def check(self, rank: int, op: str, x: Tensor) -> None:
        """Refuse a rank that calls something else."""
        shape = (op, x.numel(), x.dtype)
        if shape != self._shape:
            raise MessageMismatch(
                f"rank {rank} calls {_describe(shape)} where rank {self._first} calls"
                f" {_describe(self._shape)}"
            )

    def arrive(self, rank: int, x: Tensor, weight: int) -> None:
        """Commit this rank's part; the last one to come sets the end."""
        self.inputs[rank] = (x, weight)
        if len(self.inputs) == len(self.members) and not self._gone():
            self._combined = True
            self._combine()

    def lost(self, rank: int) -> PeerLost | None:
        """The error of ``rank``, which has arrived, when a member has gone before all had."""
        if rank not in self.inputs or self._combined:
            return None
        gone = self._gone()
        if not gone:
            return None
        for member in gone:
            self._world.end(member)
        return PeerLost(gone, self.op, self._world.departed[gone[0]], 0.0)

    def _gone(self) -> list[int]:
        """The members that were lost, or have left without that they arrived."""
        lost, departed = self._world.lost, self._world.departed
        return [m for m in departed if m in self.members and (m in lost or m not in self.inputs)]

    def wait(self, transport: SimulatedTransport, after_s: float) -> None:
        """Wait for the end, and forget the operation when the last member has seen it."""
        if not self.done:
            rank = transport.rank
            self._waiting.add(rank)
            transport.wait(self.op, self, lambda: self.lost(rank), after_s=after_s)
        self._left -= 1

    @property
    def over(self) -> bool:
        """Whether every member has seen the end."""
        return self._left == 0

    def _combine(self) -> None:
        world, (x, _) = self._world, self.inputs[self.members[0]]
        contributions = [self.inputs[m] for m in self.members if self.inputs[m][1]]
        self.total = sum(weight for _, weight in contributions)
        nbytes = x.nbytes if contributions else 0
        if contributions and x.numel():
            self.result = contributions[0][0].clone()
            for theirs, _ in contributions[1:]:
                self.result += theirs
            if self._factor is not None:
                self.result *= self._factor(self.total)
        if world.on_reduced is not None:
            world.on_reduced(self)
        price = world.network.all_reduce if self.op == "all_reduce" else world.network.broadcast
        if not self._charged:
            self._complete()
            return
        now_s, seconds = world.calendar.now_s, price(self.members, nbytes).seconds
        end_s = world.network.end_s(now_s, seconds, self.members)
        if end_s > now_s:
            self._cut_off = world.network.affected(now_s, self.members)
            world.later(end_s, self._complete)
        else:
            self._complete()

    def _complete(self) -> None:
        self.done = True
        self.inputs.clear()
        for rank in sorted(self._waiting):
            self._world.end_wait(rank)


def _describe(shape: tuple[str, int, torch.dtype]) -> str:
    return f"{shape[0]} of {shape[1]} x {shape[2]}"


class CollectiveWork(Work):
    """One member's part in a collective."""

    def __init__(
        self, transport: SimulatedTransport, group: Group, number: int, part: Collective, x: Tensor
    ) -> None:
        self._transport, self._part, self._x = transport, part, x
        self._group, self._number = group, number

    def arrive(self, weight: int) -> None:
        """Commit this rank's part."""
        self._part.arrive(self._transport.rank, self._x, weight)

    def arrive_late(self, weight: int) -> None:
        """Commit the part of a rank that waits already; end its wait, if a member has gone."""
        self.arrive(weight)
        rank, part = self._transport.rank, self._part
        if not part.done and (error := part.lost(rank)) is not None:
            self._transport.world.baton.interrupt(rank, error)

    def done(self) -> bool:
        self._transport.pass_time()
        return self._part.done

    def wait(self, after_s: float = 0.0) -> int:
        self._part.wait(self._transport, after_s)
        if self._part.result is not None:
            self._x.copy_(self._part.result)
        if self._part.over:
            del self._group.open[self._number]
        return self._part.total


class SimulatedTransport(Transport):
    """One rank's view of a :class:`World`."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._baton, self._calendar = world.baton, world.calendar
        self._inbox = world.inboxes[rank]
        self.late = rank in world.joined_late or rank in world.reborn
        self._charged = self._works = True
        self._owed_s = 0.0

    # Waiting -------------------------------------------------------------------------------------

    def wait(
        self,
        op: str,
        peers: Iterable[int],
        vigil: Vigil,
        patient: bool = False,
        after_s: float = 0.0,
    ) -> None:
        """Wait to be woken; ``vigil`` tells, whenever a rank departs, whether to give up."""
        if (error := vigil()) is not None:
            raise error
        self.world.vigils[self.rank] = vigil
        start_s = self._calendar.now_s + after_s
        try:
            self._baton.wait(self.rank, op, peers, patient, after_s)
        except PeerLost as lost:
            waited_s = self._calendar.now_s - start_s
            raise PeerLost(lost.ranks, lost.op, lost.reason, waited_s) from None
        finally:
            self.world.vigils.pop(self.rank, None)

    def loss(self, peers: Sequence[int], op: str) -> PeerLost | None:
        """The error of a wait for ``peers``, when none of them is there any more."""
        departed = self.world.departed
        if any(peer not in departed for peer in peers):
            return None
        return PeerLost(peers, op, departed[peers[0]], 0.0)

    def _until(self, time_s: float, op: str, peer: int) -> None:
        if time_s > self._calendar.now_s:
            if time_s < math.inf:
                self._baton.wake(self.rank, time_s)
            else:
                self._baton.stalled = True
            self.wait(op, (peer,), lambda: None)

    def _carry(self, src: int, nbytes: int, op: str) -> None:
        """Wait while a message comes from ``src``, once the way is whole."""
        network = self.world.network
        self._until(network.whole_s(self._calendar.now_s, (src, self.rank)), op, src)
        there_s = network.transfer(self._calendar.now_s, src, self.rank, nbytes)
        self._until(there_s, op, src)

    # Members -------------------------------------------------------------------------------------

    def alive(self) -> tuple[int, ...]:
        self._check()
        alive = self.world.alive()
        if self.rank in self.world.joining:
            return ranks(tuple(sorted((*alive, self.rank))))
        return alive

    def _check(self) -> None:
        """Let the time pass, and find out whether the others have gone on without this rank."""
        self.pass_time()
        if self.rank in self.world.behind:
            raise LeftBehind

    def membership(self) -> int:
        return self.world.membership

    def life(self, rank: int) -> int:
        late_s = self.world.joined_late.get(rank)
        if late_s is not None and self._calendar.now_s < late_s:
            return 0
        return self.world.reborn.get(rank, 1)

    def last_members(self) -> tuple[tuple[int, int], ...]:
        alive = self.alive()
        if self.world.last_members is None:
            self.world.last_members = tuple((rank, self.life(rank)) for rank in alive)
        return self.world.last_members

    def lost_life(self, rank: int) -> int:
        return self.life(rank) - (rank not in self.world.departed)

    def lost(self) -> frozenset[int]:
        return frozenset(rank for rank in self.world.lost if rank in self.world.departed)

    def left(self) -> frozenset[int]:
        return frozenset(rank for rank, why in self.world.departed.items() if why == FINISHED)

    def stopped(self) -> frozenset[int]:
        return self.world.frozen

    def stop_all(self) -> None:
        self.pass_time()
        self.world.stopping = True

    def stopping(self) -> bool:
        return self.world.stopping

    def retired(self) -> frozenset[int]:
        self.pass_time()
        return self.world.retired

    def arrived(self) -> None:
        self._check()
        self.world.arrive(self.rank)

    def rejoin(self) -> None:
        self.world.enter(self.rank)
        self.late = True

    def inherited(self, like: Tensor, rank: int) -> tuple[int, Tensor] | None:
        window = self.world.windows[rank]
        return None if window is None else (window[0], window[1].clone())

    def keep(self, x: Tensor) -> None:
        self._check()
        self.world.kept[self.rank] = x.clone()

    def kept(self) -> Tensor | None:
        left = self.world.kept.get(self.rank)
        return None if left is None else left.clone()

    def shelve(self, x: Tensor, shelf: int) -> None:
        self._check()
        self.world.shelves[self.rank, shelf] = x.clone()

    def shelved(self, rank: int, shelf: int) -> Tensor | None:
        left = self.world.shelves.get((rank, shelf))
        return None if left is None else left.clone()

    def await_change(self, seconds: float) -> bool:
        self._check()
        world, seen = self.world, self.world.membership
        end_s = self._calendar.now_s + seconds
        self._baton.wake(self.rank, end_s)
        world.awaiting.add(self.rank)
        try:
            self.wait("a rank that comes back", (), lambda: None, patient=True)
        finally:
            world.awaiting.discard(self.rank)
        return world.membership != seen

    def await_return(self, rank: int, life: int) -> None:
        self._check()
        world, op = self.world, f"a successor of rank {rank}"
        while self.life(rank) == life or rank in world.joining or rank in world.departed:
            if world.departed.get(rank) == FINISHED:
                raise PeerLost([rank], op, FINISHED, 0.0)
            world.awaiting.add(self.rank)
            try:
                self.wait(op, (rank,), lambda: None)
            finally:
                world.awaiting.discard(self.rank)

    def starters(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in self.world.joined_late)

    # Meetings ------------------------------------------------------------------------------------

    meets = True

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        world, alive = self.world, self.world.alive()
        if world.call.number != known:
            return
        lives = tuple(self.life(rank) if rank in alive else 0 for rank in range(self.size))
        world.call = Call(world.call.number + 1, step, stop, lives)
        world.given_up = max(world.given_up, over)
        world.look_again()

    def called(self) -> Call:
        return self.world.call

    def meet(self, number: int, members: Sequence[int], lives: Sequence[int]) -> bool:
        """Wait; in the end all go on at one time, in rank order."""
        self._check()
        world, op = self.world, "a meeting"
        if world.given_up >= number:
            return False
        here = world.meetings.setdefault(number, set())
        here.add(self.rank)
        if here.issuperset(members):
            for rank in sorted(here):
                world.end_wait(rank)
            self.wait(op, members, lambda: None, patient=True)
            return True
        while not here.issuperset(members):
            gone = any(
                rank in world.departed or self.life(rank) != life
                for rank, life in enumerate(lives)
                if life
            )
            if gone or world.meetings_over or world.given_up >= number:
                world.given_up = max(world.given_up, number)
                world.look_again()
                return False
            world.awaiting.add(self.rank)
            try:
                self.wait(op, members, lambda: None, patient=True)
            finally:
                world.awaiting.discard(self.rank)
        return world.given_up < number

    def retire(self) -> None:
        self.pass_time()
        self.world.retired |= {self.rank}
        self.world.meetings_over = True
        self.world.look_again()

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        world = self.world
        state: dict[str, Any] = {
            "inbox": [
                (m.src, m.tag, m.x.clone(), m.arrived_s) for m in world.inboxes[self.rank].all()
            ],
            "window": world.windows[self.rank],
            "kept": world.kept.get(self.rank),
            "in_hand": sorted(world.in_hand[self.rank]),
            "costs": world.costs[self.rank].state(),
        }
        if without is not None:
            queues = {queue: [*place] for queue, place in world.queues.items()}
            returned = world.returned + [b for rank in without for b in sorted(world.in_hand[rank])]
            state |= {"network": world.network.state(), "queues": queues}
            state |= {"returned": returned, "call": tuple(world.call[:2])}
            state["cores"] = [cores.state() for cores in world.baton.cores()]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        world, rank = self.world, self.rank
        for src, tag, x, at_s in state["inbox"]:
            arrived_s = at_s if at_s < math.inf else self._calendar.now_s  # a link may be whole now
            message = Message(src, tag, x, True, arrived_s)
            world.inboxes[rank].add(message)
            if arrived_s > self._calendar.now_s:
                world.later(arrived_s, partial(self._ring, message, rank))
        world.windows[rank] = state["window"]
        if state["kept"] is not None:
            world.kept[rank] = state["kept"]
        world.in_hand[rank] = set(state["in_hand"])
        world.costs[rank].load_state(state["costs"])
        if "queues" in state:
            world.network.load_state(state["network"])
            world.queues, world.returned = state["queues"], state["returned"]
            number, step = state["call"]
            world.call = Call(number, step, lives=(0,) * self.size)
            for cores, its_state in zip(world.baton.cores(), state["cores"], strict=True):
                cores.load_state(its_state)

    @contextmanager
    def free(self) -> Iterator[None]:
        before, self._charged = self._charged, False
        try:
            yield
        finally:
            self._charged = before

    # Messages ------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        self._handle(self.world.handling.post, x)
        message = Message(self.rank, tag, x, False, self._calendar.now_s)
        if dst not in self.world.departed:
            self.world.offered_to[self.rank].add(dst)
            self.world.inboxes[dst].add(message)
            self._ring(message, dst)
        return Offer(self, message, dst)

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        self._check()
        held = self.world.inboxes[dst].posted_by(self.rank)
        if held >= MAILBOX_CAPACITY or dst in self.world.departed:
            return False
        self.deliver(x, dst, tag)
        return True

    def deliver(self, x: Tensor, dst: int, tag: int) -> None:
        """Post ``x``, whether the mailbox of ``dst`` has room or not."""
        self._handle(self.world.handling.post, x)
        if dst not in self.world.departed:
            message = Message(self.rank, tag, x.clone(), True, math.inf)
            self.world.inboxes[dst].add(message)
            self._set_out(message, dst)

    def _set_out(self, message: Message, dst: int) -> None:
        """Put a posted message on the way, once that is whole."""
        network, now_s = self.world.network, self._calendar.now_s
        whole_s = network.whole_s(now_s, (self.rank, dst))
        if whole_s > now_s:
            self.world.later(whole_s, lambda: self._set_out(message, dst))
            return
        there_s = network.transfer(now_s, self.rank, dst, message.x.nbytes)
        message.arrived_s = there_s
        self.world.inboxes[dst].arrives(message)
        if there_s > now_s:
            self.world.later(there_s, lambda: self._ring(message, dst))
        else:
            self._ring(message, dst)

    def _ring(self, message: Message, dst: int) -> None:
        sources, tag = self.world.receivers.get(dst, ((), 0))
        if message.tag == tag and message.src in sources:
            self.world.end_wait(dst)

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        self._check()
        no_more = partial(self._loss if watch else self._no_more, sources, tag, op)
        while (message := self._inbox.find(sources, tag, self._calendar.now_s)) is None:
            self.world.receivers[self.rank] = (sources, tag)
            try:
                self.wait(op, sources, no_more, op == "recv_any")
            finally:
                del self.world.receivers[self.rank]
        return self._receive(message, like, op)

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        self._check()
        message = self._inbox.find(sources, tag, self._calendar.now_s)
        return None if message is None else self._receive(message, like, "poll")

    def _receive(self, message: Message, like: Tensor, op: str) -> tuple[int, Tensor]:
        self._inbox.remove(message)
        x, src = message.x, message.src
        try:
            check_fit(like, x.numel(), x.dtype, src, message.tag)
            if not message.posted:
                x = x.clone()
                self._carry(src, x.nbytes, op)
        finally:
            message.taken = True
            if message.awaited:
                self.world.end_wait(src)
        self._charge(self.world.handling.take, x.nbytes)
        return src, x.view_as(like)

    def _no_more(self, sources: Sequence[int], tag: int, op: str) -> BaseException | None:
        """Why to give up on a message: all who could send it are gone, and none is on its way."""
        if any(src in sources for src in self._inbox.senders(tag)):
            return None
        lost = self.loss(sources, op)
        return PeersGone() if lost and op == "recv_any" else lost

    def _loss(self, sources: Sequence[int], tag: int, op: str) -> BaseException | None:
        """The first of ``sources`` that is gone and has left no message."""
        departed, left = self.world.departed, self._inbox.senders(tag)
        gone = [rank for rank in departed if rank in sources and rank not in left]
        return PeerLost([min(gone)], op, departed[min(gone)], 0.0) if gone else None

    # Windows -------------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        self._handle(self.world.handling.publish, x)
        self._check()
        previous = self.world.windows[self.rank]
        version = 1 if previous is None else previous[0] + 1
        self.world.windows[self.rank] = (version, x.clone())
        return version

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        self._check()
        if not self._charged:
            window = self._window(src)
            return None if window is None else (window[0], window[1].clone())
        latency_s = self.world.network.link(self.rank, src).latency_s
        if latency_s == 0 or self.world.network.has_outages:
            return self.read(src, like, lambda: self._window(src))
        window = self._fetch(src, latency_s)
        if window is None:
            return None
        version, x = window
        if like is not None:
            check_fit(like, x.numel(), x.dtype, src, 0)
        self._charge(self.world.handling.peek, x.nbytes)
        return version, x.clone()

    def _fetch(self, src: int, latency_s: float) -> Window | None:
        """In one wait: the time owed passes, the request goes there, the window comes back."""
        network, seen = self.world.network, list[Window | None]()

        def ask() -> None:
            turn = self._baton.ranks[self.rank].turn
            there_s = network.request(self._calendar.now_s, self.rank, src)
            self._calendar.call(there_s, partial(look, turn))

        def look(turn: int) -> None:
            if self._baton.ranks[self.rank].turn != turn:
                return  # who asked was lost meanwhile
            now_s, window = self._calendar.now_s, self._window(src)
            seen.append(window)
            there_s = now_s + latency_s
            if window is not None:
                there_s = network.transfer(now_s, src, self.rank, window[1].nbytes)
            self._calendar.wake(there_s, self.rank, turn)

        self._baton.check(self.rank)
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s > 0:
            self._baton.compute_then(self.rank, owed_s, ask)
        else:
            ask()
        self.wait(f"peek at rank {src}", (src,), lambda: None, after_s=owed_s)
        return seen[0]

    def _window(self, src: int) -> Window | None:
        here = src not in self.world.departed and src not in self.world.joining
        return self.world.windows[src] if here else None

    def read(
        self, src: int, like: Tensor | None, look: Callable[[], Window | None]
    ) -> Window | None:
        """Fetch what ``look`` finds at ``src``, in the time that the request and it take."""
        self.pass_time()
        network, op = self.world.network, f"peek at rank {src}"
        latency_s = network.link(self.rank, src).latency_s
        self._until(network.whole_s(self._calendar.now_s, (src, self.rank)), op, src)
        self._until(network.request(self._calendar.now_s, self.rank, src), op, src)
        window = look()
        if window is None:
            self._until(self._calendar.now_s + latency_s, op, src)
            return None
        version, x = window
        if like is not None:
            check_fit(like, x.numel(), x.dtype, src, 0)
        self._carry(src, x.nbytes, op)
        self._charge(self.world.handling.peek, x.nbytes)
        return version, x.clone()

    # Collectives ---------------------------------------------------------------------------------

    def start_all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> Work:
        self._handle(self.world.handling.reduce, x)
        return self._start("all_reduce", x, weight, members, factor)

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> int:
        """In one wait: the time owed passes, then this rank arrives."""
        self._charge(self.world.handling.reduce, x.nbytes)
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s == 0:
            return self._start("all_reduce", x, weight, members, factor).wait()
        self._baton.check(self.rank)
        work = self._join("all_reduce", x, members, factor)
        self._baton.compute_then(self.rank, owed_s, lambda: work.arrive_late(weight))
        return work.wait(after_s=owed_s)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        self._handle(self.world.handling.reduce, x)
        self._start("broadcast", x, int(src == self.rank), members).wait()

    def _start(
        self,
        op: str,
        x: Tensor,
        weight: int,
        members: tuple[int, ...],
        factor: Factor | None = None,
    ) -> Work:
        self.pass_time()
        work = self._join(op, x, members, factor)
        work.arrive(weight)
        return work

    def _join(
        self, op: str, x: Tensor, members: tuple[int, ...], factor: Factor | None
    ) -> CollectiveWork:
        """This rank's part in the group's next collective, in which it has not arrived yet."""
        if self.rank in self.world.behind:
            raise LeftBehind
        lives = tuple(item for item in self.world.reborn.items() if item[0] in members)
        group = self.world.groups.get((members, lives))
        if group is None:
            group = self.world.groups[members, lives] = Group()
        number = group.calls[self.rank]
        group.calls[self.rank] += 1
        part = group.open.get(number)
        if part is None:
            part = group.open[number] = Collective(
                self.world, op, members, x, factor, self._charged, self.rank
            )
        part.check(self.rank, op, x)
        return CollectiveWork(self, group, number, part, x)

    # Clock and data ------------------------------------------------------------------------------

    def ticket(self, queue: int, epoch: int) -> int | None:
        self._check()
        world = self.world
        state = world.queues.setdefault(queue, [epoch, 0])
        if state[0] > epoch:
            return None
        if state[0] < epoch:
            state[:] = [epoch, 0]
        again = next((b for b in world.returned if b[:2] == (queue, epoch)), None)
        if again is not None:
            world.returned.remove(again)
            number = again[2]
        else:
            number = state[1]
            state[1] += 1
        world.in_hand[self.rank].add((queue, epoch, number))
        return number

    def done_with(self, queue: int, epoch: int, number: int) -> None:
        self.world.in_hand[self.rank].discard((queue, epoch, number))

    def batches_lost(self) -> int:
        return len(self.world.returned)

    def now(self) -> float:
        return self._calendar.now_s + self._owed_s

    def compute(self, seconds: float) -> None:
        self._owed_s += seconds
        if self.world.shares_cores:  # how long it takes is known only when it is over
            self.pass_time()

    def _charge(self, work: Link, nbytes: int) -> None:
        """Charge what this rank's own core does with a vector."""
        if self._charged and self._works:
            self.compute(self.world.network.work_s(work, nbytes))

    def _handle(self, work: Link, x: Tensor) -> None:
        """Charge it, and let it pass with all that was computed before."""
        self._charge(work, x.nbytes)
        self.pass_time()

    def charge_gather(self, nbytes: int) -> None:
        self._charge(self.world.handling.gather, nbytes)

    def serves(self) -> None:
        self._works = False

    def charge_update(self, nbytes: int) -> None:
        self.compute(self.world.network.update_s(nbytes))

    def know_model(self, nbytes: int, tensors: int) -> float:
        return self.world.network.know_model(nbytes, tensors)

    def pass_time(self) -> None:
        """Let the time pass that was computed, before the rank does what others can tell."""
        self._baton.check(self.rank)
        if self._owed_s > 0:
            owed_s, self._owed_s = self._owed_s, 0.0
            self._baton.sleep(self.rank, owed_s)

    def step_begins(self, step: int) -> None:
        if self.world.has_step_faults:
            self.pass_time()
            for fault in self.world.faults_at(self.rank, step):
                self.world.inject(fault)
        self._baton.check(self.rank)
        self._baton.stay_frozen(self.rank)

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        return like.new_zeros(numel)

    def resume(self) -> None:
        self._baton.check(self.rank)
        self.world.generators.switch_to(self.rank)

    def uncharged(self) -> SimulatedTransport:
        self.pass_time()
        free = copy(self)
        free._charged = False
        return free

    def close(self) -> None:
        self.pass_time()
        self.world.depart(self.rank, FINISHED)
