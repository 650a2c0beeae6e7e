"""The real wire: ZeroMQ, the clock of the host, and threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Container, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.comm.hosts.here import this_host
from paceline.comm.hosts.probe import ZmqProbe
from paceline.comm.hosts.secret import ZAP_ADDRESS, Secret
from paceline.comm.hosts.wire import BEAT_S, Bytes, Connection, Listener, Wire

SLOTS = 8
"""More make nothing faster."""
_HANDSHAKE = zmq.Event.HANDSHAKE_SUCCEEDED


class ZmqConnection(Connection):
    """A connection, and what tells when it is there again, where somebody asks for that."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
        self._socket, self._monitor, self._times = socket, monitor, 0

    def send(self, head: bytes, chunk: Bytes | None = None) -> bool:
        try:
            self._socket.send(head, zmq.NOBLOCK | (0 if chunk is None else zmq.SNDMORE))
        except zmq.Again:
            return False
        if chunk is not None:
            self._socket.send(chunk, copy=False)
        return True

    def receive(self) -> Bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def came_again(self) -> bool:
        before = self._times
        while self._monitor is not None and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self._times += 1
        return self._times > max(before, 1)

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=0)


class ZmqHeardConnection(ZmqConnection):
    """A connection on which any thread sends, under a lock, while another waits for what comes.

    The thread that waits must not touch the socket without the lock, but only its descriptor. A
    send may take away the signal there of what has come, and so always wakes that thread.
    """

    def __init__(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        super().__init__(socket, None)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        for descriptor in (socket.fd, self.wake):
            poller.register(descriptor, zmq.POLLIN)

    def send(self, head: bytes, chunk: Bytes | None = None) -> bool:
        sent = super().send(head, chunk)
        os.eventfd_write(self.wake, 1)
        return sent


class ZmqListener(Listener):
    """A socket that listens."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket, self.address = socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> tuple[bytes, Sequence[Bytes]] | None:
        try:
            client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return client.bytes, [frame.buffer for frame in frames]

    def send(self, client: bytes, message: bytes) -> None:
        try:
            self._socket.send_multipart([client, message], zmq.NOBLOCK)
        except zmq.ZMQError:  # it is gone, or asks again
            return


class ZmqWire(Wire):
    """The connections of this process to other members of a run.

    Args:
        secret: of the run.
        dead_s: a connection of which nothing was heard for so long is broken.
    """

    def __init__(self, secret: Secret, dead_s: float) -> None:
        self._secret, self._dead_s, self.place = secret, dead_s, (this_host(), os.getpid())
        self.slots = SLOTS
        self._context, self._poller = zmq.Context(), zmq.Poller()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._poller.register(self._zap, zmq.POLLIN)
        self._ends: dict[object, Connection | Listener] = {}
        self._heard: list[ZmqHeardConnection] = []

    def listen(self, host: str, most_bytes: int) -> Listener:
        return self._bind(f"tcp://{f'[{host}]' if ':' in host else host}:*", most_bytes)

    def adopt(self, descriptor: int, most_bytes: int) -> Listener:
        """Hear those who connect to a socket that listens already."""
        return self._bind("tcp://127.0.0.1:*", most_bytes, descriptor)

    def _bind(self, address: str, most_bytes: int, descriptor: int = -1) -> Listener:
        socket = self._context.socket(zmq.ROUTER)
        self._secret.guard(socket)
        socket.maxmsgsize, socket.ipv6 = most_bytes, "[" in address or descriptor >= 0
        if descriptor >= 0:  # its address counts, not the one below
            socket.setsockopt(zmq.USE_FD, descriptor)
        socket.bind(address)
        self._poller.register(socket, zmq.POLLIN)
        listener = self._ends[socket] = ZmqListener(socket)
        return listener

    def connect(self, address: str, heard: bool = False) -> Connection:
        socket = self._context.socket(zmq.DEALER)
        self._secret.show(socket)
        socket.heartbeat_ivl = int(1000 * BEAT_S)
        socket.heartbeat_timeout = int(1000 * self._dead_s)
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        socket.handshake_ivl, socket.ipv6 = 3000, True
        socket.connect(address)
        if not heard:
            return ZmqConnection(socket, socket.get_monitor_socket(_HANDSHAKE))
        connection = ZmqHeardConnection(socket, self._poller)
        self._heard.append(connection)
        return connection

    def probe(self, address: str) -> ZmqProbe:
        return ZmqProbe(self._context, self._secret, address)

    def poll(self, seconds: float) -> Container[Connection | Listener]:
        ready = [socket for socket, _ in self._poller.poll(int(1000 * seconds))]
        for heard in self._heard:
            if heard.wake in ready:
                os.eventfd_read(heard.wake)
        if self._zap in ready:
            ready.remove(self._zap)
            self._secret.answer(self._zap)
        return [*self._heard, *(self._ends[socket] for socket in ready if socket in self._ends)]

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def start(self, run: Callable[[], None]) -> Callable[[], object]:
        thread = threading.Thread(target=run, daemon=True, name="paceline-link")
        thread.start()
        return thread.join

    def close(self) -> None:
        self._context.destroy(linger=0)
        for heard in self._heard:
            os.close(heard.wake)
        self._heard.clear()
