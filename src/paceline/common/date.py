"""The date, for people and for other programs to read; no duration is made of it."""

from __future__ import annotations

import time


def date_s() -> float:
    """Seconds since 1970."""
    return time.time()


def time_of_day(later_s: float) -> str:
    """The time of day after so many seconds, where this machine is."""
    return time.strftime("%H:%M:%S", time.localtime(date_s() + later_s))
