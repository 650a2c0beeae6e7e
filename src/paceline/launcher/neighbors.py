"""What agents tell each other: that they hear nothing of the launcher.

An agent that hears nothing of the launcher cannot know whether that host is gone, or its own link
is cut. It tells its neighbors, the agents of the other hosts. When most hosts have told the same,
they end the run. An agent to whom most hosts do not tell it waits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from paceline.comm.hosts.secret import ZAP_ADDRESS, Secret
from paceline.comm.hosts.wire import NO_MESSAGE
from paceline.comm.liveness import SLACK_S

_MAX_FRAME = 1 << 10


class Neighbors:
    """The agents of the other hosts.

    Args:
        context: the sockets of this agent.
        secret: of the run.
        host: the address of this host, at which the agent listens.
        connect: makes a socket that is connected to an address.

    Attributes:
        address: where this agent listens.
        zap, listener: sockets to poll; :meth:`hear` reads them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: Secret,
        host: str,
        connect: Callable[[str], zmq.Socket[bytes]],
    ) -> None:
        self._secret, self._connect = secret, connect
        self.zap = context.socket(zmq.REP)
        self.zap.bind(ZAP_ADDRESS)
        self.listener = context.socket(zmq.ROUTER)
        secret.guard(self.listener)
        self.listener.maxmsgsize, self.listener.ipv6 = _MAX_FRAME, ":" in host
        self.listener.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
        self.address = self.listener.getsockopt_string(zmq.LAST_ENDPOINT)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._told_s: dict[str, float] = {}

    def know(self, addresses: Sequence[str]) -> None:
        """Connect to all neighbors, at the addresses that the launcher tells."""
        for address in addresses:
            if address not in self._sockets and address != self.address:
                self._sockets[address] = self._connect(address)

    def tell(self) -> None:
        """Tell all neighbors that this agent counts the launcher as gone."""
        for socket in self._sockets.values():
            with suppress(zmq.Again):  # it is said again
                socket.send_json({"without_launcher": self.address}, zmq.NOBLOCK)

    def hear(self) -> None:
        """Hear what neighbors tell, without waiting."""
        while self.zap.poll(0):
            self._secret.answer(self.zap)
        while self.listener.poll(0):
            frames = self.listener.recv_multipart()
            with suppress(*NO_MESSAGE):
                told = json.loads(frames[-1])["without_launcher"]
                if told in self._sockets:
                    self._told_s[told] = time.monotonic()

    @property
    def most_agree(self) -> bool:
        """Whether most hosts, this one included, have lately told that the launcher is gone."""
        since_s = time.monotonic() - SLACK_S
        agreeing = 1 + sum(told_s > since_s for told_s in self._told_s.values())
        hosts = len(self._sockets) + 2
        return 2 * agreeing > hosts
