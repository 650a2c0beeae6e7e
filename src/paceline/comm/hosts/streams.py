"""Messages in order over a connection that may break.

ZeroMQ connects again by itself after a connection broke, but may drop what it had queued. So a
message travels in numbered parts. The receiver takes each part once and in order, and acknowledges
it; the sender sends again what is unacknowledged when the connection is there again. No class here
knows a socket or a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_BYTES = 1 << 35
"""The longest message."""
PART_BYTES = 1 << 18
"""The most bytes of a message in one part."""
WINDOW = 64
"""How many parts may be on their way: 16 MB, enough for 1 Gbit/s with 100 ms."""
ACK_EVERY = 4
"""A receiver acknowledges every fourth part, and the last part of a message."""
STALL_S, LONGEST_STALL_S = 2.0, 32.0
"""After so long without an acknowledgement the sender sends again, whatever the connection says;
each time it waits twice as long, up to the second of them."""


class Part(NamedTuple):
    """A part of a message.

    Attributes:
        number: of the part in its stream, from 1.
        first, last: whether a message begins or ends with it.
        total: how many bytes the body of the message has.
        meta: what the message is; in its first part only.
        chunk: bytes of the body.
    """

    number: int
    first: bool
    last: bool
    total: int
    meta: bytes
    chunk: memoryview | bytes


@dataclass
class _Parcel:
    """A message on its way: its parts are numbered from ``first`` on."""

    meta: bytes
    body: memoryview
    first: int

    @property
    def end(self) -> int:
        """The number after that of its last part."""
        return self.first + max(1, -(-len(self.body) // PART_BYTES))

    def part(self, number: int) -> Part:
        """One of its parts."""
        start = (number - self.first) * PART_BYTES
        first, last = number == self.first, number == self.end - 1
        chunk = self.body[start : start + PART_BYTES]
        return Part(number, first, last, len(self.body), self.meta if first else b"", chunk)


class OutStream:
    """The sender's end of a stream.

    Attributes:
        window: how many parts may be on their way.
    """

    def __init__(self) -> None:
        self.window = WINDOW
        self._parcels: deque[_Parcel] = deque()
        self._next = self._end = 1
        self._acknowledged = 0
        self._progress_s, self._patience_s = 0.0, STALL_S

    def add(self, meta: bytes, body: memoryview) -> int:
        """Queue a message; return the number of its last part."""
        parcel = _Parcel(meta, body, self._end)
        self._parcels.append(parcel)
        self._end = parcel.end
        return self._end - 1

    def due(self) -> Iterator[Part]:
        """The parts to send now; each counts as sent when it is taken from the iterator."""
        if self._next == self._end:
            return
        for parcel in [*self._parcels]:
            if parcel.end <= self._next:
                continue
            while self._next < parcel.end:
                if self._next > self._acknowledged + self.window:
                    return
                self._next += 1
                yield parcel.part(self._next - 1)

    def unsend(self) -> None:
        """Take back the last part of :meth:`due`: the connection had no room for it."""
        self._next -= 1

    def acknowledge(self, number: int, now_s: float) -> None:
        """Hear that all parts up to ``number`` have arrived."""
        if self._acknowledged < number < self._next:
            self._acknowledged = number
            self._progress_s, self._patience_s = now_s, STALL_S
            while self._parcels and self._parcels[0].end <= number + 1:
                self._parcels.popleft()

    def rewind(self) -> None:
        """Send again all that is on its way: the connection broke, and is there again."""
        self._next = self._acknowledged + 1

    def look(self, now_s: float) -> None:
        """Send again what is on its way, if nothing was acknowledged for too long."""
        if self._next == self._acknowledged + 1:
            self._progress_s = now_s
        elif now_s > self._progress_s + self._patience_s:
            self._progress_s = now_s
            self._patience_s = min(2 * self._patience_s, LONGEST_STALL_S)
            self.rewind()

    def has_arrived(self, number: int) -> bool:
        """Whether the part of this number, and all before it, have arrived."""
        return number <= self._acknowledged

    @property
    def is_empty(self) -> bool:
        """Whether all messages have arrived."""
        return not self._parcels


class InStream:
    """The receiver's end of a stream.

    Attributes:
        last: the number of the last part that was taken.
    """

    def __init__(self) -> None:
        self.last = 0
        self._meta, self._body, self._filled = b"", torch.empty(0, dtype=torch.uint8), 0

    def add(self, part: Part) -> tuple[bytes, Tensor] | None:
        """Take a part, if it is the next one; return the message that it completes."""
        if part.number != self.last + 1:
            return None
        if part.first:
            self._meta, self._filled = part.meta, 0
            self._body = _room_for(part.total)
        end = self._filled + len(part.chunk)
        if end > len(self._body):
            raise ValueError("a part does not fit into its message")
        self._body.numpy()[self._filled : end] = np.frombuffer(part.chunk, np.uint8)
        self.last, self._filled = part.number, end
        if not part.last:
            return None
        if end != len(self._body):
            raise ValueError("a message ends before its last byte")
        body, self._body = self._body, torch.empty(0, dtype=torch.uint8)
        return self._meta, body


def _room_for(total: int) -> Tensor:
    """Room for a message; refuses a length that no message of ours has."""
    if total > MOST_BYTES:
        raise ValueError(f"a message of {total} bytes")
    return torch.empty(total, dtype=torch.uint8)
