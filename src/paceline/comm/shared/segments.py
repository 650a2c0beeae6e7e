"""Memory of a device that a keeper holds for the ranks of a host: see :mod:`.keeper`.

A rank asks the keeper for segments and cuts its vectors out of them. An address says whose segment
it is in, and which one. A segment is never given back while the run lasts, so that others may read
what a lost rank has left there. The first ones of a rank are for its windows, which a successor
takes over; the others serve its processes in turn, those with an even number and those with an odd
one.
"""

from __future__ import annotations

import time

from torch import Tensor, dtype

from paceline.comm.limits import Limits
from paceline.comm.liveness import TICK_S
from paceline.comm.shared.drivers import HANDLE_BYTES, Driver, DriverError, Milestone
from paceline.comm.shared.layout import GIVEN, HANDLE_WORDS, SEGMENTS, Layout
from paceline.comm.shared.memory import SharedWords
from paceline.errors import MessageMismatch, PacelineError, UsageError

ADDRESSES = 1 << 61
"""From here on an address is one of a device, and not of the arena."""
_SPAN = 1 << 40
_WINDOWS = 8
_HALF = (SEGMENTS - _WINDOWS) // 2
_LEAST_BYTES = 4 << 20
_ALIGNMENT = 512
_KNOWN_VECTORS = 1024


class KeeperLost(PacelineError):
    """The keeper of a device's memory does not answer; when it is gone, the launcher knows."""

    exit_code = 3


class Segments:
    """One rank's view of the device memory of all ranks.

    Args:
        words: the control area.
        layout: its words.
        rank: this rank.
        driver: of the device.
        limits: how long to wait for the keeper.
        start: the number of this process among those of the rank: see :meth:`Arena.begin`.

    Attributes:
        device: whose memory it is.

    Raises:
        DriverError: the driver refuses what is needed.
    """

    def __init__(
        self,
        words: SharedWords,
        layout: Layout,
        rank: int,
        driver: Driver,
        limits: Limits,
        start: int,
    ) -> None:
        self._words, self._layout, self._rank = words, layout, rank
        self.device, self._driver, self._limits = driver.device, driver, limits
        driver.share_words(words.address(0), words.nbytes)
        driver.finish()  # the first call prepares the device, before this rank enters
        self._busy = False
        self._opened: dict[tuple[int, int], Tensor] = {}
        self._vectors: dict[tuple[int, int, dtype], Tensor] = {}
        self._slot, self._used = _WINDOWS + start % 2 * _HALF, 0
        self._last = self._slot + _HALF
        self._room(self._slot, 1)
        self._open(self._rank, self._slot)

    def take(self, nbytes: int) -> int:
        """Memory of this rank's own; return its address."""
        nbytes = _aligned(nbytes)
        while self._used + nbytes > self._room(self._slot, nbytes):
            self._slot, self._used = self._slot + 1, 0
            if self._slot == self._last:
                raise UsageError(f"a rank must not use more than {_HALF} segments of a device")
        address = _address(self._rank, self._slot) + self._used
        self._used += nbytes
        return address

    def take_window(self, buffers: int, nbytes: int) -> list[int]:
        """Memory for the buffers of a window; later processes of this rank may take it over."""
        nbytes = _aligned(nbytes)
        for slot in range(_WINDOWS):
            if not self._words[self._layout.segment(self._rank, slot)]:
                self._room(slot, buffers * nbytes)
                first = _address(self._rank, slot)
                return [first + buffer * nbytes for buffer in range(buffers)]
        raise UsageError(f"a rank must not have more than {_WINDOWS} windows on a device")

    def tensor(self, address: int, numel: int, kind: dtype) -> Tensor:
        """The vector at ``address``, whoever owns it."""
        key = address, numel, kind
        if (known := self._vectors.get(key)) is not None:
            return known
        segment, offset = divmod(address - ADDRESSES, _SPAN)
        whole = self._open(*divmod(segment, SEGMENTS))
        end = offset + numel * kind.itemsize
        if end > len(whole) or offset % kind.itemsize:
            raise MessageMismatch(f"{numel} x {kind} at {address} must lie in its segment")
        if len(self._vectors) >= _KNOWN_VECTORS:
            del self._vectors[next(iter(self._vectors))]
        return self._vectors.setdefault(key, whole[offset:end].view(kind))

    def write(self, address: int, x: Tensor) -> None:
        """Have the device copy a vector to ``address``."""
        self._enter()
        self.tensor(address, x.numel(), x.dtype).copy_(x)

    def read(self, address: int, numel: int, kind: dtype) -> Tensor:
        """Have the device copy the vector at ``address``."""
        self._enter()
        return self.tensor(address, numel, kind).clone()

    def set_word(self, index: int, value: int) -> None:
        """Have the device set a word of the control area, after what it was asked before."""
        self._enter()
        self._driver.set_word(self._words.address(index), value)

    def _enter(self) -> None:
        self._driver.enter()
        self._busy = True

    def mark(self) -> Milestone:
        """This moment, among all that the device is asked."""
        return self._driver.mark()

    def finish(self) -> None:
        """Wait until the device has done all that it was asked."""
        if self._busy:
            self._driver.finish()
            self._busy = False

    # Segments ------------------------------------------------------------------------------------

    def _room(self, slot: int, nbytes: int) -> int:
        """The size of a segment of this rank's; a new one holds at least ``nbytes``."""
        words, index = self._words, self._layout.segment(self._rank, slot)
        if not words[index]:
            words.announce(index, max(nbytes, _LEAST_BYTES))
            words.announce(self._layout.keeper_bell, slot * self._layout.size + self._rank + 1)
        if words[index + 1] != GIVEN:  # an earlier process may have asked, and died
            self._await_keeper(index + 1)
        return words[index]

    def _open(self, owner: int, slot: int) -> Tensor:
        """The bytes of a segment."""
        whole = self._opened.get((owner, slot))
        if whole is None:
            if not 0 <= owner < self._layout.size:
                raise MessageMismatch(f"segment {slot} of rank {owner}: there is no such rank")
            index = self._layout.segment(owner, slot)
            nbytes, given = self._words.read(index, 2)
            if given != GIVEN:
                raise MessageMismatch(f"segment {slot} of rank {owner} was never given")
            handle = self._words.read(index + 2, HANDLE_WORDS)
            content = b"".join(word.to_bytes(8, "little", signed=True) for word in handle)
            whole = self._opened[owner, slot] = self._driver.open(content[:HANDLE_BYTES], nbytes)
        return whole

    def _await_keeper(self, given: int) -> None:
        words, until_s = self._words, time.monotonic() + self._limits.start_s
        while not words.wait_change(given, 0, TICK_S):
            if time.monotonic() > until_s:
                raise KeeperLost(
                    f"the keeper of {self.device} has given no memory for"
                    f" {self._limits.start_s:g} s"
                )
        if words[given] != GIVEN:
            reason = self._driver.reason(-words[given])
            raise DriverError(-words[given], f"the keeper got no memory of {self.device}: {reason}")


def _address(owner: int, slot: int) -> int:
    return ADDRESSES + (owner * SEGMENTS + slot) * _SPAN


def owner_of(address: int) -> int:
    """The rank that an address of a device belongs to."""
    return (address - ADDRESSES) // _SPAN // SEGMENTS


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
