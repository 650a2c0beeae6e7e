"""The clock of worlds whose time is real: charges cost nothing, since time passes by itself."""

from __future__ import annotations

import time

from paceline.comm.ports import Clock


class RealClock(Clock):
    """Seconds since ``started_s`` on the host's monotonic clock."""

    charged_s = 0.0

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s

    def now(self) -> float:
        return time.monotonic() - self._started_s

    def charge(self, seconds: float) -> None:
        pass

    def charge_gather(self, nbytes: int) -> None:
        pass

    def charge_update(self, nbytes: int) -> None:
        pass

    def mark_as_server(self) -> None:
        pass

    def set_model_size(self, nbytes: int, tensors: int) -> float:
        return 1.0

    def begin_step(self, step: int) -> None:
        pass

    def switch_in(self) -> None:
        pass
