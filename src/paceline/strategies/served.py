"""What methods share whose model lives on servers.

The parameters are cut into ``shards``, one server rank each. A worker sends a request that carries
a vector and the present settings of its optimizer; the server acts on its shard in place and, when
asked to, posts it back. A server answers one request after the other and never waits for a worker:
who is slow, frozen or dead delays nobody.

After each update a server publishes its shard together with its books: the number of the last
request of each worker that is in it. A server that is lost is followed by another, which begins
with what was published last. Workers that had no answer ask again, and the books tell whether their
request was acted upon: each is, once.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from paceline.comm.packet import Packet
from paceline.common.options import at_least, at_most
from paceline.errors import PeerLost, PeersGone
from paceline.model.hyperparameters import read_settings
from paceline.strategies.base import (
    SERVER,
    SUMMONS,
    WORKER,
    Staleness,
    Strategy,
)
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.base import Comm
    from paceline.strategies.toolbox.shard_optimizer import ShardOptimizer

ServerOptimizer = Literal["user", "sgd", "momentum", "adagrad"]
REQUEST, REPLY = 1, 2
ABSENT = -1.0
DROPPED = -1.0
ADOPT = 2.0
LIFE = 1 << 20
"""What the numbers of requests begin with, times the life of their worker."""
MOST_SHARDS = 10_000
KEPT_EVERY = 16
"""Updates after which a server keeps the buffers of its optimizer for a successor."""


class Request(NamedTuple):
    """The numbers of a request, before those of the optimizer.

    Attributes:
        reply: whether the worker waits for the shard.
        version: of the shard that the worker read last.
        batches: in the vector; 0: nothing to apply.
        token: the generation of the token that the worker holds, where there is one.
        last: whether the worker has come to its end.
        join: whether it is the first request of a worker that came late; 2: its vector is the
            shard to begin with.
        number: of the request, from 1, among those of its worker to this server.
    """

    reply: float = 1
    version: float = 0
    batches: float = 1
    token: float = 0
    last: float = 0
    join: float = 0
    number: float = 0


class Reply(NamedTuple):
    """The numbers before a shard.

    Attributes:
        version: how many updates are in it.
        accepted: whether the request was acted upon; -1: but for its vector, which was dropped.
        successor: whose turn it is next; -1: nobody's.
        number: of the request that it answers.
        stale_count: updates so far; then their staleness, summed, and the largest.
    """

    version: float = 0
    accepted: float = 1
    successor: float = -1
    number: float = 0
    stale_count: float = 0
    stale_total: float = 0
    stale_maximum: float = 0


@dataclass(kw_only=True)
class ServerStrategy(Strategy):
    """A method with servers: subclasses say when to ask, and how a server acts."""

    synchronous: ClassVar[bool] = False
    resumable: ClassVar[bool] = False

    shards: int = 1

    def __post_init__(self) -> None:
        at_least("shards", self.shards, 1)
        at_most("shards", self.shards, MOST_SHARDS)
        self.steps = 0
        self.versions = [0] * self.shards
        self.asked = [0] * self.shards
        self._unanswered: dict[int, tuple[Tensor, int]] = {}

    def roles(self, workers: int) -> tuple[str, ...]:
        return (WORKER,) * workers + (SERVER,) * self.shards

    @cached_property
    def parts(self) -> list[slice]:
        """What of the model each server holds."""
        numel = self.replica.flat.x.numel()
        edges = [numel * shard // self.shards for shard in range(self.shards + 1)]
        return [slice(*pair) for pair in pairwise(edges)]

    @cached_property
    def _settings(self) -> int:
        """How many numbers of an optimizer go with a request."""
        return len(self.settings())

    def settings(self) -> list[float]:
        """The numbers of this worker's optimizer that go with a request."""
        return read_settings(self.replica.optimizer)

    @property
    def books(self) -> int:
        """How many numbers a server keeps books of: two for each worker, and one."""
        return 2 * self.workers + 1

    def books_bytes(self, workers: int) -> int:
        """The bytes of the books that come with a shard that is fetched, over all shards."""
        return 8 * self.shards * (2 * workers + 1)

    @property
    def request_overhead(self) -> int:
        """The bytes of a request beside its vector, over all shards."""
        return 8 * self.shards * (len(Request._fields) + self._settings)

    @property
    def reply_overhead(self) -> int:
        """The bytes of a reply beside its vector, over all shards."""
        return 8 * self.shards * len(Reply._fields)

    # A worker's side -----------------------------------------------------------------------------

    def ask(self, shard: int, vector: Tensor, request: Request, must: bool = True) -> bool:
        """Send a request; unless it ``must`` arrive, False when the server has no room for it."""
        request = request._replace(number=self.asked[shard] + 1)
        numbers = (*request, *self.settings())
        message = Packet.of(numbers, vector[self.parts[shard]]).buffer
        server = self.workers + shard
        life = self.comm.life(server)
        left = self.comm.post(message, server, REQUEST)
        if not left and must:
            life = self._insist(message, server, life)
        elif not left and server not in self.comm.alive():
            self.must_follow(server)
        if left or must:
            self.asked[shard] += 1
            self._unanswered[shard] = (message, life)
        return left or must

    def _insist(self, message: Tensor, server: int, life: int) -> int:
        """Send a request however long that takes; return to which life of the server."""
        while True:
            try:
                self.comm.send(message, server, REQUEST)
                return life
            except PeerLost:
                life = self.find_successor(server, life)

    def find_successor(self, server: int, life: int) -> int:
        """Wait for who follows that life of a server, and return which life that is."""
        self.must_follow(server)
        self.comm.await_return(server, life)
        return self.comm.life(server)

    def must_follow(self, server: int) -> None:
        """End the run when a server is lost, unless another is to follow it."""
        if not self.comm.elastic:
            raise PeerLost(server, "a request to a server", "it is gone", 0.0)

    def hear(self, shard: int, x: Tensor) -> Reply:
        """Wait for a reply, and take its vector into ``x``; ask a successor again, if need be."""
        server, like = self.workers + shard, self._reply_like(shard, x)
        message, life = self._unanswered.pop(shard)
        while True:
            try:
                if self.comm.life(server) == life:
                    message_back = self.comm.recv(like, server, REPLY)
                    if self._answers(shard, message_back, x):
                        reply = self._take_in(shard, x, message_back)
                        self.guard.hear(server, reply.accepted == DROPPED)
                        return reply
                    continue
            except PeerLost:
                pass
            life = self._insist(message, server, self.find_successor(server, life))

    def _reply_like(self, shard: int, x: Tensor, books: int = 0) -> Tensor:
        return Packet.empty(books + len(Reply._fields), x[self.parts[shard]]).buffer

    def _answers(self, shard: int, message: Tensor, x: Tensor) -> bool:
        """Whether a reply is to the last request: one that was sent twice is answered twice."""
        reply = Reply(*Packet(message, len(Reply._fields), x.dtype).numbers.tolist())
        return round(reply.number) == self.asked[shard]

    def _take_in(self, shard: int, x: Tensor, message: Tensor) -> Reply:
        packet = Packet(message, len(Reply._fields), x.dtype)
        x[self.parts[shard]].copy_(packet.vector)
        reply = Reply(*packet.numbers.tolist())
        self.versions[shard] = round(reply.version)
        return reply

    def exchange(self, vector: Tensor, x: Tensor, **numbers: float) -> None:
        """Send ``vector`` to the servers, and take what they answer into ``x``."""
        for shard, version in enumerate(self.versions):
            self.ask(shard, vector, Request(version=version, **numbers))
        for shard in range(self.shards):
            self.hear(shard, x)

    def fetch(self, x: Tensor, comm: Comm) -> Reply:
        """Read the servers' model into ``x`` as they last published it, without them."""
        reply = Reply()
        for shard in range(self.shards):
            like = self._reply_like(shard, x, self.books)
            life = comm.life(self.workers + shard)
            while (seen := comm.peek(self.workers + shard, like)) is None:
                life = self.find_successor(self.workers + shard, life)
            reply = self._take_in(shard, x, seen[1][8 * self.books :])
        return reply

    def adopt(self, x: Tensor) -> None:
        if len(self.roles(self.workers)) == self.workers:
            super().adopt(x)
            return
        workers = self.comm.group(self.first_workers())
        workers.broadcast(x)
        if workers.rank == 0:
            self.exchange(x, x, batches=0, join=ADOPT)
        workers.barrier()  # nobody asks the servers for anything else before

    def join(self, x: Tensor) -> None:
        if not any(self.asked):  # what an earlier life has asked, a successor may still know
            self.asked = [LIFE * self.comm.life(self.comm.rank)] * self.shards
        try:
            self.exchange(x, x, batches=0, join=1)
        except PeerLost:
            raise PeersGone from None  # the servers have ended, as all workers had

    def answer(self, x: Tensor) -> Tensor:
        versions, model = [*self.versions], x.clone()
        self.fetch(model, self.comm.uncharged())
        self.versions = versions
        return model

    def finish(self, x: Tensor) -> None:
        self.flush(x)
        self.among_live(lambda workers: workers.barrier())
        last = self.fetch(x, self.comm.uncharged())
        self.stale = Staleness(*map(round, last[-3:]))

    def summon(self, rank: int, number: int, stop: bool) -> None:
        request = Request(number=SUMMONS, version=number, batches=stop)
        numbers = (*request, *self.settings())
        part = self.replica.flat.x[self.parts[rank - self.workers]]
        self.comm.send(Packet.of(numbers, part).buffer, rank, REQUEST)

    def state_dict(self) -> dict[str, Any]:
        if self.comm.rank >= self.workers:
            return self.server_state()
        return {**super().state_dict(), "asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.comm.rank >= self.workers:
            self.load_server_state(state)
            return
        self.asked = state["asked"]
        super().load_state_dict({name: v for name, v in state.items() if name != "asked"})

    def resumed(self) -> None:
        """Strike those workers off a server's books whose state is not there again."""
        if self.comm.rank >= self.workers:
            for worker in set(self.listed()) - set(self.comm.starters()):
                self.gone(worker)

    @abstractmethod
    def flush(self, x: Tensor) -> None:
        """Hand in what is left, and have the servers apply it before this returns."""

    # A server's side -----------------------------------------------------------------------------

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        if self.comm.rank >= self.workers:
            self._open_shop(x)
            self.publish()
        self.comm.group(self.comm.starters()).barrier()  # from here on there is a model to fetch

    def _open_shop(self, x: Tensor) -> None:
        """Lay out the shard, its books before it, and its optimizer."""
        self.comm.serves()
        part = self.parts[self.comm.rank - self.workers]
        self.desk = self.comm.group([*range(self.workers), self.comm.rank])
        every = Packet.of([0.0] * (self.books + len(Reply._fields)), x[part])
        self.window, self.version = every.buffer, 0
        self.shelf = Packet(self.window[8 * self.books :], len(Reply._fields), x.dtype)
        self.done, self.marks, self._era, _ = every.numbers.split(
            [self.workers, self.workers, 1, len(Reply._fields)]
        )
        self.marks.fill_(ABSENT)
        self.marks[self.first_workers()] = 0
        self.missed = 0
        self._dropped_from: set[int] = set()
        self.open(self.shelf.vector, part)

    def succeed(self, x: Tensor) -> dict[str, Any]:
        """Go on with what the lost server last published, and the optimizer as it last kept it."""
        self._open_shop(x)
        left = self.comm.inherited(self.window, self.comm.rank)
        if left is None:
            raise PeerLost(self.comm.rank, "the start of a server", "it left nothing", 0.0)
        self.window.copy_(left)
        reply = Reply(*self.shelf.numbers.tolist())
        self.version = round(reply.version)
        self.stale = Staleness(*map(round, reply[-3:]))
        facts = self.take_over()
        self.publish()
        return {"version": self.version, **facts}

    def server_state(self) -> dict[str, Any]:
        """What a checkpoint holds of a server: its shard, and its books."""
        return {"window": self.window, "version": self.version, "missed": self.missed}

    def load_server_state(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`server_state` gave."""
        self.window.copy_(state["window"])
        self.version, self.missed = state["version"], state["missed"]

    def take_over(self) -> dict[str, Any]:
        """Follow a server that was lost: its shard and its books are here."""
        return {}

    def listed(self) -> list[int]:
        """The workers that the books have a mark of."""
        return [worker for worker, mark in enumerate(self.marks.tolist()) if mark != ABSENT]

    @property
    def era(self) -> int:
        """A number that the books keep for the subclass; it grows when a server is followed."""
        return int(self._era[0])

    @era.setter
    def era(self, era: int) -> None:
        """Begin another; the books keep it once they are published."""
        self._era[0] = era

    def serve(self, x: Tensor) -> None:
        numbers = len(Request._fields) + self._settings
        like = Packet.empty(numbers, self.shelf.vector)
        while True:
            src, message = self.desk.recv_or_loss(like.buffer, REQUEST)
            if message is None:
                self.gone(src)
                continue
            packet = Packet(message, numbers, x.dtype)
            values = packet.numbers.tolist()
            request = Request(*values[: len(Request._fields)])
            if request.number == SUMMONS:
                self.listener.summoned(round(request.version), bool(request.batches))
                continue
            known = round(float(self.done[src]))
            if request.number <= known and not request.join:
                self.repeat(src)
                continue
            if not request.join and round(request.number) // LIFE == known // LIFE:
                self.missed += round(request.number) - known - 1
            self.done[src] = request.number
            if request.join == ADOPT:
                self.shelf.vector.copy_(packet.vector)
                self.publish()
                self.reply(src)
                continue
            request = self._judged(src, request, packet.vector)
            self.act(src, request, packet.vector, values[len(Request._fields) :])

    def _judged(self, src: int, request: Request, vector: Tensor) -> Request:
        """The request; without anything to apply, if the guard drops that."""
        if not request.batches or self.guard.admits(self.size_of(vector), src, "update"):
            return request
        self._dropped_from.add(src)
        return request._replace(batches=0)

    def size_of(self, vector: Tensor) -> float:
        """The norm of what the vector of a request would do to the shard."""
        return norm(vector)

    @abstractmethod
    def open(self, w: Tensor, part: slice) -> None:
        """Before the first request: ``w`` is this server's shard, ``part`` its place in ``x``."""

    @abstractmethod
    def act(self, src: int, request: Request, vector: Tensor, settings: list[float]) -> None:
        """Answer one request."""

    def gone(self, src: int) -> None:
        """Hear that a worker has died, or left."""
        self.marks[src] = ABSENT

    def repeat(self, src: int) -> None:
        """Answer once more what was acted upon before; the answer was lost with a server."""
        self.reply(src)

    def updated(self, request: Request) -> None:
        """Count an update of the shard, let its time pass, and let others see it."""
        self.comm.charge_update(self.shelf.vector.nbytes)
        self.stale.note(self.version - round(request.version))
        self.version += 1
        self.publish()

    def publish(self) -> None:
        """Let workers read the shard."""
        self.shelf.write(self._reply())
        self.desk.publish(self.window)

    def reply(
        self, src: int, vector: Tensor | None = None, accepted: bool = True, successor: int = -1
    ) -> None:
        """Post the shard, or another vector, to a worker; one that is gone does not need it."""
        verdict = DROPPED if accepted and src in self._dropped_from else accepted
        self._dropped_from.discard(src)
        number = float(self.done[src])
        reply = self._reply()._replace(accepted=verdict, successor=successor, number=number)
        self.desk.post(self._parcel(reply, vector).buffer, src, REPLY)

    def _parcel(self, reply: Reply, vector: Tensor | None = None) -> Packet:
        if vector is not None:
            return Packet.of(reply, vector)
        self.shelf.write(reply)
        return self.shelf

    def _reply(self) -> Reply:
        stale = self.stale
        return Reply(
            version=self.version,
            stale_count=stale.count,
            stale_total=stale.total,
            stale_maximum=stale.maximum,
        )


@dataclass(kw_only=True)
class GradientServed(ServerStrategy):
    """Servers that apply gradients, with an optimizer of their own.

    They do not know which parameters had no gradient in a step: those count as zero there. A
    gradient is clipped by its worker, before it is pushed; then the worker adds weight decay to it,
    if the parameter has one, at the model that it was computed at. Only where decay is no part of
    the gradient, as in AdamW, does the server shrink its model by ``lr * weight_decay``, for each
    gradient in a push; the share of them that each parameter has one in is sent along.

    Attributes:
        pending: the gradients that are still to be pushed.
        given: in how many of them each parameter has one.
        accrued: their sum.
    """

    server_optimizer: ServerOptimizer = "user"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pending = 0
        self.given: list[int] = []
        self.accrued: Tensor | None = None
        self.master: ShardOptimizer | None = None

    @cached_property
    def coupled(self) -> bool:
        """Whether weight decay is in the gradients."""
        return self.server_optimizer != "user" or self.replica.decay_is_coupled()

    def settings(self) -> list[float]:
        own = super().settings()
        if self.coupled:
            return own
        given = self.given or [0] * len(self.replica.flat.spans)
        return [*own, *(count / max(1, self.pending) for count in given)]

    def lr_factor(self, workers: int) -> float:
        """Every push counts in full, and is the older the more workers there are."""
        return 1 / workers

    def accrue(self, g: Tensor, local_move: bool) -> None:
        """Add a gradient to those that are still to be pushed, unless it is infinite."""
        if self.accrued is None:
            self.accrued = g.new_zeros(g.shape)
        if not self.replica.overflow:
            v = self.finished(g)
            self.accrued += v
            self.pending += 1
            if local_move:
                self.replica.plain_move(v)

    def finished(self, g: Tensor) -> Tensor:
        """A gradient as it is pushed: clipped, and with its weight decay."""
        self.replica.clip()
        if self.coupled:
            return self.replica.decayed(g)
        missing = self.replica.flat.missing
        before = self.given or [0] * len(missing)
        self.given = [count + (not lacks) for count, lacks in zip(before, missing, strict=True)]
        return g

    def pushed(self) -> None:
        """Begin to add up anew."""
        self.pending = 0
        self.given = []
        if self.accrued is not None:
            self.accrued.zero_()

    @property
    def adapts(self) -> bool:
        """Whether the servers' steps are other than along the gradient."""
        own = type(self.replica.optimizer).__name__ != "SGD"
        return self.server_optimizer == "adagrad" or (self.server_optimizer == "user" and own)

    def open(self, w: Tensor, part: slice) -> None:
        from paceline.strategies.toolbox.shard_optimizer import ShardOptimizer

        self.master = ShardOptimizer(w, part, self.replica, self.server_optimizer, self.coupled)

    def state_dict(self) -> dict[str, Any]:
        if self.comm.rank >= self.workers:
            return super().state_dict()
        return {**super().state_dict(), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.comm.rank < self.workers:
            self.given = state["given"]
            state = {name: value for name, value in state.items() if name != "given"}
        super().load_state_dict(state)

    def server_state(self) -> dict[str, Any]:
        own = None if self.master is None else self.master.optimizer.state_dict()
        return {**super().server_state(), "optimizer": own}

    def load_server_state(self, state: dict[str, Any]) -> None:
        super().load_server_state(state)
        if self.master is not None:
            self.master.optimizer.load_state_dict(state["optimizer"])

    def take_over(self) -> dict[str, Any]:
        """Take up the buffers of the optimizer as they were last kept: none is newer than that."""
        if self.master is None:
            return {}
        left = self.comm.kept()
        if left is not None:
            self.master.load_buffers(left)
        return {"buffers_behind": self.version % KEPT_EVERY}

    def updated(self, request: Request) -> None:
        super().updated(request)
        if self.master is None or self.version % KEPT_EVERY:
            return
        if (buffers := self.master.buffers()) is not None:
            self.comm.keep(buffers)

    def apply(
        self, request: Request, gradient: Tensor, settings: list[float], times: float = 1
    ) -> None:
        """Step with what a request holds, if anything; it counts for ``times`` gradients."""
        if request.batches:
            assert self.master is not None
            self.master.step(gradient, settings, times)
            self.updated(request)
