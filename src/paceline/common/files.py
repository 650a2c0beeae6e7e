"""Files that a run writes: private to the user, and complete or absent.

They hold the script, its arguments and everything that was logged. So folders have the mode 0700
and files 0600, whatever the umask allows. A folder that already exists keeps its mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def make_folder(path: Path) -> None:
    """Make a private folder, unless it exists; its parents get the usual mode."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def open_private(path: Path, mode: str = "w") -> TextIO:
    """Open a private text file for writing."""
    return cast(TextIO, open(path, mode, encoding="utf-8", opener=opener))


def opener(path: str, flags: int) -> int:
    """Create files with a private mode, for ``open(..., opener=opener)``."""
    return os.open(path, flags, FILE_MODE)


class Lines:
    """A text file to which lines are appended, until the disk fails.

    Then the file ends with its last complete line, and the run continues without it.

    Args:
        path: the file.
        on_failure: called once with the reason, when the disk fails.
        append: whether to append to an existing file.
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None], append: bool = False):
        self._path, self._on_failure = path, on_failure
        self._file: TextIO | None = None
        self._bytes = 0
        try:
            self._file = open_private(path, "a" if append else "w")
            self._bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            self.give_up(reason_of(error))

    def add(self, text: str) -> None:
        """Append complete lines."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
            self._bytes += len(text.encode())
        except OSError as error:
            self.give_up(reason_of(error))

    def give_up(self, reason: str) -> None:
        """Close the file after its last complete line, and report the reason."""
        self.close()
        with suppress(OSError):
            os.truncate(self._path, self._bytes)
        self._on_failure(reason)

    def close(self) -> None:
        """Close the file; later lines are ignored."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # closing retries a write that failed before
                file.close()


def reason_of(error: OSError | ValueError) -> str:
    """Why a file could not be read or written, without its name."""
    return getattr(error, "strerror", None) or str(error)


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically: readers find the old content or the new, both complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open_private(part) as file:
            file.write(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
