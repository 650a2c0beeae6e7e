"""Read files that a user names, without waiting for pipes or devices.

A file that cannot be read raises ``OSError``; one with the wrong content raises ``ValueError``.
:func:`paceline.common.files.reason_of` makes a message of either.
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
    """The content of a regular file; reading a pipe or a device might never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it must be a regular file", str(path))
        return file.read()


def read_text(path: Path) -> str:
    """The text of a regular file."""
    return read_bytes(path).decode("utf-8")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file."""
    return parse_object(read_text(path))


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object in a text; refuses integers above ``MOST``."""
    try:
        parsed = json.loads(text, parse_int=_bounded_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError("it must be a JSON object")
    return parsed


@contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """Turn whatever malformed files raise into one ``UsageError`` that begins with ``what``."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{what}: it has unexpected content: {summary_of(error)}") from error


def _bounded_int(digits: str) -> int:
    number = int(digits)
    if abs(number) > MOST:
        raise ValueError(f"{shown(number)} is too large")
    return number
