"""One record format from every world: each message, version and batch, in order.

A line of ``trace.jsonl`` is ``{"t", "rank", "event", "peer", "bytes", ...}``; times are seconds on
the run's clock, and a field that ends in ``_s`` is how long something took that was over at ``t``.
In a simulation all ranks write one trace and its hash is the run's fingerprint; real ranks write
one each, and the launcher merges them by time.
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
from pathlib import Path
from typing import Any

from paceline.common.files import Lines, open_private
from paceline.errors import UsageError

_BUFFERED = 4096
_KEPT_S = 0.25
"""How much of a real rank's trace is lost at most when it is killed."""

_BEGINS = '{"t": '
"""What each line begins with."""

Record = tuple[float, int, str, int | None, int, dict[str, Any] | None]


class Trace:
    """Collects records, writes them to a file if there is one, and hashes them.

    Args:
        path: the file.
        clock: the time that no later record is before; records that come ahead of it are sorted in.
        goes_on: whether to write after what is in the file.
        on_failure: told why, when the file is given up: the disk is full, or fails. Half a trace is
            none, so the file is removed then; the model and checkpoints need the room.
    """

    def __init__(
        self,
        path: Path | None = None,
        clock: Callable[[], float] | None = None,
        goes_on: bool = False,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._clock, self._path, self._on_failure = clock, path, on_failure
        self._file: Lines | None = None
        self._given_up = False
        if path is not None:
            self._file = Lines(path, self._fail, goes_on)
        if self._file is not None and goes_on:
            self._file.add("\n")  # a line of before may have been cut off
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
        self._records.append((time_s, rank, event, peer, nbytes, more or None))
        if len(self._records) >= self._flush_at or time_s >= self._flush_s:
            self.flush()
            self._flush_s = time_s + _KEPT_S if self._clock is None else math.inf
            self._flush_at = _BUFFERED + 2 * len(self._records)  # those that are still ahead

    def flush(self) -> None:
        """Hash and write what is buffered, up to the clock."""
        self._emit(math.inf if self._clock is None else self._clock())

    def _emit(self, until_s: float) -> None:
        if self._clock is not None:
            self._records.sort(key=_time)
        end = bisect_left(self._records, until_s, key=_time)
        records, self._records = self._records[:end], self._records[end:]
        lines = [f"{t!r} {rank} {event} {peer} {n}\n" for t, rank, event, peer, n, _ in records]
        self._digest.update("".join(lines).encode())
        if self._file is not None and not self._given_up:
            self._file.add("".join([_line(record) for record in records]))

    def give_up(self, reason: str) -> bool:
        """Make room for what matters more; False where there is no file any more."""
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
        """Write the rest; return the SHA-256 over (time, rank, event, peer, bytes) in order."""
        self._emit(math.inf)
        if self._file is not None:
            self._file.close()
            self._file = None
        return self._digest.hexdigest()


def warn_of_no_trace(folder: Path, reason: str) -> None:
    """Say that a run goes on without a trace."""
    warnings.warn(
        f"the trace of the run in {folder} is given up: {reason}; training goes on without it",
        stacklevel=3,
    )


def is_duration(name: str) -> bool:
    """Whether a field of a record tells how long it took, and not what happened."""
    return name.endswith("_s")


def _time(record: Record) -> float:
    return record[0]


def merge(parts: Sequence[Path], path: Path) -> None:
    """Merge the traces of single ranks by time into one file, and remove them."""
    with open_private(path) as out:
        streams = [_lines(part) for part in parts if part.exists()]
        out.writelines(line for _, line in heapq.merge(*streams, key=lambda item: item[0]))
    for part in parts:
        part.unlink(missing_ok=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a trace; a last line cut off by a crash is left out."""
    for _, line in _lines(path):
        yield _record(path, line)


def outline(path: Path, event: str) -> Iterator[dict[str, Any]]:
    """The records of one kind of event, and the first of each rank; sooner than all of them."""
    wanted, seen = f'"event": "{event}"', set[str]()
    for _, line in _lines(path):
        rank = line[line.find('"rank": ') : line.find(', "event"')]
        if wanted in line or rank not in seen:
            seen.add(rank)
            yield _record(path, line)


def _line(record: Record) -> str:
    t, rank, event, peer, nbytes, more = record
    rest = "".join([f', "{k}": {_json(v)}' for k, v in more.items()]) if more else ""
    who = "null" if peer is None else peer
    return (
        f'{{"t": {t!r}, "rank": {rank}, "event": "{event}", "peer": {who},'
        f' "bytes": {nbytes}{rest}}}\n'
    )


def _json(value: Any) -> str:
    """A value as JSON; the numbers that most are, sooner than the encoder writes them."""
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    return json.dumps(value)


def _lines(path: Path) -> Iterator[tuple[float, str]]:
    """Each whole line with its time; one that was cut off by a crash is left out.

    That is the last one, or the one before which another life of its rank went on.
    """
    with path.open(encoding="utf-8") as file:
        try:
            for line in file:
                begins = line[: len(_BEGINS)].rstrip("\n")
                cut_off = not line.endswith("}\n") and _BEGINS.startswith(begins)
                if not cut_off and line.endswith("\n"):
                    yield float(line[len(_BEGINS) : line.find(",")]), line
        except ValueError as error:
            raise UsageError(f"{path}: not a trace: {error}") from None


def _record(path: Path, line: str) -> dict[str, Any]:
    """The record of a line, which has at least a time, a rank and an event."""
    try:
        record = json.loads(line)
        if isinstance(record["rank"], int) and isinstance(record["event"], str):
            return dict(record, t=float(record["t"]))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        pass
    raise UsageError(f"{path}: not a record of a trace: {line[:80].rstrip()}")
