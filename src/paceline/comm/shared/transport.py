"""Processes of one host that talk through memory they share: no port, no copy that is not needed.

Each rank has a block of words that it alone writes (see :class:`Layout`): who it is, what it has
sent, what it has taken, how far it is in each group's collectives. Vectors lie in the arena; those
that :meth:`SharedMemoryTransport.allocate` made are read by peers where they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.comm.base import (
    MAILBOX_CAPACITY,
    SHELVES,
    Call,
    Factor,
    Limits,
    Transport,
    Work,
    check_fit,
)
from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.liveness import TICK_S, Processes, Watch, goes_on
from paceline.comm.ranks import ranks
from paceline.comm.shared.members import Entry, MemberTable, Standing
from paceline.comm.shared.memory import Arena, SharedWords, lies_with, map_control
from paceline.comm.shared.rendezvous import Meeting
from paceline.errors import LeftBehind, MessageMismatch, PeersGone, UsageError

if TYPE_CHECKING:
    from paceline.comm.shared.collectives import Group


MAX_GROUPS, MAX_QUEUES = 256, 64
MAX_IN_HAND, MAX_RETURNED = 64, 1024
AHEAD = 2
"""How many collectives of a group may be under way at once."""
ENTRY_WORDS = 6
BLOCK = 1 << 15
"""Elements summed at a time: small enough for a block of each vector to stay in a core's cache."""

_SENT_SLOT = MAILBOX_CAPACITY
_SLOTS = MAILBOX_CAPACITY + 1
_SLOT_WORDS = 6
_BUFFERS = 3
_WINDOW_WORDS = 3 + 2 * _BUFFERS
_PUBLISHED, _KEPT, _SHELVED = 0, 1, 2
_LIVES = 1 << 20
_LOST = (Standing.DIED, Standing.STOPPED)
_GONE = (Standing.LEFT, *_LOST)


class Layout:
    """Which word of the control area means what.

    A rank's block holds, in this order:

    - pid, bell, how many processes it has had;
    - windows, one for what it publishes, one for a later life of it, and its shelves: version,
      numel, dtype, then place and version of three buffers;
    - its outgoing messages: for each receiver, slots of (sequence, tag, dtype, numel, place, and
      which lives of the two they are between);
    - its receipts: for each sender, the sequence last taken from each slot;
    - the batches that it has in hand;
    - its groups: for each, how many collectives it has arrived at, finished and released, then
      entries of (operation, numel, dtype, weight, place, and where its part of the sum goes).

    After the blocks come the roll, the lives of those who meet at the end, the directory of groups,
    the batch that each queue gives out next, and the batches that were taken back from ranks that
    are gone; these are written under a lock. Then come meetings, and whether all are to stop.
    """

    def __init__(self, size: int) -> None:
        self._window = 3
        self._mail = self._window + (_SHELVED + SHELVES) * _WINDOW_WORDS
        self._receipts = self._mail + size * _SLOTS * _SLOT_WORDS
        self._in_hand = self._receipts + size * _SLOTS
        self._groups = self._in_hand + MAX_IN_HAND
        self._group_words = 3 + AHEAD * ENTRY_WORDS
        self._block = self._groups + MAX_GROUPS * self._group_words
        self.roll = size * self._block
        self.last = self.roll + MemberTable.words(size)
        self.directory = self.last + 1 + size
        self.queues = self.directory + MAX_GROUPS
        self.returned = self.queues + MAX_QUEUES
        self.meeting = self.returned + MAX_RETURNED
        self.stop = self.meeting + Meeting.words(size)
        self.words = self.stop + 1

    def pid(self, rank: int) -> int:
        """The rank's process."""
        return rank * self._block

    def bell(self, rank: int) -> int:
        """What senders ring; any change means that there may be a message."""
        return rank * self._block + 1

    def starts(self, rank: int) -> int:
        """How many processes the rank has had."""
        return rank * self._block + 2

    def window(self, rank: int, number: int = _PUBLISHED) -> int:
        """One of the rank's windows."""
        return rank * self._block + self._window + number * _WINDOW_WORDS

    def slot(self, src: int, dst: int, slot: int) -> int:
        """A message of ``src`` to ``dst``."""
        return src * self._block + self._mail + (dst * _SLOTS + slot) * _SLOT_WORDS

    def receipt(self, src: int, dst: int, slot: int) -> int:
        """What ``dst`` has taken from that slot."""
        return dst * self._block + self._receipts + src * _SLOTS + slot

    def in_hand(self, rank: int) -> int:
        """The batches that the rank has taken and not made use of yet."""
        return rank * self._block + self._in_hand

    def group(self, rank: int, group: int) -> int:
        """The rank's progress in a group."""
        return rank * self._block + self._groups + group * self._group_words

    def entry(self, rank: int, group: int, number: int) -> int:
        """What the rank brings to the group's collective ``number``."""
        return self.group(rank, group) + 3 + number % AHEAD * ENTRY_WORDS


@dataclass
class Region:
    """Where a vector lies in the arena; ``nbytes`` of it are borrowed and go back later."""

    place: int
    nbytes: int = 0
    receipt: int = 0
    sequence: int = 0


class _Offer(Work):
    """A message that stays where it is until its receiver has taken it."""

    def __init__(self, transport: SharedMemoryTransport, dst: int, region: Region) -> None:
        self._transport, self._dst, self._region = transport, dst, region

    def done(self) -> bool:
        return self._transport.words[self._region.receipt] >= self._region.sequence

    def wait(self) -> int:
        op, region = f"send to rank {self._dst}", self._region
        self._transport.await_words({self._dst: region.receipt}, region.sequence, op)
        return 1


class SharedMemoryTransport(Transport):
    """One rank of a run on one host.

    Args:
        fd: the arena's memfd.
        rank: this rank.
        size: how many there are.
        limits: how long to wait.
        started_s: the monotonic time that the run's clock begins at.
        late: the ranks that come after the beginning; this one is late when it is among them, or
            when it has lived before.
        elastic: whether the others go on when one is lost, and so need their vectors intact.
        workers: how many of the ranks, the first ones, are workers; the others wait for them.
    """

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        limits: Limits,
        started_s: float = 0.0,
        late: Sequence[int] = (),
        elastic: bool = True,
        workers: int | None = None,
    ) -> None:
        self._workers = size if workers is None else workers
        self.rank, self.size, self.elastic = rank, size, elastic
        self._fd, self._limits, self._started_s = fd, limits, started_s
        self.layout = Layout(size)
        self.words = SharedWords(map_control(fd, self.layout.words * 8))
        self.roll = MemberTable(
            self.words, self.layout.roll, size, lambda: self._locked(self.layout.roll)
        )
        self._processes = Processes(self._pid_of, limits, self._some_go_on)
        self._starters = tuple(peer for peer in range(size) if peer not in late)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._alive: tuple[int, ...] = ()
        self._alive_at: list[int] = []
        self._looked_s = -TICK_S
        self._last_source = -1
        self._buffers: dict[int, list[Tensor]] = {}
        self._free: list[Region] = []
        self._lent: list[Region] = []
        self.refused = 0
        self._meeting = Meeting(self)
        self._claim()
        self.words[self.layout.starts(rank)] += 1
        self.arena = Arena(fd, owner=rank + 1, start=self.words[self.layout.starts(rank)])
        self._enter(rank in late)

    def _claim(self) -> None:
        """Take this rank's place, unless another process lives that has."""
        place = self.layout.pid(self.rank)
        with self._locked(self.layout.roll):
            other = self.words[place]
            taken = other not in (0, os.getpid()) and self.roll[self.rank].standing not in _GONE
            if taken and not self._processes.has_died(self.rank):
                raise UsageError(f"rank ({self.rank}) is taken: process {other} has it, and lives")
            self.words[place] = os.getpid()

    def _enter(self, late: bool) -> None:
        """Begin a life: the first one of this rank, or another."""
        has_lived = self.roll[self.rank].life > 0
        self.late = late or has_lived
        peers, slots = range(self.size), range(_SLOTS)
        for src in peers if has_lived else ():  # what an earlier life has not taken
            for slot in slots:
                waiting = self.words[self.layout.slot(src, self.rank, slot)]
                self.words.announce(self.layout.receipt(src, self.rank, slot), waiting)
        self._entry = self.roll.enter(self.rank, self.late)  # from here on others write to this one
        sent = [self.words[self.layout.slot(self.rank, p, s)] for p in peers for s in slots]
        self._sequence = max(sent)
        self._take_back(self.rank, self._entry)  # unless another has done so

    # Who is here ---------------------------------------------------------------------------------

    def _pid_of(self, rank: int) -> int:
        return self.words[self.layout.pid(rank)]

    def _some_go_on(self) -> bool:
        """Whether a worker runs, or has come to its end; without one nobody misses another."""
        return self.rank < self._workers or any(
            self.roll[worker].standing is Standing.LEFT or goes_on(self._pid_of(worker))
            for worker in range(self._workers)
        )

    def alive(self) -> tuple[int, ...]:
        self.check()
        self._look_round()
        if self._alive_at != (entries := self.roll.entries()):
            self._alive = ranks(tuple(filter(self._is_here, range(self.size))))
            self._alive_at = entries
        return self._alive

    def _is_here(self, rank: int) -> bool:
        standing = self.roll[rank].standing
        expected = standing is Standing.EXPECTED and rank in self._starters
        return expected or standing is Standing.HERE or rank == self.rank

    def starters(self) -> tuple[int, ...]:
        return self._starters

    def membership(self) -> int:
        return self.roll.number

    def lost(self) -> frozenset[int]:
        self._look_round()
        return frozenset(rank for rank in range(self.size) if self.roll[rank].standing in _LOST)

    def left(self) -> frozenset[int]:
        ended = Standing.LEFT
        return frozenset(rank for rank in range(self.size) if self.roll[rank].standing is ended)

    def stopped(self) -> frozenset[int]:
        self._look_round()
        return self._processes.stopped()

    def stop_all(self) -> None:
        self.words[self.layout.stop] = 1

    def stopping(self) -> bool:
        return bool(self.words[self.layout.stop])

    def retired(self) -> frozenset[int]:
        return self._meeting.retired()

    def life(self, rank: int) -> int:
        life = self.roll.life(rank)
        return life if life or rank not in self._starters else 1

    def last_members(self) -> tuple[tuple[int, int], ...]:
        alive, start = self.alive(), self.layout.last
        with self._locked(self.layout.roll):
            if not self.words[start]:
                lives = [self.life(rank) if rank in alive else 0 for rank in range(self.size)]
                self.words.write(start + 1, tuple(lives))
                self.words[start] = 1
        lives = self.words.read(start + 1, self.size)
        return tuple((rank, life) for rank, life in enumerate(lives) if life)

    def lost_life(self, rank: int) -> int:
        entry = self.roll[rank]
        return entry.life - (entry.standing not in _GONE)

    def check(self) -> None:
        """Find out whether the others have gone on without this rank."""
        if self.roll.word(self.rank) != self._entry.word:
            raise LeftBehind

    def arrived(self) -> None:
        if self._entry.standing is Standing.JOINING:
            self._change(Standing.HERE)

    def rejoin(self) -> None:
        self._enter(late=True)

    def _change(self, standing: Standing) -> None:
        entry = self.roll.change(self.rank, self._entry, standing)
        if entry is None:
            raise LeftBehind
        self._entry = entry

    def _look_round(self) -> None:
        """See who has died; look after all ranks once in a while."""
        for rank in self._processes.newly_dead():
            self.why_gone(rank)
        now_s = time.monotonic()
        if now_s >= self._looked_s + TICK_S:
            self._looked_s = now_s
            for rank in range(self.size):
                self.why_gone(rank)
                entry = self.roll[rank]
                if entry.standing in _LOST and self.batches_in_hand(rank):
                    self._take_back(rank, entry)  # who struck it off was lost before it did

    def why_gone(self, rank: int, life: int = 0) -> str | None:
        """Why ``rank``, in this life of it, is not here any more; None while it is."""
        entry = self.roll[rank]
        if life and entry.life > life:
            return "it died"
        if rank != self.rank and entry.standing in (Standing.JOINING, Standing.HERE):
            standing = self._look_at(rank)
            if standing is not None:
                self._strike(rank, entry, standing)
                entry = self.roll[rank]
        if entry.standing is Standing.STOPPED:
            return f"it has been stopped for {self._limits.dead_s:.1f} s"
        return {Standing.LEFT: "it has finished", Standing.DIED: "it died"}.get(entry.standing)

    def _look_at(self, rank: int) -> Standing | None:
        if self._processes.has_died(rank):
            return Standing.DIED
        return Standing.STOPPED if self._processes.why_stopped(rank) is not None else None

    def _strike(self, rank: int, entry: Entry, standing: Standing) -> None:
        """Take a lost rank off the roll, and its batches back; of several who try, one does."""
        struck = self.roll.change(rank, entry, standing)
        if struck is not None:
            self._take_back(rank, struck)
            for peer in range(self.size):
                self._ring(peer)

    def _has_ended(self, rank: int) -> bool:
        return self.roll[rank].standing in _GONE or self._processes.has_died(rank)

    def close(self) -> None:
        self.roll.change(self.rank, self._entry, Standing.LEFT)
        for rank in range(self.size):
            self._ring(rank)

    def await_words(
        self,
        indices: dict[int, int],
        value: int,
        op: str,
        lives: dict[int, int] | None = None,
    ) -> None:
        """Wait until each rank's word has reached ``value``; give up when one of them is gone.

        With ``lives``, these lives of the ranks write into each other's memory: one that is stopped
        for too long is ended first, so that it cannot go on to write after the others have.
        """
        words, watch = self.words, None
        for index in indices.values():
            while words[index] < value and not words.wait(index, value, TICK_S):
                watch = watch or Watch(op, self._limits)
                self._look_after(indices, value, watch, lives)

    def _look_after(
        self, indices: dict[int, int], value: int, watch: Watch, lives: dict[int, int] | None
    ) -> None:
        self.check()
        gone = {rank: self.why_gone(rank, (lives or {}).get(rank, 0)) for rank in indices}
        if lives is not None:
            for rank, life in lives.items():
                if gone[rank] and self.roll[rank] == Entry(life, Standing.STOPPED):
                    self._processes.end(rank)
        # Read again after that: a rank may have done its part and then ended.
        missing = [rank for rank, index in indices.items() if self.words[index] < value]
        lost = [rank for rank in missing if gone[rank] is not None]
        if lost:
            raise watch.lost(lost, gone[lost[0]] or "")
        if missing:
            watch.keep_patience(missing)

    def await_change(self, seconds: float) -> bool:
        """Others write the number of members; so this looks for itself who is dead or stopped."""
        seen, watch = self.roll.entries(), Watch("a change", self._limits)
        while watch.waited_s < seconds:
            watch.look()
            self.words.wait_change(self.layout.roll, self.roll.number, TICK_S)
            self.alive()
            if self.roll.entries() != seen:
                return True
        return False

    def await_return(self, rank: int, life: int) -> None:
        """Wait until a successor of that life of ``rank`` is here."""
        watch, number = Watch(f"a successor of rank {rank}", self._limits), self.layout.roll
        while True:
            seen, entry = self.words[number], self.roll[rank]
            self.check()
            if entry.life > life and entry.standing is Standing.HERE:
                return
            if entry.standing is Standing.LEFT:
                raise watch.lost([rank], "it has finished")
            if not self.words.wait_change(number, seen, TICK_S):
                watch.keep_patience([rank])

    # Messages ------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        self.check()
        receipt = self.layout.receipt(self.rank, dst, _SENT_SLOT)
        previous = self.words[self.layout.slot(self.rank, dst, _SENT_SLOT)]
        self.await_words({dst: receipt}, previous, f"send to rank {dst}")
        region = self.find_place(x) or self.borrow(x)
        self._leave(x, region, dst, _SENT_SLOT, tag)
        return _Offer(self, dst, region)

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
        self.check()
        if self._has_ended(dst):
            return False
        for slot in range(MAILBOX_CAPACITY):
            taken = self.words[self.layout.receipt(self.rank, dst, slot)]
            if taken >= self.words[self.layout.slot(self.rank, dst, slot)]:
                self._leave(x, self.borrow(x), dst, slot, tag)
                return True
        return False

    def _leave(self, x: Tensor, region: Region, dst: int, slot: int, tag: int) -> None:
        index = self.layout.slot(self.rank, dst, slot)
        self._sequence += 1
        region.receipt = self.layout.receipt(self.rank, dst, slot)
        region.sequence = self._sequence
        lives = self._entry.life * _LIVES + self.life(dst)
        self.words.write(index + 1, (tag, DTYPES.index(x.dtype), x.numel(), region.place, lives))
        self.words.announce(index, region.sequence)
        self._ring(dst)
        if region.nbytes:
            self._lent.append(region)

    def _ring(self, dst: int) -> None:
        self._sequence += 1
        self.words.announce(self.layout.bell(dst), self._sequence * self.size + self.rank)

    def take(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, watch: bool = False
    ) -> tuple[int, Tensor]:
        patience, bell = None, self.layout.bell(self.rank)
        lives: dict[int, int] = {}
        while (message := self.take_now(like, sources, tag)) is None:
            rung = self.words[bell]
            for source in sources:  # among which one may be that has just come again
                lives.setdefault(source, self.life(source))
            if self._find(sources, tag) is not None:
                continue
            gone = watch and any(self.roll[source].standing in _GONE for source in sources)
            if gone or not self.words.wait_change(bell, rung, TICK_S):
                patience = patience or Watch(op, self._limits, patient=op == "recv_any")
                self._look_for_senders(lives, tag, patience, watch)
        return message

    def _look_for_senders(
        self, lives: dict[int, int], tag: int, patience: Watch, any_loss: bool
    ) -> None:
        sources = [*lives]
        told = {source: self.why_gone(source, life) for source, life in lives.items()}
        gone = {source: why for source, why in told.items() if why is not None}
        missed = len(gone) == len(sources) or (gone and any_loss)
        if not missed or self._find(sources, tag) is not None:
            patience.keep_patience(sources)
        elif patience.op == "recv_any" and not any_loss:
            raise PeersGone
        else:
            raise patience.lost(list(gone), next(iter(gone.values())))

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        self.check()
        if self._meeting.restored and (kept := self._meeting.take(sources, tag)) is not None:
            check_fit(like, kept[1].numel(), kept[1].dtype, kept[0], tag)
            return kept[0], kept[1].to(like.device).view_as(like)
        found = self._find(sources, tag)
        if found is None:
            return None
        sequence, src, slot = found
        self._last_source = src
        _, code, numel, place = self.words.read(self.layout.slot(src, self.rank, slot) + 1, 4)
        try:
            check_fit(like, numel, dtype_of(code), src, tag)
            self._check_place(src, place, like.nbytes)
            x = self.arena.tensor(place, numel, like.dtype).clone()
        finally:
            self.words.announce(self.layout.receipt(src, self.rank, slot), sequence)
        return src, x.to(like.device).view_as(like)

    def _find(self, sources: Sequence[int], tag: int) -> tuple[int, int, int] | None:
        """The oldest message with this tag of a sender; senders in turn."""
        last = self._last_source
        for src in sorted(sources, key=lambda source: (source <= last, source)):
            if self._waiting(src, tag):
                return min(self._waiting(src, tag))  # an older one may have come behind the look
        return None

    def _waiting(self, src: int, tag: int) -> list[tuple[int, int, int]]:
        words, layout, found = self.words, self.layout, []
        for slot in range(_SLOTS):
            sequence, its_tag = words.read(layout.slot(src, self.rank, slot), 2)
            taken = words[layout.receipt(src, self.rank, slot)]
            if sequence > taken and its_tag == tag:
                if self._is_valid(src, words[layout.slot(src, self.rank, slot) + 5]):
                    found.append((sequence, src, slot))
                else:
                    self.refused += 1
                    words.announce(layout.receipt(src, self.rank, slot), sequence)
        return found

    def _is_valid(self, src: int, lives: int) -> bool:
        """Whether a message is between the present lives of both, and its sender not left behind.

        What a rank sent before it died is as good as any other.
        """
        theirs, mine = divmod(lives, _LIVES)
        present = (theirs, mine) == (self.life(src), self._entry.life)
        return present and self.roll[src].standing is not Standing.STOPPED

    # Meetings ------------------------------------------------------------------------------------

    meets = True

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        alive = self.alive()
        lives = [self.life(rank) if rank in alive else 0 for rank in range(self.size)]
        with self._locked(self.layout.meeting):
            if self._meeting.called().number == known:
                self._meeting.call(step, stop, lives)
                self._meeting.give_up(over)

    def called(self) -> Call:
        return self._meeting.called()

    def meet(self, number: int, members: Sequence[int], lives: Sequence[int]) -> bool:
        return self._meeting.meet(number, members, lives, Watch("a meeting", self._limits))

    def retire(self) -> None:
        self._meeting.retire()

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        return self._meeting.snapshot(without)

    def restore(self, state: dict[str, Any]) -> None:
        self._meeting.restore(state)

    def mail(self) -> list[tuple[int, int, Tensor]]:
        """The messages that wait for this rank, those of each sender in order."""
        found = []
        for src in range(self.size):
            for slot in range(_SLOTS):
                index = self.layout.slot(src, self.rank, slot)
                sequence, tag, code, numel, place, lives = self.words.read(index, _SLOT_WORDS)
                taken = self.words[self.layout.receipt(src, self.rank, slot)]
                if sequence > taken and self._is_valid(src, lives):
                    x = self.arena.tensor(place, numel, DTYPES[code]).clone()
                    found.append((src, sequence, tag, x))
        found.sort(key=lambda message: message[:2])
        return [(src, tag, x) for src, _, tag, x in found]

    def window(self, kept: bool) -> tuple[int, Tensor] | None:
        """What this rank has published last, or kept."""
        return self._read_window(self.rank, None, _KEPT if kept else _PUBLISHED)

    def batches_in_hand(self, rank: int) -> list[int]:
        """The batches that a rank has taken and not made use of yet, a word each."""
        return [b for b in self.words.read(self.layout.in_hand(rank), MAX_IN_HAND) if b]

    def take_in_hand(self, batches: Sequence[int]) -> None:
        """Take these in hand."""
        self.words.write(self.layout.in_hand(self.rank), tuple(batches))

    def queue_words(self, without: Sequence[int]) -> list[int]:
        """How far the queues are, and which batches were taken back, or will be of these ranks."""
        queues = self.words.read(self.layout.queues, MAX_QUEUES)
        returned = [b for b in self.words.read(self.layout.returned, MAX_RETURNED) if b]
        returned += [batch for rank in without for batch in self.batches_in_hand(rank)]
        return [*queues, *(returned + [0] * MAX_RETURNED)[:MAX_RETURNED]]

    def set_queue_words(self, words: Sequence[int]) -> None:
        """Have the queues go on from there."""
        self.words.write(self.layout.queues, tuple(words))

    # Memory --------------------------------------------------------------------------------------

    def allocate(self, numel: int, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            return like.new_zeros(numel)
        return self.arena.new_tensor(numel, like.dtype)

    def find_place(self, x: Tensor) -> Region | None:
        """Where ``x`` itself lies, if peers can read it there."""
        place = self.arena.find(x) if x.device.type == "cpu" else None
        return None if place is None else Region(place)

    def borrow(self, x: Tensor | None, nbytes: int = 0) -> Region:
        """Memory that peers can read, holding a copy of ``x``."""
        nbytes = nbytes if x is None else x.nbytes
        self._reclaim()
        fitting = [region for region in self._free if region.nbytes >= nbytes]
        if fitting:
            region = min(fitting, key=lambda region: region.nbytes)
            self._free.remove(region)
        else:
            region = Region(self.arena.take(nbytes), max(nbytes, 1))
        if x is not None:
            self.arena.tensor(region.place, x.numel(), x.dtype).copy_(x)
        return region

    def give_back(self, region: Region) -> None:
        """Let the next one borrow ``region``."""
        if region.nbytes:
            self._free.append(region)

    def _reclaim(self) -> None:
        taken = [r for r in self._lent if self.words[r.receipt] >= r.sequence]
        for region in taken:
            self._lent.remove(region)
            self.give_back(region)

    # Windows -------------------------------------------------------------------------------------

    def publish(self, x: Tensor) -> int:
        return self._put(x, _PUBLISHED)

    def keep(self, x: Tensor) -> None:
        self._put(x, _KEPT)

    def shelve(self, x: Tensor, shelf: int) -> None:
        self._put(x, _SHELVED + shelf)

    def _put(self, x: Tensor, number: int) -> int:
        """Copy ``x`` into the buffer that was written longest ago, and show that one."""
        self.check()
        words, window = self.words, self.layout.window(self.rank, number)
        if number not in self._buffers:
            self._buffers[number] = self._open_window(x, window, number)
        buffers = self._buffers[number]
        check_fit(buffers[0], x.numel(), x.dtype, self.rank, 0)
        version = words[window] + 1
        buffer = version % _BUFFERS
        words.announce(window + 3 + 2 * buffer + 1, 0)
        buffers[buffer].copy_(x)
        words.announce(window + 3 + 2 * buffer + 1, version)
        words.announce(window, version)
        return version

    def _open_window(self, x: Tensor, window: int, number: int) -> list[Tensor]:
        self.words.write(window + 1, (x.numel(), DTYPES.index(x.dtype)))
        places = [self.arena.window(buffer, x.nbytes, number) for buffer in range(_BUFFERS)]
        for buffer, place in enumerate(places):
            self.words[window + 3 + 2 * buffer] = place
        return [self.arena.tensor(place, x.numel(), x.dtype) for place in places]

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        self.check()
        standing = self.roll[src].standing
        if standing is not Standing.HERE or self._processes.has_died(src):
            return None
        return self._read_window(src, like)

    def inherited(self, like: Tensor, rank: int) -> tuple[int, Tensor] | None:
        return self._read_window(rank, like)

    def kept(self) -> Tensor | None:
        left = self._read_window(self.rank, None, _KEPT)
        return None if left is None else left[1]

    def shelved(self, rank: int, shelf: int) -> Tensor | None:
        left = self._read_window(rank, None, _SHELVED + shelf)
        return None if left is None else left[1]

    def _read_window(
        self, src: int, like: Tensor | None, number: int = _PUBLISHED
    ) -> tuple[int, Tensor] | None:
        words, window = self.words, self.layout.window(src, number)
        if words[window] == 0:
            return None
        words.fence()
        numel, code = words.read(window + 1, 2)
        dtype = dtype_of(code)
        if like is not None:
            check_fit(like, numel, dtype, src, 0)
        while True:
            version = words[window]
            buffer = window + 3 + 2 * (version % _BUFFERS)
            place = words[buffer]
            self._check_place(src, place, numel * dtype.itemsize)
            x = self.arena.tensor(place, numel, dtype).clone()
            words.fence()
            if words[buffer + 1] == version:
                return version, x if like is None else x.to(like.device)
            if words[window] == version:  # else its owner has come round to this buffer again
                raise MessageMismatch(f"the window of rank {src} holds no version {version}")

    def _check_place(self, src: int, place: int, nbytes: int) -> None:
        """Refuse what does not lie where ``src`` may write, before it is looked at."""
        if nbytes < 0 or not lies_with(src + 1, place, nbytes):
            raise MessageMismatch(f"{nbytes} bytes of rank {src} at {place}: not its own memory")

    # Collectives ---------------------------------------------------------------------------------

    def start_all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> Work:
        from paceline.comm.shared.collectives import AllReduce

        return AllReduce(self._group(members), x, weight, factor)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        from paceline.comm.shared.collectives import Broadcast

        Broadcast(self._group(members), x, src).wait()

    def _group(self, members: tuple[int, ...]) -> Group:
        from paceline.comm.shared.collectives import Group

        self.check()
        group, lives = self._groups.get(members), {m: self.life(m) for m in members}
        if group is None or group.lives != lives:
            slot = self._group_slot(members, [*lives.values()])
            group = self._groups[members] = Group(self, members, slot, lives)
        return group

    def _group_slot(self, members: tuple[int, ...], lives: list[int]) -> int:
        """The place of a group in the directory; the first member to come enters it."""
        digest = hashlib.blake2b(repr((members, lives)).encode(), digest_size=7).digest()
        key = int.from_bytes(digest, "big") + 1
        with self._locked(self.layout.directory):
            for slot in range(MAX_GROUPS):
                entry = self.words[self.layout.directory + slot]
                if entry in (0, key):
                    self.words[self.layout.directory + slot] = key
                    return slot
        raise UsageError(f"a run must not use more than {MAX_GROUPS} groups")

    # Clock and data ------------------------------------------------------------------------------

    def ticket(self, queue: int, epoch: int) -> int | None:
        if queue >= MAX_QUEUES:
            raise UsageError(f"a run must not use more than {MAX_QUEUES} data loaders")
        self.alive()  # whoever is found to be gone hands its batches back
        index, first = self.layout.queues + queue, _batch(queue, epoch, 0)
        in_hand, returned = self.layout.in_hand(self.rank), self.layout.returned
        with self._locked(self.layout.queues):
            fresh = max(self.words[index], first)
            if fresh - first >= _NUMBERS:
                return None
            back = self.words.read(returned, MAX_RETURNED)
            again = [b for b in back if 0 <= b - first < _NUMBERS] if any(back) else []
            batch = again[0] if again else fresh
            self._replace(in_hand, MAX_IN_HAND, 0, batch)  # first: who is killed here has it
            if again:
                self._replace(returned, MAX_RETURNED, batch, 0)
            else:
                self.words[index] = fresh + 1
        return batch - first

    def done_with(self, queue: int, epoch: int, number: int) -> None:
        self._replace(self.layout.in_hand(self.rank), MAX_IN_HAND, _batch(queue, epoch, number), 0)

    def batches_lost(self) -> int:
        self._look_round()
        return sum(map(bool, self.words.read(self.layout.returned, MAX_RETURNED)))

    def _take_back(self, rank: int, entry: Entry) -> None:
        """Have the batches that a lost rank had in hand given out again, unless it lives anew.

        A kill in the middle of drawing, or of this, leaves a batch in two places: then it is not
        put into a third one.
        """
        returned = self.layout.returned
        with self._locked(self.layout.queues):
            if self.roll.word(rank) != entry.word:
                return
            others = [self.batches_in_hand(other) for other in range(self.size) if other != rank]
            for index in range(MAX_IN_HAND):
                place = self.layout.in_hand(rank) + index
                batch = self.words[place]
                if batch and batch < self.words[self.layout.queues + _queue_of(batch)]:
                    elsewhere = self.words.read(returned, MAX_RETURNED)
                    if batch not in elsewhere and not any(batch in held for held in others):
                        self._replace(returned, MAX_RETURNED, 0, batch)
                self.words[place] = 0

    def _replace(self, start: int, count: int, old: int, new: int) -> None:
        """Put ``new`` where ``old`` is among some words; where there is none, leave it."""
        words = self.words.read(start, count)
        if old in words:
            self.words[start + words.index(old)] = new

    @contextmanager
    def _locked(self, index: int) -> Iterator[None]:
        """A lock on a word that the kernel takes back when its holder dies.

        A holder that is stopped for too long is ended, since the others cannot go on without.
        """
        watch = None
        while not self._try_lock(index):
            watch = watch or Watch("the wait for a lock", self._limits)
            if watch.waited_s > TICK_S:
                self._look_after_holder(index)
            os.sched_yield()
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 8, index * 8)

    def _try_lock(self, index: int) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, index * 8)
        except BlockingIOError:
            return False
        return True

    def _look_after_holder(self, index: int) -> None:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index * 8, 8, 0)
        pid = struct.unpack(_FLOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))[-1]
        for rank in range(self.size):
            if self._pid_of(rank) == pid and self._processes.why_stopped(rank):
                self._processes.end(rank)

    def now(self) -> float:
        return time.monotonic() - self._started_s


_FLOCK = "hhqqi"
_NUMBERS = 1 << 31


def _batch(queue: int, epoch: int, number: int) -> int:
    """A batch of a queue as one word, which is not 0."""
    return ((queue + 1) << 56) + (epoch << 31) + number


def _queue_of(batch: int) -> int:
    return (batch >> 56) - 1
