"""Clocks of one rank that other work on the machine does not reach.

A cluster file tells of a machine that is free for the run. So what a rank takes is timed without
the time that it stood in the queue for a core, which the kernel counts for each thread.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class OwnTime:
    """Seconds of the calling thread, less those that it was ready and had no core.

    Where the kernel does not count these, the seconds of the wall.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        with suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> float:
        """The time now."""
        while True:
            before_s = self._queued()
            now_s = time.perf_counter()
            if self._queued() == before_s:  # otherwise it stood in the queue between the two
                return now_s - before_s

    def _queued(self) -> float:
        return 0.0 if self._fd is None else _queued(os.pread(self._fd, 128, 0))

    def __del__(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


def queued_s() -> float:
    """How long the threads of this process have stood in the queue for a core, all together."""
    total = 0.0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):
            total += _queued(path.read_bytes())
    return total


def busy_share(for_s: float = 0.2) -> float:
    """The share of the machine's cores that is in use, over a moment; 0 where nobody tells."""
    before = _core_times()
    time.sleep(for_s)
    spent = [now - then for now, then in zip(_core_times(), before, strict=True)]
    total = sum(spent)
    return 1 - (spent[3] + spent[4]) / total if total > 0 else 0.0


def _core_times() -> list[int]:
    """Of all cores together: user, nice, system, idle, waiting for disks, and so on."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return [0] * 8
    return [int(field) for field in first.split()[1:9]]


def _queued(schedstat: bytes) -> float:
    fields = schedstat.split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0
