"""Keep the threads of a simulation on one core: only one of them runs at a time.

Switching to a thread on another core must wake that core first; on one core a switch costs half as
much. If another program needs the same core, the simulation may use all cores again.

A thread that hands on lets the next one go before it waits itself. As batch work, the next one does
not push it off the core in between, only to wait for Python's lock: a switch costs half again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_WATCH_S = 0.5
_STARVED = 0.75
"""The share of its core below which a simulation counts as starved."""


_all_cores: set[int] = set()

_MALLOPT = {-8: 1, -3: 32 << 20, -1: 256 << 20}
"""M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of glibc.

The temporaries of a gradient are freed, and the next thread allocates the same sizes. With one
arena and no system call, it gets the same memory while that is still in the cache.
"""


@contextmanager
def on_one_core(for_good: bool = False) -> Iterator[None]:
    """Keep the calling thread, and threads that it starts, on its current core.

    They may use the others again if another program needs it, unless they stay there ``for_good``.
    Threads that wait for a GPU use little of their core, and would seem to be starved.
    """
    if sys.platform != "linux":
        yield
        return
    allowed, libc = os.sched_getaffinity(0), ctypes.CDLL(None)
    _all_cores.update(allowed)
    os.sched_setaffinity(0, {libc.sched_getcpu()} & allowed or allowed)
    is_ordinary = os.sched_getscheduler(0) == os.SCHED_OTHER
    if is_ordinary:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if hasattr(libc, "mallopt"):
        for parameter, value in _MALLOPT.items():
            libc.mallopt(parameter, value)
    finished = threading.Event()
    watcher = threading.Thread(target=_watch, args=(allowed, finished), daemon=True)
    if not for_good:
        watcher.start()
    try:
        yield
    finally:
        finished.set()
        if not for_good:
            watcher.join()
        if is_ordinary:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, allowed)
        _all_cores.clear()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def take_back_cores() -> None:
    """In a process that a simulation started: use all cores that the simulation may use."""
    if _all_cores:
        os.sched_setaffinity(0, _all_cores)
        if os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _watch(allowed: set[int], finished: threading.Event) -> None:
    """Allow all cores again once the threads get too small a share of their one core."""
    wall_s, used_s = time.monotonic(), time.process_time()
    while not finished.wait(_WATCH_S):
        now_s, now_used_s = time.monotonic(), time.process_time()
        if now_used_s - used_s < _STARVED * (now_s - wall_s):
            for thread in threading.enumerate():
                if thread.native_id is not None:
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.native_id, allowed)
            return
        wall_s, used_s = now_s, now_used_s
