"""What the registrar last told a rank: the members, and what else all ranks see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from paceline.comm.hosts.registrar import RollEntry
from paceline.comm.ports import Call, View
from paceline.comm.ranks import Ranks, ranks
from paceline.comm.standing import LOST, PRESENT, Standing


class Roll:
    """The state that the registrar pushed; it never changes.

    Args:
        shared: see :meth:`~paceline.comm.hosts.registrar.Registrar.shared`.
        late: the ranks that come after the beginning.
    """

    def __init__(self, shared: Mapping[str, Any], late: frozenset[int]) -> None:
        self.version: int = shared["version"]
        self.entries = [RollEntry.of(row) for row in shared["roll"]]
        self.closed: bool = shared["closed"]
        number, step, stop, incarnations = shared["call"]
        self.call = Call(number, step, stop, tuple(incarnations))
        self.outcomes = {int(number): outcome for number, outcome in shared["outcomes"].items()}
        self._stopped = frozenset(shared["stopped"])
        self._finished, self._late = shared["finished"], late

    def incarnation(self, rank: int) -> int:
        """Which incarnation of a rank is, or was, the last; 0 before a late joiner has come."""
        number = self.entries[rank].incarnation
        return number if number or rank in self._late else 1

    def not_ready(self, among: Sequence[int]) -> list[int]:
        """Those of these ranks that have come and are no members yet."""
        return [r for r in among if self.standing(r) in (Standing.JOINING, Standing.WAITING)]

    def standing(self, rank: int) -> Standing:
        """How a rank stands."""
        return self.entries[rank].standing

    @cached_property
    def alive(self) -> Ranks:
        """The ranks that are here, or will be at the beginning."""
        return ranks(tuple(rank for rank in range(len(self.entries)) if self._is_here(rank)))

    def _is_here(self, rank: int) -> bool:
        standing = self.standing(rank)
        expected = standing is Standing.EXPECTED and rank not in self._late
        return expected or standing is Standing.HERE

    @cached_property
    def waiting(self) -> frozenset[int]:
        """The ranks that wait to be taken in."""
        ranks = range(len(self.entries))
        return frozenset(rank for rank in ranks if self.standing(rank) is Standing.WAITING)

    @cached_property
    def finished(self) -> frozenset[int]:
        """The workers that have come to the end of their data."""
        return frozenset(
            rank
            for rank, number in enumerate(self._finished)
            if number and number == self.entries[rank].incarnation
        )

    @cached_property
    def view(self) -> View:
        """The members as ports show them."""
        everyone = range(len(self.entries))
        return View(
            self.version,
            [self.incarnation(rank) for rank in everyone],
            frozenset(rank for rank in everyone if self.standing(rank) in LOST),
            frozenset(rank for rank in everyone if self.standing(rank) is Standing.LEFT),
            self._stopped,
        )

    def why_gone(self, rank: int, incarnation: int = 0) -> str | None:
        """Why ``rank``, in this incarnation, is not here any more; None while it is."""
        entry = self.entries[rank]
        if incarnation and entry.incarnation != incarnation:
            return "it died" if entry.incarnation > incarnation else None
        return entry.reason or None if entry.standing not in _PRESENT else None


_PRESENT = (Standing.EXPECTED, *PRESENT)
