"""How one rank spent its time, from the records of its trace."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.report.timeline.items import (
    APPLY,
    COMPUTE,
    IO,
    RECEIVE,
    SEND,
    WAIT,
    Arrow,
    Item,
    Step,
    Stretch,
)

_SLIVER_S = 1e-9
_REMEMBERED = 1024
"""How many published versions of each rank are remembered; readers read recent ones."""
_WORK = {COMPUTE: "compute", APPLY: "update"}

Event = dict[str, Any]
Divide = Callable[[float, float], list[tuple[str, float, float]]]
Box = tuple[int, int, int]
"""Sender, receiver and tag: messages with the same three keep their order."""
Call = tuple[int, int, int]
"""The first member of a group, its size, and the number of the collective in it."""


def start_of(record: Event) -> float:
    """The start of what a record reports the end of."""
    took = sum(record.get(name, 0.0) for name in ("wait_s", "send_s", "load_s", "forward_s"))
    return float(record["t"] - took)


@dataclass
class Lane:
    """One rank: records tell when it was busy, and the gaps between are its own work."""

    rank: int
    is_worker: bool
    at_s: float
    step_s: float | None = None
    busy: list[Stretch] = field(default_factory=list)

    def add(self, kind: str, what: str, start_s: float, end_s: float, **facts: Any) -> None:
        """Note that the rank was busy, after all earlier spans."""
        after_s = self.busy[-1].end_s if self.busy else self.at_s
        start_s = max(start_s, after_s)
        self.busy.append(Stretch(self.rank, kind, what, start_s, max(start_s, end_s), facts))

    def closed(self, record: Event) -> Iterator[Item]:
        """The items that a record completes; for a worker, those up to its last step."""
        if not self.is_worker:
            yield from self.rest()
        elif record["event"] == "step":
            yield from self._step(record)
        elif record["event"] == "finish":
            yield from self.rest(record["t"])

    def rest(self, until_s: float = 0.0) -> Iterator[Stretch]:
        """All remaining spans of a rank that makes no more steps."""
        own = COMPUTE if self.is_worker else APPLY
        end_s = max(until_s, self.busy[-1].end_s if self.busy else self.at_s)
        yield from self._filled(end_s, lambda start_s, end_s: [(own, start_s, end_s)])

    def _step(self, record: Event) -> Iterator[Item]:
        end_s, begin_s = record["t"], record["t"] - record["step_s"]
        start_s = self.step_s
        if start_s is None:
            before = [span.end_s for span in self.busy if span.end_s <= begin_s]
            start_s = max([self.at_s, *before])
        gaps = list(self._gaps(end_s))
        own_s = sum(max(0.0, end - max(start, begin_s)) for start, end in gaps)
        gradient = _Gradient(begin_s, max(0.0, own_s - record["apply_s"]))
        yield Step(self.rank, record["step"], start_s, end_s, record["samples"])
        yield from self._filled(end_s, gradient.divide)
        self.step_s = end_s

    def _gaps(self, end_s: float) -> Iterator[tuple[float, float]]:
        at_s = self.at_s
        for span in self.busy:
            yield at_s, span.start_s
            at_s = span.end_s
        yield at_s, max(at_s, end_s)

    def _filled(self, end_s: float, divide: Divide) -> Iterator[Stretch]:
        """The busy spans, and between them the gaps as ``divide`` splits them."""
        last: Stretch | None = None
        ends = [*self.busy, None]
        for gap, span in zip(self._gaps(end_s), ends, strict=True):
            for kind, start_s, stop_s in divide(*gap):
                if last is not None and (last.kind, last.end_s) == (kind, start_s):
                    last = last._replace(end_s=stop_s)
                elif stop_s - start_s > _SLIVER_S:
                    if last is not None:
                        yield last
                    last = Stretch(self.rank, kind, _WORK[kind], start_s, stop_s, {})
            if span is not None:
                if last is not None:
                    yield last
                last = None
                yield span
        if last is not None:
            yield last
        self.at_s = max([self.at_s, end_s, *(span.end_s for span in self.busy)])
        self.busy.clear()


class _Gradient:
    """Splits a worker's own time into gradient (``compute_s`` of each step) and update."""

    def __init__(self, begin_s: float, compute_s: float) -> None:
        self._begin_s, self._left_s = begin_s, compute_s

    def divide(self, start_s: float, end_s: float) -> list[tuple[str, float, float]]:
        """Split a gap."""
        inside_s = min(max(start_s, self._begin_s), end_s)
        computed_s = min(self._left_s, end_s - inside_s)
        self._left_s -= computed_s
        until_s = inside_s + computed_s
        return [(COMPUTE, start_s, until_s), (APPLY, until_s, end_s)]


# What ranks wait for -----------------------------------------------------------------------------


class MessageMatcher:
    """Finds when each received message was sent: until then, the receiver waited."""

    def __init__(self) -> None:
        self._sent: defaultdict[Box, deque[float]] = defaultdict(deque)
        self._early: defaultdict[Box, deque[float]] = defaultdict(deque)
        self._published: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._calls: defaultdict[Call, int] = defaultdict(int)
        self._arrivals: dict[Call, tuple[int, float]] = {}
        self._open: defaultdict[int, deque[Call]] = defaultdict(deque)
        self._acts: dict[str, Callable[[Event, Lane], Sequence[Arrow] | None]] = {
            "post": self._post,
            "send": self._send,
            "send_end": self._send_end,
            "recv": self._recv,
            "gone": self._gone,
            "publish": self._publish,
            "peek": self._peek,
            "all_reduce": self._all_reduce,
            "all_reduce_end": self._all_reduce_end,
            "broadcast": self._broadcast,
            "batch": self._batch,
        }

    def add(self, record: Event, lane: Lane) -> Sequence[Arrow]:
        """Add the span of a record to the rank's lane; return the messages that it completes."""
        act = self._acts.get(record["event"])
        return (act(record, lane) if act else None) or ()

    # Messages

    def _post(self, record: Event, lane: Lane) -> Sequence[Arrow]:
        start_s = record["t"] - record.get("send_s", 0.0)
        lane.add(SEND, "post", start_s, record["t"], **_facts(record))
        return self._was_sent(record, lane.busy[-1].start_s)

    def _send(self, record: Event, lane: Lane) -> Sequence[Arrow]:
        lane.add(SEND, "send", record["t"], record["t"], **_facts(record))
        return self._was_sent(record, lane.busy[-1].start_s)

    def _send_end(self, record: Event, lane: Lane) -> None:
        lane.add(SEND, "send", start_of(record), record["t"])

    def _was_sent(self, record: Event, sent_s: float) -> Sequence[Arrow]:
        box = record["rank"], record["peer"], record["tag"]
        if self._early[box]:  # the receiver's record is older than the sender's
            return [Arrow(box[0], sent_s, box[1], max(sent_s, self._early[box].popleft()))]
        self._sent[box].append(sent_s)
        return ()

    def _recv(self, record: Event, lane: Lane) -> Sequence[Arrow]:
        box = record["peer"], record["rank"], record["tag"]
        sent_s = self._sent[box].popleft() if self._sent[box] else None
        taken_s = self._received(record, lane, "receive", sent_s)
        if sent_s is None:
            self._early[box].append(taken_s)
            return ()
        return [Arrow(box[0], sent_s, box[1], taken_s)]

    def _received(self, record: Event, lane: Lane, what: str, sent_s: float | None) -> float:
        """Split a wait at the time of sending; return when the message started to arrive."""
        start_s, end_s, facts = start_of(record), record["t"], _facts(record)
        coming_s = end_s if sent_s is None else min(max(start_s, sent_s), end_s)
        if coming_s > start_s:
            lane.add(WAIT, "wait", start_s, coming_s, **{"for": what}, **facts)
        lane.add(RECEIVE, what, coming_s, end_s, **facts)
        return lane.busy[-1].start_s

    def _gone(self, record: Event, lane: Lane) -> None:
        lane.add(WAIT, "wait", start_of(record), record["t"], **_facts(record))

    # Windows

    def _publish(self, record: Event, lane: Lane) -> None:
        facts = {"version": record["version"]}
        lane.add(SEND, "publish", start_of(record), record["t"], **facts)
        published = self._published[record["rank"]]
        published[record["version"]] = lane.busy[-1].start_s
        published.pop(record["version"] - _REMEMBERED, None)

    def _peek(self, record: Event, lane: Lane) -> Sequence[Arrow]:
        src, version = record["peer"], record["version"]
        published_s = self._published[src].get(version)
        known_s = start_of(record) if published_s is None else published_s
        taken_s = self._received(record, lane, "peek", known_s)
        if published_s is None:
            return ()
        return [Arrow(src, published_s, record["rank"], taken_s)]

    # Collectives

    def _all_reduce(self, record: Event, lane: Lane) -> None:
        members, first = record["members"], record.get("first", 0)
        group = (record["rank"], first, members)
        call = (first, members, self._calls[group])
        self._calls[group] += 1
        left, last_s = self._arrivals.get(call, (members, record["t"]))
        self._arrivals[call] = (left, max(last_s, record["t"]))
        self._open[record["rank"]].append(call)

    def _all_reduce_end(self, record: Event, lane: Lane) -> None:
        if not self._open[record["rank"]]:
            return
        call = self._open[record["rank"]].popleft()
        left, last_s = self._arrivals[call]
        self._arrivals[call] = (left - 1, last_s)
        if left == 1:
            del self._arrivals[call]
        self._received(record, lane, "all-reduce", last_s)

    def _broadcast(self, record: Event, lane: Lane) -> None:
        start_s = start_of(record)
        lane.add(WAIT, "wait", start_s, record["t"], **{"for": "broadcast"}, **_facts(record))

    # Data

    def _batch(self, record: Event, lane: Lane) -> None:
        end_s = record["t"] - record.get("forward_s", 0.0)
        facts = {"epoch": record["epoch"], "batch": record["index"], "samples": record["samples"]}
        lane.add(IO, "load", end_s - record.get("load_s", 0.0), end_s, **facts)


def _facts(record: Event) -> dict[str, Any]:
    return {name: record[name] for name in ("peer", "bytes") if record[name] is not None}
