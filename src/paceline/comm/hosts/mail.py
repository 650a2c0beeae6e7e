"""Messages between hosts: a sender pushes them, and the receiver says when it has taken one.

A small message overtakes a large one. So that messages of one tag keep their order, each names the
one before it with the same tag; the receiver puts it behind that one. And each says what its sender
has taken last: a large one may overtake the small one that says so, where a connection has lost
that, and who gets a request must know that there is room for the reply.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.hosts.link import RankLink, Topic, host_copy
from paceline.comm.hosts.windows import HostsWindows
from paceline.comm.liveness import TICK_S
from paceline.comm.offer import Offer
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
from paceline.comm.standing import GONE, Standing

_LAST_TAKEN = MAILBOX_CAPACITY + 2
"""So many messages may wait at once: the posted ones, and those that somebody sends."""
_LETTER = struct.Struct(f"<qBQQ{_LAST_TAKEN}Q")
_NUMBER = struct.Struct("<Q")


class HostsLetter(NamedTuple):
    """A message that has arrived and was not taken yet."""

    incarnation: int
    number: int
    tag: int
    dtype: int
    header: bytes
    body: Tensor

    @property
    def x(self) -> Tensor:
        """Its vector, flat."""
        return self.body.view(dtype_of(self.dtype))


def _last_taken() -> deque[int]:
    """The numbers of the messages that were taken last: none so far."""
    return deque([0] * _LAST_TAKEN, _LAST_TAKEN)


class HostsMail(Mail):
    """The mail of one rank.

    Attributes:
        restored: messages of a checkpoint, which come before all others.
    """

    def __init__(self, link: RankLink, windows: HostsWindows) -> None:
        self._link, self._windows, self._last_source = link, windows, -1
        self.restored: list[SavedMessage] = []
        link.handlers[Topic.MAIL] = self._on_letter
        link.handlers[Topic.TAKEN] = self._on_taken
        self.begin()

    def begin(self) -> None:
        """Begin an incarnation: drop all that an earlier one left."""
        self._number = 0
        self._boxes: dict[int, list[HostsLetter]] = {}
        self._early: dict[tuple[int, int, int, int], HostsLetter] = {}
        self._tails: dict[tuple[int, int, int], int] = {}
        self._sent: dict[tuple[int, int, int], int] = {}
        self._taken: defaultdict[tuple[int, int], deque[int]] = defaultdict(_last_taken)
        self._posted: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self._offered: defaultdict[tuple[int, int], set[int]] = defaultdict(set)

    # Sending -------------------------------------------------------------------------------------

    def start_send(self, x: Tensor, dst: int, tag: int, header: bytes) -> Offer:
        key = dst, self._link.check().incarnation(dst)
        with self._link.changed:
            number = self._send(x.detach().cpu(), key, tag, header)
            self._offered[key].add(number)
        return Offer(partial(self._await_taken, key, number))

    def _await_taken(self, key: tuple[int, int], number: int) -> Lost | None:
        """Wait until a message was taken; the loss of its receiver, if that comes first."""
        dst, incarnation = key
        watch = self._link.watch(f"send to rank {dst}")
        with self._link.changed:
            while number in self._offered[key]:
                roll = self._link.check()
                if (why := roll.why_gone(dst, incarnation)) is not None:
                    return Lost((dst,), watch.op, why, watch.waited_s)
                self._link.changed.wait(TICK_S)
                watch.check_limits([dst])
        return None

    def post(self, x: Tensor, dst: int, tag: int, header: bytes) -> bool:
        roll = self._link.check()
        key = dst, roll.incarnation(dst)
        with self._link.changed:
            if roll.standing(dst) in GONE or len(self._posted[key]) >= MAILBOX_CAPACITY:
                return False
            self._posted[key].add(self._send(host_copy(x), key, tag, header))
        return True

    def _send(self, x: Tensor, key: tuple[int, int], tag: int, header: bytes) -> int:
        self._number += 1
        before = self._sent.get((*key, tag), 0)
        self._sent[*key, tag] = self._number
        meta = _LETTER.pack(tag, DTYPES.index(x.dtype), self._number, before, *self._taken[key])
        meta, (dst, incarnation) = meta + header, key
        gate = self._windows.gate()
        if gate is None:
            self._link.send(dst, Topic.MAIL, meta, x, incarnation)
        else:
            self._link.send_when(gate, dst, Topic.MAIL, meta, x, incarnation)
        return self._number

    def _on_taken(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        self._note_taken(src, incarnation, _NUMBER.unpack(meta))

    def _note_taken(self, src: int, incarnation: int, numbers: Iterable[int]) -> None:
        for waiting in (self._posted, self._offered):
            waiting[src, incarnation].difference_update(numbers)

    # Receiving -----------------------------------------------------------------------------------

    def _on_letter(self, src: int, incarnation: int, meta: bytes, body: Tensor) -> None:
        """Put a letter behind the one before it with the same tag, once that has arrived."""
        tag, dtype, number, before, *taken = _LETTER.unpack_from(meta)
        self._note_taken(src, incarnation, taken)
        letter = HostsLetter(incarnation, number, tag, dtype, meta[_LETTER.size :], body)
        chain = src, incarnation, tag
        self._early[*chain, before] = letter
        while (found := self._early.pop((*chain, self._tails.get(chain, 0)), None)) is not None:
            self._tails[chain] = found.number
            self._boxes.setdefault(src, []).append(found)

    def receive(
        self, like: Tensor, sources: Sequence[int], tag: int, op: str, any_loss: bool = False
    ) -> Message | Lost:
        watch, known = self._link.watch(op, patient=any_loss), dict[int, int]()
        with self._link.changed:
            while (message := self.try_receive(like, sources, tag)) is None:
                roll = self._link.check()
                for source in sources:  # one of them may just have come again
                    known.setdefault(source, roll.incarnation(source))
                reasons = {rank: roll.why_gone(rank, number) for rank, number in known.items()}
                gone = {rank: why for rank, why in reasons.items() if why is not None}
                if len(gone) == len(known) or (gone and any_loss):
                    return Lost(tuple(gone), op, next(iter(gone.values()), ""), watch.waited_s)
                self._link.changed.wait(TICK_S)
                watch.check_limits([*known])
        return message

    def try_receive(self, like: Tensor, sources: Sequence[int], tag: int) -> Message | None:
        self._link.check()
        restored = take_restored(self.restored, like, sources, tag)
        if restored is not None:
            return restored
        with self._link.changed:
            found = self._find(sources, tag)
            if found is None:
                return None
            src, letter = found
            self._last_source = src
            self._boxes[src].remove(letter)
            self._tell_taken(src, letter)
        x = letter.x
        check_fit(like, x.numel(), x.dtype, src, tag)
        return Message(src, x.to(like.device).view_as(like), letter.header)

    def _tell_taken(self, src: int, letter: HostsLetter) -> None:
        if self._link.check().why_gone(src, letter.incarnation) is None:
            self._taken[src, letter.incarnation].append(letter.number)
            meta = _NUMBER.pack(letter.number)
            self._link.send(src, Topic.TAKEN, meta, incarnation=letter.incarnation)

    def _find(self, sources: Sequence[int], tag: int) -> tuple[int, HostsLetter] | None:
        """The oldest message with this tag of a sender; senders in turn."""
        last = self._last_source
        for src in sorted(sources, key=lambda source: (source <= last, source)):
            for letter in self._valid(src):
                if letter.tag == tag:
                    return src, letter
        return None

    def _valid(self, src: int) -> list[HostsLetter]:
        """The messages of the present incarnation of ``src``, unless it was left behind.

        What a rank sent before it died is as good as any other. Those of earlier incarnations are
        dropped; those of one that the registrar has not told of yet stay.
        """
        box, roll = self._boxes.get(src, []), self._link.roll
        if not box or roll is None:
            return []
        number, standing = roll.incarnation(src), roll.standing(src)
        box[:] = [letter for letter in box if letter.incarnation >= number]
        if standing is Standing.STOPPED:
            return []
        return [letter for letter in box if letter.incarnation == number]

    def waiting(self) -> list[SavedMessage]:
        """All messages that wait for this rank, those of each sender in order."""
        with self._link.changed:
            found = [
                (src, letter.tag, letter.x.clone(), letter.header.hex())
                for src in sorted(self._boxes)
                for letter in sorted(self._valid(src), key=lambda each: each.number)
            ]
        return [*self.restored, *found]

    # Windows -------------------------------------------------------------------------------------

    def publish(self, x: Tensor, header: bytes = b"", window: int = PUBLISHED) -> int:
        self._link.check()
        return self._windows.write(x, header, window)

    def peek(
        self, src: int, like: Tensor | None, window: int = PUBLISHED, gone: bool = False
    ) -> Published | None:
        roll = self._link.check()
        if not gone and roll.standing(src) is not Standing.HERE:
            return None
        seen = self._windows.read(src, window, gone)
        if seen is None or like is None:
            return seen
        check_fit(like, seen.x.numel(), seen.x.dtype, src, 0)
        return seen._replace(x=seen.x.to(like.device))
