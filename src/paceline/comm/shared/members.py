"""The roll: who is a member of the run, the same for every rank of a host.

A rank enters it, has the state that it needs and is ``HERE``, and leaves; or another strikes it
off, because it died or was stopped for too long. Every entry counts the lives of its rank, so that
what an earlier life has left behind is told from what the present one says. Entries change under
one lock, and each change makes the membership number grow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import NamedTuple

from paceline.comm.shared.memory import SharedWords

Lock = Callable[[], AbstractContextManager[None]]


class Standing(IntEnum):
    """Where a rank stands."""

    EXPECTED = 0
    JOINING = 1
    HERE = 2
    LEFT = 3
    DIED = 4
    STOPPED = 5


class Entry(NamedTuple):
    """What the roll says of a rank: which of its lives, and how that stands."""

    life: int
    standing: Standing

    @property
    def word(self) -> int:
        """The entry as it lies in memory."""
        return self.life * 8 + self.standing


class MemberTable:
    """The roll of ``size`` ranks, at the words from ``start`` on: the number, then the entries."""

    def __init__(self, words: SharedWords, start: int, size: int, lock: Lock) -> None:
        self._words, self._start, self.size, self._lock = words, start, size, lock

    @staticmethod
    def words(size: int) -> int:
        """How many words a roll takes."""
        return 1 + size

    @property
    def number(self) -> int:
        """The membership number: it grows with each change, and never goes back."""
        return self._words[self._start]

    def __getitem__(self, rank: int) -> Entry:
        life, standing = divmod(self.word(rank), 8)
        return Entry(life, Standing(standing))

    def life(self, rank: int) -> int:
        """Which life of a rank the entry is of; 0 before it has come."""
        return self.word(rank) // 8

    def entries(self) -> list[int]:
        """All entries as numbers, for a quick look whether they are still the same."""
        return self._words.read(self._start + 1, self.size)

    def word(self, rank: int) -> int:
        """The entry of a rank as one number, for a quick look whether it is still the same."""
        return self._words[self._start + 1 + rank]

    def enter(self, rank: int, late: bool) -> Entry:
        """Begin another life of ``rank``; one that comes late is not here before it has a state."""
        with self._lock():
            entry = Entry(self[rank].life + 1, Standing.JOINING if late else Standing.HERE)
            self._set(rank, entry)
        return entry

    def change(self, rank: int, known: Entry, standing: Standing) -> Entry | None:
        """Change the standing of ``rank``, unless its entry is another than is ``known`` by now."""
        with self._lock():
            if self[rank] != known:
                return None
            entry = Entry(known.life, standing)
            self._set(rank, entry)
        return entry

    def _set(self, rank: int, entry: Entry) -> None:
        self._words[self._start + 1 + rank] = entry.word
        self._words.announce(self._start, self.number + 1)
