"""One record format from every world: each message, version and batch, in order.

A line of ``trace.jsonl`` is ``{"t", "rank", "event", "peer", "bytes", ...}``; times are seconds on
the run's clock. In a simulation all ranks write one trace and its hash is the run's fingerprint;
real ranks write one each, and the launcher merges them by time.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

_BUFFERED = 4096

Record = tuple[float, int, str, int | None, int, dict[str, Any] | None]


class Trace:
    """Collects records, writes them to a file if there is one, and hashes them."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = path.open("w", encoding="utf-8") if path else None
        self._digest = hashlib.sha256()
        self._records: list[Record] = []

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
        if len(self._records) >= _BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Hash and write what is buffered."""
        records, self._records = self._records, []
        lines = [f"{t!r} {rank} {event} {peer} {n}\n" for t, rank, event, peer, n, _ in records]
        self._digest.update("".join(lines).encode())
        if self._file is not None:
            self._file.writelines(_line(record) for record in records)
            self._file.flush()

    def close(self) -> str:
        """Write the rest; return the SHA-256 over (time, rank, event, peer, bytes) in order."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
        return self._digest.hexdigest()


def merge(parts: Sequence[Path], path: Path) -> None:
    """Merge the traces of single ranks by time into one file, and remove them."""
    with path.open("w", encoding="utf-8") as out:
        streams = [_lines(part) for part in parts if part.exists()]
        out.writelines(line for _, line in heapq.merge(*streams, key=lambda item: item[0]))
    for part in parts:
        part.unlink(missing_ok=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a trace; a last line cut off by a crash is left out."""
    for _, line in _lines(path):
        yield json.loads(line)


def _line(record: Record) -> str:
    t, rank, event, peer, nbytes, more = record
    rest = f", {json.dumps(more)[1:-1]}" if more else ""
    who = "null" if peer is None else peer
    return (
        f'{{"t": {t!r}, "rank": {rank}, "event": "{event}", "peer": {who},'
        f' "bytes": {nbytes}{rest}}}\n'
    )


def _lines(path: Path) -> Iterator[tuple[float, str]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("}\n"):
                yield float(line[6 : line.index(",")]), line
