"""What a worker reports of itself while it trains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.record.result import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.session import Session

PARAMETERS = 64
"""How many parameters a worker shows, at most once a second, for others to compare."""


class ProgressReport:
    """Makes the reports of one worker; all of it is at hand, and nothing waits."""

    def __init__(self, session: Session) -> None:
        self._session, self._second = session, -1

    def make(self) -> Metric:
        """A report: totals of this incarnation, and some of the parameters."""
        session, t = self._session, self._session.clock.now()
        stepper, meter = session.running, session.recorder.meter
        stale = None if stepper.alone else session.strategy.stale
        second, self._second = self._second, int(t)
        return {
            "rank": session.rank,
            "t": t,
            "steps": stepper.steps,
            "samples": stepper.samples,
            "progress": session.progress if session.is_planned else None,
            "wait_s": meter.wait_s,
            "bytes": meter.bytes_sent,
            "stale_count": stale.count if stale else 0,
            "stale_total": stale.total if stale else 0,
            "parameters": _some(stepper.replica.flat.x) if self._second != second else None,
        }


def _some(x: Tensor) -> list[float] | None:
    """Some parameters, evenly spread; None on a GPU, where reading them would wait for it."""
    if x.is_cuda:
        return None
    some: list[float] = x[:: max(1, len(x) // PARAMETERS)][:PARAMETERS].tolist()
    return some if all(map(math.isfinite, some)) else None
