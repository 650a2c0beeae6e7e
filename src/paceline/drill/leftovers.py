"""What a run must not leave behind: processes, shared memory, temporary files."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

PATIENCE_S = 10.0
"""A process that is still there so long after its run has ended hangs."""


class Leftovers:
    """Looks around before a run; :meth:`found` tells what is there afterwards that was not."""

    def __init__(self) -> None:
        self._before = _all()

    def found(self) -> list[str]:
        """What is left after a while that was not there before, in words."""
        end_s = time.monotonic() + PATIENCE_S
        while (left := _all() - self._before) and time.monotonic() < end_s:
            time.sleep(0.05)
        return sorted(left)


def _all() -> set[str]:
    return _ranks() | _files("/dev/shm") | _files(tempfile.gettempdir(), "paceline")


def _ranks() -> set[str]:
    """The processes that are ranks or nurseries, but for those of this process."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        if b"paceline.nursery" in command and parent != os.getpid():
            found.add(f"process {folder.name}")
    return found


def _files(folder: str, name: str = "") -> set[str]:
    try:
        return {f"{folder}/{entry}" for entry in os.listdir(folder) if name in entry}
    except OSError:
        return set()
