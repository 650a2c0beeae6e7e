"""Read the folder of a run as a timeline."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.files import reason_of
from paceline.common.reading import parse_object, read_object, read_text, refuse_malformed
from paceline.errors import UsageError, summary_of
from paceline.record.folder import CONFIG, METRICS, TRACE
from paceline.record.trace import outline, read
from paceline.report.timeline.items import KINDS, Item, Point, Stretch, cut, shift
from paceline.report.timeline.lanes import Event, Lane, MessageMatcher, start_of


@dataclass
class RankTimes:
    """When a rank starts; for a worker, also its first step, first gradient and last step."""

    start_s: float
    first_step_s: float | None = None
    ready_s: float = 0.0
    last_step_s: float = 0.0

    @property
    def is_worker(self) -> bool:
        """Whether the rank made a step."""
        return self.first_step_s is not None


class TracedRun:
    """The items of a run's timeline, from its folder.

    Times are seconds since the first gradient of any worker was ready, so that runs can be
    compared.

    Attributes:
        name: ``real`` or ``simulated``.
        about: strategy, workers and system, as text.
        times: the times of each rank.
        zero_s: when the first gradient was ready, on the run's own clock.
        start_s: when the first rank starts.
        begin_s: when the first step starts.
        end_s: when the last step ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with refuse_malformed(rule([path])):
            self._load()

    def _load(self) -> None:
        path = self.path
        self._source = _Source(path)
        config = _config(path)
        self.name = "simulated" if config.get("world") == "simulated" else "real"
        self.about = _about(config)
        self.times = self._scan()
        workers = [times for times in self.times.values() if times.is_worker]
        if not workers:
            raise unfit(path, f"no worker has made a step in its {TRACE}")
        self.zero_s = min(times.ready_s for times in workers)
        self.start_s = min(times.start_s for times in self.times.values()) - self.zero_s
        self.begin_s = (
            min(t.first_step_s for t in workers if t.first_step_s is not None) - self.zero_s
        )
        self.end_s = max(times.last_step_s for times in workers) - self.zero_s

    def _scan(self) -> dict[int, RankTimes]:
        times: dict[int, RankTimes] = {}
        for record in self._source.outline():
            own = times.setdefault(record["rank"], RankTimes(start_of(record)))
            if record["event"] != "step":
                continue
            if "step_s" not in record:
                raise unfit(self.path, "its trace has no durations: an older version wrote it")
            if own.first_step_s is None:
                own.first_step_s = record["t"] - record["step_s"]
                own.ready_s = record["t"] - record["wait_s"] - record["apply_s"]
            own.last_step_s = record["t"]
        return dict(sorted(times.items()))

    def label(self, rank: int) -> str:
        """The name of a rank for users."""
        return f"rank {rank}" if self.times[rank].is_worker else f"rank {rank} (serves)"

    def items(self, from_s: float = -math.inf, to_s: float = math.inf) -> Iterator[Item]:
        """All items between two moments; the spans of each rank come in order."""
        for item in self._items():
            if (part := cut(shift(item, -self.zero_s), from_s, to_s)) is not None:
                yield part

    def _items(self) -> Iterator[Item]:
        matcher = MessageMatcher()
        lanes = {
            rank: Lane(rank, times.is_worker, times.start_s) for rank, times in self.times.items()
        }
        for record in self._source.records():
            lane = lanes[record["rank"]]
            yield from matcher.add(record, lane)
            yield from lane.closed(record)
        for lane in lanes.values():
            yield from lane.rest()
        yield from self._points()

    def _points(self) -> Iterator[Point]:
        for path in sorted(self.path.glob(METRICS.replace(".", "*."))):
            for record in self._logged(path):
                for name in ("loss", "accuracy"):
                    if isinstance(record.get(name), float) and record["rank"] in self.times:
                        yield Point(record["rank"], name, record["t"], record[name])

    def _logged(self, path: Path) -> list[Event]:
        """The records of a metrics file; an incomplete last line is skipped."""
        try:
            lines = read_text(path).splitlines(keepends=True)
            return [parse_object(line) for line in lines if line.endswith("\n")]
        except (OSError, ValueError) as error:
            raise unfit(self.path, f"{path.name} cannot be read: {reason_of(error)}") from None


def names_of(runs: Sequence[TracedRun]) -> list[str]:
    """Names that distinguish the runs; with their folders, if the names are equal."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else f"{run.name} ({run.path})" for run in runs]


def unfit(path: Path, reason: str) -> UsageError:
    """The error of a folder that has no timeline."""
    return UsageError(f"{rule([path])}: {reason}")


def rule(paths: Sequence[Path]) -> str:
    """The beginning of each error message about the folders of runs."""
    names = ", ".join(map(str, paths))
    return f"run ({names}) must be the folder of a run (--out or out=...)"


def _config(path: Path) -> dict[str, Any]:
    """The configuration of the run; empty for a run under another launcher."""
    try:
        return read_object(path / CONFIG)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise unfit(path, f"{CONFIG} cannot be read: {reason_of(error)}") from None


def _about(config: dict[str, Any]) -> str:
    if not config:
        return "another launcher"
    method = str(config["strategy"]).partition("(")[0].lower()
    simulated = config["world"] == "simulated"
    system = config["cluster"]["name"] if simulated else config["world"].replace("_", " ")
    return f"{method}, {config['workers']} workers, {system}"


# Records -----------------------------------------------------------------------------------------


class _Source:
    """The records in a folder: one trace, or one trace per rank under another launcher."""

    def __init__(self, path: Path) -> None:
        self._whole = path / TRACE
        parts = [p.name for p in path.glob("trace.*.jsonl") if p.is_file()]
        found = (re.fullmatch(r"trace\.(\d{1,9})\.jsonl", name) for name in parts)
        self._parts = [path / name[0] for name in sorted(filter(None, found), key=_number)]
        if not self._whole.is_file() and not self._parts:
            raise unfit(path, f"it has no {TRACE}")
        self._path = path

    def records(self) -> Iterator[Event]:
        """All records, in order of time."""
        return self._read(read)

    def outline(self) -> Iterator[Event]:
        """The steps of all ranks, and the first record of each."""
        return self._read(lambda path: outline(path, "step"))

    def _read(self, reader: Callable[[Path], Iterator[Event]]) -> Iterator[Event]:
        try:
            if self._whole.is_file():
                yield from reader(self._whole)
            else:
                parts = [_from_first_broadcast(reader(part)) for part in self._parts]
                yield from heapq.merge(*parts, key=lambda record: float(record["t"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise unfit(self._path, f"its trace cannot be read: {summary_of(error)}") from None


def _number(match: re.Match[str]) -> int:
    return int(match[1])


def _from_first_broadcast(records: Iterable[Event]) -> Iterator[Event]:
    """Shift a rank's records to a common clock: all ranks end ``setup`` at the same moment."""
    zero_s: float | None = None
    for record in records:
        if zero_s is None:
            zero_s = record["t"]
        yield {**record, "t": record["t"] - zero_s}


class Tally:
    """Seconds of each kind on each rank; for workers, from the first step to the last."""

    def __init__(self, run: TracedRun) -> None:
        self._run = run
        self.seconds = {rank: dict.fromkeys(KINDS, 0.0) for rank in run.times}

    def add(self, item: Item) -> None:
        """Count an item, if it is a span."""
        if not isinstance(item, Stretch):
            return
        times, zero_s = self._run.times[item.rank], self._run.zero_s
        start_s, end_s = item.start_s, item.end_s
        if times.first_step_s is not None:
            start_s = max(start_s, times.first_step_s - zero_s)
            end_s = min(end_s, times.last_step_s - zero_s)
        self.seconds[item.rank][item.kind] += max(0.0, end_s - start_s)
