"""Who is a member of a run over many hosts: what the registrar says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.comm.hosts.link import RankLink
from paceline.comm.hosts.roll import Roll
from paceline.comm.liveness import SLACK_S, TICK_S
from paceline.comm.ports import Members, Roster, View
from paceline.comm.ranks import ranks
from paceline.comm.standing import Standing
from paceline.errors import Outlived, PeersGone, UsageError


class HostsMembers(Members):
    """One rank's view of the members.

    Args:
        link: the connections of the rank.
        size: how many ranks there are.
        late: those that come after the beginning.
        place: the host and the process of this rank, and how many the launcher started before it.
        reset: drops the messages of an earlier incarnation.
    """

    def __init__(
        self,
        link: RankLink,
        size: int,
        late: Sequence[int],
        place: tuple[str, int, int],
        reset: Callable[[], None],
    ) -> None:
        self.link, self._place, self._reset = link, place, reset
        self.starters = ranks(tuple(rank for rank in range(size) if rank not in late))
        self._enter()

    def _enter(self) -> None:
        watch = self.link.watch("the entry")
        while "taken" in (found := self.link.begin(self._entry(), self._reset)):
            if found["by_later"]:
                raise Outlived
            # Its predecessor may have died without the registrar knowing of it yet. Time in which
            # the registrar did not reply does not count.
            watch.look()
            if watch.waited_s > self.link.limits.dead_s + SLACK_S:
                raise UsageError(f"rank ({self.link.rank}) is taken: {found['taken']}")
            self.link.wire.sleep(TICK_S)
        self.late = bool(found["late"])
        self.link.await_entry()

    def _entry(self) -> list[object]:
        """What the registrar enters into the roll."""
        host, pid, start = self._place
        return [host, pid, self.link.addresses, start]

    def alive(self) -> tuple[int, ...]:
        here, own = self.link.check().alive, self.link.rank
        return here if own in here else ranks(tuple(sorted((*here, own))))

    @property
    def roll(self) -> Roll:
        """What the registrar last said."""
        assert self.link.roll is not None
        return self.link.roll

    def view(self) -> View:
        return self.roll.view

    def incarnation(self, rank: int) -> int:
        return self.roll.incarnation(rank)

    def final_roster(self) -> tuple[tuple[int, int], ...]:
        return tuple((rank, number) for rank, number in self.link.order("final_roster"))

    def roster(self, number: int, take_in: bool = False) -> Roster | None:
        answer = self.link.order("agree", number, take_in)
        if answer is None:
            return None
        roster = _roster(answer)
        if roster.joined:
            self._await(lambda roll: _knows(roll, roster), "the roll", ())
        return roster

    def someone_waits(self) -> bool:
        return bool(self.link.check().waiting)

    def wait_to_be_taken_in(self, workers: int) -> Roster:
        self.link.order("wait")
        own, others = self.link.rank, {*range(workers)} - {self.link.rank}
        with self.link.changed:
            while (roll := self.link.check()).standing(own) is not Standing.HERE:
                if others.isdisjoint(roll.alive):
                    raise PeersGone
                self.link.changed.wait(TICK_S)
        return _roster(self.link.order("taken_in_with"))

    def announce_ready(self) -> None:
        self.link.order("ready")
        self._await(lambda roll: roll.standing(self.link.rank) is Standing.HERE, "the entry", ())

    def rejoin(self) -> None:
        self._enter()
        self.late = True

    # Waiting -------------------------------------------------------------------------------------

    def wait_for_change(self, seconds: float) -> bool:
        watch, seen = self.link.watch("a change"), self._standings(self.roll)
        while watch.waited_s < seconds:
            watch.look()
            with self.link.changed:
                self.link.changed.wait(TICK_S)
            if self._standings(self.link.check()) != seen:
                return True
        return False

    def _standings(self, roll: Roll) -> list[tuple[int, Standing]]:
        return [(entry.incarnation, entry.standing) for entry in roll.entries]

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        op = f"a successor of rank {rank}"
        watch = self.link.watch(op)

        def has_come(roll: Roll) -> bool:
            entry = roll.entries[rank]
            if entry.standing is Standing.LEFT:
                raise watch.lost([rank], "it has finished")
            return entry.incarnation > incarnation and entry.standing is Standing.HERE

        self._await(has_come, op, [rank])

    def _await(self, ready: Callable[[Roll], bool], op: str, missing: Sequence[int]) -> None:
        """Wait until what the registrar says fulfills a condition."""
        watch = self.link.watch(op)
        with self.link.changed:
            while not ready(self.link.check()):
                self.link.changed.wait(TICK_S)
                watch.check_limits(missing)


def _roster(answer: Sequence[Any]) -> Roster:
    """What the registrar answers about who acts together."""
    members, joined = answer
    return Roster(tuple((rank, number) for rank, number in members), frozenset(joined))


def _knows(roll: Roll, roster: Roster) -> bool:
    """Whether a roll shows all that were taken in, or that they are gone again."""
    numbers = dict(roster.members)
    return all(
        roll.incarnation(rank) > numbers[rank]
        or (roll.incarnation(rank) == numbers[rank] and not roll.not_ready([rank]))
        for rank in roster.joined
    )
