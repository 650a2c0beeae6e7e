"""JSON messages between two processes, each once and in order, over a connection that may break."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.comm.hosts.streams import InStream, OutStream, Part
from paceline.comm.hosts.wire import GONE_S

_HEAD = struct.Struct("<BQQ")
_FIRST, _LAST, _ACK = 1, 2, 4

Message = dict[str, Any]
Send = Callable[[list[bytes]], bool]
"""Sends frames without waiting; False when there is no room."""


class JsonLine:
    """One end of such a connection.

    Args:
        send: sends frames to the other end.

    Attributes:
        heard_s: when something was last heard of the other end.
    """

    def __init__(self, send: Send) -> None:
        self._send, self._outbox, self._inbox = send, OutStream(), InStream()
        self.heard_s = time.monotonic()

    def put(self, message: Message) -> None:
        """Send a message."""
        self._outbox.add(b"", memoryview(json.dumps(message).encode()))
        self._pump()

    def take(self, frames: Sequence[bytes]) -> Iterator[Message]:
        """Take frames that have come; the messages that they complete."""
        now_s = time.monotonic()
        if now_s > self.heard_s + GONE_S:  # what was sent meanwhile may be lost
            self._outbox.rewind()
            self._pump()
        self.heard_s = now_s
        head, chunk = (*frames, b"")[:2]
        if len(head) != _HEAD.size:
            return
        flags, number, total = _HEAD.unpack(head)
        if flags & _ACK:
            self._outbox.acknowledge(number, self.heard_s)
            self._pump()
            return
        part = Part(number, bool(flags & _FIRST), bool(flags & _LAST), total, b"", chunk)
        complete = self._inbox.add(part)
        self._send([_HEAD.pack(_ACK, self._inbox.last, 0)])
        if complete is not None:
            yield json.loads(complete[1].numpy().tobytes())

    def look(self) -> None:
        """Call this a few times a second: let the other end hear, and send again what was lost."""
        self._send([_HEAD.pack(_ACK, self._inbox.last, 0)])
        self._outbox.look(time.monotonic())
        self._pump()

    @property
    def is_idle(self) -> bool:
        """Whether the other end has all messages."""
        return self._outbox.is_empty

    def _pump(self) -> None:
        for part in self._outbox.due():
            flags = _FIRST * part.first + _LAST * part.last
            if not self._send([_HEAD.pack(flags, part.number, part.total), bytes(part.chunk)]):
                self._outbox.unsend()
                return
