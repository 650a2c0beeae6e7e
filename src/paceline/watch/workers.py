"""What the lines of progress and the events say about each worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.record.progress import ROW

WINDOW = 6
"""Over how many reports a rate is taken."""

_STATES = {
    "lost": "lost",
    "restarted": "starting again",
    "joined": "joined late",
    "rejoined": "back",
    "stopped": "stopped",
    "set_aside": "set aside",
    "outlived": "lost",
}


class Report(NamedTuple):
    """What one worker reported of itself at a time; all but the time are totals."""

    t: float
    steps: int
    samples: int
    wait_s: float
    bytes: int
    stale_count: int
    stale_total: int


assert ("rank", *Report._fields) == ROW


@dataclass
class Worker:
    """One worker, as it is known from outside.

    Attributes:
        state: what happened to it last; ``training`` if nothing did.
        earlier: its totals in earlier incarnations: steps, samples and bytes.
    """

    rank: int
    state: str = "starting"
    reports: deque[Report] = field(default_factory=lambda: deque(maxlen=WINDOW))
    earlier: tuple[int, int, int] = (0, 0, 0)

    def report(self, report: Report) -> None:
        """Take a report; one with fewer samples is of a new incarnation."""
        if self.reports and report.samples < self.reports[-1].samples:
            self.earlier = self.totals
            self.reports.clear()
            if self.state in ("lost", "starting again"):
                self.state = "back"
        if self.state == "starting":
            self.state = "training"
        self.reports.append(report)

    def happened(self, event: str) -> None:
        """Take an event of this worker."""
        if event == "joined" and self.state in ("lost", "starting again"):
            event = "rejoined"
        self.state = _STATES.get(event, self.state)

    @property
    def gone(self) -> bool:
        """Whether it does not train now."""
        return self.state in ("lost", "starting again", "stopped", "set aside")

    @property
    def totals(self) -> tuple[int, int, int]:
        """Its steps, samples and bytes, over all of its incarnations."""
        steps, samples, nbytes = self.earlier
        if not self.reports:
            return self.earlier
        last = self.reports[-1]
        return steps + last.steps, samples + last.samples, nbytes + last.bytes

    @property
    def samples_per_s(self) -> float | None:
        """How many samples a second it has trained on lately."""
        return self._per_second("samples")

    @property
    def wait_share(self) -> float | None:
        """The share of its time that it has waited lately."""
        share = self._per_second("wait_s")
        return None if share is None else min(1.0, share)

    @property
    def bytes_per_s(self) -> float | None:
        """How many bytes a second it has sent lately."""
        return self._per_second("bytes")

    @property
    def staleness(self) -> float | None:
        """The mean staleness of what it has applied lately."""
        if len(self.reports) < 2 or self.gone:
            return None
        first, last = self.reports[0], self.reports[-1]
        count = last.stale_count - first.stale_count
        return (last.stale_total - first.stale_total) / count if count else None

    def _per_second(self, name: str) -> float | None:
        if len(self.reports) < 2 or self.gone:
            return None
        first, last = self.reports[0], self.reports[-1]
        gained = float(getattr(last, name) - getattr(first, name))
        return gained / (last.t - first.t) if last.t > first.t else None

    def row(self, loss: float | None) -> dict[str, Any]:
        """What a table says about it."""
        steps, samples, nbytes = self.totals
        return {
            "rank": self.rank,
            "state": self.state,
            "steps": steps,
            "samples": samples,
            "rate": self.samples_per_s,
            "wait": self.wait_share,
            "staleness": self.staleness,
            "bytes": nbytes,
            "loss": loss,
        }


def report_of(row: list[Any]) -> tuple[int, Report]:
    """The rank and the report in a row of ``progress.jsonl``."""
    rank, t, steps, samples, wait_s, *counts = row
    return int(rank), Report(float(t), int(steps), int(samples), float(wait_s), *map(int, counts))


def rank_of_event(event: Mapping[str, Any]) -> int:
    """The rank to which something happened: of bad updates, their sender."""
    return int(event.get("sender", event["rank"]))
