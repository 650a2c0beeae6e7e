"""Collectives in the simulated world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from torch import Tensor, dtype

from paceline.comm.ports import NOT_READY, Collectives, Factor, Total
from paceline.errors import LeftBehind, MessageMismatch, PeerLost
from paceline.sim.rank import SimulatedRank

Shape = tuple[str, int, dtype]
"""The operation, the number of elements and their dtype."""


class SimulatedGroup:
    """Members that call collectives together, and by number those that not all have joined."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.open: dict[int, Collective] = {}


class Collective:
    """One collective of a group; ``inputs`` holds each member's vector and weight."""

    def __init__(
        self, first: SimulatedRank, shape: Shape, members: tuple[int, ...], factor: Factor | None
    ) -> None:
        self._world, self._first, self._charged = first.world, first.rank, first.charged
        self.op, self._shape, self.members, self._factor = shape[0], shape, members, factor
        self.total = Total(0)
        self.result: Tensor | None = None
        self.done = self._combined = False
        self.inputs: dict[int, tuple[Tensor, int]] = {}
        self._flags = 0
        self._waiting: set[int] = set()
        self._cut_off: list[int] = []
        self._rejoined = dict(self._world.rejoined)
        self.to_join = len(members)

    def __iter__(self) -> Iterator[int]:
        """The ranks waited for: those not arrived, else those with bad links, else all."""
        missing = [m for m in self.members if m not in self.inputs]
        return iter(missing or self._cut_off or self.members)

    def check(self, rank: int, shape: Shape) -> None:
        """Refuse ``rank`` if it calls another operation than the first member did.

        If a member is gone, this collective never completes, and its loss is what counts: one that
        noticed it earlier has been here before, for another operation.
        """
        if shape != self._shape and not self._gone():
            own, first = ("{} of {} x {}".format(*each) for each in (shape, self._shape))
            raise MessageMismatch(f"rank {rank} calls {own} where rank {self._first} calls {first}")

    def arrive(self, rank: int, x: Tensor, weight: int, flags: int) -> None:
        """Add the input of ``rank``; the last member to arrive starts the operation."""
        self.inputs[rank] = (x, weight)
        self._flags |= flags
        if len(self.inputs) == len(self.members) and not self._gone():
            self._combined = True
            self._combine()

    def arrive_late(self, own: SimulatedRank, x: Tensor, weight: int, flags: int) -> None:
        """Add the input of a rank that waits already; end its wait if a member is gone."""
        self.arrive(own.rank, x, weight, flags)
        if not self.done and (error := self.lost(own.rank)) is not None:
            own.baton.interrupt(own.rank, error)

    def lost(self, rank: int) -> PeerLost | None:
        """The error for ``rank``, which has arrived, if a member is gone before all have."""
        gone = self._gone() if rank in self.inputs else []
        if not gone or (self._combined and not self._is_stuck()):
            return None
        for member in gone:
            self._world.end(member)
        return PeerLost(gone, self.op, self._world.departed.get(gone[0], NOT_READY), 0.0)

    def _is_stuck(self) -> bool:
        """Whether the sum waits for a link, at whose end the registrar loses who is cut off."""
        now_s, network = self._world.calendar.now_s, self._world.network
        is_cut = network.outages.uncut_s(now_s, self.members) > now_s
        return is_cut and self._world.registrar is not None

    def _gone(self) -> list[int]:
        """The members that were lost, or departed before they arrived, also if they came again."""
        lost, departed, rejoined = self._world.lost, self._world.departed, self._world.rejoined
        gone = [m for m in departed if m in self.members and (m in lost or m not in self.inputs)]
        again = [m for m, number in rejoined.items() if number != self._rejoined.get(m, 1)]
        return [*gone, *(m for m in again if m in self.members and m not in gone)]

    def wait(self, own: SimulatedRank, x: Tensor, after_s: float = 0.0) -> Total:
        """Wait for the end, and copy the result into the vector of this member."""
        if not self.done:
            self._waiting.add(own.rank)
            try:
                own.wait(self.op, self, lambda: self.lost(own.rank), after_s=after_s)
            except BaseException:
                self._waiting.discard(own.rank)
                raise
        if self.result is not None:
            x.copy_(self.result)
        return self.total

    def _combine(self) -> None:
        world, (x, _) = self._world, self.inputs[self.members[0]]
        contributions = [self.inputs[m] for m in self.members if self.inputs[m][1]]
        weight = sum(weight for _, weight in contributions)
        self.total = Total(weight, self._flags)
        nbytes = x.nbytes if contributions else 0
        if contributions and x.numel():
            self.result = contributions[0][0].clone()
            for x_of_other, _ in contributions[1:]:
                self.result += x_of_other
            if self._factor is not None:
                self.result *= self._factor(weight)
        if world.on_reduced is not None:
            world.on_reduced(self)
        network = world.network
        now_s = end_s = world.calendar.now_s
        if self._charged:
            price = network.all_reduce if self.op == "all_reduce" else network.broadcast
            end_s, _ = network.outages.passage(now_s, price(self.members, nbytes), self.members)
        if end_s > now_s:
            self._cut_off = network.outages.affected(now_s, self.members)
            world.later(end_s, self._complete)
        else:
            self._complete()

    def _complete(self) -> None:
        self.done = True
        self.inputs.clear()
        for rank in sorted(self._waiting):
            self._world.end_wait(rank)


class SimulatedCollectives(Collectives):
    """The collectives of one rank."""

    def __init__(self, own: SimulatedRank) -> None:
        self._own, self._world = own, own.world

    def all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None, flags: int
    ) -> Total:
        """Let the owed time pass, arrive and wait for the end, blocked only once."""
        own = self._own
        own.charge(self._world.handling.reduce, x.nbytes)
        own.baton.check(own.rank)
        owed_s = own.settle_debt()
        collective = self._join("all_reduce", x, members, factor)
        if owed_s == 0:
            own.catch_up()
            collective.arrive(own.rank, x, weight, flags)
        else:
            arrive = partial(collective.arrive_late, own, x, weight, flags)
            own.baton.compute_then(own.rank, owed_s, arrive)
        return collective.wait(own, x, owed_s)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        own = self._own
        own.charge(self._world.handling.reduce, x.nbytes)
        own.pass_time()
        collective = self._join("broadcast", x, members, None)
        collective.arrive(own.rank, x, int(src == own.rank), 0)
        collective.wait(own, x)

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        rows = self._world.rows
        if rows is None:
            return like.new_zeros(numel)
        return rows.allocate(self._own.rank, numel, like)

    def _join(
        self, op: str, x: Tensor, members: tuple[int, ...], factor: Factor | None
    ) -> Collective:
        """Join the group's next collective, without arriving in it yet."""
        world, rank, shape = self._world, self._own.rank, (op, x.numel(), x.dtype)
        if rank in world.behind:
            raise LeftBehind
        new = [m for m in sorted(world.joining) if m in members and m != rank]
        if new:
            raise PeerLost(new, op, NOT_READY, 0.0)
        rejoined = tuple(item for item in world.rejoined.items() if item[0] in members)
        group = world.groups[members, rejoined]
        number = group.calls[rank]
        group.calls[rank] += 1
        if number not in group.open:
            group.open[number] = Collective(self._own, shape, members, factor)
        collective = group.open[number]
        collective.check(rank, shape)
        collective.to_join -= 1
        if not collective.to_join:
            del group.open[number]
        return collective
