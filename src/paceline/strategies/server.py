"""A server's side of methods with servers: it acts upon each request once, and answers.

A server answers one request after the other and never waits for a worker: one that is slow, stopped
or dead delays nobody. What a successor has to know it publishes: its vector, and the ledger, which
holds the number of the last request of each worker. Workers that had no answer from a lost server
ask its successor again, and the ledger tells whether their request was acted upon.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from paceline.comm.ports import Lost
from paceline.errors import PeerLost
from paceline.strategies.service import (
    ADOPT,
    CALL,
    DROPPED,
    INCARNATION,
    REPLY,
    REQUEST,
    Message,
    Reply,
    Request,
    decode,
    encode,
    last_published,
    published_numbers,
    room_for,
)
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.strategies.served import PushStrategy, RoleStrategy, ServerStrategy

ABSENT = -1
"""In place of its clock: the worker is no client."""
KEPT_EVERY = 16
"""Updates after which a server saves the buffers of its optimizer for a successor."""


class Server(ABC):
    """What runs on a rank that is no worker.

    Args:
        method: the strategy of this rank.

    Attributes:
        comm: the whole world; ``clients``: those whose messages and losses are heard.
        over: whether there is nothing more to serve; else it ends when all clients are gone.
    """

    method: RoleStrategy

    def __init__(self, method: RoleStrategy) -> None:
        self.method, self.comm = method, method.comm
        self.clients = self.comm.group([*range(method.workers), self.comm.rank])
        self.over = False

    def serve(self) -> None:
        """Answer requests, until every client has left."""
        numbers, like = self.method.request_numbers, self.method.vector_at(self.comm.rank)
        room = room_for(numbers, like)
        while not self.over:
            got = self.clients.receive_any(room, REQUEST)
            if isinstance(got, Lost):
                self.on_leave(got.rank)
                continue
            worker, message = got.src, decode(got.x, numbers, like)
            if message.number == CALL:
                self.method.listener.summoned(round(message.numbers[1]), bool(message.numbers[2]))
            else:
                self.on_message(worker, message)

    @abstractmethod
    def on_message(self, worker: int, message: Message) -> None:
        """Act upon a request, if that was not done before, and answer it."""

    @abstractmethod
    def on_leave(self, worker: int) -> None:
        """Hear that a client has died, or left."""

    @abstractmethod
    def succeed(self) -> dict[str, Any]:
        """Go on where a lost server was; return what the run's record tells of it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this server."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""

    def publish_first(self) -> None:  # noqa: B027 - not every server has something to show
        """Let workers read the vector that they begin with."""

    def on_resume(self) -> None:  # noqa: B027 - likewise
        """Hear that the state of a checkpoint is there again; some workers may not be."""


class ShardServer(Server):
    """A server that holds a shard of the model, which its requests move.

    Subclasses write :meth:`on_request`.

    Attributes:
        shard: the vector. Move it in place.
        version: how many updates are in it.
        done: the ledger: the number of the last request of each worker that was acted upon.
        clocks: a number of each client that the method makes use of; ``ABSENT`` of others.
        generation: a number that the method makes use of. A successor goes on with all of these.
        missed: how many requests of workers were lost with a server.
    """

    method: ServerStrategy
    generation: int = 0

    def __init__(self, method: ServerStrategy) -> None:
        super().__init__(method)
        self.comm.clock.mark_as_server()
        self.shard = method.vector_at(self.comm.rank).clone()
        self.version = self.missed = 0
        self.done = [0] * method.workers
        first = method.first_workers()
        self.clocks = [0 if rank in first else ABSENT for rank in range(method.workers)]
        self._dropped_from: set[int] = set()

    # What a method with a server writes ----------------------------------------------------------

    @abstractmethod
    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        """Act upon a new request, and answer it."""

    def on_leave(self, worker: int) -> None:
        self.clocks[worker] = ABSENT

    def on_repeat(self, worker: int) -> None:
        """Answer a request once more; the first answer was lost with a server."""
        self.reply(worker)

    def size_of(self, vector: Tensor) -> float:
        """The norm of what the vector of a request would do to the shard."""
        return norm(vector)

    # What it is written with ---------------------------------------------------------------------

    def present(self) -> list[int]:
        """The workers that take part."""
        return [worker for worker, clock in enumerate(self.clocks) if clock != ABSENT]

    def updated(self, request: Request) -> None:
        """Count an update of the shard, let its time pass, and let others see it."""
        self.comm.clock.charge_update(self.shard.nbytes)
        self.method.stale.note(self.version - round(request.version))
        self.version += 1
        self.publish()

    def publish(self) -> None:
        """Let workers read the shard, and a successor the ledger."""
        numbers = (*self.done, *self.clocks, self.generation, *self._reply())
        self.clients.publish(encode(numbers, self.shard))

    def reply(
        self,
        worker: int,
        vector: Tensor | None = None,
        accepted: bool = True,
        next_worker: int = -1,
    ) -> None:
        """Post the shard, or another vector, to a worker; one that is gone does not need it."""
        verdict = DROPPED if accepted and worker in self._dropped_from else accepted
        self._dropped_from.discard(worker)
        reply = self._reply()._replace(
            number=self.done[worker], accepted=verdict, next_worker=next_worker
        )
        self.clients.post(encode(reply, self.shard if vector is None else vector), worker, REPLY)

    def _reply(self) -> Reply:
        stale = self.method.stale
        return Reply(0, self.version, 1, -1, stale.count, stale.total, stale.maximum)

    # The protocol --------------------------------------------------------------------------------

    def publish_first(self) -> None:
        self.publish()

    def on_message(self, worker: int, message: Message) -> None:
        request, known = Request.of(message), self.done[worker]
        if message.number <= known and not request.join:
            self.on_repeat(worker)
            return
        if not request.join and message.number // INCARNATION == known // INCARNATION:
            self.missed += message.number - known - 1
        self.done[worker] = message.number
        if request.join == ADOPT:
            self.shard.copy_(message.vector)
            self.publish()
            self.reply(worker)
            return
        self.on_request(worker, self._judged(worker, request, message.vector), message.vector)

    def _judged(self, worker: int, request: Request, vector: Tensor) -> Request:
        """The request; without anything to apply, if the guard drops that."""
        guard = self.method.guard
        if not request.batches or guard.admits(self.size_of(vector), worker, "update"):
            return request
        self._dropped_from.add(worker)
        return request._replace(batches=0)

    def succeed(self) -> dict[str, Any]:
        """Go on with the shard and the ledger that the lost server has published last."""
        workers, rank = self.method.workers, self.comm.rank
        left = last_published(self.comm, [rank], published_numbers(workers), self.shard)
        if left is None:
            raise PeerLost(rank, "the start of a server", "it left nothing", 0.0)
        numbers = [*map(round, left.numbers)]
        self.done, self.clocks = numbers[:workers], numbers[workers : 2 * workers]
        self.generation = numbers[2 * workers]
        reply = Reply(*numbers[2 * workers + 1 :])
        self.version, self.method.stale = round(reply.version), reply.staleness
        self.shard.copy_(left.vector)
        facts = self.take_over()
        self.publish()
        return {"version": self.version, **facts}

    def take_over(self) -> dict[str, Any]:
        """Follow a lost server: its shard and its ledger are here."""
        return {}

    def on_resume(self) -> None:
        """Forget the workers that had been lost when the checkpoint was made."""
        for worker in set(self.present()) - set(self.comm.starters()):
            self.on_leave(worker)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._state} | {"shard": self.shard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard.copy_(state["shard"])
        for name in self._state:
            setattr(self, name, state[name])

    _state = ("version", "missed", "generation", "done", "clocks")


class GradientServer(ShardServer):
    """A server that steps its shard with gradients, by an optimizer of its own."""

    method: PushStrategy

    def __init__(self, method: PushStrategy) -> None:
        from paceline.strategies.toolbox.shard_optimizer import ShardOptimizer

        super().__init__(method)
        part, kind = method.parts[self.comm.rank - method.workers], method.server_optimizer
        self.optimizer = ShardOptimizer(self.shard, part, method.replica, kind, method.coupled)

    def step(self, request: Request, gradient: Tensor, times: float = 1) -> None:
        """Step with what a request holds, if anything; it counts for ``times`` gradients."""
        if request.batches:
            self.optimizer.step(gradient, request.hyperparameters, times)
            self.updated(request)

    def updated(self, request: Request) -> None:
        super().updated(request)
        if self.version % KEPT_EVERY == 0 and (buffers := self.optimizer.buffers()) is not None:
            self.comm.save_for_successor(buffers)

    def take_over(self) -> dict[str, Any]:
        """Take up the buffers of the optimizer as they were last saved: none is newer than that."""
        left = self.comm.saved_by_predecessor()
        if left is not None:
            self.optimizer.load_buffers(left)
        return {"buffers_behind": self.version % KEPT_EVERY}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self.optimizer.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.optimizer.optimizer.load_state_dict(state["optimizer"])
