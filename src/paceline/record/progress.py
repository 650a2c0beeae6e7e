"""How far each worker is, about once a second, for those who watch a run.

A line of ``progress.jsonl`` is ``{"t", "real_s", "progress", "spread", "workers"}``: the run's
clock, the time since the launcher began, the share of the planned data that is taken, an estimate
of the consensus distance, and a row of :data:`ROW` for each worker that has reported since the line
before.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.common.files import Lines

ROW = ("rank", "t", "steps", "samples", "wait_s", "bytes", "stale_count", "stale_total")
"""The entries of a row: all but the first two are totals of this incarnation of the worker."""
SHORTEST_S, LONGEST_S, HOUR_S = 1.0, 10.0, 3600.0
"""Lines come every second in the first hour; then ever less often, so that the file stays small."""
MOST_COMPARED = 64
"""How many workers are compared; the estimate must cost next to nothing."""
FRESH_S = 2.0
"""How far apart in time parameters may be that are compared with each other."""


class ProgressLog:
    """Takes what workers report a few times a second, and writes one line a second.

    Args:
        lines: the file.
        synchronous: whether only workers with as many steps are compared: others are between the
            same two steps, not apart.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.synchronous = False
        self._fresh: dict[int, Mapping[str, Any]] = {}
        self._samples: dict[int, Mapping[str, Any]] = {}
        self._share: float | None = None
        self._began_s = time.monotonic()
        self._next_s = self._began_s + SHORTEST_S

    def note(self, record: Mapping[str, Any]) -> None:
        """Take the report of a worker; see :mod:`paceline.training.progress`."""
        self._fresh[record["rank"]] = record
        if record["parameters"] is not None:
            self._samples[record["rank"]] = record
        if record["progress"] is not None:
            self._share = max(self._share or 0.0, record["progress"])
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._write()
            self._next_s = now_s + min(LONGEST_S, max(SHORTEST_S, (now_s - self._began_s) / HOUR_S))

    def close(self) -> None:
        """Write what has come since the last line, and close the file."""
        if self._fresh:
            self._write()
        self._lines.close()

    def _write(self) -> None:
        fresh, self._fresh = self._fresh, {}
        line = {
            "t": max(record["t"] for record in fresh.values()),
            "real_s": time.monotonic() - self._began_s,
            "progress": self._share,
            "spread": self._spread(),
            "workers": [[record[name] for name in ROW] for _, record in sorted(fresh.items())],
        }
        self._lines.add(json.dumps(line) + "\n")

    def _spread(self) -> float | None:
        """The consensus distance of the parameters that workers have shown lately."""
        if not self._samples:
            return None
        newest = max(self._samples.values(), key=lambda record: record["t"])
        shown = [
            record["parameters"]
            for record in self._samples.values()
            if newest["t"] - record["t"] < FRESH_S
            and (record["steps"] == newest["steps"] or not self.synchronous)
        ]
        return spread_of(shown[:MOST_COMPARED]) if len(shown) > 1 else None


def spread_of(vectors: Sequence[Sequence[float]]) -> float | None:
    """The distance of vectors from their mean, relative to the norm of the mean.

    >>> spread_of([[1.0, 2.0], [1.0, 2.0]]), spread_of([[1.0, 0.0], [3.0, 0.0]])
    (0.0, 0.5)
    """
    square = norm = 0.0
    for values in zip(*vectors, strict=True):
        mean = sum(values) / len(values)
        norm += mean * mean
        square += sum((value - mean) ** 2 for value in values)
    if not (norm > 0 and math.isfinite(square) and math.isfinite(norm)):
        return None
    return math.sqrt(square / len(vectors) / norm)
