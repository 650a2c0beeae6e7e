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


@contextmanager
def on_one_core() -> Iterator[None]:
    """Within, the calling thread and those that it starts stay on the core that it is on now."""
    if sys.platform != "linux":
        yield
        return
    allowed = os.sched_getaffinity(0)
    _given_up.update(allowed)
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()} & allowed or allowed)
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
