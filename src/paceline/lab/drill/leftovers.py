"""What a drill's runs must not leave behind: processes, shared memory, temporary files."""

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
"""A process that is still there so long after its run has ended hangs."""
MARK = "PACELINE_DRILL"
"""The variable that tells the processes of a drill from all others."""
SHARED_MEMORY = Path("/dev/shm")
CACHE = "torchinductor_"
"""How the folder begins in which torch keeps compiled code from one run to the next."""


class Leftovers:
    """Looks after what is started within it, and after nothing else on the machine.

    Processes inherit a mark in their environment, and a folder for temporary files that nobody else
    uses. Shared memory has no such mark: what another living process holds is not counted.

        with Leftovers() as left:
            launch(train, workers=4)
            left.found()
    """

    def __enter__(self) -> Self:
        ForkServer.stop_idle()  # ranks take their environment from it
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-drill-")
        self._environment = {name: os.environ.get(name) for name in (MARK, "TMPDIR")}
        self._tempdir = tempfile.tempdir
        os.environ.update({MARK: self._mark, "TMPDIR": self._folder.name})
        tempfile.tempdir = self._folder.name
        self._before = _names(SHARED_MEMORY)
        self._told: set[str] = set()
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

    def found(self) -> list[str]:
        """What is left after a while, in words; each thing is told once."""
        end_s = time.monotonic() + PATIENCE_S
        while (left := self._all() - self._told) and time.monotonic() < end_s:
            time.sleep(0.05)
        self._told |= left
        return sorted(left)

    def _all(self) -> set[str]:
        files = _names(Path(self._folder.name)) | self._shared_memory()
        kept = {path for path in files if path.name.startswith(CACHE)}
        idle = ForkServer.idle_pids()
        ours = (folder.name for folder in _every_process() if self._is_ours(folder))
        return set(map(str, files - kept)) | {
            f"process {pid}" for pid in ours if int(pid) not in idle
        }

    def _shared_memory(self) -> set[Path]:
        """What is new, belongs to this user, and is not held by a process of somebody else."""
        new = {path for path in _names(SHARED_MEMORY) - self._before if _is_this_users(path)}
        if new:
            for folder in _every_process():
                if not self._is_ours(folder) and folder.name != str(os.getpid()):
                    new -= _held(folder)
        return new

    def _is_ours(self, process: Path) -> bool:
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            return False  # it has ended, or is another user's
        return f"{MARK}={self._mark}".encode() in environment.split(b"\0")


def _every_process() -> Iterator[Path]:
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
