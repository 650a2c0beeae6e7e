"""Read files that grow, each line once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 4_000_000
"""How much of a file one look reads; the next look goes on from there."""


class Tail:
    """The lines of one file, as they come.

    A file that is replaced, or begins anew, is read again from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._inode = path, 0, -1

    def look(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file began anew, and the JSON objects in its new lines."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                anew = facts.st_ino != self._inode or facts.st_size < self._offset
                if anew:
                    self._inode, self._offset = facts.st_ino, 0
                file.seek(self._offset)
                whole, newline, _ = file.read(MOST_BYTES).rpartition(b"\n")
        except OSError:  # it is not there yet, or not any more
            return False, []
        self._offset += len(whole) + len(newline)
        return anew, [*_objects(whole)]


def _objects(text: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects in lines; other lines are skipped."""
    for line in text.splitlines():
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict):
            yield parsed
