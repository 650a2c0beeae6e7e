"""A run over many hosts, as its options say it: where the launcher listens, and for whom."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from paceline.common.options import at_least
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.comm.limits import Limits
    from paceline.launcher.agents import Agents

TOKEN_VARIABLE = "PACELINE_TOKEN"
TOKEN_FILE = "run.token"
TOKEN_BYTES = 32


@dataclass(frozen=True)
class ManyHosts:
    """Where the launcher of a run listens.

    Args:
        count: how many hosts there are, this one included.
        address: of this host.
        port: at which agents of the other hosts join.
        token_file: holds the run's token; it is made if it does not exist.
        encryption: whether connections beyond the loopback are encrypted.
        workers_each: how many workers a host takes at most; None for any number.

    Attributes:
        slots_here: how many ranks may be on this host; None for any number.
    """

    count: int
    address: str
    port: int
    token_file: Path | None
    encryption: bool = True
    workers_each: int | None = None
    slots_here: ClassVar[int | None] = None

    @classmethod
    def of(
        cls,
        count: int,
        listen: str | None,
        token_file: Path | None,
        encryption: bool,
        workers_each: int | None,
    ) -> ManyHosts | None:
        """From the options of a run; None for a run on one host."""
        at_least("hosts", count, 1)
        if workers_each is not None:
            at_least("workers_per_host", workers_each, 1)
        if count == 1 and listen is None:
            for name, value, default in (
                ("encryption", encryption, True),
                ("workers_per_host", workers_each, None),
            ):
                if value != default:
                    needs = "is for a run on many hosts: it needs listen"
                    raise UsageError(f"{name} ({value}) {needs}")
            return None
        if listen is None:
            raise UsageError(
                f"hosts ({count}) needs listen: the address and port of this host at which the"
                " others join, such as 10.0.0.1:7000"
            )
        where = address_and_port("listen", listen)
        return cls(count, *where, token_file, encryption, workers_each)

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this host can join."""
        return self.address.startswith("127.") or self.address in ("::1", "localhost")

    @property
    def encrypted(self) -> bool:
        """Whether connections are encrypted: what does not leave this host is not."""
        return self.encryption and not self.is_loopback

    def say_if_open(self) -> None:
        """Say that whoever reads the network can read the run, if that is so."""
        if not self.encryption and not self.is_loopback:
            print(
                "paceline: connections between hosts are not encrypted: whoever reads the network"
                " can read all that they carry, and join the run",
                file=sys.stderr,
                flush=True,
            )

    @property
    def how_to_join(self) -> str:
        """What to type on the other hosts."""
        text = f"paceline run SCRIPT --join {self.address}:{self.port}"
        if TOKEN_VARIABLE not in os.environ or self.token_file is not None:
            text += f" --token-file {self.token_file or TOKEN_FILE}"
        if not self.encryption:
            text += " --no-encryption"
        others = "1 other host" if self.count == 2 else f"{self.count - 1} other hosts"
        return f"paceline: waiting for {others}; to join, type there: {text}"

    def token(self) -> bytes:
        """The run's token, from where the options say; a new file, where there is none."""
        if self.token_file is None and TOKEN_VARIABLE in os.environ:
            return read_token(None)
        path = self.token_file or Path(TOKEN_FILE)
        if not path.exists():
            from paceline.comm.hosts.secret import new_token

            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(fd, "w") as file:
                file.write(new_token().hex() + "\n")
        return read_token(path)

    def listener(self, port: int = 0) -> socket.socket:
        """A socket that listens at this host's address."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        try:
            return socket.create_server((self.address, port), family=family)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise UsageError(
                f"listen ({self.address}:{port}) must be a free port of this host: {reason}"
            ) from None

    @contextmanager
    def agents(self, limits: Limits) -> Iterator[Agents]:
        """Listen for the agents of the other hosts."""
        from paceline.comm.hosts.secret import Secret
        from paceline.launcher.agents import Agents

        with self.listener(self.port) as listener:
            secret = Secret(self.token(), self.encrypted)
            self.say_if_open()
            yield Agents(listener.fileno(), secret, limits)


def read_token(path: Path | None) -> bytes:
    """The token in a file, or without one in the environment.

    >>> read_token(Path("nowhere"))
    Traceback (most recent call last):
    paceline.errors.UsageError: token_file (nowhere) must be a file: No such file or directory
    """
    if path is None:
        name, text = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
        if not text:
            raise UsageError(f"a token is needed: --token-file FILE, or {TOKEN_VARIABLE}")
    else:
        name = f"token_file ({path})"
        try:
            mode, text = path.stat().st_mode, path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"{name} must be a file: {reason}") from None
        if mode & 0o077:
            raise UsageError(f"{name} must be readable by its owner only: chmod 600 {path}")
    try:
        token = bytes.fromhex(text.strip())
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise UsageError(f"{name} must hold {2 * TOKEN_BYTES} hexadecimal digits")
    return token


def address_and_port(name: str, text: str) -> tuple[str, int]:
    """An address and its port.

    >>> address_and_port("listen", "10.0.0.1:7000"), address_and_port("join", "[::1]:80")
    (('10.0.0.1', 7000), ('::1', 80))
    """
    address, _, port = text.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{name} ({text}) must be an address and a port, such as 10.0.0.1:7000")
    return address.removeprefix("[").removesuffix("]"), int(port)


def split(
    homes: Sequence[int], workers: int, hosts: int, each: int | None = None
) -> list[int | None]:
    """The host of each rank: workers in equal shares, and the others at home, or in turn.

    Args:
        homes: the worker beside which each rank belongs; its own number for a worker, and for a
            rank that may be anywhere.
        workers: how many of the ranks, the first ones, are workers.
        hosts: how many there are.
        each: the most workers of a host; those for whom there is no room have no host.

    >>> split([0, 1, 2, 3, 4, 5], 4, 2)
    [0, 0, 1, 1, 0, 1]
    >>> split([0, 1, 2, 3, 0, 1, 2, 3], 4, 2)
    [0, 0, 1, 1, 0, 0, 1, 1]
    >>> split([0, 1, 2, 3], 4, 2, each=1)
    [0, 1, None, None]
    """
    placed = workers if each is None else min(workers, each * hosts)
    shares: list[int | None] = [worker * hosts // placed for worker in range(placed)]
    shares += [None] * (workers - placed)
    for rank, home in list(enumerate(homes))[workers:]:
        beside = shares[home] if home < workers else None
        shares.append((rank - workers) % hosts if beside is None else beside)
    return shares
