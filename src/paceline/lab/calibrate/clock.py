"""Clocks that other work on the machine does not disturb.

A cluster file describes a machine that does nothing else. So times are measured without the time
that a thread was ready to run and waited for a core; the kernel counts it for each thread.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from paceline.lab.bench.device import finish


class OwnTime:
    """The time of the calling thread, without the time that it waited for a core.

    If the kernel does not count the waiting, this is wall-clock time.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> float:
        """The current time, in seconds."""
        while True:
            queued_s = self._queued()
            now_s = time.perf_counter()
            if self._queued() == queued_s:  # otherwise it waited for a core in between
                return now_s - queued_s

    def _queued(self) -> float:
        return 0.0 if self._fd is None else _queued(os.pread(self._fd, 128, 0))

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class WorkTime:
    """The processor time of this process; or, where it works on a GPU, the time until that is done.

    Args:
        device: what the work is done on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """The current time, in seconds."""
        if self._device.type == "cpu":
            return time.process_time()
        finish(self._device)
        return time.perf_counter()


def queued_s() -> float:
    """How long all threads of this process together have waited for a core."""
    total = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):
            total += _queued(path.read_bytes())
    return total


def busy_share(for_s: float = 0.2) -> float:
    """The share of the machine's cores in use during ``for_s``; 0 if the system does not tell."""
    before = _core_times()
    time.sleep(for_s)
    spent = [now - then for now, then in zip(_core_times(), before, strict=True)]
    total = sum(spent)
    return 1 - (spent[3] + spent[4]) / total if total > 0 else 0.0


def _core_times() -> list[int]:
    """The times of all cores together: user, nice, system, idle, waiting for disks, and so on."""
    try:
        total = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return [0] * 8
    return [int(field) for field in total.split()[1:9]]


def _queued(schedstat: bytes) -> float:
    fields = schedstat.split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0
