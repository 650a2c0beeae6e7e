"""Serve the page of a run: in this process, or beside a run in a process of its own.

``python -m paceline.watch.server FOLDER FD`` serves on a socket that it inherits; it reads the
token from its input, and ends when that is closed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from paceline.common.files import reason_of
from paceline.errors import UsageError
from paceline.watch.run import WatchedRun

LOOPBACK = "127.0.0.1"
NICE = 10
"""Training goes first."""
END_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where a page is: a socket that listens, and the token that opens it."""

    listener: socket.socket
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    @classmethod
    def at(cls, address: str = LOOPBACK, port: int = 0) -> Place:
        """Listen there; by default on a free port that only this machine can reach."""
        for package in ("starlette", "uvicorn"):
            if find_spec(package) is None:
                raise UsageError(f'the page needs {package}: pip install "paceline[live]"')
        try:
            kind = socket.AF_INET6 if ":" in address else socket.AF_INET
            return cls(socket.create_server((address, port), family=kind))
        except OSError as error:
            what = f"listen ({address}:{port}) must be a free address of this machine"
            raise UsageError(f"{what}: {reason_of(error)}") from None

    @property
    def url(self) -> str:
        """The page's address, with its key."""
        address, port = self.listener.getsockname()[:2]
        if address in ("0.0.0.0", "::"):
            address = socket.gethostname()
        return f"http://{_bracketed(address)}:{port}/#{self.token}"


def allowed_hosts(listener: socket.socket) -> Callable[[str], bool]:
    """Which values of the header ``Host`` mean this page.

    A page of another site can make its own name lead here, but not an address, nor our name.
    """
    address, port = listener.getsockname()[:2]
    names = {_bracketed(address), "localhost"}
    everywhere = ipaddress.ip_address(address).is_unspecified
    if not ipaddress.ip_address(address).is_loopback:
        names |= {socket.gethostname()}

    def allowed(host: str) -> bool:
        name, _, given = host.rpartition(":")
        return given == str(port) and (name in names or (everywhere and _is_address(name)))

    return allowed


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def serve(folder: Path, place: Place, until_closed: int | None = None) -> None:
    """Serve the page until Ctrl-C, or until the descriptor ``until_closed`` is closed."""
    import uvicorn

    from paceline.watch.page import Page

    page = Page(WatchedRun(folder), place.token, allowed_hosts(place.listener))
    config = uvicorn.Config(
        page.app,
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        if until_closed is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(until_closed, setattr, server, "should_exit", True)
        await server.serve(sockets=[place.listener])

    asyncio.run(run())


class Beside:
    """A server in a process of its own, beside a run; it ends with this process at the latest."""

    def __init__(self, folder: Path) -> None:
        place = Place.at()
        self.url, fd = place.url, place.listener.fileno()
        command = [sys.executable, "-m", "paceline.watch.server", str(folder), str(fd)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[fd], start_new_session=True
        )
        place.listener.close()
        assert self._process.stdin is not None
        self._input = self._process.stdin
        self._input.write(f"{place.token}\n".encode())
        self._input.flush()

    @property
    def pid(self) -> int:
        """The process that serves."""
        return self._process.pid

    def wait(self) -> None:
        """Wait until the server ends, which it does not by itself."""
        self._process.wait()

    def close(self) -> None:
        """End the server."""
        self._input.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(folder: str, fd: str) -> None:
    """Serve on an inherited socket, until the standard input is closed."""
    os.nice(NICE)
    token = sys.stdin.buffer.raw.readline().decode().strip()  # type: ignore[union-attr]
    serve(Path(folder), Place(socket.socket(fileno=int(fd)), token), until_closed=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
