"""The clock of worlds whose time is real: charges cost nothing, since time passes by itself."""

from __future__ import annotations

import time

from paceline.comm.ports import Clock


class RealClock(Clock):
    """Seconds since ``started_s`` on the host's monotonic clock."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s

    def now(self) -> float:
        return time.monotonic() - self._started_s
