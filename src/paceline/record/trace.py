"""The trace of a run: every message, version and batch in order, in one format for all worlds.

A line of ``trace.jsonl`` is ``{"t", "rank", "event", "peer", "bytes", ...}``. Times are seconds on
the run's clock; a field that ends in ``_s`` is the duration of something that ended at ``t``. In a
simulation all ranks write one trace, and its hash is the run's fingerprint. Real ranks write one
trace each, and the launcher merges them by time.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from paceline.common.files import Lines, open_private
from paceline.errors import UsageError

_BUFFERED = 4096
_FLUSH_INTERVAL_S = 0.25
"""At most this much of a real rank's trace is lost when the rank is killed."""

_LINE_START = '{"t": '
"""The beginning of each line."""

Record = tuple[float, int, str, int | None, int, dict[str, Any] | None, int]


class Trace:
    """Hashes records, and writes them to a file if there is one.

    Args:
        path: the file.
        clock: a lower bound for the times of all later records; records ahead of it are held back
            and sorted. None: records come in order.
        place: the place of a rank's present record among those of equal time; by default they stay
            in the order in which they came.
        append: whether to append to an existing file.
        on_failure: called with the reason if the disk is full or fails. The file is then removed:
            an incomplete trace is of no use, and the model and checkpoints need the space.
    """

    def __init__(
        self,
        path: Path | None = None,
        clock: Callable[[], float] | None = None,
        append: bool = False,
        on_failure: Callable[[str], None] | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self._place = place
        self._clock, self._path, self._on_failure = clock, path, on_failure
        self._given_up = False
        self._file = None if path is None else Lines(path, self._fail, append)
        if self._file is not None and append:
            self._file.add("\n")  # the last line of the earlier process may be incomplete
        self._digest = hashlib.sha256()
        self._records: list[Record] = []
        self._flush_at = _BUFFERED
        self._flush_s = 0.0 if clock is None else math.inf

    def record(
        self,
        time_s: float,
        rank: int,
        event: str,
        peer: int | None = None,
        nbytes: int = 0,
        **more: Any,
    ) -> None:
        """Add one event; ``more`` is written, but not part of the hash."""
        place = 0 if self._place is None else self._place(rank)
        self._records.append((time_s, rank, event, peer, nbytes, more or None, place))
        if len(self._records) >= self._flush_at or time_s >= self._flush_s:
            self.flush()
            self._flush_s = time_s + _FLUSH_INTERVAL_S if self._clock is None else math.inf
            self._flush_at = _BUFFERED + 2 * len(self._records)  # beside those held back

    def flush(self) -> None:
        """Hash and write the buffered records up to the clock."""
        self._emit(math.inf if self._clock is None else self._clock())

    def _emit(self, until_s: float) -> None:
        if self._clock is not None:
            self._records.sort(key=itemgetter(0) if self._place is None else itemgetter(0, 6))
        end = bisect_left(self._records, until_s, key=itemgetter(0))
        records, self._records = self._records[:end], self._records[end:]
        lines = [f"{t!r} {rank} {event} {peer} {n}\n" for t, rank, event, peer, n, *_ in records]
        self._digest.update("".join(lines).encode())
        if self._file is not None and not self._given_up:
            self._file.add("".join([_line(record) for record in records]))

    def give_up(self, reason: str) -> bool:
        """Remove the file to make room on the disk; False if there is no file any more."""
        if self._file is None or self._given_up:
            return False
        self._file.give_up(reason)
        return True

    def _fail(self, reason: str) -> None:
        self._given_up = True
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
            warn = self._on_failure or partial(warn_of_no_trace, self._path.parent)
            warn(reason)

    def close(self) -> str:
        """Write the remaining records; return the SHA-256 over (time, rank, event, peer, bytes)."""
        self._emit(math.inf)
        if self._file is not None:
            self._file.close()
            self._file = None
        return self._digest.hexdigest()


def warn_of_no_trace(folder: Path, reason: str) -> None:
    """Warn that a run continues without a trace."""
    warnings.warn(
        f"the trace of the run in {folder} was abandoned: {reason}; training continues without it",
        stacklevel=3,
    )


def is_duration(name: str) -> bool:
    """Whether a field of a record is a duration."""
    return name.endswith("_s")


def merge(parts: Sequence[Path], path: Path) -> None:
    """Merge the traces of single ranks by time into one file, and remove them."""
    with open_private(path) as out:
        streams = [_lines(part) for part in parts if part.exists()]
        out.writelines(line for _, line in heapq.merge(*streams, key=itemgetter(0)))
    for part in parts:
        part.unlink(missing_ok=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a trace; lines that a crash cut off are skipped."""
    for _, line in _lines(path):
        yield _record(path, line)


def outline(path: Path, event: str) -> Iterator[dict[str, Any]]:
    """The records of one kind of event, and the first of each rank; faster than :func:`read`."""
    wanted, seen = f'"event": "{event}"', set[str]()
    for _, line in _lines(path):
        rank = line[line.find('"rank": ') : line.find(', "event"')]
        if wanted in line or rank not in seen:
            seen.add(rank)
            yield _record(path, line)


def _line(record: Record) -> str:
    t, rank, event, peer, nbytes, more, _ = record
    rest = "".join([f', "{k}": {_json(v)}' for k, v in more.items()]) if more else ""
    who = "null" if peer is None else peer
    return (
        f'{{"t": {t!r}, "rank": {rank}, "event": "{event}", "peer": {who},'
        f' "bytes": {nbytes}{rest}}}\n'
    )


def _json(value: Any) -> str:
    """A value as JSON; faster than the encoder for numbers, the most common values."""
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    return json.dumps(value)


def _lines(path: Path) -> Iterator[tuple[float, str]]:
    """Each complete line with its time; lines that a crash cut off are skipped.

    Such a line is the last of the file, or the last of one of the rank's earlier incarnations.
    """
    with path.open(encoding="utf-8") as file:
        try:
            for line in file:
                start = line[: len(_LINE_START)].rstrip("\n")
                cut_off = not line.endswith("}\n") and _LINE_START.startswith(start)
                if not cut_off and line.endswith("\n"):
                    yield float(line[len(_LINE_START) : line.find(",")]), line
        except ValueError as error:
            raise UsageError(f"{path}: not a trace: {error}") from None


def _record(path: Path, line: str) -> dict[str, Any]:
    """The record in a line; refuses one without a time, a rank and an event."""
    try:
        record = json.loads(line)
        if isinstance(record["rank"], int) and isinstance(record["event"], str):
            return dict(record, t=float(record["t"]))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        pass
    raise UsageError(f"{path}: not a record of a trace: {line[:80].rstrip()}")
