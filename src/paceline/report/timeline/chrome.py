"""A timeline in Chrome's trace-event format, which Perfetto opens.

Each rank is a process with one lane (a thread) for its steps and one for each kind of span. So the
lane shows the kind, because Perfetto picks the colors itself. The ranks of several runs alternate:
rank 0 of each run, then rank 1 of each run. Messages are arrows, logged numbers are counters.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from paceline.report.timeline.items import (
    KINDS,
    NAMES,
    RECEIVE,
    SEND,
    Arrow,
    Item,
    Point,
    Step,
    Stretch,
)
from paceline.report.timeline.traced import TracedRun, names_of

LANES = ("step", *KINDS)


class ChromeTrace:
    """Writes trace events to a file.

    Args:
        file: the file.
        runs: the runs to write; the first moment of any of them is time 0.
        from_s: a lower bound for the times of all items.
    """

    def __init__(self, file: TextIO, runs: Sequence[TracedRun], from_s: float) -> None:
        self.events = 0
        self._file, self._runs = file, list(runs)
        self._zero_s = max(from_s, min(run.start_s for run in runs))
        self._flows = 0
        self._processes: set[int] = set()
        self._lanes: set[tuple[int, int]] = set()
        self._names = dict(zip(runs, names_of(runs), strict=True))
        about = {name: f"{run.about} ({run.path})" for run, name in self._names.items()}
        head = {"displayTimeUnit": "ms", "otherData": about}
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')

    def add(self, run: TracedRun, item: Item) -> None:
        """Write one item of one of the runs."""
        if isinstance(item, Stretch):
            self._slice(run, item, item.kind, item.what, item.facts)
        elif isinstance(item, Step):
            facts = {"step": item.number, "samples": item.samples}
            self._slice(run, item, "step", f"step {item.number}", facts)
        elif isinstance(item, Arrow):
            self._arrow(run, item)
        else:
            self._counter(run, item)

    def close(self) -> None:
        """Write the end of the file."""
        self._file.write("\n]}\n")

    def _slice(
        self, run: TracedRun, item: Stretch | Step, lane: str, name: str, facts: dict[str, Any]
    ) -> None:
        start, end = self._ns(item.start_s), self._ns(item.end_s)
        ids = self._lane_ids(run, item.rank, lane)
        self._write("X", name, ids, start, cat=lane, dur=_us(end - start), args=facts)

    def _arrow(self, run: TracedRun, message: Arrow) -> None:
        self._flows += 1
        flow = {"cat": "message", "id": self._flows}
        src, dst = self._lane_ids(run, message.src, SEND), self._lane_ids(run, message.dst, RECEIVE)
        self._write("s", "message", src, self._ns(message.sent_s), **flow)
        self._write("f", "message", dst, self._ns(message.taken_s), **flow, bp="e")

    def _counter(self, run: TracedRun, point: Point) -> None:
        ids = self._lane_ids(run, point.rank, "step")
        args = {point.name: point.value}
        self._write("C", point.name, ids, self._ns(point.time_s), args=args)

    def _lane_ids(self, run: TracedRun, rank: int, lane: str) -> tuple[int, int]:
        """The process id and thread id of a lane; their names are written at the first use."""
        pid = 1 + rank * len(self._runs) + self._runs.index(run)
        ids = pid, 10 * pid + LANES.index(lane)  # some readers need globally unique tids
        if ids not in self._lanes:
            if ids[0] not in self._processes:
                self._processes.add(ids[0])
                self._name_process(run, rank, ids)
            self._lanes.add(ids)
            self._meta("thread_name", ids, name=NAMES.get(lane, lane))
            self._meta("thread_sort_index", ids, sort_index=ids[1])
        return ids

    def _name_process(self, run: TracedRun, rank: int, ids: tuple[int, int]) -> None:
        name = run.label(rank)
        if len(self._runs) > 1:
            name += f", {self._names[run]}"
        self._meta("process_name", ids, name=name)
        self._meta("process_labels", ids, labels=run.about)
        self._meta("process_sort_index", ids, sort_index=ids[0])

    def _meta(self, what: str, ids: tuple[int, int], **args: Any) -> None:
        self._write("M", what, ids, 0, args=args)

    def _write(self, phase: str, name: str, ids: tuple[int, int], ns: int, **more: Any) -> None:
        event = {"ph": phase, "name": name, "pid": ids[0], "tid": ids[1], "ts": _us(ns), **more}
        self._file.write((",\n" if self.events else "") + json.dumps(event))
        self.events += 1

    def _ns(self, time_s: float) -> int:
        return max(0, round((time_s - self._zero_s) * 1e9))


def open_text(path: Path) -> AbstractContextManager[TextIO]:
    """Open a text file for writing, gzipped if its name ends in .gz."""
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _us(ns: int) -> float:
    return ns / 1000
