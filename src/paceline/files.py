"""Files that a run writes: for its user alone, and whole or not there.

What a run was asked to do is in them, its script and arguments, and so is all that was logged. So
folders have the mode 0700 and files 0600, whatever the umask allows. A folder that is there already
keeps its mode.
"""

from __future__ import annotations

import os
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
