"""A timeline in the trace-event format of Chrome, which Perfetto opens.

Each rank is a process of its own with a lane (a thread) for its steps and one for each kind of
span, so that the kinds are told apart by their place: Perfetto picks the colours itself. Ranks of
two runs stand in turns, each below its like. Messages are arrows, numbers that were logged are
counters.
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
    Item,
    Message,
    Point,
    Span,
    Step,
)
from paceline.report.timeline.traced import TracedRun, names_of

LANES = ("step", *KINDS)


class ChromeTrace:
    """A file of trace events, written as they come.

    Args:
        file: where to write.
        runs: what is going to be written; the first moment of any of them is time 0.
        from_s: no item is before it.
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
        if isinstance(item, Span):
            self._slice(run, item, item.kind, item.what, item.facts)
        elif isinstance(item, Step):
            facts = {"step": item.number, "samples": item.samples}
            self._slice(run, item, "step", f"step {item.number}", facts)
        elif isinstance(item, Message):
            self._arrow(run, item)
        else:
            self._counter(run, item)

    def close(self) -> None:
        """Write the end."""
        self._file.write("\n]}\n")

    def _slice(
        self, run: TracedRun, item: Span | Step, lane: str, name: str, facts: dict[str, Any]
    ) -> None:
        start, end = self._ns(item.start_s), self._ns(item.end_s)
        place = self._place(run, item.rank, lane)
        self._write("X", name, place, start, cat=lane, dur=_us(end - start), args=facts)

    def _arrow(self, run: TracedRun, message: Message) -> None:
        self._flows += 1
        flow = {"cat": "message", "id": self._flows}
        src, dst = self._place(run, message.src, SEND), self._place(run, message.dst, RECEIVE)
        self._write("s", "message", src, self._ns(message.sent_s), **flow)
        self._write("f", "message", dst, self._ns(message.taken_s), **flow, bp="e")

    def _counter(self, run: TracedRun, point: Point) -> None:
        place = self._place(run, point.rank, "step")
        args = {point.name: point.value}
        self._write("C", point.name, place, self._ns(point.time_s), args=args)

    def _place(self, run: TracedRun, rank: int, lane: str) -> tuple[int, int]:
        """The process and the thread of a lane; named when they are first used."""
        pid = 1 + rank * len(self._runs) + self._runs.index(run)
        place = pid, 10 * pid + LANES.index(lane)  # some readers want tids that differ everywhere
        if place not in self._lanes:
            if place[0] not in self._processes:
                self._processes.add(place[0])
                self._name_process(run, rank, place)
            self._lanes.add(place)
            self._meta("thread_name", place, name=NAMES.get(lane, lane))
            self._meta("thread_sort_index", place, sort_index=place[1])
        return place

    def _name_process(self, run: TracedRun, rank: int, place: tuple[int, int]) -> None:
        name = run.label(rank)
        if len(self._runs) > 1:
            name += f", {self._names[run]}"
        self._meta("process_name", place, name=name)
        self._meta("process_labels", place, labels=run.about)
        self._meta("process_sort_index", place, sort_index=place[0])

    def _meta(self, what: str, place: tuple[int, int], **args: Any) -> None:
        self._write("M", what, place, 0, args=args)

    def _write(self, phase: str, name: str, place: tuple[int, int], ns: int, **more: Any) -> None:
        event = {"ph": phase, "name": name, "pid": place[0], "tid": place[1], "ts": _us(ns), **more}
        self._file.write((",\n" if self.events else "") + json.dumps(event))
        self.events += 1

    def _ns(self, time_s: float) -> int:
        return max(0, round((time_s - self._zero_s) * 1e9))


def open_text(path: Path) -> AbstractContextManager[TextIO]:
    """A file to write text to, gzipped if its name says so."""
    if path.suffix == ".gz":
        return gzip.open(path, "wt", encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _us(ns: int) -> float:
    return ns / 1000
