"""The socket in a run's folder through which the launcher can be asked to add a worker, or to stop.

It is a Unix socket that only its user may open. A request and its reply are one JSON object each.
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

SOCKET = "control"
REPLY_TIMEOUT_S = 10.0
MOST_BYTES = 4096

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class ControlSocket:
    """The launcher's side, in the folder of the run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET
        self._path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with _short_path(folder) as short:
                self._socket.bind(f"{short}/{SOCKET}")
        finally:
            os.umask(before)
        self._socket.listen()

    def fileno(self) -> int:
        """The descriptor that becomes readable when a request arrives."""
        return self._socket.fileno()

    def answer(self, handle: Handler) -> None:
        """Reply to one request; anything malformed is ignored."""
        connection, _ = self._socket.accept()
        with connection, suppress(OSError, ValueError):
            connection.settimeout(1.0)
            request = json.loads(connection.recv(MOST_BYTES))
            if isinstance(request, dict):
                connection.sendall(json.dumps(handle(request)).encode())

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def ask(name: str, folder: str | os.PathLike[str], request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request to the launcher of the run in a folder, and wait for its reply.

    ``name`` is what a user calls the folder, for the message if there is no such run.
    """
    path = Path(folder)
    try:
        with (
            _short_path(path) as short,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer,
        ):
            peer.settimeout(REPLY_TIMEOUT_S)
            peer.connect(f"{short}/{SOCKET}")
            peer.sendall(json.dumps(request).encode())
            reply: dict[str, Any] = json.loads(peer.recv(MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it does not reply"
        message = f"{name} ({folder}) must be the folder of a run in progress: {reason}"
        raise UsageError(message) from None
    return reply


@contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A path of the folder that is short enough for a socket's address."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
