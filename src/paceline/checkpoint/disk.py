"""Crash-safe writes: after a crash a file has its old content or its new content, never a mix.

A file is written under another name, flushed, and renamed; then its folder is flushed. Each of
these points has a name, and a process with ``PACELINE_FAILPOINT=NAME`` in its environment is killed
(SIGKILL) when it reaches that point. The names are ``KIND.POINT``, with the kinds in ``KINDS`` and
the points in ``POINTS``: ``rank.fsync`` is just before the state of a rank is flushed.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from paceline.common.files import make_folder, opener

FAILPOINT = "PACELINE_FAILPOINT"
KINDS = ("rank", "metrics", "manifest", "latest")
POINTS = ("open", "write", "fsync", "rename", "folder", "end")
_PART = ".part"


class Disk:
    """The operations that write checkpoints; tests replace them to simulate a failing disk."""

    def write(self, path: Path, content: bytes, on_half: Callable[[], None]) -> None:
        """Write a file; calls ``on_half`` when half of it is written."""
        half = len(content) // 2
        with open(path, "wb", opener=opener) as file:
            file.write(content[:half])
            file.flush()
            on_half()
            file.write(memoryview(content)[half:])

    def flush(self, path: Path) -> None:
        """Make a file or folder survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        """Rename a file, and replace the one that had the new name."""
        path.replace(target)

    def make_folder(self, path: Path) -> None:
        """Make a folder, unless it exists."""
        make_folder(path)

    def remove(self, path: Path) -> None:
        """Remove a file or a folder, if it exists."""
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()


def replace_file(path: Path, content: bytes, kind: str, disk: Disk = DISK) -> None:
    """Replace ``path`` atomically: readers find the old content or the new, both complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}{_PART}")
    failpoint(f"{kind}.open")
    try:
        disk.write(part, content, lambda: failpoint(f"{kind}.write"))
        failpoint(f"{kind}.fsync")
        disk.flush(part)
        failpoint(f"{kind}.rename")
        disk.rename(part, path)
    except BaseException:
        disk.remove(part)
        raise
    failpoint(f"{kind}.folder")
    disk.flush(path.parent)
    failpoint(f"{kind}.end")


def failpoint(name: str) -> None:
    """Kill this process here, if the environment names this point."""
    if os.environ.get(FAILPOINT) == name:
        os.kill(os.getpid(), signal.SIGKILL)
