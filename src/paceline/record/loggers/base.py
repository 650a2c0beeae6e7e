"""What every logger is: a place that takes metrics and events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.common.date import date_s

Value = bool | int | float | str
_PLACE = ("t", "rank", "step", "samples")
"""The entries of a record that say where and when; the others are what was logged."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a logger knows about its run.

    Args:
        folder: of the run, if it has one.
        settings: its hyper-parameters.
        began_s: the date when it began.
    """

    folder: Path | None
    settings: Mapping[str, Value]
    began_s: float = field(default_factory=date_s)

    @property
    def name(self) -> str:
        """The name of the run: that of its folder, or of its method."""
        if self.folder is not None:
            return self.folder.absolute().name
        return str(self.settings.get("spec", "paceline"))


class Logger(ABC):
    """Writes what a run logs; making one opens the back-end.

    Every method may raise an exception if the back-end fails, and may be slow.
    """

    @abstractmethod
    def metric(self, record: Mapping[str, Any]) -> None:
        """Write one record of ``worker.log``."""

    @abstractmethod
    def event(self, record: Mapping[str, Any]) -> None:
        """Write that a rank was lost, joined late, rejoined, ..."""

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered, and close the back-end."""


def values_of(record: Mapping[str, Any]) -> dict[str, Value]:
    """What a worker logged in a record; what was not finite is left out."""
    return {k: v for k, v in record.items() if k not in _PLACE and v is not None}


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a worker logged in a record."""
    return {k: float(v) for k, v in values_of(record).items() if not isinstance(v, str)}


def sentence_of(event: Mapping[str, Any]) -> str:
    """An event as text.

    >>> sentence_of({"t": 3.25, "event": "lost", "rank": 1, "reason": "it was ended by SIGKILL"})
    'at 3.2 s: rank 1 lost (reason: it was ended by SIGKILL)'
    """
    facts = {k: v for k, v in event.items() if k not in ("t", "event", "rank")}
    more = ", ".join(f"{name}: {value}" for name, value in facts.items())
    text = f"at {event['t']:.1f} s: rank {event['rank']} {event['event']}"
    return f"{text} ({more})" if more else text
