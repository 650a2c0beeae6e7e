"""Memory that the processes of one host share, and the words in it that they wait on.

The memory is one ``memfd``: it has no name, so nothing is left of it when the last process that
holds it ends, however it ends. The file is sparse: each rank takes what it needs from a range of
its own, and pages exist once they are touched. Every word has one writer, or is written under a
lock; a bell has several, and is only compared for a change. So no atomic read-modify-write is
needed anywhere.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from typing import Any

import torch
from torch import Tensor

from paceline.comm.shared.drivers import pin
from paceline.errors import MessageMismatch, UsageError

PAGE = mmap.ALLOCATIONGRANULARITY
RANGE_BYTES = 1 << 40
"""The part of the sparse file that belongs to one rank."""
MAX_PINNED = 1024
"""How many of these are page-locked, so that a GPU copies from them and into them itself."""
MAX_MAPPINGS = 4096
"""How many pieces of the memory are kept mapped; the kernel allows some 65,000 of a process."""

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 0x7FFFFFFF
_STRONG_ORDER = platform.machine() == "x86_64"
_YIELDS, _MORE_YIELDS = 200, 4000
"""How often a wait yields before it sleeps. A sleeping rank takes some 50 us to wake, so a wait
yields for longer where that takes no core from other ranks."""
_CPU = torch.device("cpu")


class Arena:
    """One rank's view of the shared memory.

    Args:
        fd: the memfd, inherited from the launcher.
        owner: whose range :meth:`take` allocates from; 0 is the control area's.
    """

    def __init__(self, fd: int, owner: int) -> None:
        self._fd, self._first = fd, owner * RANGE_BYTES
        self._next = self._first
        self._mapped: dict[tuple[int, int], mmap.mmap] = {}
        self._own: list[tuple[int, int, int]] = []
        self._pinned: list[mmap.mmap] = []

    def begin(self, start: int) -> None:
        """Allocate for process number ``start`` of the owner.

        Two processes that follow each other use different quarters of the range: peers may still
        read what the earlier one has left.
        """
        self._next = self._first + start % 2 * RANGE_BYTES // 4

    @staticmethod
    def create(ranks: int) -> int:
        """Make the memory for so many ranks; return its file descriptor."""
        if not _SYS_FUTEX:
            raise UsageError(
                f"transport (shared_memory) must be distributed on {platform.machine()}:"
                " shared memory is for x86_64 and aarch64"
            )
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
        os.ftruncate(fd, (ranks + 1) * RANGE_BYTES)
        return fd

    def take(self, nbytes: int) -> int:
        """Allocate zeroed memory from this rank's own range; return its offset in the file."""
        start = self._next
        self._next += _pages(max(nbytes, 1))
        return start

    def window(self, buffer: int, nbytes: int, number: int) -> int:
        """The offset of a buffer of one of this rank's windows; a successor finds the same."""
        return self._first + (4 + number) * RANGE_BYTES // 8 + buffer * _pages(nbytes)

    def map(self, start: int, nbytes: int) -> tuple[mmap.mmap, int]:
        """The memory of ``nbytes`` at ``start``: a mapping, and where in it they begin."""
        first = start - start % PAGE
        key = (first, _pages(start - first + max(nbytes, 1)))
        if key not in self._mapped:
            if first < 0 or first + key[1] > os.fstat(self._fd).st_size:
                raise MessageMismatch(f"{nbytes} bytes at {start} must lie in the shared memory")
            if len(self._mapped) >= MAX_MAPPINGS:  # whoever still uses the oldest one keeps it
                del self._mapped[next(iter(self._mapped))]
            memory = mmap.mmap(self._fd, key[1], mmap.MAP_SHARED, offset=first)
            if torch.cuda.is_initialized() and len(self._pinned) < MAX_PINNED and pin(memory):
                self._pinned.append(memory)  # a page-locked address must not get other memory
            self._mapped[key] = memory
        return self._mapped[key], start - first

    def tensor(self, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The vector at ``start``, wherever it was allocated."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        memory, offset = self.map(start, numel * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)

    def write(self, start: int, x: Tensor, header: bytes) -> None:
        """Copy a vector to ``start``, and a header behind it."""
        memory, offset = self.map(start, x.nbytes + len(header))
        end = offset + x.nbytes
        if x.numel():
            torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).copy_(x)
        memory[end : end + len(header)] = header

    def write_bytes(self, start: int, content: bytes) -> None:
        """Copy bytes to ``start``."""
        memory, offset = self.map(start, len(content))
        memory[offset : offset + len(content)] = content

    def read_bytes(self, start: int, nbytes: int) -> bytes:
        """A copy of the bytes at ``start``."""
        memory, offset = self.map(start, nbytes)
        return memory[offset : offset + nbytes]

    def read(
        self,
        start: int,
        numel: int,
        dtype: torch.dtype,
        header_bytes: int,
        device: torch.device = _CPU,
    ) -> tuple[Tensor, bytes]:
        """Copies of the vector at ``start``, on ``device``, and of the header behind it."""
        nbytes = numel * dtype.itemsize
        memory, offset = self.map(start, nbytes + header_bytes)
        end = offset + nbytes
        x = torch.empty(0, dtype=dtype, device=device)
        if numel:
            there = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
            x = there.to(device, copy=True)
        return x, memory[end : end + header_bytes]

    def array(self, start: int, numel: int, dtype: torch.dtype) -> Any:
        """The vector at ``start`` for quick sums: numpy's, except of the dtypes of 16 bits."""
        vector = self.tensor(start, numel, dtype)
        return vector if dtype.itemsize == 2 else vector.numpy()

    def new_tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed vector of this rank's own that others can map."""
        nbytes = numel * dtype.itemsize
        start = self.take(nbytes)
        vector = self.tensor(start, numel, dtype).zero_()  # an earlier process may have used it
        self._own.append((vector.data_ptr(), nbytes, start))
        return vector

    def find(self, x: Tensor) -> int | None:
        """Where ``x`` lies, if it lies in a vector that :meth:`new_tensor` made."""
        address, nbytes = x.data_ptr(), x.nbytes
        for first, room, start in self._own:
            if first <= address and address + nbytes <= first + room:
                return start + address - first
        return None


def lies_with(owner: int, start: int, nbytes: int) -> bool:
    """Whether so many bytes from ``start`` on are in the range of ``owner``."""
    first = owner * RANGE_BYTES
    return first <= start and start + nbytes <= first + RANGE_BYTES


def map_control(fd: int, nbytes: int) -> mmap.mmap:
    """The words at the beginning of the memory, which belong to no rank."""
    return mmap.mmap(fd, _pages(nbytes), mmap.MAP_SHARED)


class SharedWords:
    """64-bit words of shared memory that ranks set, read and wait on.

    Args:
        memory: where they lie.
        ranks: how many processes wait on them.
    """

    def __init__(self, memory: mmap.mmap, ranks: int) -> None:
        spare = len(os.sched_getaffinity(0)) >= 2 * ranks
        self._yields = _MORE_YIELDS if spare else _YIELDS
        self._words = memoryview(memory).cast("B").cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.nbytes = len(memory)

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value

    def address(self, index: int) -> int:
        """Where a word lies in this process."""
        return self._address + index * 8

    def read(self, index: int, count: int) -> list[int]:
        """Several words in a row."""
        return self._words[index : index + count].tolist()

    def write(self, index: int, values: tuple[int, ...]) -> None:
        """Set several words in a row."""
        for value in values:
            self._words[index] = value
            index += 1

    def announce(self, index: int, value: int) -> None:
        """Set a word after all that was written before it, and wake those who wait on it."""
        if not _STRONG_ORDER:
            self.fence()
        self._words[index] = value
        _syscall(_SYS_FUTEX, self._address + index * 8, _FUTEX_WAKE, _EVERYONE, None)

    def fence(self) -> None:
        """A full memory barrier: the kernel's waking path is one."""
        _syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 0, None)

    def wait(self, index: int, value: int, timeout_s: float) -> bool:
        """Wait until the word has reached ``value``; False after ``timeout_s``.

        A few yields first, since the other rank often needs just this core; then a futex.
        """
        words = self._words
        for _ in range(self._yields):
            if words[index] >= value:
                break
            os.sched_yield()
        else:
            seen = words[index]
            if seen < value:
                self._sleep(index, seen, timeout_s)
            if words[index] < value:
                return False
        if not _STRONG_ORDER:
            self.fence()
        return True

    def wait_change(self, index: int, seen: int, timeout_s: float) -> bool:
        """Wait until the word is no longer what was ``seen``; False after ``timeout_s``."""
        for _ in range(self._yields):
            if self._words[index] != seen:
                return True
            os.sched_yield()
        self._sleep(index, seen, timeout_s)
        return self._words[index] != seen

    def _sleep(self, index: int, seen: int, timeout_s: float) -> None:
        seconds = int(timeout_s)
        timeout = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
        address = self._address + index * 8
        _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(timeout))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
