"""The registrar's state in memory that outlives its process.

The launcher holds the memory. Two slots are written in turn, each with its number and a checksum,
so that one of them is whole whenever the registrar is killed.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import Any

_HEAD = struct.Struct("<QQI")
_SLOT_BYTES = 1 << 26


class Journal:
    """The two slots.

    Args:
        fd: a file; it is long and empty in most places.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._number = fd, 0

    @staticmethod
    def create() -> int:
        """Memory for a journal, as a descriptor that processes inherit."""
        fd = os.memfd_create("paceline-journal")
        os.ftruncate(fd, 2 * _SLOT_BYTES)
        return fd

    def write(self, state: dict[str, Any]) -> None:
        """Save a state, in place of the one before the last."""
        self._number += 1
        body = json.dumps(state, separators=(",", ":")).encode()
        head = _HEAD.pack(self._number, len(body), zlib.crc32(body))
        os.pwrite(self._fd, head + body, self._number % 2 * _SLOT_BYTES)

    def read(self) -> dict[str, Any] | None:
        """The last state that was saved whole; None when there is none."""
        found = sorted(filter(None, map(self._read_slot, range(2))), key=lambda pair: pair[0])
        if not found:
            return None
        self._number, body = found[-1]
        state: dict[str, Any] = json.loads(body)
        return state

    def _read_slot(self, slot: int) -> tuple[int, bytes] | None:
        number, length, checksum = _HEAD.unpack(os.pread(self._fd, _HEAD.size, slot * _SLOT_BYTES))
        body = os.pread(self._fd, min(length, _SLOT_BYTES), slot * _SLOT_BYTES + _HEAD.size)
        return (number, body) if number and zlib.crc32(body) == checksum else None
