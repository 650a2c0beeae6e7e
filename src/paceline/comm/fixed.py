"""Members of worlds that nobody joins in mid-run: each rank has one incarnation."""

from __future__ import annotations

from collections.abc import Callable

from paceline.comm.ports import Members, Roster, View
from paceline.comm.ranks import everyone, ranks
from paceline.errors import PeerLost, UsageError


class FixedMembers(Members):
    """The ranks of such a world.

    Args:
        size: how many there are.
        gone: returns the ranks that are lost, and those that departed.
    """

    late = False

    def __init__(
        self,
        size: int,
        gone: Callable[[], tuple[frozenset[int], frozenset[int]]] = lambda: _NOBODY,
    ) -> None:
        self.starters = everyone(size)
        self._gone = gone

    def alive(self) -> tuple[int, ...]:
        lost, departed = self._gone()
        if not lost and not departed:
            return self.starters
        return ranks(tuple(r for r in self.starters if r not in lost and r not in departed))

    def view(self) -> View:
        lost, departed = self._gone()
        version = len(lost) + len(departed)
        return View(version, (1,) * len(self.starters), lost, departed)

    def incarnation(self, rank: int) -> int:
        return 1

    def final_roster(self) -> tuple[tuple[int, int], ...]:
        return tuple((rank, 1) for rank in self.starters)

    def roster(self, number: int, take_in: bool = False) -> Roster | None:
        return Roster(self.final_roster())

    def someone_waits(self) -> bool:
        return False

    def wait_to_be_taken_in(self, workers: int) -> Roster:
        raise UsageError("this world does not take a rank in")

    def wait_for_change(self, seconds: float) -> bool:
        return False

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        raise PeerLost([rank], "the wait for a successor", "nobody can follow it", 0.0)

    def announce_ready(self) -> None:
        pass

    def rejoin(self) -> None:
        raise UsageError("this world does not take a rank back")


_NOBODY: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
