"""Who is a member of a run on one host: one table, the same for every rank.

A rank enters the table, becomes ``HERE`` once it has the state that it needs, and leaves; or
another rank strikes it off, because it died or was stopped for too long. Every entry counts the
incarnations of its rank, so that messages of an earlier incarnation are told from those of the
present one. Entries change under one lock, and each change makes the membership version grow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.comm.liveness import TICK_S, Watch
from paceline.comm.ports import NOT_READY, Members, Roster, View
from paceline.comm.ranks import ranks
from paceline.comm.shared.layout import SLOTS
from paceline.comm.standing import GONE, LOST, PRESENT, Standing
from paceline.errors import LeftBehind, PeerLost, PeersGone, UsageError

if TYPE_CHECKING:
    from paceline.comm.shared.queue import BatchTable
    from paceline.comm.shared.rank import SharedRank


_NOT_READY = (Standing.JOINING, Standing.WAITING)


class Entry(NamedTuple):
    """What the table says of a rank: which of its incarnations, and how that one stands."""

    incarnation: int
    standing: Standing

    @property
    def word(self) -> int:
        """The entry as it lies in memory."""
        return self.incarnation * 8 + self.standing


class MemberTable:
    """The entries of all ranks, in shared words: the version, then they."""

    def __init__(self, shared: SharedRank) -> None:
        self._shared, self._words, self._start = shared, shared.words, shared.layout.members

    @property
    def version(self) -> int:
        """It grows with each change, and never goes back."""
        return self._words[self._start]

    def __getitem__(self, rank: int) -> Entry:
        incarnation, standing = divmod(self.word(rank), 8)
        return Entry(incarnation, Standing(standing))

    def incarnation(self, rank: int) -> int:
        """Which incarnation of a rank the entry is of; 0 before it has come."""
        return self.word(rank) // 8

    def entries(self) -> list[int]:
        """All entries as numbers, for a quick look whether they are still the same."""
        return self._words.read(self._start + 1, self._shared.size)

    def word(self, rank: int) -> int:
        """The entry of a rank as one number, for a quick look whether it is still the same."""
        return self._words[self._start + 1 + rank]

    def enter(self, rank: int, late: bool) -> Entry:
        """Begin an incarnation of ``rank``; a late joiner is not here before it has its state."""
        with self._shared.locked(self._start):
            entry = Entry(self[rank].incarnation + 1, Standing.JOINING if late else Standing.HERE)
            self.set(rank, entry)
        return entry

    def change(self, rank: int, known: Entry, standing: Standing) -> Entry | None:
        """Change the standing of ``rank``, unless its entry is no longer the ``known`` one."""
        with self._shared.locked(self._start):
            if self[rank] != known:
                return None
            entry = Entry(known.incarnation, standing)
            self.set(rank, entry)
        return entry

    def set(self, rank: int, entry: Entry) -> None:
        """Set an entry; under the lock only."""
        self._words[self._start + 1 + rank] = entry.word
        self._words.announce(self._start, self.version + 1)


class SharedMembers(Members):
    """One rank's view of the members; it also strikes off ranks that it finds to be lost.

    Args:
        shared: the memory.
        batches: takes back the batches of a lost rank.
        late: the ranks that come after the beginning; this one is late when it is among them, or
            when it had another incarnation before.
    """

    def __init__(self, shared: SharedRank, batches: BatchTable, late: Sequence[int]) -> None:
        self.shared, self._batches = shared, batches
        self._table, self._processes = shared.table, shared.processes
        self.starters = ranks(tuple(peer for peer in range(shared.size) if peer not in late))
        self._alive: tuple[int, ...] = ()
        self._view = View(0, ())
        self._seen: tuple[list[int], frozenset[int]] | None = None
        self._looked_s = -TICK_S
        self._claim()
        self._enter(shared.rank in late)

    def _claim(self) -> None:
        """Take this rank, unless another process lives that has it."""
        shared, index = self.shared, self.shared.layout.pid(self.shared.rank)
        with shared.locked(shared.layout.members):
            other = shared.words[index]
            taken = other not in (0, os.getpid()) and self._table[shared.rank].standing not in GONE
            if taken and not self._processes.has_died(shared.rank):
                raise UsageError(
                    f"rank ({shared.rank}) is taken: process {other} has it, and lives"
                )
            shared.words[index] = os.getpid()
        shared.words[shared.layout.starts(shared.rank)] += 1
        shared.begin(shared.words[shared.layout.starts(shared.rank)])

    def _enter(self, late: bool) -> None:
        """Begin an incarnation: the first one of this rank, or another."""
        shared, own = self.shared, self.shared.rank
        words, layout = shared.words, shared.layout
        shared.deferred.settle(wait=True)
        was_here = self._table[own].incarnation > 0
        self.late = late or was_here
        slots = [(peer, slot) for peer in range(shared.size) for slot in range(SLOTS)]
        for src, slot in slots if was_here else ():  # drop what an earlier incarnation left
            words.announce(layout.receipt(src, own, slot), words[layout.slot(src, own, slot)])
        self._entry = self._table.enter(own, self.late)  # from here on others write to this one
        sent = [words[layout.slot(own, peer, slot)] for peer, slot in slots]
        shared.sequence = max(*sent, shared.sequence)
        self._batches.take_back(own, self._entry)  # unless another has done so

    # Who is here ---------------------------------------------------------------------------------

    def alive(self) -> tuple[int, ...]:
        self.check()
        self.view()
        return self._alive

    def view(self) -> View:
        self._look_round()
        seen = self._table.entries(), self._processes.stopped()
        if self._seen != seen:
            everyone = range(self.shared.size)
            standings = [self._table[rank].standing for rank in everyone]
            self._seen = seen
            self._alive = ranks(tuple(r for r in everyone if self._is_here(r, standings[r])))
            self._view = View(
                self._table.version,
                [self.incarnation(rank) for rank in everyone],
                frozenset(rank for rank in everyone if standings[rank] in LOST),
                frozenset(rank for rank in everyone if standings[rank] is Standing.LEFT),
                seen[1],
            )
        return self._view

    def _is_here(self, rank: int, standing: Standing) -> bool:
        expected = standing is Standing.EXPECTED and rank in self.starters
        return expected or standing is Standing.HERE or rank == self.shared.rank

    def incarnation(self, rank: int) -> int:
        number = self._table.incarnation(rank)
        return number if number or rank not in self.starters else 1

    def ready(self, among: Sequence[int]) -> dict[int, int]:
        """The incarnation of each of these ranks; raises PeerLost for one that is no member yet."""
        entries = {rank: self._table[rank] for rank in among}
        new = [r for r, e in entries.items() if e.standing in _NOT_READY and r != self.shared.rank]
        if new:
            raise PeerLost(new, "a collective", NOT_READY, 0.0)
        return {r: e.incarnation or int(r in self.starters) for r, e in entries.items()}

    def final_roster(self) -> tuple[tuple[int, int], ...]:
        shared, roster, start = self.shared, self.who_is_here(), self.shared.layout.roster
        with shared.locked(shared.layout.members):
            if not shared.words[start]:
                shared.words.write(start + 1, roster)
                shared.words[start] = 1
        numbers = shared.words.read(start + 1, shared.size)
        return tuple((rank, number) for rank, number in enumerate(numbers) if number)

    def roster(self, number: int, take_in: bool = False) -> Roster | None:
        shared, start = self.shared, self.shared.layout.agreed(take_in)
        here = self.who_is_here()
        with shared.locked(shared.layout.members):
            if shared.words[start] < number:
                waiting = self._waiting() if take_in else {}
                numbers = [2 * incarnation for incarnation in here]
                for rank, entry in waiting.items():
                    numbers[rank] = 2 * entry.incarnation + 1
                shared.words.write(start + 1, tuple(numbers))
                shared.words[start] = number
            return None if shared.words[start] > number else self._carry_out(take_in)

    def _carry_out(self, take_in: bool) -> Roster:
        """The last roster of a kind, under the lock; all that it takes in are members afterwards.

        Whoever asked for it first may have been killed before it did this.
        """
        shared = self.shared
        numbers = shared.words.read(shared.layout.agreed(take_in) + 1, shared.size)
        members = tuple((rank, number // 2) for rank, number in enumerate(numbers) if number)
        roster = Roster(members, frozenset(r for r, number in enumerate(numbers) if number % 2))
        for rank, entry in self._waiting().items() if take_in else ():
            if rank in roster.joined and (rank, entry.incarnation) in members:
                self._table.set(rank, entry._replace(standing=Standing.HERE))
        return roster

    def _waiting(self) -> dict[int, Entry]:
        entries = {rank: self._table[rank] for rank in range(self.shared.size)}
        return {rank: e for rank, e in entries.items() if e.standing is Standing.WAITING}

    def someone_waits(self) -> bool:
        return Standing.WAITING in {word % 8 for word in self._table.entries()}

    def wait_to_be_taken_in(self, workers: int) -> Roster:
        own, words = self.shared.rank, self.shared.words
        entry = self._table.change(own, self._entry, Standing.WAITING)
        if entry is None:
            raise LeftBehind
        self._entry = entry
        while (now := self._table[own]) == entry:
            version = self._table.version
            self.view()
            if not any(rank < workers for rank in self._alive if rank != own):
                raise PeersGone
            words.wait_change(self.shared.layout.members, version, TICK_S)
        if now != entry._replace(standing=Standing.HERE):
            raise LeftBehind
        self._entry = now
        with self.shared.locked(self.shared.layout.members):
            return self._carry_out(take_in=True)

    def who_is_here(self) -> tuple[int, ...]:
        """The incarnation of each rank that is alive; 0 for the others."""
        alive, everyone = self.alive(), range(self.shared.size)
        return tuple(self.incarnation(rank) if rank in alive else 0 for rank in everyone)

    def check(self) -> None:
        """Find out whether the others have gone on without this rank."""
        if self._table.word(self.shared.rank) != self._entry.word:
            raise LeftBehind

    @property
    def own_incarnation(self) -> int:
        """The incarnation of this rank that this process is."""
        return self._entry.incarnation

    def announce_ready(self) -> None:
        if self._entry.standing is Standing.JOINING:
            entry = self._table.change(self.shared.rank, self._entry, Standing.HERE)
            if entry is None:
                raise LeftBehind
            self._entry = entry

    def rejoin(self) -> None:
        self._enter(late=True)

    def leave(self) -> None:
        """Come to the end in good order."""
        self._table.change(self.shared.rank, self._entry, Standing.LEFT)
        for rank in range(self.shared.size):
            self.shared.ring(rank)

    # Who is gone ---------------------------------------------------------------------------------

    def _look_round(self) -> None:
        """See who has died; look after all ranks once in a while."""
        for rank in self._processes.dead():
            self.why_gone(rank)
        now_s = time.monotonic()
        if now_s >= self._looked_s + TICK_S:
            self._looked_s = now_s
            for rank in range(self.shared.size):
                self.why_gone(rank)
                entry = self._table[rank]
                if entry.standing in LOST and self._batches.in_hand(rank):
                    self._batches.take_back(rank, entry)  # its striker was lost before it did this

    def why_gone(self, rank: int, incarnation: int = 0) -> str | None:
        """Why ``rank``, in this incarnation, is not here any more; None while it is."""
        entry = self._table[rank]
        if incarnation and entry.incarnation > incarnation:
            return "it died"
        if rank != self.shared.rank and entry.standing in PRESENT:
            standing = self._look_at(rank)
            if standing is not None:
                self._strike(rank, entry, standing)
                entry = self._table[rank]
        if entry.standing is Standing.STOPPED:
            return f"it has been stopped for {self.shared.limits.dead_s:.1f} s"
        return {Standing.LEFT: "it has finished", Standing.DIED: "it died"}.get(entry.standing)

    def _look_at(self, rank: int) -> Standing | None:
        if self._processes.has_died(rank):
            return Standing.DIED
        return Standing.STOPPED if self._processes.why_stopped(rank) is not None else None

    def _strike(self, rank: int, entry: Entry, standing: Standing) -> None:
        """Strike off a lost rank, and take its batches back; of several who try, one does."""
        struck = self._table.change(rank, entry, standing)
        if struck is not None:
            self._batches.take_back(rank, struck)
            for peer in range(self.shared.size):
                self.shared.ring(peer)

    def has_ended(self, rank: int) -> bool:
        """Whether ``rank`` is gone, or its process has ended and nobody has struck it off yet."""
        return self._table[rank].standing in GONE or self._processes.has_died(rank)

    # Waiting -------------------------------------------------------------------------------------

    def await_words(
        self, indices: Mapping[int, int], value: int, op: str, writers: Mapping[int, int]
    ) -> None:
        """Wait until each rank's word has reached ``value``; give up when one of them is gone.

        ``writers``, each with its incarnation, write into each other's memory: one that is stopped
        for too long is killed first, so that it cannot go on to write after the others have.
        """
        words, watch = self.shared.words, None
        for index in indices.values():
            while words[index] < value and not words.wait(index, value, TICK_S):
                watch = watch or Watch(op, self.shared.limits)
                self._look_after(indices, value, watch, writers)

    def _look_after(
        self, indices: Mapping[int, int], value: int, watch: Watch, writers: Mapping[int, int]
    ) -> None:
        self.check()
        gone = {rank: self.why_gone(rank, writers.get(rank, 0)) for rank in indices}
        for rank, number in writers.items():
            if gone[rank] and self._table[rank] == Entry(number, Standing.STOPPED):
                self._processes.end(rank)
        # Read again after that: a rank may have done its part and then ended.
        missing = [rank for rank, index in indices.items() if self.shared.words[index] < value]
        lost = [rank for rank in missing if gone[rank] is not None]
        if lost:
            raise watch.lost(lost, gone[lost[0]] or "")
        if missing:
            watch.check_limits(missing)

    def wait_for_change(self, seconds: float) -> bool:
        """Other ranks change the table when they find a loss; this one looks for itself, too."""
        shared, watch = self.shared, Watch("a change", self.shared.limits)
        seen = self._table.entries()
        while watch.waited_s < seconds:
            watch.look()
            shared.words.wait_change(shared.layout.members, self._table.version, TICK_S)
            self.alive()
            if self._table.entries() != seen:
                return True
        return False

    def wait_for_successor(self, rank: int, incarnation: int) -> None:
        words, version = self.shared.words, self.shared.layout.members
        watch = Watch(f"a successor of rank {rank}", self.shared.limits)
        while True:
            seen, entry = words[version], self._table[rank]
            self.check()
            if entry.incarnation > incarnation and entry.standing is Standing.HERE:
                return
            if entry.standing is Standing.LEFT:
                raise watch.lost([rank], "it has finished")
            if not words.wait_change(version, seen, TICK_S):
                watch.check_limits([rank])
