"""Messages in shared memory.

A sender copies the message into memory of its own and names it in a slot of its receiver; the
receiver copies it out and gives a receipt. No process in between, no system call but a wake-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.liveness import TICK_S, Watch
from paceline.comm.offer import Offer, as_value
from paceline.comm.ports import (
    MAILBOX_CAPACITY,
    PUBLISHED,
    Lost,
    Mail,
    Message,
    Published,
    check_fit,
)
from paceline.comm.restored import SavedMessage, take_restored
from paceline.comm.shared.layout import SENT_SLOT, SLOT_WORDS, SLOTS
from paceline.comm.shared.members import SharedMembers
from paceline.comm.shared.places import Spot
from paceline.comm.shared.regions import Region, Regions
from paceline.comm.shared.windows import Windows
from paceline.comm.standing import GONE, Standing
from paceline.errors import PeerLost

_INCARNATIONS = 1 << 20


class SharedMail(Mail):
    """The mail of one rank.

    Attributes:
        restored: messages of a checkpoint, which come before all others.
    """

    def __init__(self, members: SharedMembers, regions: Regions) -> None:
        shared = self._shared = members.shared
        self._members, self._regions, self._windows = members, regions, Windows(shared)
        self._words, self._layout, self._rank = shared.words, shared.layout, shared.rank
        self._places, self._deferred, self._last_source = shared.places, shared.deferred, -1
        self.restored: list[SavedMessage] = []

    # Sending -------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Offer:
        self._members.check()
        self._deferred.settle()
        previous = self._words[self._layout.slot(self._rank, dst, SENT_SLOT)]
        if (lost := self._await_receipt(dst, previous)) is not None:
            return Offer(lambda: lost)
        region = self._regions.copy(x, header) if header else self._regions.place(x)
        self._leave(x, region, dst, SENT_SLOT, tag, header)
        return Offer(partial(self._await_receipt, dst, region.sequence))

    def _await_receipt(self, dst: int, sequence: int) -> Lost | None:
        """Wait until ``dst`` has taken a message that was sent; its loss, if that comes first."""
        receipt = self._layout.receipt(self._rank, dst, SENT_SLOT)
        try:
            self._members.await_words({dst: receipt}, sequence, f"send to rank {dst}", {})
        except PeerLost as lost:
            return as_value(lost)
        return None

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        self._members.check()
        self._deferred.settle()
        if self._members.has_ended(dst):
            return False
        for slot in range(MAILBOX_CAPACITY):
            taken = self._words[self._layout.receipt(self._rank, dst, slot)]
            if taken >= self._words[self._layout.slot(self._rank, dst, slot)]:
                self._leave(x, self._regions.copy(x, header), dst, slot, tag, header)
                return True
        return False

    def _leave(
        self, x: Tensor, region: Region, dst: int, slot: int, tag: int, header: bytes
    ) -> None:
        shared, index = self._shared, self._layout.slot(self._rank, dst, slot)
        shared.sequence += 1
        region.receipts = (self._layout.receipt(self._rank, dst, slot),)
        region.sequence = shared.sequence
        both = self._members.own_incarnation * _INCARNATIONS + self._members.incarnation(dst)
        dtype = DTYPES.index(x.dtype)
        message = tag, dtype, x.numel(), *region.spot, len(header), both
        self._words.write(index + 1, message)
        self._places.finish()
        self._words.announce(index, region.sequence)
        shared.ring(dst)
        self._regions.lend(region)

    # Receiving -----------------------------------------------------------------------------------

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        watch, bell = None, self._layout.bell(self._rank)
        table, known = self._shared.table, dict[int, int]()
        while (message := self.try_receive(like, sources, tag)) is None:
            rung = self._words[bell]
            for source in sources:  # one of them may just have come again
                known.setdefault(source, self._members.incarnation(source))
            if self._find(sources, tag) is not None:
                continue
            self._deferred.settle(wait=True)
            gone = any_loss and any(table[source].standing in GONE for source in sources)
            if gone or not self._words.wait_change(bell, rung, TICK_S):
                watch = watch or Watch(op, self._shared.limits, patient=any_loss)
                lost = self._look_for_senders(known, tag, watch, any_loss)
                if lost is not None:
                    return lost
        return message

    def _look_for_senders(
        self, known: dict[int, int], tag: int, watch: Watch, any_loss: bool
    ) -> Lost | None:
        """The senders that are gone, when that means that no message will come."""
        sources = [*known]
        reasons = {rank: self._members.why_gone(rank, number) for rank, number in known.items()}
        gone = {rank: why for rank, why in reasons.items() if why is not None}
        missed = len(gone) == len(sources) or (gone and any_loss)
        if not missed or self._find(sources, tag) is not None:
            watch.check_limits(sources)
            return None
        return Lost(tuple(gone), watch.op, next(iter(gone.values())), watch.waited_s)

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        self._members.check()
        self._deferred.settle()
        restored = take_restored(self.restored, like, sources, tag)
        if restored is not None:
            return restored
        found = self._find(sources, tag)
        if found is None:
            return None
        sequence, src, slot = found
        self._last_source = src
        index = self._layout.slot(src, self._rank, slot)
        code, numel, *places, header_bytes = self._words.read(index + 2, 5)
        spot, mark = Spot(*places), None
        try:
            check_fit(like, numel, dtype_of(code), src, tag)
            self._places.check(src, spot, like.nbytes, header_bytes)
            x, header = self._places.read(spot, numel, like.dtype, header_bytes, like)
            mark = self._places.mark(spot)
        finally:
            self._deferred.announce(self._layout.receipt(src, self._rank, slot), sequence, mark)
        if slot == SENT_SLOT:  # its sender waits for the receipt
            self._deferred.settle(wait=True)
        return Message(src, x.to(like.device).view_as(like), header)

    def _find(self, sources: Sequence[int], tag: int) -> tuple[int, int, int] | None:
        """The oldest message with this tag of a sender; senders in turn."""
        last = self._last_source
        for src in sorted(sources, key=lambda source: (source <= last, source)):
            if self._waiting(src, tag):
                return min(self._waiting(src, tag))  # an older one may have come behind the look
        return None

    def _waiting(self, src: int, tag: int) -> list[tuple[int, int, int]]:
        """The messages of ``src`` with this tag: sequence, sender, slot."""
        words, layout, found = self._words, self._layout, []
        for slot in range(SLOTS):
            index = layout.slot(src, self._rank, slot)
            sequence, its_tag = words.read(index, 2)
            taken = self._deferred[layout.receipt(src, self._rank, slot)]
            if sequence > taken and its_tag == tag:
                if self._is_valid(src, words[index + 7]):
                    found.append((sequence, src, slot))
                else:
                    words.announce(layout.receipt(src, self._rank, slot), sequence)
        return found

    def _is_valid(self, src: int, incarnations: int) -> bool:
        """Whether a message is between the present incarnations, and its sender not left behind.

        What a rank sent before it died is as good as any other.
        """
        members, own = self._members, self._members.own_incarnation
        present = divmod(incarnations, _INCARNATIONS) == (members.incarnation(src), own)
        return present and self._shared.table[src].standing is not Standing.STOPPED

    def waiting(self) -> list[SavedMessage]:
        """All messages that wait for this rank, those of each sender in order."""
        found = []
        self._deferred.settle(wait=True)
        for src in range(self._shared.size):
            for slot in range(SLOTS):
                index = self._layout.slot(src, self._rank, slot)
                sequence, tag, code, numel, *places, size, both = self._words.read(
                    index, SLOT_WORDS
                )
                taken = self._words[self._layout.receipt(src, self._rank, slot)]
                if sequence > taken and self._is_valid(src, both):
                    x, header = self._places.read(Spot(*places), numel, DTYPES[code], size)
                    found.append((src, sequence, tag, x, header.hex()))
        found.sort(key=lambda message: message[:2])
        return [*self.restored, *((src, tag, x, header) for src, _, tag, x, header in found)]

    # Windows -------------------------------------------------------------------------------------

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        self._members.check()
        return self._windows.write(x, header, window)

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        if not gone:
            self._members.check()
            standing = self._shared.table[src].standing
            if standing is not Standing.HERE or self._shared.processes.has_died(src):
                return None
        return self._windows.read(src, like, window)
