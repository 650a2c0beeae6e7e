"""One rank's connections: to the registrar, and to every other rank.

Each rank listens at two addresses, for control and for data, so that a small message does not wait
behind a large one. It connects to the two addresses of each rank that it has something for. A
thread receives; any thread sends. What a rank knows is guarded by one lock, ``changed``, on which
all waits wait.
"""

from __future__ import annotations

import itertools
import json
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from paceline.comm.hosts.roll import Roll
from paceline.comm.hosts.secret import ZAP_ADDRESS, Secret
from paceline.comm.hosts.streams import ACK_EVERY, PART_BYTES, InStream, OutStream, Part
from paceline.comm.limits import Limits
from paceline.comm.liveness import TICK_S, Watch
from paceline.errors import CommError, LeftBehind, MessageMismatch

CONTROL, DATA = 0, 1
"""The two streams to each rank."""
SMALL_BYTES = 1 << 14
"""A message of up to so many bytes travels on the control stream."""
BEAT_S = 0.25
"""How often a rank and the registrar hear of each other."""
REPEAT_S = 0.5
"""After so long without a reply, an order is sent again."""
_VERSION = 1
_HEAD = struct.Struct("<BBIIIQQ")
_FIRST, _LAST, _ON_DATA, _ACK = 1, 2, 4, 8
_MAX_FRAME = PART_BYTES + (1 << 16)
_HANDSHAKE = zmq.Event.HANDSHAKE_SUCCEEDED


class Topic(IntEnum):
    """Who takes a message."""

    MAIL = 1
    TAKEN = 2
    PEEK = 3
    WINDOW = 4
    COPY = 5
    COLLECT = 6
    ASK = 7
    ANSWER = 8
    THROUGH = 9


Handler = Callable[[int, int, bytes, Tensor], None]
"""Takes a message: its sender, the sender's incarnation, what it is, and its body."""


class Receipt(NamedTuple):
    """What to ask for whether a message has arrived: its receiver, its stream, its last part."""

    rank: int
    outbox: OutStream
    number: int

    @property
    def has_come(self) -> bool:
        """Whether the receiver has the message."""
        return self.outbox.has_arrived(self.number)


class Peer:
    """The way between one incarnation of this rank and one of another.

    Args:
        rank: the other.
        theirs, own: the incarnations.

    Attributes:
        outboxes, inboxes: the streams to it, and from it.
        owed: the streams from it of which it is to hear how far they have come.
        sockets: connections to it, once it is known where it listens.
        monitors: tell when each of them is there again.
        connected: how often each of them was.
    """

    def __init__(self, rank: int, theirs: int, own: int) -> None:
        self.rank, self.theirs, self.own = rank, theirs, own
        self.outboxes = (OutStream(), OutStream())
        self.inboxes = (InStream(), InStream())
        self.owed: set[int] = set()
        self.sockets: list[zmq.Socket[bytes]] = []
        self.monitors: list[zmq.Socket[bytes]] = []
        self.connected = [0, 0]

    def look(self, now_s: float) -> None:
        """Send again what a connection has lost that broke."""
        for channel, monitor in enumerate(self.monitors):
            while monitor.poll(0):
                recv_monitor_message(monitor)
                self.connected[channel] += 1
                if self.connected[channel] > 1:
                    self.outboxes[channel].rewind()
                    self.owed = {CONTROL, DATA}
        for outbox in self.outboxes:
            outbox.look(now_s)

    def close(self) -> None:
        """Give up what is on its way."""
        for socket in self.sockets:
            socket.disable_monitor()
            socket.close(linger=0)
        for monitor in self.monitors:
            monitor.close(linger=0)


class RankLink:
    """The connections of one rank.

    Args:
        registrar: its address.
        host: the address of this host, at which the rank listens.
        rank: this rank.
        secret: of the run.
        limits: how long to wait.
        late: the ranks that come after the beginning.

    Attributes:
        addresses: where this rank listens.
        changed: guards all that follows; whoever waits is woken by it.
        roll: what the registrar last said.
        incarnation: of this rank.
        handlers: who takes a message, by its kind. The thread calls them, with the lock held.
        on_roll: called likewise with what the registrar says.
    """

    def __init__(
        self,
        registrar: str,
        host: str,
        rank: int,
        secret: Secret,
        limits: Limits,
        late: Sequence[int],
    ) -> None:
        self.rank, self.limits, self._secret, self._late = rank, limits, secret, frozenset(late)
        self.changed = threading.Condition()
        self.roll: Roll | None = None
        self.incarnation = 0
        self.handlers: dict[int, Handler] = {}
        self.on_roll: Callable[[Roll], None] = lambda roll: None
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(ZAP_ADDRESS)
        self._listeners = [self._listen(host) for _ in (CONTROL, DATA)]
        self.addresses = [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in self._listeners]
        self._registrar = self._connect(registrar)
        self._client, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._orders: dict[int, tuple[Any, float]] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._awaited: set[int] = set()
        self.heard_s = time.monotonic()
        self._peers: dict[tuple[int, int, int], Peer] = {}
        self._early: list[tuple[int, int, bytes, Tensor]] = []
        self._over = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="paceline-link")
        self._thread.start()

    def _listen(self, host: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        self._secret.guard(socket)
        socket.maxmsgsize, socket.ipv6 = _MAX_FRAME, ":" in host
        socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
        return socket

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        self._secret.show(socket)
        beat_ms = int(1000 * BEAT_S)
        socket.heartbeat_ivl, socket.heartbeat_timeout = beat_ms, int(1000 * self.limits.dead_s)
        socket.reconnect_ivl, socket.reconnect_ivl_max = 50, 1000
        socket.handshake_ivl, socket.ipv6 = 3000, True
        socket.connect(address)
        return socket

    # Waiting -------------------------------------------------------------------------------------

    def check(self) -> Roll:
        """What the registrar last said, if this rank may still act on it.

        If nothing was heard of the registrar for too long, the others may have gone on without
        this rank: it waits until it knows.

        Raises:
            LeftBehind: the others have gone on without this rank.
        """
        if self._failure is not None:
            raise CommError("the thread of the connections ended by an error") from self._failure
        roll = self.roll
        if roll is None or time.monotonic() - self.heard_s > self.limits.dead_s:
            roll = self._await_registrar()
        own = roll.entries[self.rank]
        if own.incarnation != self.incarnation or roll.why_gone(self.rank) is not None:
            raise LeftBehind
        return roll

    def _await_registrar(self) -> Roll:
        watch, asked_s = Watch("a step", self.limits, whom="the registrar"), time.monotonic()
        with self.changed:
            while self.roll is None or self.heard_s < asked_s:
                self.changed.wait(TICK_S)
                watch.check_limits([])
            return self.roll

    def begin(self, enter: Sequence[Any], reset: Callable[[], None]) -> dict[str, Any]:
        """Begin an incarnation of this rank; return what the registrar says of it.

        ``reset`` drops what an earlier incarnation left, before messages to this one are heard.
        """
        found: dict[str, Any] = self.order("enter", *enter)
        with self.changed:
            reset()
            self.incarnation = found.get("incarnation", 0)
            early, self._early = self._early, []
            for src, incarnation, meta, body in early:
                self._hand_on(src, incarnation, self.incarnation, meta, body)
        return found

    def await_entry(self) -> None:
        """Wait until the registrar has told of the present incarnation of this rank."""
        watch = Watch("the entry", self.limits, whom="the registrar")
        with self.changed:
            while self.roll is None or self.roll.entries[self.rank].incarnation < self.incarnation:
                self.changed.wait(TICK_S)
                watch.check_limits([])

    # Orders --------------------------------------------------------------------------------------

    def order(self, name: str, *arguments: Any) -> Any:
        """Give the registrar an order; wait for the reply and return it.

        Raises:
            LeftBehind: the others have gone on without this rank.
        """
        watch = Watch(f"the order to {name}", self.limits, whom="the registrar")
        with self.changed:
            number = self._give([name, *arguments])
            self._awaited.add(number)
            while number not in self._replies:
                self.changed.wait(TICK_S)
                watch.check_limits([])
            self._awaited.discard(number)
            reply = self._replies.pop(number)
        if reply.get("left_behind"):
            raise LeftBehind
        if "error" in reply:
            raise CommError(f"the registrar refuses {name}: {reply['error']}")
        return reply["value"]

    def tell(self, name: str, *arguments: Any) -> None:
        """Give the registrar an order without waiting for it to be done."""
        with self.changed:
            self._give([name, *arguments])

    def _give(self, order: list[Any]) -> int:
        number = next(self._numbers)
        self._orders[number] = order, time.monotonic()
        self._send_order(number)
        return number

    def _send_order(self, number: int) -> None:
        order, _ = self._orders[number]
        done = min(self._orders) - 1
        self._tell_registrar(
            {
                "client": self._client,
                "rank": self.rank,
                "incarnation": self.incarnation,
                "number": number,
                "done": done,
                "order": order,
            }
        )

    def _tell_registrar(self, message: dict[str, Any]) -> None:
        with suppress(zmq.Again):  # orders are sent again, and beats come again
            self._registrar.send(json.dumps(message).encode(), zmq.NOBLOCK)

    # Messages ------------------------------------------------------------------------------------

    def send(
        self,
        dst: int,
        kind: Topic,
        meta: bytes,
        body: Tensor | None = None,
        may_go: Callable[[], bool] | None = None,
        incarnation: int = 0,
    ) -> Receipt:
        """Send a message to ``dst``; its body must not change before it has arrived.

        Args:
            dst: the rank, in its present incarnation or the one that is given.
            kind: who takes it there.
            meta: what it is.
            body: its vector, in the memory of the host.
            may_go: the message waits until this is true.
            incarnation: of the receiver.
        """
        content = memoryview(b"") if body is None else _bytes_of(body)
        channel = CONTROL if len(content) <= SMALL_BYTES else DATA
        with self.changed:
            assert self.roll is not None
            peer = self._peer(dst, incarnation or self.roll.incarnation(dst), self.incarnation)
            number = peer.outboxes[channel].add(bytes([kind]) + meta, content, may_go)
            self._pump(peer)
        return Receipt(dst, peer.outboxes[channel], number)

    def _peer(self, rank: int, theirs: int, own: int) -> Peer:
        key = rank, theirs, own
        if key not in self._peers:
            self._peers[key] = Peer(*key)
        return self._peers[key]

    def _pump(self, peer: Peer) -> None:
        """Send what may go."""
        if not peer.sockets and not self._open(peer):
            return
        for channel in [*peer.owed]:
            flags = _ACK | (_ON_DATA if channel == DATA else 0)
            head = self._head(peer, flags, peer.inboxes[channel].last, 0)
            if _try_send(peer.sockets[CONTROL], head):
                peer.owed.discard(channel)
        for channel, outbox in enumerate(peer.outboxes):
            flags = _ON_DATA if channel == DATA else 0
            for part in outbox.due():
                ends = _FIRST * part.first + _LAST * part.last
                head = self._head(peer, flags | ends, part.number, part.total)
                if not _try_send(peer.sockets[channel], head + part.meta, part.chunk):
                    outbox.unsend()
                    break

    def _open(self, peer: Peer) -> bool:
        """Connect to a rank, if it is known where it listens."""
        assert self.roll is not None
        entry = self.roll.entries[peer.rank]
        if entry.incarnation != peer.theirs or self.roll.why_gone(peer.rank) is not None:
            return False
        if not entry.addresses or self._over:
            return False
        for address in entry.addresses:
            socket = self._connect(address)
            peer.monitors.append(socket.get_monitor_socket(_HANDSHAKE))
            peer.sockets.append(socket)
        return True

    def _head(self, peer: Peer, flags: int, number: int, total: int) -> bytes:
        return _HEAD.pack(_VERSION, flags, self.rank, peer.own, peer.theirs, number, total)

    def flush(self) -> None:
        """Wait until all that was sent has arrived, or its receiver is gone."""
        watch = Watch("the wait for messages to arrive", self.limits)
        with self.changed:
            while waiting := [peer.rank for peer in self._peers.values() if self._owes(peer)]:
                self.changed.wait(TICK_S)
                watch.check_limits(waiting)

    def _owes(self, peer: Peer) -> bool:
        """Whether something is on its way that the other may still get."""
        assert self.roll is not None
        gone = self.roll.why_gone(peer.rank, peer.theirs) is not None
        return not gone and not all(outbox.is_empty for outbox in peer.outboxes)

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # who waits must not wait for ever
            self._failure = error
            raise

    def _serve(self) -> None:
        poller, looked_s, beat_s = zmq.Poller(), 0.0, 0.0
        for socket in (self._zap, self._registrar, *self._listeners):
            poller.register(socket, zmq.POLLIN)
        while not self._over:
            ready = dict(poller.poll(int(500 * TICK_S)))
            if self._zap in ready:
                self._secret.answer(self._zap)
            with self.changed:
                if self._registrar in ready:
                    self._hear_registrar()
                for channel, socket in enumerate(self._listeners):
                    if socket in ready:
                        self._hear_ranks(channel, socket)
                now_s = time.monotonic()
                if now_s > looked_s + TICK_S / 2:
                    looked_s = now_s
                    self._look(now_s)
                if now_s > beat_s + BEAT_S:
                    beat_s = now_s
                    beat = {"beat": self.rank, "incarnation": self.incarnation}
                    version = self.roll.version if self.roll else 0
                    self._tell_registrar({**beat, "version": version})

    def _look(self, now_s: float) -> None:
        """Give orders again that had no reply; send again what a broken connection lost."""
        for number, (order, given_s) in self._orders.items():
            if now_s > given_s + REPEAT_S:
                self._orders[number] = order, now_s
                self._send_order(number)
        for peer in [*self._peers.values()]:
            peer.look(now_s)
            self._pump(peer)

    def _hear_registrar(self) -> None:
        while True:
            try:
                message = json.loads(self._registrar.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.heard_s = time.monotonic()
            if "roll" in message:
                if self.roll is None or message["version"] > self.roll.version:
                    self.roll = Roll(message, self._late)
                    self._drop_gone(self.roll)
                    self.on_roll(self.roll)
            elif "number" in message:
                number = message["number"]
                if self._orders.pop(number, None) is not None and number in self._awaited:
                    self._replies[number] = message
            self.changed.notify_all()

    def _drop_gone(self, roll: Roll) -> None:
        """Forget the ways to ranks that are gone; open those to ranks that have come."""
        for key, peer in [*self._peers.items()]:
            if peer.own < self.incarnation or roll.why_gone(peer.rank, peer.theirs) is not None:
                self._peers.pop(key).close()
            else:
                self._pump(peer)

    def _hear_ranks(self, channel: int, socket: zmq.Socket[bytes]) -> None:
        for _ in range(64):  # then look at the other sockets, too
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            with suppress(ValueError, IndexError, struct.error, MessageMismatch):
                self._hear_frames(channel, frames[1:])  # drops what no member of ours sends

    def _hear_frames(self, channel: int, frames: Sequence[zmq.Frame]) -> None:
        """Take a part, or an acknowledgement; drop what is neither."""
        head = frames[0].bytes if frames else b""
        if len(head) < _HEAD.size or head[0] != _VERSION:
            return
        _, flags, src, theirs, own, number, total = _HEAD.unpack_from(head)
        if own < self.incarnation or self.roll is None or src >= len(self.roll.entries):
            return
        if theirs < self.roll.incarnation(src):
            return
        peer = self._peer(src, theirs, own)
        if flags & _ACK:
            stream = DATA if flags & _ON_DATA else CONTROL
            peer.outboxes[stream].acknowledge(number, time.monotonic())
            for other in [*self._peers.values()]:  # a message to another rank may wait for this
                self._pump(other)
            self.changed.notify_all()
        elif len(frames) == 2:
            first, last = bool(flags & _FIRST), bool(flags & _LAST)
            part = Part(number, first, last, total, head[_HEAD.size :], frames[1].buffer)
            message = peer.inboxes[channel].add(part)
            taken = peer.inboxes[channel].last
            if part.last or taken % ACK_EVERY == 0 or part.number != taken:
                peer.owed.add(channel)
            if message is not None:
                self._hand_on(src, theirs, own, *message)
        self._pump(peer)

    def _hand_on(self, src: int, incarnation: int, own: int, meta: bytes, body: Tensor) -> None:
        """Give a message to who takes it; keep one for an incarnation that is just beginning."""
        if own > self.incarnation:
            self._early.append((src, incarnation, meta, body))
            return
        handler = self.handlers.get(meta[0] if meta else -1)
        if handler is not None:
            handler(src, incarnation, meta[1:], body)
        self.changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._over

    def close(self) -> None:
        """Stop the thread, and close all connections. Idempotent."""
        if self._over:
            return
        self._over = True
        self._thread.join()
        with self.changed:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
            self._context.destroy(linger=0)


def _try_send(
    socket: zmq.Socket[bytes], head: bytes, chunk: memoryview | bytes | None = None
) -> bool:
    """Send without waiting; False when there is no room."""
    try:
        socket.send(head, zmq.NOBLOCK | (0 if chunk is None else zmq.SNDMORE))
    except zmq.Again:
        return False
    if chunk is not None:
        socket.send(chunk, copy=False)
    return True


def host_copy(x: Tensor) -> Tensor:
    """A copy of a vector in the memory of the host."""
    return x.detach().to("cpu", copy=True).contiguous()


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a vector of the host."""
    return x.detach().reshape(-1).view(torch.uint8).numpy().data
