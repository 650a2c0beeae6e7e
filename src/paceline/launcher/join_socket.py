"""A run's door: the socket in its folder at which the launcher can be asked to take a worker in.

It is a Unix socket that only its user may open. A question and its answer are a line of JSON each.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

DOOR = "control"
ANSWER_S = 10.0
MOST_BYTES = 4096

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class JoinSocket:
    """The launcher's end, in the folder of the run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / DOOR
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with _short(folder) as short:
                self._socket.bind(f"{short}/{DOOR}")
        finally:
            os.umask(before)
        self._socket.listen()

    def fileno(self) -> int:
        """What can be read when somebody asks."""
        return self._socket.fileno()

    def answer(self, answer: Answer) -> None:
        """Answer one question; who asks something else, or nothing, is not heard."""
        connection, _ = self._socket.accept()
        with connection, suppress(OSError, ValueError):
            connection.settimeout(1.0)
            question = json.loads(connection.recv(MOST_BYTES))
            if isinstance(question, dict):
                connection.sendall(json.dumps(answer(question)).encode())

    def close(self) -> None:
        """Close it, and leave nothing behind."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def ask(folder: str | os.PathLike[str], question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the launcher of the run in a folder, and wait for its answer."""
    path = Path(folder)
    try:
        with _short(path) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(ANSWER_S)
            line.connect(f"{short}/{DOOR}")
            line.sendall(json.dumps(question).encode())
            told: dict[str, Any] = json.loads(line.recv(MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it does not answer"
        message = f"join ({folder}) must be the folder of a run that goes on: {reason}"
        raise UsageError(message) from None
    return told


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The folder under a name that is short enough for a socket's address."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
