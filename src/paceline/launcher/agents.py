"""The launcher's side of other hosts: their agents join it, and start ranks for it.

Agents are in no process of the run: they start ranks, end them, and pass on what these say. Who is
a member of the run is the registrar's to say.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import zmq

from paceline._version import __version__
from paceline.comm.hosts.line import JsonLine
from paceline.comm.hosts.probe import ZmqProbe
from paceline.comm.hosts.secret import ZAP_ADDRESS, Secret
from paceline.comm.hosts.wire import BEAT_S, NO_MESSAGE
from paceline.comm.limits import Limits
from paceline.errors import PacelineError
from paceline.launcher.places import RankHost
from paceline.launcher.rank_process import Message

_MAX_FRAME = 1 << 20
_END_S = 5.0
"""How long the launcher waits at the end until agents know that the run is over."""


class OtherHost(RankHost):
    """A host whose agent has joined.

    Args:
        agents: guards what is known of it, and wakes the supervisor.
        line: to the agent.
        hello: what the agent said when it joined.

    Attributes:
        name: the address of the host.
        was_lost: whether it has counted as lost, and maybe has come back.
    """

    def __init__(self, agents: Agents, line: JsonLine, hello: Message, probe: ZmqProbe) -> None:
        self._agents, self.line, self.hello, self._probe = agents, line, hello, probe
        self.name: str = hello["address"]
        self.slots: int | None = hello["slots"]
        self._said: defaultdict[int, deque[Message]] = defaultdict(deque)
        self._codes: dict[int, int] = {}
        self._stopped: dict[int, str] = {}
        self._starts: dict[int, int] = {}
        self._is_gone = self.was_lost = False

    def look(self) -> None:
        """Call this a few times a second: see whether its agent, and so all its ranks, are gone."""
        self.was_lost |= self.is_silent
        if not self._is_gone and self._probe.is_broken():
            self._is_gone = True
            self._probe.close()
            for number in self._starts:
                self._codes.setdefault(number, -signal.SIGKILL)

    @property
    def silent_s(self) -> float:
        """How long nothing was heard of its agent."""
        return time.monotonic() - self.line.heard_s

    @property
    def is_silent(self) -> bool:
        """Whether the host counts as lost, for now."""
        return self._is_gone or self.silent_s > self._agents.limits.dead_s

    def fds(self) -> Sequence[int]:
        return []

    def receive(self, ready: set[int]) -> None:
        pass

    def start(self, number: int, config: Message) -> None:
        with self._agents.lock:
            self._starts[number] = self._starts.get(number, 0) + 1
            for facts in (self._said, self._codes, self._stopped):  # of an earlier process
                facts.pop(number, None)
            elapsed_s = time.monotonic() - config["started_s"]
            order = {"start": number, "times": self._starts[number], "elapsed_s": elapsed_s}
            self.line.put({**order, "config": config})

    def hear(self, message: Message) -> None:
        """Take a message of the agent."""
        number = message.get("rank", -1)
        if message.get("times") != self._starts.get(number):
            return  # of an earlier process
        if "said" in message:
            self._said[number].append(message["said"])
        elif "ended" in message:
            self._codes.setdefault(number, message["ended"])
        elif "stopped" in message:
            self._stopped[number] = message["stopped"]
            if not message["stopped"]:
                del self._stopped[number]

    def messages(self, number: int) -> Iterator[Message]:
        with self._agents.lock:
            said, self._said[number] = self._said[number], deque()
        yield from said

    def code_of(self, number: int) -> int | None:
        return self._codes.get(number)

    def send_signal(self, number: int, what: int) -> None:
        with self._agents.lock:
            self.line.put({"signal": what, "rank": number, "times": self._starts[number]})
            if what == signal.SIGKILL and self.is_silent:
                self._codes.setdefault(number, -what)  # it is fenced, and ends when it hears this

    def is_stopped(self, number: int) -> bool:
        return self.is_silent or number in self._stopped

    def why_stopped(self, number: int) -> str | None:
        if self.is_silent:
            return f"nothing was heard of its host {self.name} for {self.silent_s:.1f} s"
        return self._stopped.get(number) or None

    def goes_on(self, number: int) -> bool:
        return number not in self._codes and not self.is_stopped(number)


class Agents:
    """All agents, heard by a thread.

    Args:
        listener: the descriptor of the socket at which the launcher listens.
        secret: of the run.
        limits: how long to wait.

    Attributes:
        lock: guards what is known of the hosts.
        hosts: those whose agents have joined, in that order.
        wake: a descriptor that becomes readable when an agent has said something.
    """

    def __init__(self, listener: int, secret: Secret, limits: Limits) -> None:
        self.lock, self.limits, self._secret = threading.RLock(), limits, secret
        self.hosts: list[OtherHost] = []
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._by_identity: dict[bytes, OtherHost | None] = {}
        self._lines: dict[bytes, JsonLine] = {}
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._socket = self._context.socket(zmq.ROUTER)
        secret.guard(self._socket)
        self._socket.maxmsgsize, self._socket.router_handover = _MAX_FRAME, 1
        self._socket.setsockopt(zmq.USE_FD, os.dup(listener))
        self._socket.bind("tcp://127.0.0.1:*")  # the address of the descriptor counts
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="paceline-agents")
        self._thread.start()

    def await_hosts(self, count: int, how_to_join: str) -> None:
        """Wait until so many agents have joined."""
        print(how_to_join, file=sys.stderr, flush=True)
        began_s = time.monotonic()
        while len(self.hosts) < count:
            waited_s = time.monotonic() - began_s
            if waited_s > self.limits.start_s:
                missing = f"{count - len(self.hosts)} of {count} other hosts have not joined"
                error = PacelineError(f"{missing} {waited_s:.0f} s after the start")
                error.exit_code = 3
                raise error
            time.sleep(BEAT_S / 5)

    def want(self, count: int) -> None:
        """Hear that so many ranks wait for a host; here, somebody has to make one join."""

    def _run(self) -> None:
        poller, looked_s = zmq.Poller(), 0.0
        # Other threads send with the lock, which poll does not hold: it must not touch the socket.
        for what in (self._zap, self._socket.fd):
            poller.register(what, zmq.POLLIN)
        while not self._over:
            ready = dict(poller.poll(int(250 * BEAT_S)))
            if self._zap in ready:
                self._secret.answer(self._zap)
            with self.lock:
                self._hear()
                if time.monotonic() > looked_s + BEAT_S:
                    looked_s = time.monotonic()
                    for line in self._lines.values():
                        line.look()
                    for host in self.hosts:
                        host.look()

    def _hear(self) -> None:
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if identity not in self._lines:
                self._lines[identity] = JsonLine(partial(self._send, identity))
            with suppress(*NO_MESSAGE):
                for message in self._lines[identity].take(frames):
                    self._handle(identity, message)

    def _handle(self, identity: bytes, message: Message) -> None:
        host = self._by_identity.get(identity)
        if host is not None:
            host.hear(message)
        elif "hello" in message and identity not in self._by_identity:
            self._welcome(identity, message)
        os.eventfd_write(self.wake, 1)

    def _welcome(self, identity: bytes, hello: Message) -> None:
        line = self._lines[identity]
        if hello["hello"] != __version__:
            ours = f"this is paceline {hello['hello']}, the launcher's is {__version__}"
            line.put({"over": 2, "text": ours})
            self._by_identity[identity] = None
            return
        probe = ZmqProbe(self._context, self._secret, hello["neighbor"])
        host = self._by_identity[identity] = OtherHost(self, line, hello, probe)
        self.hosts.append(host)
        neighbors = [each.hello["neighbor"] for each in self.hosts]
        for each in self.hosts:
            each.line.put({"neighbors": neighbors, "dead_s": self.limits.dead_s})

    def _send(self, identity: bytes, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def end(self, code: int, text: str = "") -> None:
        """Tell all agents that the run is over, and stop listening."""
        with self.lock:
            for host in self.hosts:
                host.line.put({"over": code, "text": text})
        until_s = time.monotonic() + _END_S
        while time.monotonic() < until_s:
            with self.lock:
                if all(host.line.is_idle or host.is_silent for host in self.hosts):
                    break
            time.sleep(BEAT_S / 10)
        self._over = True
        self._thread.join()
        self._context.destroy(linger=0)
        os.close(self.wake)
