"""Lightning's global rank, which logs and saves where it is 0, for the worker that leads."""

from __future__ import annotations

from typing import Any

from paceline.training.worker import current_worker


class LeadingRank:
    """The number 0 on the worker that leads, now; another one elsewhere.

    Lightning keeps one rank for a process. Simulated workers are threads of one process, and who
    leads changes when that worker is lost, so this looks it up each time. Outside of a run it is
    the rank that was there before.

    Args:
        former: the rank outside of a run.
    """

    def __init__(self, former: int) -> None:
        self._former = former

    def __index__(self) -> int:
        worker = current_worker()
        if worker is None:
            return self._former
        return 0 if worker.leads else worker.rank or worker.size

    __int__ = __index__

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __gt__(self, other: int) -> bool:
        return int(self) > other

    def __lt__(self, other: int) -> bool:
        return int(self) < other

    def __hash__(self) -> int:
        return hash(int(self))

    def __str__(self) -> str:
        return str(int(self))


def let_leader_be_zero() -> None:
    """Have Lightning log and save on the worker that leads."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    function: Any = rank_zero_only
    if not isinstance(getattr(function, "rank", None), LeadingRank):
        function.rank = LeadingRank(getattr(function, "rank", None) or 0)
