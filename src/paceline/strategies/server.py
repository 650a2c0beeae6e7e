"""A server's side of methods with servers: it applies each request once, and replies.

A server handles one request after the other and never waits for a worker: one that is slow, stopped
or dead delays nobody. A server publishes what its successor has to know: its vector and the ledger,
which holds the number of the last request of each worker. A worker that got no reply from a lost
server sends its request again to the successor, and the ledger says whether it was applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from paceline.comm.ports import SAVED, Lost
from paceline.errors import PeerLost
from paceline.strategies.service import (
    ADOPT,
    CALL,
    DROPPED,
    REPLY,
    REQUEST,
    Numbered,
    Reply,
    Request,
    last_published,
    pack,
    unpack,
)
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.strategies.served import PushStrategy, RoleStrategy, ServerStrategy

ABSENT = -1
"""In place of its clock: the worker does not take part."""
SAVED_EVERY = 16
"""Updates after which a server saves the buffers of its optimizer for a successor."""


class Server(ABC):
    """What runs on a rank that is no worker.

    Args:
        method: the strategy of this rank.

    Attributes:
        comm: the whole world.
        clients: the ranks whose messages and losses the server receives.
        over: whether to stop serving; a server also stops when all clients are gone.
    """

    method: RoleStrategy

    def __init__(self, method: RoleStrategy) -> None:
        self.method, self.comm = method, method.comm
        self.clients = self.comm.group([*range(method.workers), self.comm.rank])
        self.over = False

    def serve(self) -> None:
        """Handle requests, until every client is gone."""
        like = self.method.vector_at(self.comm.rank)
        while not self.over:
            received = self.clients.receive_any(like, REQUEST)
            if isinstance(received, Lost):
                self.on_leave(received.src)
                continue
            message = Numbered.of(received)
            if message.number == CALL:
                call, stop, *_ = unpack(message.body)
                self.method.listener.summoned(call, bool(stop))
            else:
                self.on_message(received.src, message)

    @abstractmethod
    def on_message(self, worker: int, message: Numbered) -> None:
        """Apply a request, unless that was done before, and reply."""

    @abstractmethod
    def on_leave(self, worker: int) -> None:
        """Called when a client was lost, or has departed."""

    @abstractmethod
    def succeed(self) -> dict[str, Any]:
        """Take the place of a lost server; return what the run's record says about it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this server."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""

    def publish_first(self) -> None:  # noqa: B027 - not every server publishes
        """Called after the start: let workers read the vector that they begin with."""

    def on_resume(self) -> None:  # noqa: B027 - likewise
        """Called after the state of a checkpoint was taken up; some workers may be missing."""


class ShardServer(Server):
    """A server that holds a shard of the model, which requests change.

    A method with servers writes :meth:`on_request`, and where it needs to :meth:`on_repeat`,
    :meth:`on_leave` and :meth:`size_of`.

    Attributes:
        shard: the vector. Change it in place.
        version: how many updates are in it.
        done: the ledger: of each worker, the number of its last request that was applied.
        clocks: of each worker, a number for the method to use; ``ABSENT``: it does not take part.
        generation: a number for the method to use. A successor takes over all of these.
    """

    method: ServerStrategy
    generation: int = 0

    def __init__(self, method: ServerStrategy) -> None:
        super().__init__(method)
        self.comm.clock.mark_as_server()
        self.shard = method.vector_at(self.comm.rank)  # no model is trained on this rank
        self.version = 0
        self.done = [0] * method.workers
        first = method.first_workers()
        self.clocks = [0 if rank in first else ABSENT for rank in range(method.workers)]
        self._dropped_from: set[int] = set()

    @abstractmethod
    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        """Apply a new request, and reply."""

    def on_repeat(self, worker: int) -> None:
        """Reply again to a request that was applied; the first reply was lost with a server."""
        self.reply(worker)

    def on_leave(self, worker: int) -> None:
        self.clocks[worker] = ABSENT

    def size_of(self, vector: Tensor) -> float:
        """The norm of the change that the vector of a request would make, for the guard."""
        return norm(vector)

    def kind_of(self, request: Request) -> str:
        """What the guard knows the vector of a request as."""
        return "update"

    # What a method uses --------------------------------------------------------------------------

    def present(self) -> list[int]:
        """The workers that take part."""
        return [worker for worker, clock in enumerate(self.clocks) if clock != ABSENT]

    def updated(self, request: Request) -> None:
        """Count an update of the shard, charge its time, and publish the shard."""
        self.comm.clock.charge_update(self.shard.nbytes)
        self.method.stale.note(self.version - request.version)
        self.version += 1
        self.publish()

    def publish(self) -> None:
        """Let workers read the shard, and a successor the ledger."""
        header = pack(*self._reply(), *self.done, *self.clocks, self.generation)
        self.clients.board.publish(self.shard, header)

    def reply(
        self,
        worker: int,
        vector: Tensor | None = None,
        accepted: bool = True,
        next_worker: int = -1,
    ) -> None:
        """Post the shard, or another vector, to a worker; a lost worker does not need it."""
        verdict = DROPPED if accepted and worker in self._dropped_from else accepted
        self._dropped_from.discard(worker)
        reply = self._reply()._replace(
            number=self.done[worker], accepted=verdict, next_worker=next_worker
        )
        content = self.shard if vector is None else vector
        self.clients.board.post(content, worker, REPLY, pack(*reply))

    def _reply(self) -> Reply:
        stale = self.method.stale
        return Reply(0, self.version, 1, -1, stale.count, stale.total, stale.maximum)

    # The protocol --------------------------------------------------------------------------------

    def publish_first(self) -> None:
        self.publish()

    def on_message(self, worker: int, message: Numbered) -> None:
        request = Request.of(message)
        if request.number <= self.done[worker] and not request.join:
            self.on_repeat(worker)
            return
        self.done[worker] = request.number
        if request.join == ADOPT:
            self.shard.copy_(message.vector)
            self.publish()
            self.reply(worker)
            return
        self.on_request(worker, self._judged(worker, request, message.vector), message.vector)

    def _judged(self, worker: int, request: Request, vector: Tensor) -> Request:
        """The request; with nothing to apply, if the guard drops its vector."""
        guard = self.method.guard
        what = self.kind_of(request)
        if not request.batches or guard.admits(self.size_of(vector), worker, what):
            return request
        self._dropped_from.add(worker)
        return request._replace(batches=0)

    def succeed(self) -> dict[str, Any]:
        """Take over the shard and the ledger that the lost server published last."""
        workers, rank = self.method.workers, self.comm.rank
        left = last_published(self.comm, [rank], self.shard)
        if left is None:
            raise PeerLost(rank, "the start of a server", "it left nothing", 0.0)
        reply, ledger = Reply.of(left), [*unpack(left.header)[len(Reply._fields) :]]
        self.version, self.method.stale = reply.version, reply.staleness
        self.done, self.clocks = ledger[:workers], ledger[workers : 2 * workers]
        self.generation = ledger[2 * workers]
        self.shard.copy_(left.vector)
        facts = self.take_over()
        self.publish()
        return {"version": self.version, **facts}

    def take_over(self) -> dict[str, Any]:
        """Called in a successor that has the shard and the ledger; for what else a method has."""
        return {}

    def on_resume(self) -> None:
        """Forget the workers that had been lost when the checkpoint was made."""
        for worker in set(self.present()) - set(self.comm.members.starters()):
            self.on_leave(worker)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._state} | {"shard": self.shard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard.copy_(state["shard"])
        for name in self._state:
            setattr(self, name, state[name])

    _state = ("version", "generation", "done", "clocks")


class GradientServer(ShardServer):
    """A server that steps its shard with gradients, by an optimizer of its own.

    Attributes:
        optimizer: of the shard.
    """

    method: PushStrategy

    def __init__(self, method: PushStrategy) -> None:
        from paceline.strategies.toolbox.shard_optimizer import ShardOptimizer

        super().__init__(method)
        part, kind = method.parts[self.comm.rank - method.workers], method.server_optimizer
        self.optimizer = ShardOptimizer(self.shard, part, method.replica, kind, method.coupled)

    def step(self, request: Request, gradient: Tensor, times: float | None = 1) -> None:
        """Step with the vector of a request, if it has one.

        It counts for ``times`` gradients; None: it is a mean.
        """
        if request.batches:
            self.optimizer.step(gradient, request.hyperparameters, times)
            self.updated(request)

    def kind_of(self, request: Request) -> str:
        """Updates of several optimizers may be of very different sizes."""
        parts = self.method.replica.parts
        if len(parts) == 1:
            return super().kind_of(request)
        shares = request.hyperparameters[-len(parts) :]
        stepped = [str(part.number) for part, share in zip(parts, shares, strict=True) if share]
        return f"update of optimizer {', '.join(stepped)}"

    def updated(self, request: Request) -> None:
        super().updated(request)
        if self.version % SAVED_EVERY == 0 and (buffers := self.optimizer.buffers()) is not None:
            self.comm.board.publish(buffers, window=SAVED)

    def take_over(self) -> dict[str, Any]:
        """Take over the buffers of the optimizer as they were last saved."""
        left = self.comm.board.peek(self.comm.rank, window=SAVED, gone=True)
        if left is not None:
            self.optimizer.load_buffers(left.x)
        return {"buffers_behind": self.version % SAVED_EVERY}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])
