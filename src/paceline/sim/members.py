"""The members of a simulated run."""

from __future__ import annotations

from paceline.comm.ports import Members, View
from paceline.comm.ranks import ranks
from paceline.errors import PeerLost
from paceline.sim.rank import SimulatedRank

FINISHED = "it has finished"


class SimulatedMembers(Members):
    """One rank's view of the members."""

    def __init__(self, own: SimulatedRank) -> None:
        self._own, self._world, self._rank = own, own.world, own.rank
        self.late = self._rank in self._world.joined_late or self._rank in self._world.rejoined
        everyone = range(self._world.size)
        self.starters = ranks(tuple(r for r in everyone if r not in self._world.joined_late))

    def alive(self) -> tuple[int, ...]:
        self._own.check()
        alive = self._world.alive()
        if self._rank in self._world.joining:
            return ranks(tuple(sorted((*alive, self._rank))))
        return alive

    def view(self) -> View:
        return self._world.view()

    def incarnation(self, rank: int) -> int:
        return self._world.incarnation(rank)

    def final_roster(self) -> tuple[tuple[int, int], ...]:
        alive = self.alive()
        if self._world.final_roster is None:
            self._world.final_roster = tuple((rank, self.incarnation(rank)) for rank in alive)
        return self._world.final_roster

    def announce_ready(self) -> None:
        self._own.check()
        self._world.arrive(self._rank)

    def rejoin(self) -> None:
        self._world.enter(self._rank)
        self.late = True

    def wait_for_change(self, seconds: float) -> bool:
        self._own.check()
        world, seen = self._world, self._world.membership
        self._own.baton.wake(self._rank, self._own.calendar.now_s + seconds)
        self._own.wait_for_members("a rank that rejoins", (), patient=True)
        return world.membership != seen

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        self._own.check()
        world, op = self._world, f"a successor of rank {rank}"
        while (
            self.incarnation(rank) == incarnation or rank in world.joining or rank in world.departed
        ):
            if world.departed.get(rank) == FINISHED:
                raise PeerLost([rank], op, FINISHED, 0.0)
            self._own.wait_for_members(op, (rank,))
