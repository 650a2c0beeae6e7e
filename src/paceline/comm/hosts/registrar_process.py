"""The process of the registrar: it hears orders, watches its host, and tells all what changes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from paceline.comm.hosts.here import this_host
from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.link import BEAT_S
from paceline.comm.hosts.registrar import Registrar
from paceline.comm.hosts.secret import ZAP_ADDRESS, Secret
from paceline.comm.limits import Limits
from paceline.comm.liveness import TICK_S, Processes
from paceline.comm.standing import GONE, Standing

_MAX_FRAME = 1 << 20
_FORGOTTEN_S = 30.0
"""A connection of which nothing was heard for so long gets nothing more."""
_LINGER_S = 1.0
"""So long a registrar without a launcher goes on after the last rank: its reply may be lost."""


class RegistrarProcess:
    """The registrar of a run, at the address at which ``listener`` listens.

    Args:
        registrar: decides.
        listener: the descriptor of a socket that listens.
        journal: where its state outlives this process.
        secret: of the run.
        limits: how long to wait.
    """

    def __init__(
        self, registrar: Registrar, listener: int, journal: Journal, secret: Secret, limits: Limits
    ) -> None:
        self._registrar, self._journal, self._secret = registrar, journal, secret
        if (state := journal.read()) is not None:
            registrar.load_state(state)
        self._host = this_host()
        self._processes = Processes(lambda rank: registrar.roll[rank].pid, limits)
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._socket = self._context.socket(zmq.ROUTER)
        secret.guard(self._socket)
        self._socket.maxmsgsize, self._socket.ipv6 = _MAX_FRAME, True
        self._socket.setsockopt(zmq.USE_FD, listener)
        self._socket.bind("tcp://127.0.0.1:*")  # the address of the descriptor counts
        self._clients: dict[bytes, tuple[float, int]] = {}
        self._ended_s = 0.0

    def run(self, alone: bool = False) -> None:
        """Serve until this process is ended; ``alone``, until all ranks are gone."""
        poller = zmq.Poller()
        for socket in (self._zap, self._socket):
            poller.register(socket, zmq.POLLIN)
        looked_s, beat_s = time.monotonic(), 0.0
        while not (alone and self._is_over()):
            ready = dict(poller.poll(int(500 * TICK_S)))
            if self._zap in ready:
                self._secret.answer(self._zap)
            if self._socket in ready:
                self._hear()
            now_s = time.monotonic()
            if now_s > looked_s + TICK_S:
                self._watch_host()
                # A longer time was one in which this process was stopped itself.
                self._registrar.pass_time(min(now_s - looked_s, 3 * TICK_S))
                looked_s = now_s
            if now_s > beat_s + BEAT_S:
                beat_s = now_s
                self._tell_all({"beat": self._registrar.version}, now_s)
            self._push()

    def _is_over(self) -> bool:
        """Whether all ranks are gone, or nothing is heard of any."""
        if all(entry.standing in GONE for entry in self._registrar.roll):
            self._ended_s = self._ended_s or time.monotonic()
            return time.monotonic() > self._ended_s + _LINGER_S
        self._ended_s = 0.0
        began = any(entry.incarnation for entry in self._registrar.roll)
        return began and not self._clients

    def _hear(self) -> None:
        """Take all messages that are here; then save the state, and only then reply."""
        replies: list[tuple[bytes, dict[str, Any]]] = []
        while True:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = json.loads(frames[-1]) if frames else None
                reply = self._handle(client, message)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # not of a member that speaks our language
            if reply is not None:
                replies.append((client, reply))
        if replies:
            self._journal.write(self._registrar.state())
        for client, reply in replies:
            self._send(client, reply)

    def _handle(self, client: bytes, message: Any) -> dict[str, Any] | None:
        now_s = time.monotonic()
        _, version = self._clients.get(client, (0.0, 0))
        if "beat" in message:
            self._clients[client] = now_s, int(message["version"])
            self._registrar.hear(int(message["beat"]), int(message["incarnation"]))
            return None
        self._clients[client] = now_s, version
        if "states" in message:
            for rank, (pid, state) in message["states"].items():
                self._hear_state(int(rank), message["host"], pid, state)
            return None
        return self._registrar.handle(
            str(message["client"]),
            int(message["rank"]),
            int(message["incarnation"]),
            int(message["number"]),
            int(message["done"]),
            message["order"],
        )

    def _watch_host(self) -> None:
        """See which processes of this host have died, are stopped, or run."""
        for rank, entry in enumerate(self._registrar.roll):
            if entry.host == self._host and entry.standing in (Standing.JOINING, Standing.HERE):
                state = "stopped" if self._processes.is_stopped(rank) else "running"
                if self._processes.has_died(rank):
                    state = "died"
                self._hear_state(rank, self._host, entry.pid, state)

    def _hear_state(self, rank: int, host: str, pid: int, state: str) -> None:
        """Hear how a process on a host is, which may have been followed by another since."""
        entry = self._registrar.roll[rank]
        if (entry.host, entry.pid) != (host, pid):
            return
        if state == "died":
            self._registrar.strike(rank, entry.incarnation, Standing.DIED, "it died")
        elif state == "stopped":
            self._registrar.hear_stopped(rank, entry.incarnation)
        else:
            self._registrar.hear(rank, entry.incarnation)

    def _push(self) -> None:
        """Tell those who do not know it what has changed."""
        version = self._registrar.version
        behind = [client for client, (_, known) in self._clients.items() if known < version]
        if behind:
            self._journal.write(self._registrar.state())
            shared = self._registrar.shared()
            for client in behind:
                heard_s, _ = self._clients[client]
                self._clients[client] = heard_s, version
                self._send(client, shared)

    def _tell_all(self, message: dict[str, Any], now_s: float) -> None:
        for client, (heard_s, _) in [*self._clients.items()]:
            if now_s > heard_s + _FORGOTTEN_S:
                del self._clients[client]
            else:
                self._send(client, message)

    def _send(self, client: bytes, message: dict[str, Any]) -> None:
        with suppress(zmq.ZMQError):  # it is gone, or asks again
            self._socket.send_multipart([client, json.dumps(message).encode()], zmq.NOBLOCK)


def keep_roll(
    listener: int,
    journal: int,
    token: bytes,
    encrypted: bool,
    *,
    size: int,
    workers: int,
    late: Sequence[int],
    limits: Limits,
) -> None:
    """The main function of the registrar's process."""
    registrar = Registrar(size, workers, late, limits.dead_s)
    secret = Secret(token, encrypted)
    RegistrarProcess(registrar, listener, Journal(journal), secret, limits).run()


def main() -> None:
    """The main function of a registrar that no launcher started; see ``own_registrar``."""
    facts = json.loads(sys.stdin.read())
    limits = Limits(**facts["limits"])
    registrar = Registrar(facts["size"], facts["workers"], [], limits.dead_s)
    secret = Secret(bytes.fromhex(facts["token"]), facts["encrypted"])
    journal = Journal(facts["journal"])
    RegistrarProcess(registrar, facts["listener"], journal, secret, limits).run(alone=True)


if __name__ == "__main__":
    main()
