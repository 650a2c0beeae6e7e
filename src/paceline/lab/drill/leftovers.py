"""Find what the runs of a drill leave behind: processes, shared memory, temporary files."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.launcher.fork_client import ForkServer

PATIENCE_S = 10.0
"""A process that still exists this long after the end of its run hangs."""
VARIABLE = "PACELINE_DRILL"
"""The environment variable by which the processes of a drill are recognized."""
SHARED_MEMORY = Path("/dev/shm")
CACHE = "torchinductor_"
"""The prefix of the folder in which torch caches compiled code; it may stay."""


class Leftovers:
    """Finds what is left of runs in this context, and of nothing else on the machine.

    The processes of these runs inherit an environment variable with the drill's id, and a folder of
    their own for temporary files. Shared memory has no such id: a segment that a process of another
    run holds does not count.

        with Leftovers() as leftovers:
            launch(train, workers=4)
            leftovers.remaining()
    """

    def __enter__(self) -> Self:
        ForkServer.stop_idle()  # ranks inherit their environment from the fork server
        self._drill_id = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-drill-")
        self._environment = {name: os.environ.get(name) for name in (VARIABLE, "TMPDIR")}
        self._tempdir = tempfile.tempdir
        os.environ.update({VARIABLE: self._drill_id, "TMPDIR": self._folder.name})
        tempfile.tempdir = self._folder.name
        self._before = _names(SHARED_MEMORY)
        self._reported: set[str] = set()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        ForkServer.stop_idle()
        tempfile.tempdir = self._tempdir
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._folder.cleanup()

    def remaining(self) -> list[str]:
        """What is left after :data:`PATIENCE_S`, in words; each thing is reported once."""
        end_s = time.monotonic() + PATIENCE_S
        while (left := self._all() - self._reported) and time.monotonic() < end_s:
            time.sleep(0.05)
        self._reported |= left
        return sorted(left)

    def _all(self) -> set[str]:
        files = _names(Path(self._folder.name)) | self._shared_memory()
        caches = {path for path in files if path.name.startswith(CACHE)}
        idle = ForkServer.idle_pids()
        ours = (folder.name for folder in _process_folders() if self._is_ours(folder))
        return set(map(str, files - caches)) | {
            f"process {pid}" for pid in ours if int(pid) not in idle
        }

    def _shared_memory(self) -> set[Path]:
        """New segments of this user that no process of another run holds."""
        new = {path for path in _names(SHARED_MEMORY) - self._before if _is_this_users(path)}
        if new:
            for folder in _process_folders():
                if not self._is_ours(folder) and folder.name != str(os.getpid()):
                    new -= _held(folder)
        return new

    def _is_ours(self, process: Path) -> bool:
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            return False  # it has ended, or is another user's
        return f"{VARIABLE}={self._drill_id}".encode() in environment.split(b"\0")


def _process_folders() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")


def _held(process: Path) -> set[Path]:
    """The shared memory that a process has mapped or open."""
    held = set()
    try:
        for line in (process / "maps").read_text(errors="replace").splitlines():
            _, _, path = line.partition(f"{SHARED_MEMORY}/")
            held.add(SHARED_MEMORY / path)
        for descriptor in (process / "fd").iterdir():
            held.add(descriptor.readlink())
    except OSError:
        pass  # it has ended, or is another user's
    return held


def _is_this_users(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _names(folder: Path) -> set[Path]:
    try:
        return set(folder.iterdir())
    except OSError:
        return set()
