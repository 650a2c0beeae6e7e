"""A connection that shows whether the process at its other end still exists.

When a process ends, its host closes the connection, and refuses a new one. A link that is cut, or a
process that is stopped, does neither.
"""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.comm.hosts.secret import Secret

GONE_S = 1.0
"""A connection that broke and is not back after so long: the process at its other end is gone."""
_CAME, _BROKE = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED


class Probe:
    """Watches a connection, which carries nothing.

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

    @property
    def is_broken(self) -> bool:
        """Whether the connection broke, and did not come back in time."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == _CAME:
                self._here, self._broken_s = True, None
            elif self._here:  # else a handshake took too long: the process may be stopped
                self._here, self._broken_s = False, time.monotonic()
        return self._broken_s is not None and time.monotonic() > self._broken_s + GONE_S

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
