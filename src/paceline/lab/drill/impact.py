"""Measure the impact of a fault from a run's trace: detection time, gap and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.record.folder import TRACE
from paceline.record.trace import read

SETTLED_S = 1.0
"""How long after a fault its throughput is measured again."""


@dataclass
class StepLog:
    """The steps of one rank: when each ended, and how many samples it had."""

    times: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def between(self, from_s: float, to_s: float) -> int:
        """The samples of the steps that ended between two times."""
        pairs = zip(self.times, self.samples, strict=True)
        return sum(samples for t, samples in pairs if from_s < t <= to_s)


_HARM = ("stopped", "slowed", "lost")


@dataclass(frozen=True)
class FaultImpact:
    """The impact of a fault; a figure that was not measured is None.

    Attributes:
        fault_s: when the first fault happened.
        notice_s: how long it took until another rank noticed the loss.
        gap_s: the longest time between two steps of a survivor, after the fault.
        throughput: samples per second of all ranks after the fault, over those before.
    """

    fault_s: float | None
    notice_s: float | None
    gap_s: float | None
    throughput: float | None


def worst(impacts: Sequence[FaultImpact]) -> FaultImpact:
    """The worst of each figure over several runs."""
    return FaultImpact(
        min((impact.fault_s for impact in impacts if impact.fault_s is not None), default=None),
        max((impact.notice_s for impact in impacts if impact.notice_s is not None), default=None),
        max((impact.gap_s for impact in impacts if impact.gap_s is not None), default=None),
        min(
            (impact.throughput for impact in impacts if impact.throughput is not None), default=None
        ),
    )


def measure_impact(
    folder: Path,
    events: Sequence[Mapping[str, Any]],
    victims: Sequence[int],
    settled_s: float = SETTLED_S,
    fault_s: float | None = None,
) -> FaultImpact:
    """Measure the impact in the trace of a run whose ``events`` harmed the ``victims``.

    The fault happened at ``fault_s``; without it, when the first victim was harmed.
    """
    steps: dict[int, StepLog] = {}
    noticed: list[float] = []
    harmed = [e["t"] for e in events if e["event"] in _HARM and e["rank"] in victims]
    fault_s = min(harmed, default=None) if fault_s is None else fault_s
    for record in read(folder / TRACE):
        rank = record["rank"]
        if record["event"] == "step":
            log = steps.setdefault(rank, StepLog())
            log.times.append(record["t"])
            log.samples.append(record["samples"])
        elif rank not in victims and _notices(record, victims):
            noticed.append(record["t"])
    if fault_s is None:
        return FaultImpact(None, None, None, None)
    survivors = [log for rank, log in steps.items() if rank not in victims]
    harm = {event["event"] for event in events if event["rank"] in victims} - {"slowed"}
    later = [t for t in noticed if harm and t >= fault_s - 0.1]
    return FaultImpact(
        fault_s,
        max(0.0, min(later) - fault_s) if later else None,
        max((_longest_gap(log, fault_s) for log in survivors), default=None),
        _throughput_ratio([*steps.values()], fault_s, settled_s),
    )


def _notices(record: Mapping[str, Any], victims: Sequence[int]) -> bool:
    """Whether a record shows that its rank noticed the loss of a victim."""
    if record["event"] == "alive":
        return any(victim in record["missing"] for victim in victims)
    return record["event"] in ("gone", "returned", "missed") and record["peer"] in victims


def _longest_gap(log: StepLog, fault_s: float) -> float:
    """The longest time between two steps, the second of which ended after the fault."""
    gaps = [b - a for a, b in zip(log.times, log.times[1:], strict=False) if b >= fault_s]
    return max(gaps, default=0.0)


def _throughput_ratio(steps: Sequence[StepLog], fault_s: float, settled_s: float) -> float | None:
    times = [t for log in steps for t in log.times]
    first, last = min(times, default=0.0), max(times, default=0.0)
    from_s = fault_s + settled_s
    if first >= fault_s or from_s >= last:
        return None
    before = sum(log.between(first, fault_s) for log in steps) / (fault_s - first)
    after = sum(log.between(from_s, last) for log in steps) / (last - from_s)
    return after / before if before else None
