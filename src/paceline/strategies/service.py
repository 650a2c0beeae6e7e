"""A worker's side of methods with servers: numbered requests, and whoever answers them.

A worker that has no answer asks again: the server's next incarnation, or a server that stands in
for it. Servers keep a ledger of the last request of each worker (``strategies/server.py``), so that
a request that arrives twice is acted upon once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.comm.packet import Packet
from paceline.comm.ports import Lost
from paceline.errors import PeerLost
from paceline.strategies.place import Staleness

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm

REQUEST, REPLY = 1, 2
"""The tags of messages to a server, and from it."""
CALL = -1
"""In place of the number of a request: the message calls a server to a checkpoint."""
DROPPED = -1.0
"""In place of whether a request was accepted: the guard has dropped its vector."""
ADOPT = 2.0
"""In place of whether a worker joins: its vector is the model to begin with."""
INCARNATION = 1 << 20
"""The requests of a worker that joins late are numbered from this, times its incarnation."""


class Message(NamedTuple):
    """What a message holds: its numbers, of which the first is that of a request; and a vector."""

    numbers: list[float]
    vector: Tensor

    @property
    def number(self) -> int:
        """The number of the request, or of the request that this is the answer to."""
        return round(self.numbers[0])


def encode(numbers: Sequence[float], vector: Tensor) -> Tensor:
    """A message as it travels, and as it is published."""
    return Packet.of(numbers, vector).buffer


def decode(message: Tensor, count: int, like: Tensor) -> Message:
    """What :func:`encode` was given: so many numbers, and a vector ``like`` another."""
    packet = Packet(message, count, like.dtype)
    return Message(packet.numbers.tolist(), packet.vector)


def room_for(count: int, like: Tensor) -> Tensor:
    """A tensor as large as a message of so many numbers and a vector ``like`` another."""
    return Packet.empty(count, like).buffer


class Request(NamedTuple):
    """The numbers of a request to a :class:`~paceline.strategies.server.ShardServer`.

    Attributes:
        number: of the request, from 1, among those of its worker to this server.
        reply: whether the worker waits for the shard.
        version: of the shard that the worker read last.
        batches: in the vector; 0: nothing to apply.
        token: the generation of the token that the worker holds, where there is one.
        last: whether the worker has come to its end.
        join: whether it is the first request of a worker that came late; 2: its vector is the
            shard to begin with.
        hyperparameters: of the worker's optimizer.
    """

    number: float = 0
    reply: float = 1
    version: float = 0
    batches: float = 1
    token: float = 0
    last: float = 0
    join: float = 0
    hyperparameters: tuple[float, ...] = ()

    @classmethod
    def of(cls, message: Message) -> Request:
        """The request that a message is."""
        number, reply, version, batches, token, last, join, *rest = message.numbers
        return cls(number, reply, version, batches, token, last, join, tuple(rest))

    @property
    def numbers(self) -> tuple[float, ...]:
        """What a message has after the number of the request, and before its vector."""
        own = (self.reply, self.version, self.batches, self.token, self.last, self.join)
        return own + self.hyperparameters


REQUEST_NUMBERS = len(Request._fields) - 1
"""How many numbers a request has, without those of the optimizer."""


class Reply(NamedTuple):
    """The numbers before a shard.

    Attributes:
        number: of the request that it answers.
        version: how many updates are in the shard.
        accepted: whether the request was acted upon; -1: but for its vector, which was dropped.
        next_worker: whose turn it is next; -1: nobody's.
        stale_count: updates so far; then their staleness, summed, and the largest.
    """

    number: float = 0
    version: float = 0
    accepted: float = 1
    next_worker: float = -1
    stale_count: float = 0
    stale_total: float = 0
    stale_maximum: float = 0

    @property
    def staleness(self) -> Staleness:
        """That of all updates in the shard."""
        return Staleness(*map(round, self[-3:]))


def published_numbers(workers: int) -> int:
    """How many numbers a server publishes before its shard: its ledger, and those of a reply."""
    return 2 * workers + 1 + len(Reply._fields)


class Service:
    """The requests of one worker to a server, one after the other, and their answers.

    Args:
        comm: the whole world.
        server: the rank that is asked first.
        numbers: how many an answer has before its vector.
        like: a vector of the size of that.
        stand_ins: ranks that answer in place of a lost server. They publish their answers, too:
            when all have come to their end, what they published last is the last answer.

    Attributes:
        server: the rank that is asked at present.
        asked: the number of the last request.
        unanswered: whether :meth:`hear` has not returned since the last request.
    """

    def __init__(
        self, comm: Comm, server: int, numbers: int, like: Tensor, stand_ins: Sequence[int] = ()
    ) -> None:
        self.comm, self.server, self.asked = comm, server, 0
        self._numbers, self._like, self._stand_ins = numbers, like, stand_ins
        self._message: Tensor | None = None
        self._incarnation = 1

    @property
    def unanswered(self) -> bool:
        """Whether :meth:`hear` has not returned since the last request."""
        return self._message is not None

    def ask(self, numbers: Sequence[float], vector: Tensor, must: bool = True) -> bool:
        """Send a request; unless it ``must`` arrive, False when the server has no room for it."""
        message = encode((self.asked + 1, *numbers), vector)
        incarnation = self.comm.incarnation(self.server)
        left = self.comm.post(message, self.server, REQUEST)
        if not left and not must:
            if self.server not in self.comm.alive():
                self._check_elastic()
            return False
        self.asked += 1
        self._message, self._incarnation = message, incarnation
        if not left:
            self._insist(message)
        return True

    def hear(self) -> Message:
        """Wait for the answer to the last request; if its server is lost, ask another."""
        assert self._message is not None
        while True:
            answer = self._receive() or self._ask_again(self._message)
            if answer is not None and answer.number == self.asked:  # a repeated one has two
                self._message = None
                return answer

    def _receive(self) -> Message | None:
        """What the server answers; None when the one that was asked is lost."""
        if self.comm.incarnation(self.server) != self._incarnation:
            return None
        room = room_for(self._numbers, self._like)
        got = self.comm.receive(room, self.server, REPLY)
        return None if isinstance(got, Lost) else decode(got.x, self._numbers, self._like)

    def _ask_again(self, message: Tensor) -> Message | None:
        """Ask who follows; when all have come to their end, return what they published last."""
        try:
            self._turn_to_next()
            self._insist(message)
        except PeerLost:
            last = last_published(self.comm, self._stand_ins, self._numbers, self._like)
            if last is None or last.number != self.asked:
                raise
            return last
        return None

    def _insist(self, message: Tensor) -> None:
        """Send a request however long that takes."""
        while True:
            try:
                return self.comm.send(message, self.server, REQUEST)
            except PeerLost:
                self._turn_to_next()

    def _turn_to_next(self) -> None:
        """Go on with a server that stands in for a lost one, or else with its successor."""
        self._check_elastic()
        here = [rank for rank in self._stand_ins if rank in self.comm.alive()]
        after = [rank for rank in here if rank > self.server]
        others = after or [rank for rank in here if rank != self.server]
        if others:
            self.server = others[0]
            self._incarnation = self.comm.incarnation(self.server)
            return
        try:
            self._incarnation = self.await_successor(self._incarnation)
        except PeerLost:
            if not any(rank in self.comm.alive() for rank in self._stand_ins):
                raise
            self._turn_to_next()  # to one that has come meanwhile

    def await_successor(self, incarnation: int) -> int:
        """Wait for who follows that incarnation of the server; return which one that is."""
        self._check_elastic()
        self.comm.wait_for_successor(self.server, incarnation)
        return self.comm.incarnation(self.server)

    def _check_elastic(self) -> None:
        """End the run when a server is lost, unless another is to follow it."""
        if not self.comm.elastic:
            raise PeerLost(self.server, "a request to a server", "it is gone", 0.0)

    def published(self, comm: Comm, numbers: int) -> Message:
        """What the server has published last: so many numbers, and its vector."""
        room, incarnation = room_for(numbers, self._like), comm.incarnation(self.server)
        while (seen := comm.peek(self.server, room)) is None:
            incarnation = self.await_successor(incarnation)
        return decode(seen[1], numbers, self._like)


def last_published(
    comm: Comm, servers: Sequence[int], numbers: int, like: Tensor
) -> Message | None:
    """Of what servers have published, if need be in an earlier incarnation, the latest."""
    room = room_for(numbers, like)
    left = [comm.last_published(room, rank) for rank in servers]
    found = [decode(seen.x, numbers, like) for seen in left if seen is not None]
    return max(found, key=lambda message: message.number, default=None)
