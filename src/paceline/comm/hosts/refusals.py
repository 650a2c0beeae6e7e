"""Whether what listens at an address refuses this process: it has another token, say."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.comm.hosts.secret import Secret
from paceline.comm.limits import Limits
from paceline.comm.liveness import TICK_S, Watch
from paceline.errors import UsageError

_MET, _CLOSED = zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
REFUSALS = 5
"""Who was refused so often, and never admitted, need not try again."""


class Refusals:
    """How often what listens at an address has refused to speak with a socket.

    Args:
        peer: the socket, which has not connected yet.

    Attributes:
        has_met: whether it was admitted.
    """

    def __init__(self, peer: zmq.Socket[bytes]) -> None:
        ends = _CLOSED | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
        self._events = peer.get_monitor_socket(_MET | ends | zmq.Event.DISCONNECTED)
        self._count, self.has_met, self._comes_again = 0, False, False

    def are_final(self, wait_s: float = 0.0) -> bool:
        """Whether it will refuse for good: it has done nothing else, and often."""
        while self._events.poll(int(1000 * wait_s)):
            self._take(recv_monitor_message(self._events)["event"])
        return not self.has_met and self._count >= REFUSALS

    def _take(self, event: int) -> None:
        """ZeroMQ comes again after a closed connection alone: the other end may be starting."""
        if event == _CLOSED:
            self._count, self._comes_again = self._count + 1, True
        elif event == _MET:
            self.has_met = True
        elif event == zmq.Event.DISCONNECTED and self._comes_again:
            self._comes_again = False
        else:
            self._count += REFUSALS


def await_admission(address: str, secret: Secret, limits: Limits) -> None:
    """Wait, for ``start_s`` at most, until the registrar that listens there admits this process.

    Raises:
        UsageError: what listens there refuses it.
    """
    context, watch = zmq.Context(), Watch("the start", limits, whom=f"the registrar at {address}")
    try:
        socket = context.socket(zmq.DEALER)
        secret.show(socket)
        socket.ipv6, socket.reconnect_ivl = True, 50
        refusals = Refusals(socket)
        socket.connect(address)
        while not refusals.has_met and watch.waited_s < limits.start_s:
            if refusals.are_final(TICK_S):
                raise UsageError(
                    f"what listens at {address} refuses this rank: it is no registrar of this run,"
                    " or has another token"
                )
            watch.check_limits([])
    finally:
        context.destroy(linger=0)
