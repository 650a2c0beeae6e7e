"""Connections in virtual time, which break as those of ZeroMQ do.

A connection keeps the order of its frames and doubles none. When it breaks, what is on its way is
lost; some frames that the sender's kernel had already may still come, even behind frames of the
next connection. A link between two hosts that is cut holds all frames up; a connection over it
breaks when that lasts as long as a heartbeat may be missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial

from paceline.comm.hosts.wire import BEAT_S, GONE_S, Bytes, Connection, Listener, Probe, Wire
from paceline.lab.faulttest.hosts.stage import HostProcess, Stage, StageCondition

_LOOK_S = 0.1
"""How often connections look whether they are broken."""
_PATIENCE = 0.98
"""How likely a kernel tries once more to send over a link that is cut."""
_CLOCKS_S = 1000.0
"""How much the clocks of two hosts may differ."""
_SLOTS = 2
"""As many parts as a large message has: the next one waits for room in memory."""

Frames = tuple[Bytes, ...]


class Network:
    """All connections of a run.

    Args:
        stage: where it runs.
        latency_s: about how long a frame takes; each connection has its own.
        room: how many frames a connection takes before it has no room.
        dead_s: a connection of which nothing was heard for so long is broken.

    Attributes:
        cuts: the links that are cut, each as its two hosts.
        listeners: who listens, by address.
        connections: all that were not closed.
        broken: how often one broke.
    """

    def __init__(self, stage: Stage, latency_s: float, room: int, dead_s: float) -> None:
        self.stage, self.latency_s, self.room, self.dead_s = stage, latency_s, room, dead_s
        self.random = stage.random
        self.cuts: list[frozenset[int]] = []
        self.listeners: dict[str, StageListener] = {}
        self.connections: list[StageConnection] = []
        self.by_name: dict[bytes, StageConnection] = {}
        self.broken = 0
        stage.call_in(_LOOK_S, self._look)

    def is_up(self, host: int, other: int) -> bool:
        """Whether two hosts reach each other."""
        return host == other or frozenset((host, other)) not in self.cuts

    def _look(self) -> None:
        for connection in [*self.connections]:
            connection.look(_LOOK_S)
        self.stage.call_in(_LOOK_S, self._look)

    def break_between(self, process: HostProcess, other: HostProcess) -> None:
        """Break all connections between two processes."""
        for connection in [*self.connections]:
            if {connection.process, connection.listener.process} == {process, other}:
                connection.break_down()

    def break_some(self, process: HostProcess) -> None:
        """Break some connections that a process has made: it could not hear of them for long."""
        for connection in [*self.connections]:
            if connection.process is process and self.random.random() < 0.5:
                connection.break_down()

    def end(self, process: HostProcess) -> None:
        """The host closes the connections of a process that has ended."""
        for connection in [*self.connections]:
            if connection.process is process:
                connection.close()
        for listener in self.listeners.values():
            if listener.process is process:
                listener.waiting.clear()


class StageListener(Listener):
    """Who listens at an address; another process may take its place.

    Attributes:
        process: who hears.
        waiting: what it has not taken yet.
    """

    def __init__(self, network: Network, process: HostProcess, address: str) -> None:
        self._network, self.process, self.address = network, process, address
        self.waiting: deque[tuple[bytes, Frames]] = deque()
        self.wake: Callable[[], None] = lambda: None
        self.on_arrival: Callable[[Frames], None] = lambda frames: None

    def put(self, client: bytes, frames: Frames) -> None:
        """Take what has come."""
        if self.process.alive:
            self.waiting.append((client, frames))
            self.on_arrival(frames)
            self.wake()

    def receive(self) -> tuple[bytes, Sequence[Bytes]] | None:
        return self.waiting.popleft() if self.waiting else None

    def send(self, client: bytes, message: bytes) -> None:
        self.process.act()
        connection = self._network.by_name.get(client)
        if connection is not None and connection.name == client:
            connection.send_back(message)


class StageConnection(Connection):
    """A connection of a process to who listens at an address.

    Attributes:
        name: of the present connection; empty while there is none.
        waiting: what has come by it and was not taken yet.
    """

    def __init__(self, network: Network, process: HostProcess, address: str) -> None:
        self._network, self.process, self._stage = network, process, network.stage
        self.listener = network.listeners[address]
        self._latency_s = network.latency_s * network.random.choice((0.2, 1.0, 4.0))
        self._reads_late = network.random.random() < 0.5
        self.name, self._count, self._again = b"", 0, False
        self._target: HostProcess | None = None
        self.waiting: deque[Bytes] = deque()
        self.wake: Callable[[], None] = lambda: None
        self._queued: deque[Frames] = deque()
        self._out: deque[Frames] = deque()
        self._back: deque[Frames] = deque()
        self._silent_s, self._closed = 0.0, False
        network.connections.append(self)
        self._stage.call_in(2 * self._latency_s, self._connect)

    # Its life ------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._closed or self.name:
            return
        target = self.listener.process
        if self.process.stopped or not target.alive or target.stopped or not self._is_up(target):
            self._stage.call_in(0.05 + 0.1 * self._network.random.random(), self._connect)
            return
        self._count += 1
        self._again = self._count > 1
        self._target, self._silent_s = target, 0.0
        self.name = f"{self.process.pid}:{len(self._network.by_name)}".encode()
        self._network.by_name[self.name] = self
        for frames in self._queued:
            self._transmit(frames)
        self._queued.clear()

    def _is_up(self, target: HostProcess) -> bool:
        return self._network.is_up(self.process.host, target.host)

    def look(self, seconds: float) -> None:
        """Break down if the other end is gone, or was not heard of for too long."""
        target = self._target
        if not self.name or target is None or self.process.stopped:
            return
        if not self._is_up(target) or target.stopped:
            self._silent_s += seconds
            if self._silent_s > self._network.dead_s + BEAT_S * self._network.random.random():
                self.break_down()
        elif target is not self.listener.process or not target.alive:
            self.break_down()
        else:
            self._silent_s = 0.0

    def break_down(self) -> None:
        """Lose what is on its way, and begin to connect again."""
        if self.name:
            self._network.broken += 1
            self._lose()
            self._stage.call_in(0.05 + 0.1 * self._network.random.random(), self._connect)

    def _lose(self) -> None:
        """Lose what is on its way; the kernel may still deliver the first frames of it."""
        random = self._network.random
        coming = random.randint(0, len(self._out)) if random.random() < 0.7 else 0
        delay_s = 0.0
        for frames in [*self._out][:coming]:
            delay_s += self._latency_s * 4 * random.random()
            act = partial(self._straggle, self.name, self._target, _copied(frames))
            self._stage.call_in(delay_s, act)
        self._out.clear()
        self._back.clear()
        self.name, self._target = b"", None

    def _straggle(self, name: bytes, target: HostProcess | None, frames: Frames) -> None:
        if target is None or target is not self.listener.process:
            return
        if self._is_up(target):
            self.listener.put(name, frames)
        elif self._network.random.random() < _PATIENCE:
            self._stage.call_in(0.03, partial(self._straggle, name, target, frames))

    def close(self) -> None:
        self._closed = True
        self._lose()
        if self in self._network.connections:
            self._network.connections.remove(self)

    def came_again(self) -> bool:
        again, self._again = self._again, False
        return again

    # Frames --------------------------------------------------------------------------------------

    def send(self, head: bytes, chunk: Bytes | None = None) -> bool:
        self.process.act()
        return self.put(head, chunk)

    def put(self, head: bytes, chunk: Bytes | None = None) -> bool:
        """Send frames, where no thread of the process runs."""
        if len(self._out) + len(self._queued) >= self._network.room:
            return False
        frames: Frames = (head,) if chunk is None else (head, chunk)
        if not self._reads_late:
            frames = _copied(frames)
        if self.name:
            self._transmit(frames)
        else:
            self._queued.append(frames)
        return True

    def _transmit(self, frames: Frames) -> None:
        self._out.append(frames)
        self._stage.call_in(self._delay_s(frames), partial(self._arrive, self.name))

    def _delay_s(self, frames: Frames) -> float:
        size = sum(map(len, frames))
        return self._latency_s * (0.5 + self._network.random.random()) + size / 1e8

    def _arrive(self, name: bytes) -> None:
        """The oldest frames on their way arrive, if the link is not cut."""
        if name != self.name or self._target is None:
            return
        if not self._is_up(self._target):
            self._stage.call_in(0.03, partial(self._arrive, name))
        elif self._target is self.listener.process:
            self.listener.put(self.name, _copied(self._out.popleft()))

    def send_back(self, message: bytes) -> None:
        """Send what the other end says."""
        if len(self._back) < self._network.room:
            self._back.append((message,))
            self._stage.call_in(self._delay_s((message,)), partial(self._arrive_back, self.name))

    def _arrive_back(self, name: bytes) -> None:
        if name != self.name or self._target is None:
            return
        if not self._is_up(self._target):
            self._stage.call_in(0.03, partial(self._arrive_back, name))
        else:
            self.waiting.append(self._back.popleft()[0])
            self.wake()

    def receive(self) -> Bytes | None:
        return self.waiting.popleft() if self.waiting else None


class StageProbe(Probe):
    """Watches whether the process that listens at an address exists."""

    def __init__(self, network: Network, process: HostProcess, address: str) -> None:
        self._network, self._process = network, process
        self._target = network.listeners[address].process
        self._here, self._broken_s = False, -1.0

    def is_broken(self) -> bool:
        """A link that is cut shows nothing, nor does a process that is stopped."""
        target, now_s = self._target, self._network.stage.now_s
        if self._network.is_up(self._process.host, target.host):
            if target.alive and not target.stopped:
                self._here = True
            elif self._here and not target.alive:
                self._here, self._broken_s = False, now_s
        return self._broken_s >= 0 and now_s > self._broken_s + GONE_S

    def close(self) -> None:
        return


def _copied(frames: Frames) -> Frames:
    """The frames with the bytes that they have now."""
    return tuple(bytes(frame) for frame in frames)


class StageWire(Wire):
    """The surroundings of one process.

    Args:
        network: connects it.
        process: the process.
    """

    def __init__(self, network: Network, process: HostProcess) -> None:
        self._network, self._process, self._stage = network, process, network.stage
        self.place, self.slots = (f"host{process.host}", process.pid), _SLOTS
        self._ends: list[StageConnection | StageListener] = []
        self._made: list[StageConnection] = []
        self._poller: int | None = None

    def listen(self, host: str, most_bytes: int) -> Listener:
        listener = StageListener(self._network, self._process, f"{host}/{self._serial()}")
        self._network.listeners[listener.address] = listener
        self.hear(listener)
        return listener

    def _serial(self) -> int:
        return len(self._network.listeners)

    def hear(self, end: StageConnection | StageListener) -> None:
        """Have :meth:`poll` tell of what comes there."""
        end.wake = self._wake
        self._ends.append(end)

    def connect(self, address: str, heard: bool = False) -> Connection:
        connection = StageConnection(self._network, self._process, address)
        self._made.append(connection)
        if heard:
            self.hear(connection)
        return connection

    def probe(self, address: str) -> Probe:
        return StageProbe(self._network, self._process, address)

    def _wake(self) -> None:
        if self._poller is not None:
            self._stage.wake(self._poller)

    def poll(self, seconds: float) -> Container[Connection | Listener]:
        if any(end.waiting for end in self._ends):
            self._stage.hesitate(0.3)
        else:
            self._poller = self._stage.thread
            self._stage.wait(seconds)
            self._poller = None
        return [end for end in self._ends if end.waiting]

    def now_s(self) -> float:
        return self._stage.now_s + _CLOCKS_S * self._process.host

    def sleep(self, seconds: float) -> None:
        self._stage.sleep(seconds)

    def condition(self) -> StageCondition:
        return StageCondition(self._stage)

    def start(self, run: Callable[[], None]) -> Callable[[], object]:
        return self._process.start(run)

    def close(self) -> None:
        for connection in self._made:
            connection.close()
