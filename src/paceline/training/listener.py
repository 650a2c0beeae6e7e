"""What a rank reports to its run; the world that started the rank says who listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.record.result import Metric, OnMetric


def _ignore(record: Metric) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who is called with what a rank reports; by default nobody.

    Args:
        metric: a record of ``worker.log``.
        progress: the progress of a worker, a few times a second.
        event: something happened to a rank.
        ready: this rank has completed its setup.
    """

    metric: OnMetric = _ignore
    progress: OnMetric = _ignore
    event: OnMetric = _ignore
    ready: Callable[[], None] = lambda: None
