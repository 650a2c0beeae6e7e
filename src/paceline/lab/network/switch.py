"""A switch in user space, whose packets take time: what ``tc netem`` does, where a kernel has none.

    python -m paceline.lab.network.switch RATE_MBIT DELAY_S QUEUE_S

It passes packets on between the interfaces ``port<i>`` of the network that it runs in. A packet
arrives after ``DELAY_S``, and after those before it have passed through the cable of the receiver,
whose rate is ``RATE_MBIT`` ("none": no limit); one that would wait there for longer than
``QUEUE_S`` is dropped. (The sender's cable has its rate in the sender's kernel.) The switch reads
lines, and says "done" after each: ``join i``, ``leave i``, ``place i group``, ``place i nowhere``.
It ends with its standard input.

The kernel hands over up to 64 KB of a TCP stream as one packet, with a header that says how to cut
it (``PACKET_VNET_HDR``). This is what makes Python fast enough.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

_ALL_PROTOCOLS = socket.htons(3)  # ETH_P_ALL
_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23  # SOL_PACKET and two of its options
_RECEIVE_BUFFER_FORCE = 33  # SO_RCVBUFFORCE
_BUFFER_BYTES = 8 << 20
_HEADER = struct.Struct("=BBHHHH")  # struct virtio_net_hdr: flags, kind, header, segment, ...
_LARGEST = 1 << 17
_AT_ONCE = 64
_BROADCAST = 1

Frame = bytes


@dataclass
class Port:
    """One end of the switch: the cable to a host."""

    socket: socket.socket
    group: str = "nowhere"
    card: bytes = b""
    """The address of the host's network card, as its own packets tell it."""
    free_s: float = 0.0
    """When the cable to the host has carried all that waits for it."""
    leaving: deque[tuple[float, Frame]] = field(default_factory=deque)


class Switch:
    """Passes packets on between ports, and keeps each as long as the network would."""

    def __init__(self, bytes_per_s: float | None, delay_s: float, queue_s: float) -> None:
        self._bytes_per_s, self._delay_s, self._queue_s = bytes_per_s, delay_s, queue_s
        self._ports: dict[str, Port] = {}
        self._flying: deque[tuple[float, Port, str, Frame]] = deque()

    def serve(self) -> None:
        """Pass packets on until standard input ends."""
        print("ready", flush=True)
        while True:
            wait_s = self._next_s() - time.monotonic()
            sockets = [port.socket for port in self._ports.values()]
            ready, _, _ = select.select([sys.stdin.fileno(), *sockets], [], [], max(0.0, wait_s))
            if sys.stdin.fileno() in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self.obey(*line.split())
                print("done", flush=True)
            for port in list(self._ports.values()):
                if port.socket in ready:
                    self._read(port)
            self._arrive()
            self._leave()

    def obey(self, order: str, number: str, group: str = "") -> None:
        """Do what a line of standard input says."""
        if order == "join":
            self._ports[number] = Port(_listen(f"port{number}"))
        elif order == "leave":
            self._ports.pop(number).socket.close()
        elif order == "place":
            self._ports[number].group = group
        else:
            raise ValueError(f"no order {order}")

    def _next_s(self) -> float:
        """When something is to be done next, though nothing happens."""
        times = [port.leaving[0][0] for port in self._ports.values() if port.leaving]
        times += [self._flying[0][0]] if self._flying else []
        return min(times, default=time.monotonic() + 60.0)

    def _read(self, port: Port) -> None:
        due_s = time.monotonic() + self._delay_s
        with suppress(OSError):  # nothing more to read, or the host is gone
            for _ in range(_AT_ONCE):
                frame = port.socket.recv(_LARGEST)
                port.card = frame[_HEADER.size + 6 : _HEADER.size + 12]
                self._flying.append((due_s, port, port.group, frame))

    def _arrive(self) -> None:
        """Hand packets that have come through the network to the cables of their receivers."""
        now_s = time.monotonic()
        while self._flying and self._flying[0][0] <= now_s:
            due_s, source, group, frame = self._flying.popleft()
            card = frame[_HEADER.size : _HEADER.size + 6]
            to_all = card[0] & _BROADCAST
            for port in self._ports.values():
                joined = port is not source and port.group == group != "nowhere"
                if joined and (to_all or card == port.card):
                    self._queue(port, due_s, frame)

    def _queue(self, port: Port, due_s: float, frame: Frame) -> None:
        start_s = max(port.free_s, due_s)
        if start_s - due_s <= self._queue_s:
            took_s = wire_bytes(frame) / self._bytes_per_s if self._bytes_per_s else 0.0
            port.free_s = start_s + took_s
            port.leaving.append((port.free_s, frame))

    def _leave(self) -> None:
        now_s = time.monotonic()
        for port in self._ports.values():
            while port.leaving and port.leaving[0][0] <= now_s:
                frame = port.leaving.popleft()[1]
                if port.group != "nowhere":
                    with suppress(OSError):  # the host is gone, or cannot take more: it is lost
                        port.socket.send(frame)


def wire_bytes(frame: Frame) -> int:
    """What a packet occupies on the wire, with the headers of all segments that it is cut into.

    >>> header = _HEADER.pack(1, 1, 66, 1448, 0, 0)
    >>> wire_bytes(header + bytes(66 + 3 * 1448)), wire_bytes(bytes(_HEADER.size + 60))
    (4542, 60)
    """
    kind, header, segment = _header(frame)
    size = len(frame) - _HEADER.size
    if not kind or not segment:
        return size
    return size + header * ((size - header - 1) // segment)


def _header(frame: Frame) -> tuple[int, int, int]:
    """How a packet is to be cut: the kind, the size of its headers, and that of each segment."""
    _flags, kind, header, segment, _start, _offset = _HEADER.unpack_from(frame)
    return kind, header, segment


def _listen(interface: str) -> socket.socket:
    """A socket for all packets of an interface, whole as the kernel has them."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, _ALL_PROTOCOLS)
    opened.setsockopt(_PACKET, _VNET_HEADER, 1)
    opened.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    try:
        opened.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, _BUFFER_BYTES)
    except PermissionError:  # only root may have more than the system's limit
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    opened.setblocking(False)
    opened.bind((interface, 0))
    return opened


def main() -> None:
    """Run the switch that the command line describes."""
    rate_mbit, delay_s, queue_s = sys.argv[1:]
    bytes_per_s = None if rate_mbit == "none" else float(rate_mbit) * 1e6 / 8
    Switch(bytes_per_s, float(delay_s), float(queue_s)).serve()


if __name__ == "__main__":
    main()
