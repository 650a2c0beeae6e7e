"""Files that a user names: read if they are what they should be, and never waited for.

What cannot be read raises ``OSError``, and what is not as it should be ``ValueError``, whatever
Python makes of it; :func:`why` tells either in words.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.common.options import MOST, shown
from paceline.errors import UsageError, summary_of


def read_bytes(path: Path) -> bytes:
    """The content of a regular file: a pipe may never have one, and a device no end of it."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it must be a regular file", str(path))
        return file.read()


def read_text(path: Path) -> str:
    """The text of a regular file."""
    return read_bytes(path).decode("utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a regular file holds."""
    return parse_object(read_text(path))


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object of a text; its numbers are of a size that every format holds."""
    try:
        told = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(told, dict):
        raise ValueError("it must be a JSON object")
    return told


def why(error: OSError | ValueError) -> str:
    """The reason of what went wrong with a file, for a sentence that names it."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def taken_from(what: str) -> Iterator[None]:
    """Make one sentence of whatever fails for what files hold, which begins with ``what``."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{what}: it holds something else: {summary_of(error)}") from error


def _whole(digits: str) -> int:
    number = int(digits)
    if abs(number) > MOST:
        raise ValueError(f"{shown(number)} is too large")
    return number
