"""Memory through which a rank hands parts of messages to another rank of its host.

A part that goes over a socket is copied four times, and encrypted. Through memory that both see it
is copied in and out, and the socket carries only where it lies. The memory is anonymous: nothing is
left of it when both ranks are gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref

from paceline.comm.hosts.streams import PART_BYTES
from paceline.comm.hosts.wire import Bytes

_PLACE = struct.Struct("<IIII")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MOST_BYTES = 64 * PART_BYTES


class NearMemory:
    """The memory of one stream, at the sender's end.

    A part stays there until it is acknowledged; so no more parts than there are slots may be on
    their way.

    Args:
        slots: how many parts it holds.
    """

    def __init__(self, slots: int) -> None:
        self._slots, size = slots, slots * PART_BYTES
        self._fd = os.memfd_create("paceline-near", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = memoryview(mmap.mmap(self._fd, size))

    def put(self, number: int, chunk: Bytes) -> bytes:
        """Copy a part there; return where it is."""
        start = number % self._slots * PART_BYTES
        self._memory[start : start + len(chunk)] = chunk
        return _PLACE.pack(os.getpid(), self._fd, start, len(chunk))


class NearView:
    """The memory of one stream, at the receiver's end.

    Args:
        place: where a part of the stream is.

    Raises:
        OSError: this process cannot see the sender's memory.
        ValueError: that is no memory of a stream.
    """

    def __init__(self, place: Bytes) -> None:
        pid, number, *_ = _PLACE.unpack(place)
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            # One that can shrink would end the process that reads it.
            if seals & _SEALS != _SEALS or not 0 < size <= _MOST_BYTES:
                raise ValueError("no memory of a stream")
            self._memory = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def part(self, place: Bytes) -> memoryview:
        """A part; it may change once it is acknowledged."""
        *_, start, length = _PLACE.unpack(place)
        if length > PART_BYTES or start + length > len(self._memory):
            raise ValueError(f"{length} bytes at {start}, in memory of {len(self._memory)}")
        return self._memory[start : start + length]
