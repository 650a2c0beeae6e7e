"""What a run's folder tells of a fault: who noticed when, who stood still, what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.record.folder import TRACE
from paceline.record.trace import read

SETTLED_S = 1.0
"""How long after a fault the throughput is not counted yet."""


@dataclass
class Steps:
    """The steps of one rank: when each ended, and how many samples it had."""

    times: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def between(self, from_s: float, to_s: float) -> int:
        """The samples of the steps that ended in a span of time."""
        pairs = zip(self.times, self.samples, strict=True)
        return sum(samples for t, samples in pairs if from_s < t <= to_s)


_HARM = ("stopped", "slowed", "lost")


@dataclass(frozen=True)
class Look:
    """What was seen.

    Attributes:
        fault_s: when the first thing went wrong.
        notice_s: how long it took until another rank saw that one was gone.
        gap_s: the longest time that a survivor was without a step, from the fault on.
        throughput: samples a second of all after the fault, over those before.
    """

    fault_s: float | None
    notice_s: float | None
    gap_s: float | None
    throughput: float | None


def worst(looks: Sequence[Look]) -> Look:
    """The worst of each figure over several runs."""
    return Look(
        min((look.fault_s for look in looks if look.fault_s is not None), default=None),
        max((look.notice_s for look in looks if look.notice_s is not None), default=None),
        max((look.gap_s for look in looks if look.gap_s is not None), default=None),
        min((look.throughput for look in looks if look.throughput is not None), default=None),
    )


def look_at(
    folder: Path,
    events: Sequence[Mapping[str, Any]],
    victims: Sequence[int],
    settled_s: float = SETTLED_S,
) -> Look:
    """Read the trace of a run whose ``events`` tell what happened to the ``victims``."""
    steps: dict[int, Steps] = {}
    noticed: list[float] = []
    hurt = [e["t"] for e in events if e["event"] in _HARM and e["rank"] in victims]
    fault_s = min(hurt, default=None)
    for record in read(folder / TRACE):
        rank = record["rank"]
        if record["event"] == "step":
            own = steps.setdefault(rank, Steps())
            own.times.append(record["t"])
            own.samples.append(record["samples"])
        elif rank not in victims and _tells_of(record, victims):
            noticed.append(record["t"])
    if fault_s is None:
        return Look(None, None, None, None)
    survivors = [own for rank, own in steps.items() if rank not in victims]
    harm = {event["event"] for event in events if event["rank"] in victims} - {"slowed"}
    later = [t for t in noticed if harm and t >= fault_s - 0.1]
    return Look(
        fault_s,
        max(0.0, min(later) - fault_s) if later else None,
        max((_longest_gap(own, fault_s) for own in survivors), default=None),
        _ratio([*steps.values()], fault_s, settled_s),
    )


def _tells_of(record: Mapping[str, Any], victims: Sequence[int]) -> bool:
    """Whether a record shows that its rank has missed a victim."""
    if record["event"] == "alive":
        return any(victim in record["missing"] for victim in victims)
    return record["event"] in ("gone", "returned", "missed") and record["peer"] in victims


def _longest_gap(own: Steps, fault_s: float) -> float:
    """The longest time between two steps, of those that ended after the fault."""
    gaps = [b - a for a, b in zip(own.times, own.times[1:], strict=False) if b >= fault_s]
    return max(gaps, default=0.0)


def _ratio(steps: Sequence[Steps], fault_s: float, settled_s: float) -> float | None:
    times = [t for own in steps for t in own.times]
    first, last = min(times, default=0.0), max(times, default=0.0)
    from_s = fault_s + settled_s
    if first >= fault_s or from_s >= last:
        return None
    before = sum(own.between(first, fault_s) for own in steps) / (fault_s - first)
    after = sum(own.between(from_s, last) for own in steps) / (last - from_s)
    return after / before if before else None
