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
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.hosts.near import NearMemory, NearView
from paceline.comm.hosts.roll import Roll
from paceline.comm.hosts.streams import ACK_EVERY, PART_BYTES, WINDOW, InStream, OutStream, Part
from paceline.comm.hosts.wire import BEAT_S, Bytes, Connection, Listener, Wire
from paceline.comm.limits import Limits
from paceline.comm.liveness import TICK_S, Watch
from paceline.errors import CommError, LeftBehind, MessageMismatch

CONTROL, DATA = 0, 1
"""The two streams to each rank."""
SMALL_BYTES = 1 << 14
"""A message of up to so many bytes travels on the control stream."""
REPEAT_S = 0.5
"""After so long without a reply, an order is sent again."""
_VERSION = 1
_HEAD = struct.Struct("<BBIIIQQ")
_FIRST, _LAST, _ON_DATA, _ACK, _NEAR = 1, 2, 4, 8, 16
_MAX_FRAME = PART_BYTES + (1 << 16)


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


class HeldMessage(NamedTuple):
    """A message that waits until ``may_go()`` is true."""

    may_go: Callable[[], bool]
    channel: int
    meta: bytes
    content: memoryview


class Peer:
    """The way between one incarnation of this rank and one of another.

    Args:
        rank: the other.
        theirs, own: the incarnations.

    Attributes:
        held: what waits until it may be sent; other messages overtake it.
        outboxes, inboxes: the streams to it, and from it.
        owed: the streams from it of which it is to hear how far they have come.
        connections: for control and for data, once it is known where it listens.
        slots: how many parts the memory holds through which this rank hands it large messages; 0
            if it does not see that memory.
        sees: whether this rank sees what the other hands it so.
    """

    def __init__(self, rank: int, theirs: int, own: int) -> None:
        self.rank, self.theirs, self.own = rank, theirs, own
        self.held: deque[HeldMessage] = deque()
        self.outboxes = (OutStream(), OutStream())
        self.inboxes = (InStream(), InStream())
        self.owed: set[int] = set()
        self.connections: list[Connection] = []
        self.slots, self.sees = 0, True
        self._memory: NearMemory | None = None
        self._view: NearView | None = None

    def use_memory(self, slots: int) -> None:
        """Hand large messages through memory from now on, or no more."""
        if slots != self.slots:
            self.slots, data = slots, self.outboxes[DATA]
            data.window = slots or WINDOW
            data.rewind()

    def hand(self, part: Part) -> tuple[int, Bytes]:
        """The bytes of a part of a large message as they travel, and the flag that says how."""
        if not self.slots:
            return 0, part.chunk
        if self._memory is None:
            self._memory = NearMemory(self.slots)
        return _NEAR, self._memory.put(part.number, part.chunk)

    def see(self, place: Bytes) -> Bytes | None:
        """A part that the other has handed through memory; None if this rank cannot see it."""
        try:
            if self._view is None:
                self._view = NearView(place)
        except OSError:  # another user's, or the sender is gone
            self.sees = False
            return None
        return self._view.part(place)

    def look(self, now_s: float) -> None:
        """Send again what a connection has lost that broke."""
        for connection, outbox in zip(self.connections, self.outboxes, strict=False):
            if connection.came_again():
                outbox.rewind()
                self.owed = {CONTROL, DATA}
        for outbox in self.outboxes:
            outbox.look(now_s)

    def close(self) -> None:
        """Give up what is on its way."""
        for connection in self.connections:
            connection.close()


class RankLink:
    """The connections of one rank.

    Args:
        registrar: its address.
        host: the address of this host, at which the rank listens.
        rank: this rank.
        wire: what connects it.
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
        wire: Wire,
        limits: Limits,
        late: Sequence[int],
    ) -> None:
        self.rank, self.wire, self.limits, self._late = rank, wire, limits, frozenset(late)
        self.changed = wire.condition()
        self.roll: Roll | None = None
        self.incarnation = 0
        self.handlers: dict[int, Handler] = {}
        self.on_roll: Callable[[Roll], None] = lambda roll: None
        self._listeners = [wire.listen(host, _MAX_FRAME) for _ in (CONTROL, DATA)]
        self.addresses = [listener.address for listener in self._listeners]
        self._registrar = wire.connect(registrar, heard=True)
        self._client, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._orders: dict[int, tuple[Any, float]] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._awaited: set[int] = set()
        self.heard_s = wire.now_s()
        self._peers: dict[tuple[int, int, int], Peer] = {}
        self._early: list[tuple[int, int, bytes, Tensor]] = []
        self._over = False
        self._failure: BaseException | None = None
        self._await_thread = wire.start(self._run)

    # Waiting -------------------------------------------------------------------------------------

    def watch(self, op: str, whom: str | None = None, patient: bool = False) -> Watch:
        """One wait of this rank, from now on."""
        return Watch(op, self.limits, patient, whom, self.wire.now_s)

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
        if roll is None or self.wire.now_s() - self.heard_s > self.limits.dead_s:
            roll = self._await_registrar()
        own = roll.entries[self.rank]
        if own.incarnation != self.incarnation or roll.why_gone(self.rank) is not None:
            raise LeftBehind
        return roll

    def _await_registrar(self) -> Roll:
        watch, asked_s = self.watch("a step", "the registrar"), self.wire.now_s()
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
        if "incarnation" not in found:
            return found
        with self.changed:
            self.incarnation = found["incarnation"]
            reset()
            early, self._early = self._early, []
            for src, incarnation, meta, body in early:
                self._hand_on(src, incarnation, self.incarnation, meta, body)
        return found

    def await_entry(self) -> None:
        """Wait until the registrar has told of the present incarnation of this rank."""
        watch = self.watch("the entry", "the registrar")
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
        watch = self.watch(f"the order to {name}", "the registrar")
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
        self._orders[number] = order, self.wire.now_s()
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
        # Where there is no room: orders are sent again, and beats come again.
        self._registrar.send(json.dumps(message).encode())

    # Messages ------------------------------------------------------------------------------------

    def send(
        self,
        dst: int,
        kind: Topic,
        meta: bytes,
        body: Tensor | None = None,
        incarnation: int = 0,
    ) -> Receipt:
        """Send a message to ``dst``; its body must not change before it has arrived.

        Args:
            dst: the rank, in its present incarnation or the one that is given.
            kind: who takes it there.
            meta: what it is.
            body: its vector, in the memory of the host.
            incarnation: of the receiver.
        """
        content, channel = _content_of(body)
        with self.changed:
            assert self.roll is not None
            peer = self._peer(dst, incarnation or self.roll.incarnation(dst), self.incarnation)
            number = peer.outboxes[channel].add(bytes([kind]) + meta, content)
            self._pump(peer)
        return Receipt(dst, peer.outboxes[channel], number)

    def send_when(
        self,
        may_go: Callable[[], bool],
        dst: int,
        kind: Topic,
        meta: bytes,
        body: Tensor,
        incarnation: int,
    ) -> None:
        """Send a message once ``may_go()`` is true; see :meth:`send`.

        It must not hold up others: what it waits for may have to go the same way.
        """
        content, channel = _content_of(body)
        with self.changed:
            peer = self._peer(dst, incarnation, self.incarnation)
            peer.held.append(HeldMessage(may_go, channel, bytes([kind]) + meta, content))
            self._pump(peer)

    def _peer(self, rank: int, theirs: int, own: int) -> Peer:
        key = rank, theirs, own
        if key not in self._peers:
            self._peers[key] = Peer(*key)
        return self._peers[key]

    def _pump(self, peer: Peer) -> None:
        """Send what may go."""
        while peer.held and peer.held[0].may_go():
            _, channel, meta, content = peer.held.popleft()
            peer.outboxes[channel].add(meta, content)
        if not peer.connections and not self._open(peer):
            return
        for channel in [*peer.owed]:
            flags = _ACK | (_ON_DATA if channel == DATA else 0) | (_NEAR if peer.sees else 0)
            head = self._head(peer, flags, peer.inboxes[channel].last, 0)
            if peer.connections[CONTROL].send(head):
                peer.owed.discard(channel)
        for channel, outbox in enumerate(peer.outboxes):
            flags = _ON_DATA if channel == DATA else 0
            for part in outbox.due():
                ends = _FIRST * part.first + _LAST * part.last
                how, chunk = peer.hand(part) if channel == DATA else (0, part.chunk)
                head = self._head(peer, flags | ends | how, part.number, part.total)
                if not peer.connections[channel].send(head + part.meta, chunk):
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
        peer.connections = [self.wire.connect(address) for address in entry.addresses]
        peer.use_memory(self.wire.slots if entry.host == self.wire.place[0] else 0)
        return True

    def _head(self, peer: Peer, flags: int, number: int, total: int) -> bytes:
        return _HEAD.pack(_VERSION, flags, self.rank, peer.own, peer.theirs, number, total)

    def flush(self) -> None:
        """Wait until all that was sent has arrived, or its receiver is gone.

        Raises:
            LeftBehind: the others have gone on without this rank: they take nothing more of it.
        """
        watch = self.watch("the wait for messages to arrive")
        with self.changed:
            while waiting := [peer.rank for peer in self._peers.values() if self._owes(peer)]:
                self.check()
                self.changed.wait(TICK_S)
                watch.check_limits(waiting)

    def _owes(self, peer: Peer) -> bool:
        """Whether something is on its way that the other may still get."""
        assert self.roll is not None
        gone = self.roll.why_gone(peer.rank, peer.theirs) is not None
        idle = not peer.held and all(outbox.is_empty for outbox in peer.outboxes)
        return not gone and not idle

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # who waits must not wait for ever
            self._failure = error
            raise

    def _serve(self) -> None:
        looked_s = beat_s = 0.0
        while not self._over:
            ready = self.wire.poll(TICK_S / 2)
            with self.changed:
                if self._registrar in ready:
                    self._hear_registrar()
                for channel, listener in enumerate(self._listeners):
                    if listener in ready:
                        self._hear_ranks(channel, listener)
                now_s = self.wire.now_s()
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
        while (heard := self._registrar.receive()) is not None:
            message = json.loads(bytes(heard))
            self.heard_s = self.wire.now_s()
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

    def _hear_ranks(self, channel: int, listener: Listener) -> None:
        for _ in range(64):  # then look at the other listener, too
            if (heard := listener.receive()) is None:
                return
            with suppress(ValueError, IndexError, struct.error, MessageMismatch):
                self._hear_frames(channel, heard[1])  # drops what no member of ours sends

    def _hear_frames(self, channel: int, frames: Sequence[Bytes]) -> None:
        """Take a part, or an acknowledgement; drop what is neither."""
        head = bytes(frames[0]) if frames else b""
        if len(head) < _HEAD.size or head[0] != _VERSION:
            return
        _, flags, src, theirs, own, number, total = _HEAD.unpack_from(head)
        if self.roll is None or src >= len(self.roll.entries):
            return
        # One incarnation later may be: this rank begins it, or has not yet heard of it.
        if own - self.incarnation not in (0, 1) or theirs - self.roll.incarnation(src) not in (
            0,
            1,
        ):
            return
        peer = self._peer(src, theirs, own)
        if flags & _ACK:
            stream = DATA if flags & _ON_DATA else CONTROL
            peer.outboxes[stream].acknowledge(number, self.wire.now_s())
            if not flags & _NEAR:
                peer.use_memory(0)
            for other in [*self._peers.values()]:  # a message to another rank may wait for this
                self._pump(other)
            self.changed.notify_all()
        elif len(frames) == 2:
            first, last = bool(flags & _FIRST), bool(flags & _LAST)
            chunk = peer.see(frames[1]) if flags & _NEAR else frames[1]
            if chunk is None:
                peer.owed.add(DATA)
                return self._pump(peer)
            part = Part(number, first, last, total, head[_HEAD.size :], chunk)
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
        self._await_thread()
        with self.changed:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
            self.wire.close()


def host_copy(x: Tensor) -> Tensor:
    """A copy of a vector in the memory of the host."""
    return x.detach().to("cpu", copy=True).contiguous()


def _content_of(body: Tensor | None) -> tuple[memoryview, int]:
    """The memory of a vector of the host, and the stream that it travels on."""
    if body is None:
        return memoryview(b""), CONTROL
    content = body.detach().reshape(-1).view(torch.uint8).numpy().data
    return content, CONTROL if len(content) <= SMALL_BYTES else DATA
