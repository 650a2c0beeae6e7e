"""A slow network on one machine: network namespaces joined by links of a limited rate.

Each rank's namespace has one interface, ``eth0``, connected to a bridge in a namespace of its own.
The kernel's token bucket filter (``tc tbf``) limits both directions of each link, as a network card
and a switch would.

The namespaces have no names: only open files keep them alive. When the process that made them ends,
however it ends, the kernel removes them and everything in them. Nothing in them can reach, or be
reached from, the rest of the machine. Making them needs root or the capability CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from paceline.common.options import above, at_least
from paceline.errors import PacelineError

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
BURST_S, LEAST_BURST = 1e-3, 1 << 14
"""How much an idle link lets pass at once: what it carries in BURST_S, at least LEAST_BURST."""
QUEUE_S = 0.05
"""A packet that would wait longer than this in the filter is dropped."""
MTU, FRAME_BYTES, HEADER_BYTES = 1500, 14, 52
"""The largest IP packet, the Ethernet header that the filter counts with it, and the IP and TCP
headers (with time stamps) inside it."""

T = TypeVar("T")


def payload_rate(bits_per_s: float) -> float:
    """The payload that TCP gets through such a link, bytes per second.

    >>> round(payload_rate(100e6) / 12.5e6, 3)
    0.956
    """
    return bits_per_s / 8 * (MTU - HEADER_BYTES) / (MTU + FRAME_BYTES)


def why_not() -> str | None:
    """Why no slow network can be made here; None if a trial succeeds."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f'no command "{tool}": install iproute2'
    try:
        with SlowNetwork(1, 100e6):
            return None
    except (OSError, PacelineError) as error:
        return f"no network namespace can be made: {error}"


class SlowNetwork:
    """A namespace for each rank with limited links between them, as a context manager.

    Args:
        size: the number of ranks.
        bits_per_s: the rate of each link, in each direction.
    """

    def __init__(self, size: int, bits_per_s: float) -> None:
        at_least("size", size, 1)
        above("bits_per_s", bits_per_s, 0)
        self.size, self.bits_per_s = size, bits_per_s
        self._files: list[int] = []

    def __enter__(self) -> SlowNetwork:
        try:
            self._files = [_new_namespace() for _ in range(self.size + 1)]
            self._hub("ip", "link", "add", "hub", "type", "bridge", "mcast_snooping", "0")
            self._hub("ip", "link", "set", "hub", "addrgenmode", "none", "up")
            for rank in range(self.size):
                self._connect(rank)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the namespaces; the kernel removes those that no process uses."""
        while self._files:
            os.close(self._files.pop())

    def _connect(self, rank: int) -> None:
        """Connect a rank to the bridge by a link of limited rate."""
        port, namespace = f"port{rank}", self.path(rank)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._hub("ip", "link", "add", port, *cable)
        self._hub("ip", "link", "set", port, "master", "hub", "addrgenmode", "none", "up")
        self.run(rank, "ip", "link", "set", "lo", "up")
        self.run(rank, "ip", "address", "add", f"{self.address(rank)}/16", "dev", "eth0")
        self.run(rank, "ip", "link", "set", "eth0", "addrgenmode", "none", "mtu", str(MTU), "up")
        limit = ("rate", f"{self.bits_per_s:.0f}bit", "burst", str(self.burst_bytes))
        queue = ("latency", f"{QUEUE_S * 1e3:.0f}ms")
        self._hub("tc", "qdisc", "add", "dev", port, "root", "tbf", *limit, *queue)
        self.run(rank, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit, *queue)

    @property
    def burst_bytes(self) -> int:
        """How many bytes an idle link lets pass at once."""
        return max(LEAST_BURST, round(BURST_S * self.bits_per_s / 8))

    def address(self, rank: int) -> str:
        """The address at which others reach a rank."""
        return f"10.77.{rank // 250}.{rank % 250 + 1}"

    def path(self, rank: int) -> str:
        """The file by which a process of root can enter the namespace of a rank."""
        return f"/proc/{os.getpid()}/fd/{self._files[rank]}"

    def run(self, rank: int, *command: str) -> str:
        """Run a command in the namespace of a rank; return its output."""
        return _inside(self._files[rank], lambda: _run(command))

    def _hub(self, *command: str) -> str:
        return self.run(self.size, *command)

    def bytes_sent(self) -> list[int]:
        """The bytes that each rank has sent over its link so far, with all headers."""
        return [self._passed(rank, "eth0") for rank in range(self.size)]

    def bytes_received(self) -> list[int]:
        """The bytes that were sent to each rank over its link so far, with all headers."""
        return [self._passed(self.size, f"port{rank}") for rank in range(self.size)]

    def _passed(self, rank: int, device: str) -> int:
        """The bytes that a filter has let through."""
        statistics: list[dict[str, Any]] = json.loads(
            self.run(rank, "tc", "-s", "-j", "qdisc", "show", "dev", device)
        )
        return int(statistics[0]["bytes"])


def enter(path: str) -> None:
    """Move the calling thread, and whatever it starts later, into a namespace."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", file, _NEW_NETWORK)
    finally:
        os.close(file)


def _new_namespace() -> int:
    """Make an empty namespace; return the open file that keeps it alive."""

    def make() -> int:
        _call("unshare", _NEW_NETWORK)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(make)


def _inside(file: int, action: Callable[[], T]) -> T:
    """Run ``action`` in the namespace of ``file``."""

    def enter_and_act() -> T:
        _call("setns", file, _NEW_NETWORK)
        return action()

    return _in_thread(enter_and_act)


def _in_thread(action: Callable[[], T]) -> T:
    """Run ``action`` in a thread of its own: it may change the thread's namespace."""
    values: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            values.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return values[0]


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library that returns 0, or sets ``errno``."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _run(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PacelineError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
