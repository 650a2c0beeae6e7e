"""Windows in shared memory: what a rank publishes, whole at every moment, also after its death.

A window has three buffers. Its owner copies into the one that was written longest ago, then names
it as the present version. A reader that was overtaken twice while it copied starts again.

Where the vectors lie on a device, the device sets the words of the version itself, after it has
copied: the owner does not wait for it. Headers are in a ring then, since the owner may be some
versions ahead of its device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.dtypes import DTYPES, dtype_of
from paceline.comm.ports import Published, check_fit
from paceline.comm.shared.layout import BUFFERS
from paceline.comm.shared.places import Spot
from paceline.comm.shared.rank import SharedRank
from paceline.errors import MessageMismatch

HEADERS = 8
"""How many versions an owner may be ahead of its device."""


@dataclass
class Window:
    """A window of this rank's own: what it holds, and the last version that was written to it."""

    numel: int
    dtype: torch.dtype
    version: int


class Windows:
    """The windows of all ranks; each rank writes its own."""

    def __init__(self, shared: SharedRank) -> None:
        self._words, self._layout, self._places = shared.words, shared.layout, shared.places
        self._rank = shared.rank
        self._own: dict[int, Window] = {}

    def write(self, x: Tensor, header: bytes, window: int) -> int:
        """Copy a message into the buffer that was written longest ago, and show that one."""
        words, start = self._words, self._layout.window(self._rank, window)
        if window not in self._own:
            self._open(x, header, start, window)
        own = self._own[window]
        check_fit(x, own.numel, own.dtype, self._rank, 0)
        if len(header) != words[start + 3]:
            raise MessageMismatch(
                f"a header of {len(header)} bytes: the window has one of {words[start + 3]}"
            )
        own.version += 1
        buffer = _buffer(start, own.version)
        spot = Spot(*words.read(buffer + 1, 2))
        if spot.on_device:
            self._write_on_device(spot, x, header, (start, buffer, own.version))
        else:
            words.announce(buffer, 0)
            self._places.write(spot, x, header)
            words.announce(buffer, own.version)
            words.announce(start, own.version)
        return own.version

    def _write_on_device(
        self, spot: Spot, x: Tensor, header: bytes, to: tuple[int, int, int]
    ) -> None:
        start, buffer, version = to
        if version - self._words[start] >= HEADERS:
            self._places.finish()
        self._write_header(spot, header, version)
        self._places.set_word(buffer, 0)
        self._places.write(spot, x)
        self._places.set_word(buffer, version)
        self._places.set_word(start, version)

    def _write_header(self, spot: Spot, header: bytes, version: int) -> None:
        """Write a header to its place in the ring; while that is done, it belongs to no version."""
        place, arena = _in_ring(spot, len(header), version), self._places.arena
        arena.write_bytes(place, bytes(8))
        self._words.fence()
        arena.write_bytes(place + 8, header)
        self._words.fence()
        arena.write_bytes(place, version.to_bytes(8, "little"))

    def _open(self, x: Tensor, header: bytes, start: int, window: int) -> None:
        """Find memory for a window, or take over that of an earlier process."""
        shape = [x.numel(), DTYPES.index(x.dtype), len(header)]
        if self._words.read(start + 1, 3) != shape or not self._words[start]:
            self._words.write(start + 1, tuple(shape))
            for buffer, spot in enumerate(self._places.window(x, len(header), window)):
                self._words.write(_buffer(start, buffer) + 1, spot)
        self._own[window] = Window(x.numel(), x.dtype, self._words[start])

    def read(self, src: int, like: Tensor | None, window: int) -> Published | None:
        """A copy of what is in a window of ``src``; None before the first version."""
        words, start = self._words, self._layout.window(src, window)
        if src == self._rank:
            self._places.finish()
        if words[start] == 0:
            return None
        words.fence()
        numel, code, header_bytes = words.read(start + 1, 3)
        dtype = dtype_of(code)
        if like is not None:
            check_fit(like, numel, dtype, src, 0)
        while True:
            version = words[start]
            buffer = _buffer(start, version)
            spot = Spot(*words.read(buffer + 1, 2))
            self._places.check(src, spot, numel * dtype.itemsize, header_bytes)
            shape = numel, dtype, header_bytes
            x, header, written = self._read(spot, shape, version, like)
            words.fence()
            if words[buffer] == version and written:
                return Published(version, x if like is None else x.to(like.device), header)
            if words[start] == version:  # else its owner has overtaken this reader
                raise MessageMismatch(f"the window of rank {src} holds no version {version}")

    def _read(
        self, spot: Spot, shape: tuple[int, torch.dtype, int], version: int, like: Tensor | None
    ) -> tuple[Tensor, bytes, bool]:
        """What is in a buffer now, and whether its header is of this version."""
        if not spot.on_device:
            return *self._places.read(spot, *shape, like), True
        numel, dtype, header_bytes = shape
        x, _ = self._places.read(spot, numel, dtype, 0)
        place = _in_ring(spot, header_bytes, version)
        self._places.finish()
        header = self._places.arena.read_bytes(place, 8 + header_bytes)
        return x, header[8:], int.from_bytes(header[:8], "little") == version


def _in_ring(spot: Spot, header_bytes: int, version: int) -> int:
    """Where the header of a version lies."""
    return spot.header + version % HEADERS * (8 + header_bytes)


def _buffer(start: int, version: int) -> int:
    """The words of the buffer that holds a version."""
    return start + 4 + 3 * (version % BUFFERS)
