"""The agent of a host: it starts ranks there for the launcher of a run on another host.

``paceline run train.py --join ADDRESS`` is an agent. It starts ranks when the launcher says so,
passes on what they say and how they end, and tells the registrar which of them run, are stopped or
have died. When the launcher says that the run is over, it ends with the exit code of the run.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import replace

import zmq

from paceline._version import __version__
from paceline.comm.hosts.here import this_host
from paceline.comm.hosts.line import JsonLine
from paceline.comm.hosts.refusals import Refusals
from paceline.comm.hosts.secret import Secret
from paceline.comm.hosts.wire import BEAT_S
from paceline.comm.limits import Limits
from paceline.common.reference import Reference
from paceline.errors import PacelineError, UsageError
from paceline.launcher.fork_client import ForkServer
from paceline.launcher.many_hosts import ManyHosts
from paceline.launcher.neighbors import Neighbors
from paceline.launcher.places import ThisHost
from paceline.launcher.rank_process import Message
from paceline.launcher.supervisor import threads_per_rank

GIVE_UP_S = 60.0
"""How long an agent that most hosts do not confirm waits for a launcher that it has lost."""


def join(
    launcher: ManyHosts, token: bytes, train: Reference | None, about: Message | None = None
) -> int:
    """Start ranks for the launcher that listens there; return the exit code of the run.

    Args:
        launcher: where it listens.
        token: of the run.
        train: where ranks find here what they train; None if that is where the launcher has it.
        about: more that the launcher is told of this host: its ``slots``, and what else it needs.
    """
    launcher.say_if_open()
    with ForkServer.borrow() as fork_server:
        fork_server.await_ready(Limits())  # a host that has joined can start ranks at once
        agent = Agent(fork_server, launcher, token, train, about or {}, Limits())
        try:
            return agent.run()
        finally:
            agent.end()


class Agent:
    """The agent of this host; see :func:`join`."""

    def __init__(
        self,
        fork_server: ForkServer,
        launcher: ManyHosts,
        token: bytes,
        train: Reference | None,
        about: Message,
        limits: Limits,
    ) -> None:
        host, port = launcher.address, launcher.port
        self._launcher, self._train, self._limits = f"{host}:{port}", train, limits
        self._about = {"slots": None, **about}
        own = own_address(host, port)
        self._secret = Secret(token, launcher.encrypted)
        self._address, self._name = own, this_host()
        self._context = zmq.Context()
        self._socket = self._dealer()
        self._refusals = Refusals(self._socket)
        self._socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
        self._registrar: zmq.Socket[bytes] | None = None
        self._neighbors = Neighbors(self._context, self._secret, own, self._connect)
        self._line = JsonLine(self._send)
        self._heard_s = time.monotonic()
        # Ranks of this world inherit nothing beside their pipe.
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._here = ThisHost(fork_server, self._nothing, limits)
        self._times: dict[int, int] = {}
        self._running: set[int] = set()
        self._stopped: dict[int, str] = {}
        self._over: Message | None = None

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        peer = self._dealer()
        peer.connect(address)
        return peer

    def _dealer(self) -> zmq.Socket[bytes]:
        peer = self._context.socket(zmq.DEALER)
        self._secret.show(peer)
        peer.identity = uuid.uuid4().bytes
        peer.heartbeat_ivl = int(1000 * BEAT_S)
        peer.heartbeat_timeout = int(1000 * self._limits.dead_s)
        peer.reconnect_ivl, peer.reconnect_ivl_max, peer.handshake_ivl = 50, 1000, 3000
        peer.ipv6 = True
        return peer

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def run(self) -> int:
        """Work until the run is over."""
        hello = {"hello": __version__, "address": self._address, **self._about}
        self._line.put({**hello, "neighbor": self._neighbors.address})
        looked_s = 0.0
        while self._over is None:
            poller = zmq.Poller()
            for peer in (self._socket, self._neighbors.zap, self._neighbors.listener):
                poller.register(peer, zmq.POLLIN)
            for fd in self._here.fds():
                poller.register(fd, zmq.POLLIN)
            ready = dict(poller.poll(int(400 * BEAT_S)))
            if self._socket in ready:
                self._hear()
            self._neighbors.hear()
            if self._neighbors.most_agree:  # there is nothing left to wait for
                self._check_launcher()
            self._here.receive({fd for fd in ready if isinstance(fd, int)})
            self._pass_on()
            if time.monotonic() > looked_s + BEAT_S / 2:
                looked_s = time.monotonic()
                self._look()
        if self._over.get("text"):
            print(f"paceline: {self._over['text']}", file=sys.stderr, flush=True)
        return int(self._over["over"])

    def _hear(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for message in self._line.take(frames):
                self._obey(message)

    def _obey(self, message: Message) -> None:
        if "over" in message:
            self._over = message
        elif "neighbors" in message:
            self._neighbors.know(message["neighbors"])
            self._limits = replace(self._limits, dead_s=message["dead_s"])
        elif "start" in message:
            self._start(message)
        elif message["rank"] in self._running and self._is_present(message):
            self._here.send_signal(message["rank"], message["signal"])

    def _is_present(self, message: Message) -> bool:
        """Whether a message is about the present process of a rank."""
        return bool(self._times.get(message["rank"]) == message["times"])

    def _start(self, order: Message) -> None:
        """Start a rank, with the surroundings of this host."""
        number, config = order["start"], order["config"]
        config |= {
            "host": self._address,
            "started_s": time.monotonic() - order["elapsed_s"],
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "argv": sys.argv,
            "path": sys.path,
            "threads": threads_per_rank(config["together"]),
        }
        argument = config["argument"]
        if self._train is not None and "train" in argument:
            same = {n: v for n, v in argument["train"].items() if n in ("name", "argv")}
            argument["train"] = same | self._train
        if argument.get("out") is not None:
            os.makedirs(argument["out"], exist_ok=True)
        if self._registrar is None:
            self._registrar = self._connect(config["registrar"])
        self._times[number] = order["times"]
        self._here.start(number, config)
        self._running.add(number)

    def _pass_on(self) -> None:
        """Pass on what ranks say, and how they end."""
        for number in [*self._running]:
            code = self._here.code_of(number)
            facts = {"rank": number, "times": self._times[number]}
            for message in self._here.messages(number):
                self._line.put({**facts, "said": message})
            if code is not None:
                self._running.discard(number)
                self._stopped.pop(number, None)
                self._line.put({**facts, "ended": code})

    def _look(self) -> None:
        """Look after the ranks of this host, and tell launcher and registrar of it."""
        self._line.look()
        states: dict[int, tuple[int, str]] = {}
        for number in self._times:
            pid = self._here.pid_of(number)
            if number not in self._running:
                states[number] = pid, "died"
                continue
            states[number] = pid, "stopped" if self._here.is_stopped(number) else "running"
            why = self._here.why_stopped(number) or ""
            if why != self._stopped.get(number, ""):
                self._stopped[number] = why
                facts = {"rank": number, "times": self._times[number]}
                self._line.put({**facts, "stopped": why})
        if self._registrar is not None:
            report = {"host": self._name, "states": states}
            with suppress(zmq.Again):  # the next report says the same
                self._registrar.send_json(report, zmq.NOBLOCK)
            while self._registrar.poll(0):
                self._registrar.recv()
                self._heard_s = time.monotonic()
        self._check_launcher()

    @property
    def _silent_s(self) -> float:
        """How long nothing was heard of the launcher, or the registrar beside it."""
        return time.monotonic() - max(self._heard_s, self._line.heard_s)

    def _check_launcher(self) -> None:
        """End the run on this host if the launcher, and the registrar beside it, are gone."""
        if self._refusals.are_final():
            raise UsageError(
                f"what listens at {self._launcher} refuses this host: it is no launcher, or has"
                " another token, or only one of the two was given --no-encryption"
            )
        silent_s = self._silent_s
        why = "the address, the token or --no-encryption is wrong, or it is gone"
        patience_s = self._limits.start_s
        if self._times:
            why, patience_s = "it is gone, or the link to it is cut", GIVE_UP_S
            if silent_s > self._limits.dead_s:
                self._neighbors.tell()
                if self._neighbors.most_agree:
                    why, patience_s = "most hosts agree that it is gone", 0.0
        if silent_s > patience_s:
            error = PacelineError(
                f"nothing was heard of the launcher at {self._launcher} for {silent_s:.0f} s: {why}"
            )
            error.exit_code = 3
            raise error

    def end(self) -> None:
        """End all ranks of this host, and all connections."""
        self._here.end([*self._running])
        until_s = time.monotonic() + 1.0
        is_there = self._silent_s < self._limits.dead_s
        while is_there and not self._line.is_idle and time.monotonic() < until_s:
            self._socket.poll(50)
            self._hear()
        self._context.destroy(linger=200 if is_there else 0)
        os.close(self._nothing)


def own_address(host: str, port: int) -> str:
    """The address of this host from which it reaches another."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"join ({host}:{port}) must be an address that exists: {reason}") from None
