"""Memory of a device that several processes open: what a driver offers a keeper and its ranks.

A keeper allocates it, and hands out 64 bytes that stand for it; a rank opens it with these.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import PacelineError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_ON_DEVICE = 3  # for all contexts, and mapped


class DriverError(PacelineError):
    """A driver refused; ``code`` is its reason."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


class Driver(Protocol):
    """The memory of one device.

    Attributes:
        device: as torch names it.
    """

    device: torch.device

    def allocate(self, nbytes: int) -> bytes:
        """Take memory, and keep it as long as this process lives; return its handle."""

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        """The bytes of a handle that another process has allocated."""

    def enter(self) -> None:
        """Begin to ask something of the device: what was asked on another stream is done first."""

    def mark(self) -> Milestone:
        """This moment, among all that this thread asks of the device."""

    def share_words(self, address: int, nbytes: int) -> None:
        """Let the device set words of the host's memory."""

    def set_word(self, address: int, value: int) -> None:
        """Have the device set such a word, after all that this thread has asked of it before."""

    def finish(self) -> None:
        """Wait until the device has done all that this process asked of it through here."""

    def reason(self, code: int) -> str:
        """What the code of a :class:`DriverError` means."""


class Milestone(Protocol):
    """A moment among all that a thread asks of a device."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class CudaDriver(Driver):
    """Memory of an NVIDIA GPU, shared by CUDA's IPC handles.

    A keeper needs the driver's library alone, so that it holds a context and nothing else.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._index, self._distance = index, 0
        self._stream: torch.cuda.Stream | None = None
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(1, f"the driver of NVIDIA GPUs is missing: {error}") from None
        device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, nbytes: int) -> bytes:
        pointer, handle = ctypes.c_uint64(), _Handle()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            self._call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
            self._call("cuCtxSynchronize")
        return bytes(handle.content)

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        pointer, content = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        with self._current():
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), content, _LAZY_PEER_ACCESS)
        view = _Bytes(pointer.value or 0, nbytes)
        return torch.as_tensor(view, device=self.device)

    def enter(self) -> None:
        stream = torch.cuda.current_stream(self._index)
        if self._stream is not None and self._stream != stream:
            self._stream.synchronize()
        self._stream = stream

    def mark(self) -> Milestone:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return event

    def share_words(self, address: int, nbytes: int) -> None:
        pointer, size = ctypes.c_uint64(), ctypes.c_size_t(nbytes)
        with self._current():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), size, _ON_DEVICE)
            words = ctypes.c_void_p(address)
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), words, 0)
        self._distance = (pointer.value or 0) - address

    def set_word(self, address: int, value: int) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._index).cuda_stream)
        word = ctypes.c_uint64(address + self._distance)
        self._call("cuStreamWriteValue64_v2", stream, word, ctypes.c_uint64(value), 0)

    def finish(self) -> None:
        (self._stream or torch.cuda.current_stream(self._index)).synchronize()

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The context of this device is the thread's own while this lasts."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise DriverError(code, f"cuda:{self._index}: {name}: {self.reason(code)}")

    def reason(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"no reason given").decode()


class _Handle(ctypes.Structure):
    _fields_ = (("content", ctypes.c_ubyte * HANDLE_BYTES),)


class _Bytes:
    """Device memory for torch to look at where it lies."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3,
        }  # fmt: skip


class HostDriver(Driver):
    """Memory of the host in place of a device's: for tests where there is no device.

    As with a device, a milestone is not reached at once.
    """

    device = torch.device("cpu")

    def __init__(self, index: int) -> None:
        self._kept: list[int] = []

    def allocate(self, nbytes: int) -> bytes:
        fd = os.memfd_create("paceline-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        self._kept.append(fd)
        return struct.pack("=qq", os.getpid(), fd).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        pid, fd = struct.unpack_from("=qq", handle)
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)

    def enter(self) -> None:
        pass

    def mark(self) -> Milestone:
        return _SlowMilestone()

    def share_words(self, address: int, nbytes: int) -> None:
        pass

    def set_word(self, address: int, value: int) -> None:
        ctypes.c_int64.from_address(address).value = value

    def finish(self) -> None:
        pass

    def reason(self, code: int) -> str:
        return os.strerror(code)


class _SlowMilestone(Milestone):
    """A milestone that is reached when it is asked for the second time."""

    def __init__(self) -> None:
        self._asked = False

    def query(self) -> bool:
        before, self._asked = self._asked, True
        return before

    def synchronize(self) -> None:
        pass


def pin(memory: mmap.mmap) -> bool:
    """Page-lock memory for the GPU that this process uses; False if that cannot be had."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    size = ctypes.c_size_t(len(memory))
    code: int = cuda.cuMemHostRegister_v2(ctypes.c_void_p(address), size, _ON_DEVICE)
    return code == 0


DRIVERS = {"cuda": CudaDriver, "host": HostDriver}


def driver_of(device: str) -> Driver:
    """The driver of a device by its name: ``cuda:1``, or ``host``."""
    kind, _, index = device.partition(":")
    return DRIVERS[kind](int(index or 0))
