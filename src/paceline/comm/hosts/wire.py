"""What a rank, or the registrar, needs of its host: connections, a clock, and threads.

:mod:`.zeromq` has the real ones. Fault testing has others, in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from types import TracebackType
from typing import Protocol

Bytes = bytes | memoryview
BEAT_S = 0.25
"""How often the two ends of a connection, and a rank and the registrar, hear of each other."""

NO_MESSAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What reading a message of JSON can raise if no member of ours has sent it."""
GONE_S = 1.0
"""A connection that broke and is not back after so long: the process at its other end is gone."""


class Connection(Protocol):
    """A way to one address.

    It keeps the order. It may break, loses then what is on its way, and comes again by itself.
    """

    def send(self, head: bytes, chunk: Bytes | None = None) -> bool:
        """Send one or two frames without waiting; False when there is no room."""

    def receive(self) -> Bytes | None:
        """A message that has come from there; None when there is none."""

    def came_again(self) -> bool:
        """Whether it has broken and come again since this was last asked."""

    def close(self) -> None:
        """Give up what is on its way."""


class Probe(Protocol):
    """A connection that carries nothing, and shows whether the process at its other end exists.

    When a process ends, its host closes the connection, and refuses a new one. A link that is cut,
    or a process that is stopped, does neither.
    """

    def is_broken(self) -> bool:
        """Whether the connection broke, and did not come back within :data:`GONE_S`."""

    def close(self) -> None:
        """Close the connection."""


class Listener(Protocol):
    """Hears those who have connected to one address.

    Attributes:
        address: where it listens.
    """

    address: str

    def receive(self) -> tuple[bytes, Sequence[Bytes]] | None:
        """The frames of a message, and which connection it came by; None when there is none."""

    def send(self, client: bytes, message: bytes) -> None:
        """Send a message back by a connection, unless that is gone."""


class Condition(Protocol):
    """A lock, and a wait for those who change what it guards; as that of :mod:`threading`."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...

    def wait(self, timeout: float) -> bool:
        """Give the lock away until others have changed something, or for so many seconds."""

    def notify_all(self) -> None:
        """Wake all who wait."""


class Wire(Protocol):
    """The surroundings of one process.

    Attributes:
        place: names the host and the process.
        slots: how many parts of a stream the memory holds through which ranks of one host hand
            each other large messages.
    """

    place: tuple[str, int]
    slots: int

    def listen(self, host: str, most_bytes: int) -> Listener:
        """Listen at an address of this host, for frames of up to so many bytes."""

    def connect(self, address: str, heard: bool = False) -> Connection:
        """Connect to an address; :meth:`poll` tells what comes from there if it is ``heard``."""

    def probe(self, address: str) -> Probe:
        """Watch whether the process that listens at an address exists."""

    def poll(self, seconds: float) -> Container[Connection | Listener]:
        """Wait until something has come, or for so long; return where it has come."""

    def now_s(self) -> float:
        """The time, which never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def condition(self) -> Condition:
        """A new condition."""

    def start(self, run: Callable[[], None]) -> Callable[[], object]:
        """Run a function in a thread; return what waits for its end."""

    def close(self) -> None:
        """End all connections."""
