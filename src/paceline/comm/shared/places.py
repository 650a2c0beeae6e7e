"""Where ranks leave vectors for each other: in the arena, or in the memory of a device.

A header always lies in the arena: behind its vector, or by itself where that is on a device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.shared.drivers import Milestone
from paceline.comm.shared.layout import BUFFERS
from paceline.comm.shared.memory import Arena, lies_with
from paceline.comm.shared.segments import ADDRESSES, Segments, owner_of
from paceline.errors import MessageMismatch

MAX_HEADER_BYTES = 1 << 24
"""The largest header that a rank reads, whatever a peer claims."""


class Spot(NamedTuple):
    """Where a message lies: its vector, and its header, if that is not behind the vector."""

    vector: int
    header: int = 0

    @property
    def on_device(self) -> bool:
        """Whether its vector lies on a device."""
        return self.vector >= ADDRESSES


class Places:
    """One rank's view of all memory that the ranks of a host share.

    Attributes:
        arena: the memory of the host.
        segments: that of the device, if the ranks share one.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.segments: Segments | None = None

    def device_for(self, x: Tensor) -> Segments | None:
        """The device that a vector like ``x`` is left on; None for the arena."""
        here = self.segments is not None and x.device == self.segments.device and x.numel() > 0
        return self.segments if here else None

    def on_device(self, x: Tensor) -> Tensor:
        """A vector of the host on the device, if there is one."""
        return x if self.segments is None else x.to(self.segments.device)

    def tensor(self, place: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The vector at an offset of the arena, or at an address of the device."""
        if place < ADDRESSES:
            return self.arena.tensor(place, numel, dtype)
        return self._device().tensor(place, numel, dtype)

    def window(self, x: Tensor, header_bytes: int, number: int) -> list[Spot]:
        """Where the buffers of one of this rank's windows lie, for messages like ``x``."""
        if (device := self.device_for(x)) is None:
            nbytes = x.nbytes + header_bytes
            return [Spot(self.arena.window(buffer, nbytes, number)) for buffer in range(BUFFERS)]
        return [
            Spot(place, self.arena.window(0, header_bytes, number))
            for place in device.take_window(BUFFERS, x.nbytes)
        ]

    def set_word(self, index: int, value: int) -> None:
        """Have the device set a word, after what it was asked before."""
        self._device().set_word(index, value)

    def write(self, spot: Spot, x: Tensor, header: bytes = b"") -> None:
        """Copy a vector and its header to where they belong; a device may still be at it."""
        if not spot.on_device:
            self.arena.write(spot.vector, x, header)
            return
        if header:
            self.arena.write_bytes(spot.header, header)
        self._device().write(spot.vector, x)

    def read(
        self,
        spot: Spot,
        numel: int,
        dtype: torch.dtype,
        header_bytes: int,
        like: Tensor | None = None,
    ) -> tuple[Tensor, bytes]:
        """Copies of a vector, beside ``like``, and of its header; a device may still be at it."""
        if not spot.on_device:
            device = torch.device("cpu") if like is None else like.device
            return self.arena.read(spot.vector, numel, dtype, header_bytes, device)
        header = self.arena.read_bytes(spot.header, header_bytes) if header_bytes else b""
        return self._device().read(spot.vector, numel, dtype), header

    def check(self, src: int, spot: Spot, nbytes: int, header_bytes: int) -> None:
        """Refuse what does not lie where ``src`` may write, before it is looked at."""
        sane = nbytes >= 0 and 0 <= header_bytes <= MAX_HEADER_BYTES
        if spot.on_device:
            header_is_own = not header_bytes or lies_with(src + 1, spot.header, header_bytes)
            own = owner_of(spot.vector) == src and header_is_own
        else:
            own = lies_with(src + 1, spot.vector, nbytes + header_bytes)
        if not (sane and own):
            raise MessageMismatch(
                f"{nbytes} bytes and a header of {header_bytes} of rank {src} at {spot.vector}: not"
                " its own memory"
            )

    def mark(self, spot: Spot) -> Milestone | None:
        """This moment, among all that the device is asked; None for a message in the arena."""
        return self.mark_device() if spot.on_device else None

    def mark_device(self) -> Milestone:
        """This moment, among all that the device is asked."""
        return self._device().mark()

    def finish(self) -> None:
        """Wait until the device, if there is one, has made all reads and writes of this rank."""
        if self.segments is not None:
            self.segments.finish()

    def _device(self) -> Segments:
        if self.segments is None:
            raise MessageMismatch("a vector on a device must not be sent to a rank without one")
        return self.segments
