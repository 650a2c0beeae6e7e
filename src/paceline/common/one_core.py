"""Keep the threads of a simulation on one core: they run one at a time anyway.

Handing the baton to a thread on another core wakes that core first; on one core it costs half as
much. If another program wants the same core, the simulation is given back all of them.
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


_given_up: set[int] = set()

_MALLOPT = {-8: 1, -3: 32 << 20, -1: 256 << 20}
"""M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of glibc.

A gradient's temporaries are freed and asked for again by the next thread: from one arena, and
without a trip to the kernel, they come back while they are still in the cache.
"""


@contextmanager
def on_one_core() -> Iterator[None]:
    """Within, the calling thread and those that it starts stay on the core that it is on now."""
    if sys.platform != "linux":
        yield
        return
    allowed, libc = os.sched_getaffinity(0), ctypes.CDLL(None)
    _given_up.update(allowed)
    os.sched_setaffinity(0, {libc.sched_getcpu()} & allowed or allowed)
    if hasattr(libc, "mallopt"):
        for parameter, value in _MALLOPT.items():
            libc.mallopt(parameter, value)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(allowed, over), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        os.sched_setaffinity(0, allowed)
        _given_up.clear()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def take_back_cores() -> None:
    """For a process started from within: use the cores that the simulation gave up."""
    if _given_up:
        os.sched_setaffinity(0, _given_up)


def _watch(allowed: set[int], over: threading.Event) -> None:
    """Let the threads go where they like once they get too little of their core."""
    wall_s, used_s = time.monotonic(), time.process_time()
    while not over.wait(_WATCH_S):
        now_s, now_used_s = time.monotonic(), time.process_time()
        if now_used_s - used_s < _STARVED * (now_s - wall_s):
            _free_all(allowed)
            return
        wall_s, used_s = now_s, now_used_s


def _free_all(allowed: set[int]) -> None:
    for thread in threading.enumerate():
        if thread.native_id is not None:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread.native_id, allowed)
