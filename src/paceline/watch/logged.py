"""What workers have logged, as those who watch a run see it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.record.folder import METRICS
from paceline.record.loggers.base import numbers_of
from paceline.watch.band import Band
from paceline.watch.tail import Tail

MOST_NAMES = 8
"""How many logged names have a chart."""
_FIRST = ("loss", "accuracy")
_TOTALS = ("all_samples", "all_bytes")
"""What the end of a run adds to each record."""


class Logged:
    """The metrics of a run: of its launcher or, under another launcher, of each rank.

    Attributes:
        t: the time of the last record.
        last: the last loss and accuracy; ``losses``: the last loss of each rank.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self._forget()

    def _forget(self) -> None:
        self._bands: dict[str, Band] = {}
        self.last: dict[str, float] = {}
        self.losses: dict[int, float] = {}
        self.t = 0.0

    def bands(self) -> dict[str, Band]:
        """What was logged over time, by its name; loss and accuracy first."""
        names = sorted(self._bands, key=lambda name: (*_FIRST, name).index(name))
        return {name: self._bands[name] for name in names}

    def look(self) -> bool:
        """Read what is new; whether there was anything."""
        whole = self._folder / METRICS
        paths = [whole] if whole.exists() else sorted(self._folder.glob("metrics.*.jsonl"))
        if self._tails.keys() != {*paths}:
            self._tails = {path: Tail(path) for path in paths}
            self._forget()
        looks = [tail.look() for tail in self._tails.values()]
        if any(anew for anew, _ in looks) and self._bands:
            self._forget()
            self._tails = {path: Tail(path) for path in paths}  # the others once more, too
            looks = [tail.look() for tail in self._tails.values()]
        records = [record for _, found in looks for record in found]
        for record in records:
            with suppress(LookupError, TypeError, ValueError):
                self._take(record)
        return bool(records) or any(anew for anew, _ in looks)

    def _take(self, record: Mapping[str, Any]) -> None:
        rank, t = int(record["rank"]), float(record["t"])
        self.t = max(self.t, t)
        for name, value in numbers_of(record).items():
            if name in _TOTALS:
                continue
            if name not in self._bands and len(self._bands) < MOST_NAMES:
                self._bands[name] = Band()
            if name in self._bands:
                self._bands[name].add(t, value)
            if name in _FIRST:
                self.last[name] = value
            if name == "loss":
                self.losses[rank] = value
