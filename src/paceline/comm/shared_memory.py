"""Processes of one host that talk through memory they share: no port, no copy that is not needed.

Each rank has a block of words that it alone writes (see :class:`Layout`): who it is, what it has
sent, what it has taken, how far it is in each group's collectives. Vectors lie in the arena; those
that :meth:`SharedMemoryTransport.allocate` made are read by peers where they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.comm.arena import Arena, Words
from paceline.comm.base import MAILBOX_CAPACITY, Factor, Limits, Transport, Work, check_fit
from paceline.comm.dtypes import DTYPES
from paceline.comm.liveness import TICK_S, Processes, Watch
from paceline.errors import PeersGone, UsageError

if TYPE_CHECKING:
    from paceline.comm.shared_collective import Group


MAX_GROUPS, MAX_QUEUES = 256, 64
AHEAD = 2
"""How many collectives of a group may be under way at once."""
ENTRY_WORDS = 5
BLOCK = 1 << 15
"""Elements summed at a time: small enough for a block of each vector to stay in a core's cache."""

_HERE, _LEFT = 1, 2
_SENT_SLOT = MAILBOX_CAPACITY
_SLOTS = MAILBOX_CAPACITY + 1
_SLOT_WORDS = 5
_BUFFERS = 3


class Layout:
    """Which word of the control area means what.

    A rank's block holds, in this order:

    - pid, state, bell;
    - its window: version, numel, dtype, then place and version of three buffers;
    - its outgoing messages: for each receiver, slots of (sequence, tag, dtype, numel, place);
    - its receipts: for each sender, the sequence last taken from each slot;
    - its groups: for each, how many collectives it has arrived at, finished and released, then
      entries of (operation, numel, dtype, weight, place).

    After the blocks come the directory of groups, and the queues; these are written under a lock.
    """

    def __init__(self, size: int) -> None:
        self._window = 3
        self._mail = self._window + 3 + 2 * _BUFFERS
        self._receipts = self._mail + size * _SLOTS * _SLOT_WORDS
        self._groups = self._receipts + size * _SLOTS
        self._group_words = 3 + AHEAD * ENTRY_WORDS
        self._block = self._groups + MAX_GROUPS * self._group_words
        self.directory = size * self._block
        self.queues = self.directory + MAX_GROUPS
        self.words = self.queues + 2 * MAX_QUEUES

    def pid(self, rank: int) -> int:
        """The rank's process."""
        return rank * self._block

    def state(self, rank: int) -> int:
        """Whether the rank is here."""
        return rank * self._block + 1

    def bell(self, rank: int) -> int:
        """What senders ring; any change means that there may be a message."""
        return rank * self._block + 2

    def window(self, rank: int) -> int:
        """The rank's window."""
        return rank * self._block + self._window

    def slot(self, src: int, dst: int, slot: int) -> int:
        """A message of ``src`` to ``dst``."""
        return src * self._block + self._mail + (dst * _SLOTS + slot) * _SLOT_WORDS

    def receipt(self, src: int, dst: int, slot: int) -> int:
        """What ``dst`` has taken from that slot."""
        return dst * self._block + self._receipts + src * _SLOTS + slot

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
    """

    def __init__(
        self, fd: int, rank: int, size: int, limits: Limits, started_s: float = 0.0
    ) -> None:
        self.rank, self.size = rank, size
        self._fd, self._limits, self._started_s = fd, limits, started_s
        self.layout = Layout(size)
        self.arena = Arena(fd, owner=rank + 1)
        control, _ = self.arena.map(0, self.layout.words * 8)
        self.words = Words(control)
        self._processes = Processes(lambda peer: self.words[self.layout.pid(peer)], limits)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._sequence = 0
        self._last_source = -1
        self._free: list[Region] = []
        self._lent: list[Region] = []
        self._window: list[Tensor] = []
        self.words[self.layout.pid(rank)] = os.getpid()
        self.words.announce(self.layout.state(rank), _HERE)

    # Who is here ---------------------------------------------------------------------------------

    def alive(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if self.why_gone(rank) is None)

    def why_gone(self, rank: int) -> str | None:
        """Why ``rank`` is not here any more; None while it is."""
        if self._has_left(rank):
            return "it has finished"
        return self._processes.why_lost(rank) if rank != self.rank else None

    def _has_left(self, rank: int) -> bool:
        return self.words[self.layout.state(rank)] == _LEFT

    def _has_ended(self, rank: int) -> bool:
        return self._has_left(rank) or self._processes.has_died(rank)

    def close(self) -> None:
        self.words.announce(self.layout.state(self.rank), _LEFT)
        for rank in range(self.size):
            self._ring(rank)

    def await_words(self, indices: dict[int, int], value: int, op: str) -> None:
        """Wait until each rank's word has reached ``value``; give up when one of them is gone."""
        words, watch = self.words, None
        for index in indices.values():
            while words[index] < value and not words.wait(index, value, TICK_S):
                watch = watch or Watch(op, self._limits)
                self._look_after(indices, value, watch)

    def _look_after(self, indices: dict[int, int], value: int, watch: Watch) -> None:
        gone = {rank: self.why_gone(rank) for rank in indices}
        # Read again after that: a rank may have done its part and then ended.
        missing = [rank for rank, index in indices.items() if self.words[index] < value]
        lost = [rank for rank in missing if gone[rank] is not None]
        if lost:
            raise watch.lost(lost, gone[lost[0]] or "")
        if missing:
            watch.keep_patience(missing)

    # Messages ------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int) -> Work:
        receipt = self.layout.receipt(self.rank, dst, _SENT_SLOT)
        previous = self.words[self.layout.slot(self.rank, dst, _SENT_SLOT)]
        self.await_words({dst: receipt}, previous, f"send to rank {dst}")
        region = self.find_place(x) or self.borrow(x)
        self._leave(x, region, dst, _SENT_SLOT, tag)
        return _Offer(self, dst, region)

    def post(self, x: Tensor, dst: int, tag: int) -> bool:
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
        self.words.write(index + 1, (tag, DTYPES.index(x.dtype), x.numel(), region.place))
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
        while (message := self.take_now(like, sources, tag)) is None:
            rung = self.words[bell]
            if self._find(sources, tag) is not None:
                continue
            leaving = watch and any(self._has_left(source) for source in sources)
            if leaving or not self.words.wait_change(bell, rung, TICK_S):
                patience = patience or Watch(op, self._limits, patient=op == "recv_any")
                self._look_for_senders(sources, tag, patience, watch)
        return message

    def _look_for_senders(
        self, sources: Sequence[int], tag: int, patience: Watch, any_loss: bool
    ) -> None:
        gone = {source: why for source in sources if (why := self.why_gone(source)) is not None}
        missed = len(gone) == len(sources) or (gone and any_loss)
        if not missed or self._find(sources, tag) is not None:
            patience.keep_patience(sources)
        elif patience.op == "recv_any" and not any_loss:
            raise PeersGone
        else:
            raise patience.lost(list(gone), next(iter(gone.values())))

    def take_now(self, like: Tensor, sources: Sequence[int], tag: int) -> tuple[int, Tensor] | None:
        found = self._find(sources, tag)
        if found is None:
            return None
        sequence, src, slot = found
        self._last_source = src
        _, code, numel, place = self.words.read(self.layout.slot(src, self.rank, slot) + 1, 4)
        try:
            check_fit(like, numel, DTYPES[code], src, tag)
            x = self.arena.tensor(place, numel, DTYPES[code]).clone()
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
                found.append((sequence, src, slot))
        return found

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
        words, window = self.words, self.layout.window(self.rank)
        if not self._window:
            self._open_window(x, window)
        check_fit(self._window[0], x.numel(), x.dtype, self.rank, 0)
        version = words[window] + 1
        buffer = version % _BUFFERS
        words.announce(window + 3 + 2 * buffer + 1, 0)
        self._window[buffer].copy_(x)
        words.announce(window + 3 + 2 * buffer + 1, version)
        words.announce(window, version)
        return version

    def _open_window(self, x: Tensor, window: int) -> None:
        self.words.write(window + 1, (x.numel(), DTYPES.index(x.dtype)))
        for buffer in range(_BUFFERS):
            place = self.arena.take(x.nbytes)
            self._window.append(self.arena.tensor(place, x.numel(), x.dtype))
            self.words[window + 3 + 2 * buffer] = place

    def peek(self, src: int, like: Tensor | None) -> tuple[int, Tensor] | None:
        words, window = self.words, self.layout.window(src)
        if words[window] == 0 or self._has_ended(src):
            return None
        words.fence()
        numel, code = words.read(window + 1, 2)
        if like is not None:
            check_fit(like, numel, DTYPES[code], src, 0)
        while True:
            version = words[window]
            buffer = window + 3 + 2 * (version % _BUFFERS)
            x = self.arena.tensor(words[buffer], numel, DTYPES[code]).clone()
            words.fence()
            if words[buffer + 1] == version:  # else its owner has come round to this buffer again
                return version, x if like is None else x.to(like.device)

    # Collectives ---------------------------------------------------------------------------------

    def start_all_reduce(
        self, x: Tensor, weight: int, members: tuple[int, ...], factor: Factor | None = None
    ) -> Work:
        from paceline.comm.shared_collective import AllReduce

        return AllReduce(self._group(members), x, weight, factor)

    def broadcast(self, x: Tensor, src: int, members: tuple[int, ...]) -> None:
        from paceline.comm.shared_collective import Broadcast

        Broadcast(self._group(members), x, src).wait()

    def _group(self, members: tuple[int, ...]) -> Group:
        from paceline.comm.shared_collective import Group

        if members not in self._groups:
            self._groups[members] = Group(self, members, self._group_slot(members))
        return self._groups[members]

    def _group_slot(self, members: tuple[int, ...]) -> int:
        """The place of a group in the directory; the first member to come enters it."""
        digest = hashlib.blake2b(repr(members).encode(), digest_size=7).digest()
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
        index = self.layout.queues + 2 * queue
        with self._locked(index):
            reached, drawn = self.words.read(index, 2)
            if reached > epoch + 1:
                return None
            drawn = drawn if reached == epoch + 1 else 0
            self.words.write(index, (epoch + 1, drawn + 1))
            return drawn

    @contextmanager
    def _locked(self, index: int) -> Iterator[None]:
        """A lock on a word that the kernel takes back when its holder dies."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 8, index * 8)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 8, index * 8)

    def now(self) -> float:
        return time.monotonic() - self._started_s
