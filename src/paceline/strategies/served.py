"""What methods share whose model lives on servers.

The parameters are cut into ``shards``, one server rank each. A worker sends a request that carries
a vector and the present settings of its optimizer; the server acts on its shard in place and, when
asked to, posts it back. A server answers one request after the other and never waits for a worker:
who is slow, frozen or dead delays nobody.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from paceline.errors import PeerLost
from paceline.options import at_least
from paceline.parcel import Parcel
from paceline.settings import read_settings
from paceline.strategies.base import SERVER, WORKER, Staleness, Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.base import Comm
    from paceline.replica import Replica

ServerOptimizer = Literal["user", "sgd", "momentum", "adagrad"]
REQUEST, REPLY = 1, 2


class Request(NamedTuple):
    """The numbers of a request, before those of the optimizer.

    Attributes:
        reply: whether the worker waits for the shard.
        version: of the shard that the worker read last.
        batches: in the vector; 0: nothing to apply.
        token: the generation of the token that the worker holds, where there is one.
        last: whether the worker has come to its end.
        join: whether it is the first request of a worker that came late.
    """

    reply: float = 1
    version: float = 0
    batches: float = 1
    token: float = 0
    last: float = 0
    join: float = 0


class Reply(NamedTuple):
    """The numbers before a shard.

    Attributes:
        version: how many updates are in it.
        accepted: whether the request was acted upon.
        successor: whose turn it is next; -1: nobody's.
        stale_count: updates so far; then their staleness, summed, and the largest.
    """

    version: float = 0
    accepted: float = 1
    successor: float = -1
    stale_count: float = 0
    stale_total: float = 0
    stale_maximum: float = 0


@dataclass(kw_only=True)
class Served(Strategy):
    """A method with servers: subclasses say when to ask, and how a server acts."""

    synchronous: ClassVar[bool] = False
    resumable: ClassVar[bool] = False

    shards: int = 1

    def __post_init__(self) -> None:
        at_least("shards", self.shards, 1)
        self.steps = 0
        self.versions = [0] * self.shards

    def roles(self, workers: int) -> tuple[str, ...]:
        return (WORKER,) * workers + (SERVER,) * self.shards

    def bind(self, comm: Comm, replica: Replica, workers: int, seed: int = 0) -> None:
        super().bind(comm, replica, workers, seed)
        numel = replica.flat.x.numel()
        edges = [numel * shard // self.shards for shard in range(self.shards + 1)]
        self.parts = [slice(*pair) for pair in pairwise(edges)]
        self._settings = len(read_settings(replica.optimizer))

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
        numbers = (*request, *read_settings(self.replica.optimizer))
        message = Parcel.of(numbers, vector[self.parts[shard]]).buffer
        server = self.workers + shard
        left = self.comm.post(message, server, REQUEST)
        if not left:
            self.check_server(shard)
        if not left and must:
            self.comm.send(message, server, REQUEST)
        return left or must

    def check_server(self, shard: int) -> None:
        """End the run when a server is gone."""
        server = self.workers + shard
        if server not in self.comm.alive():
            raise PeerLost(server, "a request to a server", "it is gone", 0.0)

    def hear(self, shard: int, x: Tensor) -> Reply:
        """Wait for a reply, and take its vector into ``x``."""
        like = Parcel.empty(len(Reply._fields), x[self.parts[shard]])
        return self._take_in(shard, x, self.comm.recv(like.buffer, self.workers + shard, REPLY))

    def _take_in(self, shard: int, x: Tensor, message: Tensor) -> Reply:
        parcel = Parcel(message, len(Reply._fields), x.dtype)
        x[self.parts[shard]].copy_(parcel.vector)
        reply = Reply(*parcel.numbers.tolist())
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
        for shard, part in enumerate(self.parts):
            like = Parcel.empty(len(Reply._fields), x[part])
            seen = comm.peek(self.workers + shard, like.buffer)
            if seen is None:
                self.check_server(shard)
            else:
                reply = self._take_in(shard, x, seen[1])
        return reply

    def join(self, x: Tensor) -> None:
        self.exchange(x, x, batches=0, join=1)

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

    @abstractmethod
    def flush(self, x: Tensor) -> None:
        """Hand in what is left, and have the servers apply it before this returns."""

    # A server's side -----------------------------------------------------------------------------

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        if self.comm.rank >= self.workers:
            self.comm.serves()
            part = self.parts[self.comm.rank - self.workers]
            self.desk = self.comm.group([*range(self.workers), self.comm.rank])
            self.shelf, self.version = Parcel.of(Reply(), x[part]), 0
            self.open(self.shelf.vector, part)
            self.publish()
        self.comm.group(self.comm.starters()).barrier()  # from here on there is a model to fetch

    def serve(self, x: Tensor) -> None:
        numbers = len(Request._fields) + self._settings
        like = Parcel.empty(numbers, self.shelf.vector)
        while True:
            src, message = self.desk.recv_or_loss(like.buffer, REQUEST)
            if message is None:
                self.gone(src)
                continue
            parcel = Parcel(message, numbers, x.dtype)
            values = parcel.numbers.tolist()
            request = Request(*values[: len(Request._fields)])
            self.act(src, request, parcel.vector, values[len(Request._fields) :])

    @abstractmethod
    def open(self, w: Tensor, part: slice) -> None:
        """Before the first request: ``w`` is this server's shard, ``part`` its place in ``x``."""

    @abstractmethod
    def act(self, src: int, request: Request, vector: Tensor, settings: list[float]) -> None:
        """Answer one request."""

    def gone(self, src: int) -> None:
        """Hear that a worker has died, or left."""

    def updated(self, request: Request) -> None:
        """Count an update of the shard, let its time pass, and let others see it."""
        self.comm.charge_update(self.shelf.vector.nbytes)
        self.stale.note(self.version - round(request.version))
        self.version += 1
        self.publish()

    def publish(self) -> None:
        """Let workers read the shard."""
        self.desk.publish(self._parcel(self._reply()).buffer)

    def reply(
        self, src: int, vector: Tensor | None = None, accepted: bool = True, successor: int = -1
    ) -> None:
        """Post the shard, or another vector, to a worker; one that is gone does not need it."""
        reply = self._reply()._replace(accepted=accepted, successor=successor)
        self.desk.post(self._parcel(reply, vector).buffer, src, REPLY)

    def _parcel(self, reply: Reply, vector: Tensor | None = None) -> Parcel:
        if vector is not None:
            return Parcel.of(reply, vector)
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
class GradientServed(Served):
    """Servers that apply gradients, with an optimizer of their own.

    They do not know which parameters had no gradient in a step: those count as zero there, and
    decay with the rest. A gradient is clipped by its worker, before it is pushed.
    """

    server_optimizer: ServerOptimizer = "user"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pending = 0
        self.accrued: Tensor | None = None

    def lr_factor(self, workers: int) -> float:
        """Every push counts in full, and is the older the more workers there are."""
        return 1 / workers

    def accrue(self, g: Tensor, local_move: bool) -> None:
        """Add a gradient to those that are still to be pushed, unless it is infinite."""
        if self.accrued is None:
            self.accrued = g.new_zeros(g.shape)
        if not self.replica.overflow:
            self.replica.clip()
            self.accrued += g
            self.pending += 1
            if local_move:
                self.replica.plain_move(g)

    def pushed(self) -> None:
        """Begin to add up anew."""
        self.pending = 0
        if self.accrued is not None:
            self.accrued.zero_()

    @property
    def adapts(self) -> bool:
        """Whether the servers' steps are other than along the gradient."""
        own = type(self.replica.optimizer).__name__ != "SGD"
        return self.server_optimizer == "adagrad" or (self.server_optimizer == "user" and own)

    def open(self, w: Tensor, part: slice) -> None:
        from paceline.master import Master

        self.master = Master(w, part, self.replica, self.server_optimizer)

    def apply(
        self, request: Request, gradient: Tensor, settings: list[float], times: float = 1
    ) -> None:
        """Step with the gradient of a request; of none, do nothing."""
        if request.batches:
            self.master.step(gradient, settings, times)
            self.updated(request)
