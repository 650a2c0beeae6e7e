"""The members of a simulated run."""

from __future__ import annotations

from paceline.comm.ports import Members, Roster, View
from paceline.comm.ranks import ranks
from paceline.errors import PeerLost, PeersGone
from paceline.sim.rank import SimulatedRank

FINISHED = "it has finished"


class SimulatedMembers(Members):
    """One rank's view of the members."""

    def __init__(self, own: SimulatedRank) -> None:
        self._own, self._world, self._rank = own, own.world, own.rank
        self.late = self._rank in self._world.joined_late or self._rank in self._world.rejoined
        later = {*self._world.joined_late, *self._world.away}
        self.starters = ranks(tuple(r for r in range(self._world.size) if r not in later))

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

    def roster(self, number: int, take_in: bool = False) -> Roster | None:
        self._own.check()
        world = self._world
        last, roster = world.rosters.get(take_in, (0, Roster(())))
        if last < number:
            joined = frozenset(world.waiting if take_in else ())
            for rank in sorted(joined):
                world.arrive(rank)
            members = tuple((rank, self.incarnation(rank)) for rank in world.alive())
            last, roster = world.rosters[take_in] = number, Roster(members, joined)
        return roster if last == number else None

    def someone_waits(self) -> bool:
        return bool(self._world.waiting)

    def wait_to_be_taken_in(self, workers: int) -> Roster:
        self._own.check()
        world = self._world
        world.waiting.add(self._rank)
        try:
            while self._rank in world.joining:
                if not any(rank < workers for rank in world.alive()):
                    raise PeersGone
                self._own.wait_for_members("the others to take it in", (), patient=True)
        finally:
            world.waiting.discard(self._rank)
        return world.rosters[True][1]

    def announce_ready(self) -> None:
        self._own.check()
        self._world.arrive(self._rank)

    def rejoin(self) -> None:
        if self._world.registrar is not None:
            self._world.registrar.await_link(self._own)
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
