"""Files that a run writes: for its user alone, and whole or not there.

What a run was asked to do is in them, its script and arguments, and so is all that was logged. So
folders have the mode 0700 and files 0600, whatever the umask allows. A folder that is there already
keeps its mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO, cast

FOLDER_MODE, FILE_MODE = 0o700, 0o600


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there; those above it are made as everybody makes them."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def open_private(path: Path, mode: str = "w") -> TextIO:
    """Open a text to write it."""
    return cast(TextIO, open(path, mode, encoding="utf-8", opener=opener))


def opener(path: str, flags: int) -> int:
    """Open a file to write it, for ``open(..., opener=opener)``."""
    return os.open(path, flags, FILE_MODE)


class Lines:
    """A text that grows by lines, as long as the disk takes them; then it is given up.

    What is there of it then are whole lines. A run does not end because its notes do.

    Args:
        path: the file.
        on_failure: told once why there are no more.
        goes_on: whether to write after what is in the file.
    """

    def __init__(self, path: Path, on_failure: Callable[[str], None], goes_on: bool = False):
        self._path, self._on_failure = path, on_failure
        self._file: TextIO | None = None
        self._bytes = 0
        try:
            self._file = open_private(path, "a" if goes_on else "w")
            self._bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            self.give_up(reason_of(error))

    def add(self, text: str) -> None:
        """Add whole lines."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
            self._bytes += len(text.encode())
        except OSError as error:
            self.give_up(reason_of(error))

    def give_up(self, reason: str) -> None:
        """Write no more, and say so."""
        self.close()
        with suppress(OSError):
            os.truncate(self._path, self._bytes)
        self._on_failure(reason)

    def close(self) -> None:
        """Write no more."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # of what could not be written before
                file.close()


def reason_of(error: OSError) -> str:
    """Why a file could not be written, in the system's words."""
    return error.strerror or str(error)


def write_private(path: Path, text: str) -> None:
    """Write a file in place of another: whoever looks finds the old one or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open_private(part) as file:
            file.write(text)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
