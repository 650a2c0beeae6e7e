"""The real probe, which sees when ZeroMQ loses a connection, and when it has one again."""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.comm.hosts.secret import Secret
from paceline.comm.hosts.wire import GONE_S, Probe

_CAME, _BROKE = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED


class ZmqProbe(Probe):
    """Watches a connection.

    Args:
        context: makes its sockets.
        secret: of the run.
        address: where the other process listens.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], secret: Secret, address: str
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        secret.show(self._socket)
        self._socket.ipv6, self._socket.reconnect_ivl = True, 50
        self._monitor = self._socket.get_monitor_socket(_CAME | _BROKE)
        self._socket.connect(address)
        self._here = False
        self._broken_s: float | None = None

    def is_broken(self) -> bool:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == _CAME:
                self._here, self._broken_s = True, None
            elif self._here:  # else a handshake took too long: the process may be stopped
                self._here, self._broken_s = False, time.monotonic()
        return self._broken_s is not None and time.monotonic() > self._broken_s + GONE_S

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
