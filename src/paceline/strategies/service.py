"""A worker's side of methods with servers: numbered requests, and their replies.

A worker whose server is lost before it replies sends the request again: to the successor of the
server, or to a server that stands in for it. Servers keep a ledger of the last request of each
worker (``strategies/server.py``), so that a request that arrives twice is applied once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.comm.ports import Lost
from paceline.errors import PeerLost
from paceline.strategies.place import Staleness

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm import ports
    from paceline.comm.comm import Comm

REQUEST, REPLY = 1, 2
"""The tags of messages to a server, and from it."""
CALL = -1
"""In place of the number of a request: the message calls a server to a checkpoint."""
DROPPED = -1
"""In place of whether a request was accepted: the guard dropped its vector."""
ADOPT = 2
"""In place of whether a worker joins: its vector is the model to begin with."""
INCARNATION = 1 << 20
"""The requests of a late joiner are numbered from this, times its incarnation."""


def pack(*numbers: int) -> bytes:
    """A header that holds these numbers, 8 bytes each."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def unpack(header: bytes) -> tuple[int, ...]:
    """The numbers that :func:`pack` was given."""
    return struct.unpack(f"<{len(header) // 8}q", header)


class Numbered(NamedTuple):
    """A message of this protocol: a request, or the reply to one.

    Attributes:
        number: of the request.
        body: the rest of the header.
        vector: what the message carries.
    """

    number: int
    body: bytes
    vector: Tensor

    @classmethod
    def of(cls, message: ports.Message | ports.Published) -> Numbered:
        """Read a message, or what was published, as one."""
        return cls(unpack(message.header[:8])[0], message.header[8:], message.x)

    @property
    def header(self) -> bytes:
        """The whole header."""
        return pack(self.number) + self.body


class Request(NamedTuple):
    """The header of a request to a :class:`~paceline.strategies.server.ShardServer`.

    Attributes:
        number: of the request, from 1, among those of its worker to this server.
        reply: whether the worker waits for a reply.
        version: of the shard that the worker read last.
        batches: in the vector; 0: nothing to apply.
        token: the generation of the token that the worker holds, where there is one.
        last: whether the worker is at the end of its data.
        join: whether it is the first request of a late joiner; ``ADOPT``: its vector is the shard
            to begin with.
        hyperparameters: of the worker's optimizer.
    """

    number: int = 0
    reply: int = 1
    version: int = 0
    batches: int = 1
    token: int = 0
    last: int = 0
    join: int = 0
    hyperparameters: tuple[float, ...] = ()

    @property
    def body(self) -> bytes:
        """The header after the number."""
        own = pack(self.reply, self.version, self.batches, self.token, self.last, self.join)
        return own + struct.pack(f"<{len(self.hyperparameters)}d", *self.hyperparameters)

    @classmethod
    def of(cls, message: Numbered) -> Request:
        """The request that a message is."""
        own, rest = message.body[:48], message.body[48:]
        reply, version, batches, token, last, join = unpack(own)
        hyperparameters = struct.unpack(f"<{len(rest) // 8}d", rest)
        return cls(message.number, reply, version, batches, token, last, join, hyperparameters)


REQUEST_NUMBERS = len(Request._fields) - 1
"""How many numbers a request has, without those of the optimizer."""


class Reply(NamedTuple):
    """The header of a reply of a :class:`~paceline.strategies.server.ShardServer`.

    Attributes:
        number: of the request.
        version: how many updates are in the shard.
        accepted: whether the request was applied; ``DROPPED``: it was, without its vector.
        next_worker: whose turn it is next, where workers take turns; -1: nobody's.
        stale_count: updates so far; then their staleness, summed, and the largest.
    """

    number: int = 0
    version: int = 0
    accepted: int = 1
    next_worker: int = -1
    stale_count: int = 0
    stale_total: int = 0
    stale_maximum: int = 0

    @classmethod
    def of(cls, message: Numbered) -> Reply:
        """The reply that a message is, or begins with."""
        return cls(message.number, *unpack(message.body)[: len(cls._fields) - 1])

    @property
    def staleness(self) -> Staleness:
        """That of all updates in the shard."""
        return Staleness(*self[-3:])


class Service:
    """The requests of one worker to one server, one after the other, and their replies.

    Args:
        comm: the whole world.
        server: the rank that gets the first request.
        like: a vector of the size of those in replies.
        stand_ins: ranks that reply in place of a lost server. These publish their replies: when
            all have departed, what they published last is the last reply.

    Attributes:
        server: the rank that gets the next request.
        number: of the last request.
    """

    def __init__(
        self, comm: Comm, server: int, like: Tensor, stand_ins: Sequence[int] = ()
    ) -> None:
        self.comm, self.server, self.number = comm, server, 0
        self._like, self._stand_ins = like, stand_ins
        self._unanswered: Numbered | None = None
        self._incarnation = 1

    @property
    def awaits_reply(self) -> bool:
        """Whether :meth:`await_reply` has not returned since the last request."""
        return self._unanswered is not None

    def send_request(self, body: bytes, vector: Tensor, must: bool = True) -> bool:
        """Send a request; unless it ``must`` arrive, return False if the server has no room.

        Until the reply is there the vector must not change: it may have to be sent again.
        """
        request = Numbered(self.number + 1, body, vector)
        incarnation = self.comm.members.incarnation(self.server)
        posted = self.comm.board.post(vector, self.server, REQUEST, request.header)
        if not posted and not must:
            if self.server not in self.comm.members.alive():
                self._check_elastic()
            return False
        self.number += 1
        self._unanswered, self._incarnation = request, incarnation
        if not posted:
            self._insist(request)
        return True

    def await_reply(self) -> Numbered:
        """Wait for the reply to the last request; if its server is lost, ask another one."""
        assert self._unanswered is not None
        while True:
            reply = self._receive() or self._send_again(self._unanswered)
            if reply is not None and reply.number == self.number:  # not one to an earlier request
                self._unanswered = None
                return reply

    def _receive(self) -> Numbered | None:
        """What the server replies; None if the incarnation that was asked is lost."""
        if self.comm.members.incarnation(self.server) != self._incarnation:
            return None
        received = self.comm.receive(self._like, self.server, REPLY)
        return None if isinstance(received, Lost) else Numbered.of(received)

    def _send_again(self, request: Numbered) -> Numbered | None:
        """Ask the next server; when all have departed, return the reply that they published."""
        try:
            self._turn_to_next()
            self._insist(request)
        except PeerLost:
            last = last_published(self.comm, self._stand_ins, self._like)
            if last is None or last.number != self.number:
                raise
            return last
        return None

    def _insist(self, request: Numbered) -> None:
        """Send a request, however long that takes."""
        while True:
            try:
                return self.comm.send(request.vector, self.server, REQUEST, request.header)
            except PeerLost:
                self._turn_to_next()

    def _turn_to_next(self) -> None:
        """From a lost server, turn to one that stands in for it; if there is none, wait for its
        successor."""
        self._check_elastic()
        here = [rank for rank in self._stand_ins if rank in self.comm.members.alive()]
        after = [rank for rank in here if rank > self.server]
        others = after or [rank for rank in here if rank != self.server]
        if others:
            self.server = others[0]
            self._incarnation = self.comm.members.incarnation(self.server)
            return
        try:
            self._incarnation = self.await_successor(self._incarnation)
        except PeerLost:
            if not any(rank in self.comm.members.alive() for rank in self._stand_ins):
                raise
            self._turn_to_next()  # to one that has come meanwhile

    def await_successor(self, incarnation: int) -> int:
        """Wait for the successor of that incarnation of the server; return its incarnation."""
        self._check_elastic()
        self.comm.members.wait_for_successor(self.server, incarnation)
        return self.comm.members.incarnation(self.server)

    def _check_elastic(self) -> None:
        """End the run, unless a lost server has a successor."""
        if not self.comm.elastic:
            raise PeerLost(self.server, "a request to a server", "it is gone", 0.0)

    def peek(self, comm: Comm) -> Numbered:
        """What the server published last."""
        incarnation = comm.members.incarnation(self.server)
        while (seen := comm.board.peek(self.server, self._like)) is None:
            incarnation = self.await_successor(incarnation)
        return Numbered.of(seen)


def last_published(comm: Comm, servers: Sequence[int], like: Tensor) -> Numbered | None:
    """The reply of the highest number that any incarnation of these servers published last."""
    seen = [comm.board.peek(rank, like, gone=True) for rank in servers]
    found = [Numbered.of(each) for each in seen if each is not None]
    return max(found, key=lambda reply: reply.number, default=None)
