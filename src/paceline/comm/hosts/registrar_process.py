"""The process of the registrar: it hears orders, watches its host, and tells all what changes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.registrar import Registrar
from paceline.comm.hosts.wire import BEAT_S, NO_MESSAGE, Listener, Probe, Wire
from paceline.comm.limits import Limits
from paceline.comm.liveness import TICK_S, Processes
from paceline.comm.standing import GONE, PRESENT, Standing

if TYPE_CHECKING:
    from paceline.comm.hosts.secret import Secret

_MAX_FRAME = 1 << 20
_FORGOTTEN_S = 30.0
"""A connection of which nothing was heard for so long gets nothing more."""
_LINGER_S = 1.0
"""So long a registrar without a launcher goes on after the last rank: its reply may be lost."""


class HostProcesses(Protocol):
    """Which processes of a host have died, or are stopped."""

    def has_died(self, rank: int) -> bool:
        """Whether the process of ``rank`` has ended."""

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of ``rank`` is stopped now."""


class RegistrarProcess:
    """The registrar of a run.

    Args:
        registrar: decides.
        wire: its surroundings.
        listener: hears all who have connected to its address.
        journal: where its state outlives this process.
        processes: of the ranks on the same host.
    """

    def __init__(
        self,
        registrar: Registrar,
        wire: Wire,
        listener: Listener,
        journal: Journal,
        processes: HostProcesses,
    ) -> None:
        self._registrar, self._wire, self._listener = registrar, wire, listener
        self._journal, self._processes, (self._host, _) = journal, processes, wire.place
        if (state := journal.read()) is not None:
            registrar.load_state(state)
        self._clients: dict[bytes, tuple[float, int]] = {}
        self._probes: dict[tuple[int, int], Probe] = {}
        self._ended_s = 0.0

    def run(self, alone: bool = False) -> None:
        """Serve until this process is ended; ``alone``, until all ranks are gone."""
        looked_s, beat_s = self._wire.now_s(), 0.0
        while not (alone and self._is_over()):
            if self._listener in self._wire.poll(TICK_S / 2):
                self._hear()
            now_s = self._wire.now_s()
            if now_s > looked_s + TICK_S:
                self._watch_host()
                self._probe_others()
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
            self._ended_s = self._ended_s or self._wire.now_s()
            return self._wire.now_s() > self._ended_s + _LINGER_S
        self._ended_s = 0.0
        began = any(entry.incarnation for entry in self._registrar.roll)
        return began and not self._clients

    def _hear(self) -> None:
        """Take all messages that are here; then save the state, and only then reply."""
        replies: list[tuple[bytes, dict[str, Any]]] = []
        while (heard := self._listener.receive()) is not None:
            client, frames = heard
            try:
                message = json.loads(bytes(frames[-1])) if frames else None
                reply = self._handle(client, message)
            except NO_MESSAGE:
                continue
            if reply is not None:
                replies.append((client, reply))
        if replies:
            self._journal.write(self._registrar.state())
        for client, reply in replies:
            self._send(client, reply)

    def _handle(self, client: bytes, message: Any) -> dict[str, Any] | None:
        now_s = self._wire.now_s()
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
            if entry.host == self._host and entry.standing in PRESENT:
                state = "stopped" if self._processes.is_stopped(rank) else "running"
                if self._processes.has_died(rank):
                    state = "died"
                self._hear_state(rank, self._host, entry.pid, state)

    def _probe_others(self) -> None:
        """See which processes of other hosts are gone: their agents may be gone with them."""
        present = {
            (rank, entry.incarnation): entry
            for rank, entry in enumerate(self._registrar.roll)
            if entry.addresses and entry.host != self._host and entry.standing in PRESENT
        }
        for key in self._probes.keys() - present:
            self._probes.pop(key).close()
        for key, entry in present.items():
            if key not in self._probes:
                self._probes[key] = self._wire.probe(entry.addresses[0])
            elif self._probes[key].is_broken():
                self._registrar.strike(*key, Standing.DIED, "it died")
                self._probes.pop(key).close()

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
        self._listener.send(client, json.dumps(message).encode())


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
    from paceline.comm.hosts.secret import Secret

    registrar = Registrar(size, workers, late, limits.dead_s)
    at_descriptor(registrar, listener, journal, Secret(token, encrypted), limits).run()


def at_descriptor(
    registrar: Registrar, listener: int, journal: int, secret: Secret, limits: Limits
) -> RegistrarProcess:
    """The registrar's process on this host, at the address at which a socket listens."""
    from paceline.comm.hosts.zeromq import ZmqWire

    wire = ZmqWire(secret, limits.dead_s)
    processes = Processes(lambda rank: registrar.roll[rank].pid, limits)
    adopted = wire.adopt(listener, _MAX_FRAME)
    return RegistrarProcess(registrar, wire, adopted, Journal(journal), processes)


def main() -> None:
    """The main function of a registrar that no launcher started; see ``own_registrar``."""
    from paceline.comm.hosts.secret import Secret

    facts = json.loads(sys.stdin.read())
    limits = Limits(**facts["limits"])
    registrar = Registrar(facts["size"], facts["workers"], [], limits.dead_s)
    secret = Secret(bytes.fromhex(facts["token"]), facts["encrypted"])
    at_descriptor(registrar, facts["listener"], facts["journal"], secret, limits).run(alone=True)


if __name__ == "__main__":
    main()
