"""What methods with servers share: which ranks serve, and how workers reach them.

On a rank that is no worker the strategy makes a :class:`~paceline.strategies.server.Server`, and
runs it. On a worker it has a :class:`~paceline.strategies.service.Service` for each server.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.common.options import at_least, at_most
from paceline.errors import PeerLost, PeersGone
from paceline.model.gradient import Gradient
from paceline.model.hyperparameters import read_hyperparameters
from paceline.strategies.base import SERVER, WORKER, Role, Strategy
from paceline.strategies.service import (
    ADOPT,
    CALL,
    DROPPED,
    INCARNATION,
    REQUEST,
    REQUEST_NUMBERS,
    Numbered,
    Reply,
    Request,
    Service,
    pack,
)

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm
    from paceline.strategies.server import Server

ServerOptimizer = Literal["user", "sgd", "momentum", "adagrad"]
MOST_SHARDS = 10_000


@dataclass(kw_only=True)
class RoleStrategy(Strategy):
    """A method with ranks that are no workers: each of them runs a server.

    Attributes:
        services: on a worker, one for each server that it sends requests to.
        server: on a rank that is no worker, what runs there.
    """

    resumable: ClassVar[bool] = False
    state: ClassVar[tuple[str, ...]] = ("requests",)

    @abstractmethod
    def make_server(self) -> Server:
        """The server of this rank, whose parameters are those of rank 0 by now."""

    @abstractmethod
    def make_services(self) -> list[Service]:
        """On a worker: one service for each server that it sends requests to."""

    @property
    @abstractmethod
    def request_numbers(self) -> int:
        """How many numbers of 8 bytes the header of a request has."""

    def vector_at(self, server: int) -> Tensor:
        """The part of this rank's parameters that goes to that server, and comes from it."""
        return self.replica.flat.x

    @property
    def serves(self) -> bool:
        """Whether this rank is no worker."""
        return self.comm.rank >= self.workers

    def bind(self, *args: Any, **named: Any) -> None:
        super().bind(*args, **named)
        self.connect()

    def connect(self) -> None:
        """Begin to send requests, for the first time or anew."""
        self.services = [] if self.serves else self.make_services()

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        if self.serves:
            self.server = self.make_server()
            self.server.publish_first()

    def adopt(self, x: Tensor) -> None:
        self.comm.group(self.first_workers()).broadcast(x)

    def rejoin(self, x: Tensor) -> None:
        self.connect()
        super().rejoin(x)

    def serve(self, x: Tensor) -> None:
        self.server.serve()

    def succeed(self) -> dict[str, Any]:
        """In place of ``setup``, on a rank that follows a lost server.

        What it returns, in particular how much was lost, goes into the run's record.
        """
        self.server = self.make_server()
        return self.server.succeed()

    def summon(self, rank: int, number: int, stop: bool) -> None:
        """Have the server on ``rank`` call ``listener.summoned``.

        The worker does not wait for the server, which may be in a round that waits for this worker.
        """
        call = pack(CALL, number, stop).ljust(8 * self.request_numbers, b"\0")
        message = (self.vector_at(rank), rank, REQUEST, call)
        if not self.comm.board.post(*message):
            self.comm.send(*message)

    @property
    def requests(self) -> list[int]:
        """The number of the last request to each server."""
        return [service.number for service in self.services]

    @requests.setter
    def requests(self, numbers: list[int]) -> None:
        """Count on from these."""
        for service, number in zip(self.services, numbers, strict=True):
            service.number = number

    def state_dict(self) -> dict[str, Any]:
        return self.server.state_dict() if self.serves else super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.server.load_state_dict if self.serves else super().load_state_dict)(state)


@dataclass(kw_only=True)
class ServerStrategy(RoleStrategy):
    """A method whose model lives on servers, cut into ``shards``: one server rank each.

    Subclasses say when workers send requests, and make the
    :class:`~paceline.strategies.server.ShardServer` that replies.

    Attributes:
        steps: of this worker.
        versions: of each shard, the one that this worker read last.
    """

    synchronous: ClassVar[bool] = False
    state: ClassVar[tuple[str, ...]] = ("steps", "versions")

    shards: int = 1

    def __post_init__(self) -> None:
        at_least("shards", self.shards, 1)
        at_most("shards", self.shards, MOST_SHARDS)
        self.steps = 0
        self.versions = [0] * self.shards

    def roles(self, workers: int) -> tuple[Role, ...]:
        return (WORKER,) * workers + (SERVER,) * self.shards

    def make_services(self) -> list[Service]:
        servers = range(self.workers, self.workers + self.shards)
        return [Service(self.comm, rank, self.vector_at(rank)) for rank in servers]

    @cached_property
    def parts(self) -> list[slice]:
        """What of the model each server holds."""
        numel = self.replica.flat.x.numel()
        edges = [numel * shard // self.shards for shard in range(self.shards + 1)]
        return [slice(*pair) for pair in pairwise(edges)]

    def vector_at(self, server: int) -> Tensor:
        return self.replica.flat.x[self.parts[server - self.workers]]

    def hyperparameters(self) -> tuple[float, ...]:
        """The numbers of this worker's optimizer that go with a request.

        Those of groups that it got in mid-run do not: servers do not know these.
        """
        return tuple(read_hyperparameters(self.replica.optimizer)[: self._settings])

    @cached_property
    def _settings(self) -> int:
        """How many numbers the optimizer had at the start."""
        return len(read_hyperparameters(self.replica.optimizer))

    @cached_property
    def request_numbers(self) -> int:
        return REQUEST_NUMBERS + len(self.hyperparameters())

    # What a method is written with ---------------------------------------------------------------

    def send_request(self, shard: int, vector: Tensor, request: Request, must: bool = True) -> bool:
        """Send a request; unless it ``must`` arrive, return False if the server has no room."""
        body = request._replace(hyperparameters=self.hyperparameters()).body
        return self.services[shard].send_request(body, vector[self.parts[shard]], must)

    def await_reply(self, shard: int, x: Tensor) -> Reply:
        """Wait for a reply, and copy its vector into ``x``."""
        reply = self._take(shard, self.services[shard].await_reply(), x)
        self.guard.hear(self.workers + shard, reply.accepted == DROPPED)
        return reply

    def exchange(
        self, vector: Tensor, x: Tensor, batches: int = 1, last: int = 0, join: int = 0
    ) -> None:
        """Send ``vector`` to the servers, and copy their replies into ``x``."""
        for shard, version in enumerate(self.versions):
            request = Request(version=version, batches=batches, last=last, join=join)
            self.send_request(shard, vector, request)
        for shard in range(self.shards):
            self.await_reply(shard, x)

    def fetch(self, x: Tensor, comm: Comm) -> Reply:
        """Copy the model that the servers last published into ``x``; they do nothing for it."""
        for shard, service in enumerate(self.services):
            reply = self._take(shard, service.peek(comm), x)
        return reply

    def _take(self, shard: int, message: Numbered, x: Tensor) -> Reply:
        x[self.parts[shard]].copy_(message.vector)
        reply = Reply.of(message)
        self.versions[shard] = reply.version
        return reply

    # The verbs of a worker -----------------------------------------------------------------------

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self.starters().barrier()  # from here on there is a model to fetch

    def adopt(self, x: Tensor) -> None:
        workers = self.comm.group(self.first_workers())
        workers.broadcast(x)
        if workers.rank == 0:
            self.exchange(x, x, batches=0, join=ADOPT)
        workers.barrier()  # nobody sends the servers another request before

    def join(self, x: Tensor) -> None:
        own = self.comm.members.incarnation(self.comm.rank)  # the ledger knows earlier ones
        for service in self.services:
            service.number = service.number or INCARNATION * own
        try:
            self.exchange(x, x, batches=0, join=1)
        except PeerLost:
            raise PeersGone from None  # the servers have departed, as all workers had

    def answer(self, x: Tensor) -> Tensor:
        versions, model = [*self.versions], x.clone()
        self.fetch(model, self.comm.group(metered=False))
        self.versions = versions
        return model

    def flush(self, x: Tensor) -> None:
        """At the end: hand in what is left, and have the servers apply it before this returns."""

    def finish(self, x: Tensor) -> None:
        self.flush(x)
        self.among_live(lambda workers: workers.barrier())
        self.stale = self.fetch(x, self.comm.group(metered=False)).staleness


@dataclass(kw_only=True)
class PushStrategy(ServerStrategy):
    """A method whose workers push gradients to servers that have an optimizer of their own.

    Servers do not know which parameters had no gradient in a step: those count as zero there. A
    gradient is clipped by its worker, before it is pushed; then the worker adds weight decay to it,
    if the parameter has one, at the model that it was computed at. Only where decay is no part of
    the gradient, as in AdamW, does the server shrink its model by ``lr * weight_decay``, for each
    gradient in a push. With a push goes, for each parameter, the share of its gradients that
    include the parameter.

    Attributes:
        pending: the gradients that are still to be pushed.
        given: in how many of them each parameter has one; and of several optimizers, how many are
            those of each.
        accrued: their sum.
    """

    adds_up: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("pending", "given", "accrued")

    server_optimizer: ServerOptimizer = "user"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pending = 0
        self.given: list[int] = []
        self.accrued: Tensor | None = None

    @cached_property
    def coupled(self) -> list[bool]:
        """Of each optimizer, whether weight decay is in its gradients."""
        optimizers = self.replica.optimizers
        user = self.server_optimizer == "user"
        return self.replica.decay_is_coupled() if user else [True] * len(optimizers)

    @property
    def fixed_groups(self) -> str:  # type: ignore[override]  # a class attribute elsewhere
        name = type(self).__name__
        why = f"the servers of {name} step with the parameter groups that they knew at the start"
        return why if self.uses_gradient else ""

    @property
    def adapts(self) -> bool:
        """Whether the servers' steps are other than along the gradient."""
        own = any(type(each).__name__ != "SGD" for each in self.replica.optimizers)
        return self.server_optimizer == "adagrad" or (self.server_optimizer == "user" and own)

    def hyperparameters(self) -> tuple[float, ...]:
        own = super().hyperparameters()
        if not self.uses_gradient:
            return own
        given = self.given or [0] * len(self._given_in(Gradient()))
        return *own, *(count / max(1, self.pending) for count in given)

    def _given_in(self, g: Gradient) -> list[bool]:
        """What :attr:`given` counts of one gradient."""
        spans, parts = self.replica.flat.spans, self.replica.parts
        present = [] if all(self.coupled) else g.present or [False] * len(spans)
        stepped = [part is g.part for part in parts] if self.replica.several else []
        return [*present, *stepped]

    def mean(self, total: Tensor) -> Tensor:
        """The mean of the gradients that were added up; of each optimizer, of its own."""
        if not self.replica.several:
            return total / self.pending
        mean, parts = total.clone(), self.replica.parts
        for part, count in zip(parts, self.given[-len(parts) :], strict=True):
            mean[part.place].div_(max(1, count))
        return mean

    def accrue(self, g: Gradient, local_move: bool) -> None:
        """Add a gradient to those that are still to be pushed, if it is usable."""
        if self.accrued is None:
            self.accrued = g.vector.new_zeros(g.vector.shape)
        if g.usable:
            v = self.prepared(g)
            self.accrued += v
            self.pending += 1
            if local_move:
                self.replica.plain_move(v)

    def prepared(self, g: Gradient) -> Tensor:
        """A gradient as it is pushed: clipped, and with its weight decay."""
        g, now = self.replica.clip(g), self._given_in(g)
        before = self.given or [0] * len(now)
        self.given = [count + has for count, has in zip(before, now, strict=True)]
        return self.replica.decayed(g) if self.coupled[g.part.number] else g.vector

    def pushed(self) -> None:
        """Clear what was pushed."""
        self.pending = 0
        self.given = []
        if self.accrued is not None:
            self.accrued.zero_()
