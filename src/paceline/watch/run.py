"""A run as its folder shows it, in progress or ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.common.date import date_s
from paceline.common.reading import read_object
from paceline.errors import UsageError
from paceline.record.folder import (
    CONFIG,
    EVENTS,
    LOCK,
    METRICS,
    PROGRESS,
    RESULT,
    is_claimed,
)
from paceline.record.loggers.base import sentence_of
from paceline.watch.band import Band
from paceline.watch.logged import Logged
from paceline.watch.tail import Tail
from paceline.watch.workers import Worker, rank_of_event, report_of

MOST_EVENTS = 200
"""How many of the last events are shown."""
QUIET_S = 60.0
"""After so long without a new line, a run of another machine counts as ended."""
_IN_RESULT = {
    "loss": "loss",
    "accuracy": "accuracy",
    "samples_per_s": "rate",
    "wait_share": "wait",
    "staleness_mean": "staleness",
    "consensus_distance": "spread",
}
"""The names of the totals in the result of a run, and here."""
PACE_S = 120.0
"""Over how long a time the pace is taken that says when the run ends."""


def check_is_run(path: Path) -> None:
    """Refuse a folder that no run has written to."""
    names = (CONFIG, METRICS, RESULT, LOCK, "metrics.*.jsonl")
    if not any(found for name in names for found in path.glob(name)):
        raise UsageError(f"run ({path}) must be the folder that a run writes to (--out, out=...)")


class WatchedRun:
    """Reads what is new in a run's folder, and sums up what is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self.result: dict[str, Any] | None = None
        self._logged = Logged(path)
        self._events, self._progress = Tail(path / EVENTS), Tail(path / PROGRESS)
        self._stamps: dict[str, tuple[int, int]] = {}
        self._t = 0.0
        self._forget_progress()
        self._happened: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self.version = 0

    def look(self) -> bool:
        """Read what is new; whether there was anything."""
        looks = (self._look_at_objects, self._logged.look, self._look_at_progress)
        new = any([*(look() for look in looks), self._look_at_events()])
        self.version += new
        return new

    def look_at_all(self) -> None:
        """Read all that there is so far, however much that is."""
        while self.look():
            pass

    # Reading -------------------------------------------------------------------------------------

    def _look_at_objects(self) -> bool:
        """Read the configuration and the result, if they have changed."""
        new = False
        for name in (CONFIG, RESULT):
            try:
                facts = (self.path / name).stat()
            except OSError:
                if name == RESULT and self.result is not None:  # the folder has a new run
                    self.result, new = None, True
                    self._stamps.pop(name, None)
                continue
            stamp = (facts.st_ino, facts.st_mtime_ns)
            if self._stamps.get(name) != stamp:
                with suppress(OSError, ValueError):
                    content = read_object(self.path / name)
                    self._stamps[name], new = stamp, True
                    if name == CONFIG:
                        self.config = content
                    else:
                        content.pop("metrics", None)
                        self.result = content
        return new

    def _look_at_progress(self) -> bool:
        anew, lines = self._progress.look()
        if anew:
            self._forget_progress()
            self._events = Tail(self.path / EVENTS)  # they change the workers' states
        for line in lines:
            with suppress(LookupError, TypeError, ValueError):
                self._take_progress(line)
        return anew or bool(lines)

    def _take_progress(self, line: Mapping[str, Any]) -> None:
        t = float(line["t"])
        self._t = max(self._t, t)
        for row in line["workers"]:
            rank, report = report_of(row)
            worker = self._worker(rank)
            worker.report(report)
            for name in ("samples_per_s", "wait_share", "staleness"):
                if (value := getattr(worker, name)) is not None:
                    self._facts[name].add(t, value)
        if line["spread"] is not None:
            self._facts["spread"].add(t, float(line["spread"]))
        if (share := self._share(line["progress"])) is not None:
            self._pace.append((float(line["real_s"]), share))
            while self._pace[-1][0] - self._pace[0][0] > PACE_S:
                self._pace.popleft()
        self._seen_s = time.monotonic()

    def _share(self, share: float | None) -> float | None:
        """The share of the run that is done; by the steps, if only those are planned."""
        planned = self.config.get("arguments", {}).get("steps")
        if share is not None or not isinstance(planned, int):
            return share
        return min(1.0, max(w.totals[0] for w in self._workers.values()) / max(1, planned))

    def _look_at_events(self) -> bool:
        anew, events = self._events.look()
        if anew:
            self._happened.clear()
        for event in events:
            with suppress(LookupError, TypeError, ValueError):
                self._happened.append({"t": float(event["t"]), "text": sentence_of(event)})
                self._worker(rank_of_event(event)).happened(event["event"])
        return anew or bool(events)

    def _forget_progress(self) -> None:
        self._workers: dict[int, Worker] = {}
        names = ("samples_per_s", "wait_share", "staleness", "spread")
        self._facts = {name: Band() for name in names}
        self._pace: deque[tuple[float, float]] = deque()
        self._seen_s = time.monotonic()
        self._t = 0.0

    def _worker(self, rank: int) -> Worker:
        return self._workers.setdefault(rank, Worker(rank))

    # Summing up ----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``running``, ``ended``, or ``broken off``: it ended without a result."""
        if self.result is not None:
            return "ended"
        return "running" if self._is_alive() else "broken off"

    def _is_alive(self) -> bool:
        """Whether the process that writes the folder exists, here or on another machine."""
        claimed = is_claimed(self.path)
        if claimed is not None:
            return claimed
        try:
            return date_s() - (self.path / PROGRESS).stat().st_mtime < QUIET_S
        except OSError:
            return False

    @property
    def left_s(self) -> float | None:
        """How long the run still takes at its present pace."""
        if self.state != "running" or len(self._pace) < 2:
            return None
        (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
        if last <= first or last_s <= first_s:
            return None
        left_s = (1.0 - last) * (last_s - first_s) / (last - first)
        return max(0.0, left_s - (time.monotonic() - self._seen_s))

    def summary(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        state = self.state
        workers = range(int(self.config.get("workers", 0) or 0))
        rows = [self._worker(rank) for rank in workers]
        rows += [w for rank, w in sorted(self._workers.items()) if rank not in workers]
        rows = [w for w in rows if not workers or w.rank in workers]  # servers make no steps
        return {
            "version": self.version,
            "name": self.path.absolute().name,
            "strategy": self.config.get("spec") or self.config.get("strategy"),
            "world": self.config.get("world"),
            "state": state,
            "t": max(self._t, self._logged.t),
            "progress": 1.0 if state == "ended" else self._pace[-1][1] if self._pace else None,
            "left_s": self.left_s,
            "totals": self._totals(rows),
            "workers": [self._row(worker, state) for worker in rows],
            "charts": self._charts(),
            "events": [*self._happened],
            "stop": self._stop(state),
        }

    def _totals(self, workers: list[Worker]) -> dict[str, Any]:
        """The numbers of the whole run: those of its result, if there is one."""
        steps, samples, nbytes = (sum(w.totals[n] for w in workers) for n in range(3))
        if (result := self.result) is not None:  # which does not count the work of lost processes
            return {
                **{ours: result.get(theirs) for theirs, ours in _IN_RESULT.items()},
                "steps": max(steps, result.get("steps") or 0),
                "samples": max(samples, result.get("samples") or 0),
                "bytes": max(nbytes, result.get("bytes_sent") or 0),
            }
        return {
            "loss": self._logged.last.get("loss"),
            "accuracy": self._logged.last.get("accuracy"),
            "steps": steps,
            "samples": samples,
            "bytes": nbytes,
            "rate": _sum([w.samples_per_s for w in workers]),
            "wait": _mean([w.wait_share for w in workers]),
            "staleness": _mean([w.staleness for w in workers]),
            "spread": self._facts["spread"].last,
        }

    def _row(self, worker: Worker, state: str) -> dict[str, Any]:
        row = worker.row(self._logged.losses.get(worker.rank))
        if state != "running" and not worker.gone:
            row |= {"state": "ended", "rate": None, "wait": None, "staleness": None}
        return row

    def _charts(self) -> list[dict[str, Any]]:
        """Name, unit and rows of each chart: what was logged first."""
        titles = {
            "samples_per_s": ("samples per second of a worker", "number"),
            "wait_share": ("share of waiting", "share"),
            "staleness": ("staleness", "number"),
            "spread": ("spread of the models", "number"),
        }
        bands = self._logged.bands()
        charts = [{"name": n, "unit": "number", "rows": b.rows()} for n, b in bands.items()]
        for name, (title, unit) in titles.items():
            if rows := self._facts[name].rows():
                charts.append({"name": title, "unit": unit, "rows": rows})
        return charts

    def _stop(self, state: str) -> dict[str, Any]:
        """Whether the run can be stopped with a checkpoint from here, and if not, why."""
        why = None
        if state != "running":
            why = "the run has ended"
        elif self.config.get("world") in ("simulated", "launched", None):
            why = "only a run in real processes that paceline has launched can be stopped from here"
        elif not self.config.get("checkpoints"):
            why = "the run makes no checkpoints: start it with --checkpoint-minutes"
        return {"possible": why is None, "why": why}


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
