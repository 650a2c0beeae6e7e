"""The laws of methods with servers: each push counts once, before it is acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from paceline.lab.faulttest.watched import Observer, around, close, when_made
from paceline.model.gradient import Gradient
from paceline.strategies.cyclic import Cyclic
from paceline.strategies.easgd import EASGD
from paceline.strategies.ring import TOKEN, Seat
from paceline.strategies.served import PushStrategy, ServerStrategy
from paceline.strategies.server import ShardServer
from paceline.strategies.service import Request, unpack
from paceline.strategies.ssp import SSP
from paceline.strategies.toolbox.guard import is_sound
from paceline.training.session import Session

Incarnation = tuple[int, int]
"""A rank and its incarnation."""


@dataclass
class Push:
    """A request of a worker to a server, and its effect.

    Attributes:
        vector: the part of the worker's vector that belongs to the shard.
        request: the numbers that were sent with it.
        lr: the worker's learning rate at that time.
        read: the version of the shard that the worker had read last.
        server_incarnation: the server's incarnation when the request was sent.
        version: the version of the shard that contains the push; None before it is applied.
        moved: by how much it moved the shard.
        ring: how many workers were in the ring: a cyclic move is divided by this.
    """

    vector: Tensor
    request: Request
    lr: float
    read: int
    server_incarnation: int
    version: int | None = None
    moved: Tensor | None = None
    ring: int = 1


@dataclass
class Shadow:
    """What a server's shard must be, computed from the pushes; not always ``predictable``."""

    x: Tensor
    version: int = 0
    buffer: Tensor | None = None
    predictable: bool = True
    acting: Push | None = None


class Pushes(Observer):
    """Each push is applied once, before it is acknowledged; the shard is the sum of its updates."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pushed: dict[tuple[Incarnation, int, int], Push] = {}
        self._read: dict[tuple[Incarnation, int], int] = {}
        self._shadows: dict[int, Shadow] = {}
        self._updates: dict[Incarnation, Tensor] = {}

    def watches(self) -> bool:
        method = self.schedule.method
        return (
            isinstance(method, ServerStrategy)
            and not method.synchronous
            and self.schedule.workers > 1
        )

    def attach(self, session: Session) -> None:
        strategy: Any = session.strategy
        if session.rank >= session.size:
            when_made(strategy, "make_server", self._attach_to_server)
            return
        around(strategy, "send_request", lambda inner, *a, **k: self._send(session, inner, *a, **k))
        around(strategy, "await_reply", lambda inner, *a: self._await_reply(session, inner, *a))
        around(strategy, "fetch", lambda inner, *a: self._fetch(session, inner, *a))
        if isinstance(strategy, PushStrategy):
            around(strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))
            around(strategy, "local_update", lambda inner, g: self._local_update(session, inner, g))
            around(strategy, "flush", lambda inner, x: self._flush(session, inner, x))

    def _attach_to_server(self, server: Any) -> None:
        around(server, "on_request", lambda inner, *a: self._on_request(server, inner, *a))
        around(server, "on_repeat", lambda inner, src: self._on_repeat(inner, src))
        around(server, "updated", lambda inner, r: self._updated(server, inner, r))
        around(server, "publish", lambda inner: self._publish(server, inner))

    def _who(self, rank: int) -> Incarnation:
        return rank, self.scene.incarnation(rank)

    # Workers -------------------------------------------------------------------------------------

    def _step(self, session: Session, inner: Any, x: Tensor, g: Gradient) -> None:
        strategy: Any = session.strategy
        who = self._who(session.rank)
        if strategy.uses_gradient and g.usable:
            decay = 0.1 if self.schedule.optimizer == "decay" else 0.0
            self._add_update(who, g.vector + decay * x)
        elif not strategy.uses_gradient and g.usable and who not in self._updates:
            self._add_update(who, x - strategy.origin)  # the user may have moved x before step one
        inner(x, g)

    def _local_update(self, session: Session, inner: Any, g: Gradient) -> None:
        assert session.stepper is not None
        x = session.stepper.replica.flat.x
        before = x.clone()
        inner(g)
        self._add_update(self._who(session.rank), x - before)

    def _add_update(self, who: Incarnation, update: Tensor) -> None:
        self._updates[who] = update + self._updates[who] if who in self._updates else update

    def _send(
        self,
        session: Session,
        inner: Any,
        shard: int,
        vector: Tensor,
        request: Request,
        **flags: bool,
    ) -> bool:
        strategy: Any = session.strategy
        who, server = self._who(session.rank), session.size + shard
        push = Push(
            vector[strategy.parts[shard]].clone(),
            request,
            strategy.replica.lrs()[0],
            self._read.get((who, shard), 0),
            self.scene.incarnation(server),
        )
        self.scene.check(
            is_sound(push.vector), "finite", lambda: f"rank {who[0]} sends {push.vector.tolist()}"
        )
        self._pushed[who, shard, strategy.services[shard].number + 1] = push
        sent: bool = inner(shard, vector, request, **flags)
        if not sent:
            del self._pushed[who, shard, strategy.services[shard].number + 1]
        return sent

    def _await_reply(self, session: Session, inner: Any, shard: int, x: Tensor) -> Any:
        strategy: Any = session.strategy
        who, number = self._who(session.rank), strategy.services[shard].number
        push = self._pushed[who, shard, number]
        reply = inner(shard, x)
        version = reply.version
        if reply.accepted and push.request.batches:
            self.scene.check(
                push.version is not None and push.version <= version,
                "acknowledged means applied",
                lambda: (
                    f"push {number} of rank {who[0]} was acknowledged at version {version}"
                    + (
                        " and never applied"
                        if push.version is None
                        else f", applied at {push.version}"
                    )
                ),
            )
        if push.moved is not None:
            self._compare_moves(who, push, x[strategy.parts[shard]], session.size + shard)
        self._note_version(who, shard, version)
        if not reply.accepted:
            self.scene.sites["push refused"] += 1
        return reply

    def _compare_moves(self, who: Incarnation, push: Push, move: Tensor, server: int) -> None:
        """A worker moves as far as the center did; not at all if a successor forgot it."""
        assert push.moved is not None
        no_record = push.server_incarnation < self.scene.incarnation(server) and not move.any()
        self.scene.check(
            no_record or close(move, push.moved),
            "an exchange keeps the sum",
            lambda: f"rank {who[0]} moves by {move.tolist()}, the center by {push.moved}",
        )

    def _fetch(self, session: Session, inner: Any, x: Tensor, comm: Any) -> Any:
        reply, strategy = inner(x, comm), cast(ServerStrategy, session.strategy)
        for shard, version in enumerate(strategy.versions):
            self._note_version(self._who(session.rank), shard, version)
        return reply

    def _note_version(self, who: Incarnation, shard: int, version: int) -> None:
        before = self._read.get((who, shard), 0)
        self.scene.check(
            version >= before, "versions", f"rank {who[0]} saw version {version} after {before}"
        )
        self._read[who, shard] = version

    def _flush(self, session: Session, inner: Any, x: Tensor) -> None:
        """After a flush, each update of this incarnation is in the model, or lost with a server."""
        inner(x)
        who, strategy = self._who(session.rank), cast(ServerStrategy, session.strategy)
        expected = self._updates.get(who, torch.zeros_like(x))
        moves = isinstance(strategy, Cyclic) and strategy.moves
        mean = isinstance(strategy, Cyclic) and strategy.scale == "mean" and not moves
        total = torch.zeros_like(x)
        for (pusher, shard, _), push in self._pushed.items():
            if pusher == who and push.request.batches and self._counts(push, session.size + shard):
                times = push.request.batches if mean else 1.0
                total[strategy.parts[shard]] += times * push.vector
        self.scene.check(
            close(total, expected),
            f"every {'move' if moves else 'gradient'} counts once",
            lambda: f"rank {who[0]} made {expected.tolist()}, pushed {total.tolist()}",
        )

    def _counts(self, push: Push, server: int) -> bool:
        """Whether a push is in the model, or was lost with a server and asked for no reply."""
        lost = not push.request.reply and push.server_incarnation < self.scene.incarnation(server)
        return push.version is not None or lost

    # Servers -------------------------------------------------------------------------------------

    def _on_request(
        self, server: ShardServer, inner: Any, src: int, request: Request, vector: Tensor
    ) -> None:
        who, number = self._who(src), request.number
        shadow = self._shadow(server)
        key = (who, server.comm.rank - server.method.workers, number)
        push = self._pushed.get(key)
        if push is None:
            self.scene.check(False, "fence", f"rank {src} never sent the request {number}")
            return
        self.scene.check(
            torch.equal(push.vector, vector), "messages", f"request {number} of rank {src} changed"
        )
        shadow.acting, push.ring = push, len({*server.present(), src})
        inner(src, request, vector)
        shadow.acting = None

    def _on_repeat(self, inner: Any, src: int) -> None:
        self.scene.sites["push asked again"] += 1
        inner(src)

    def _updated(self, server: ShardServer, inner: Any, request: Request) -> None:
        shadow, before = self._shadow(server), server.method.stale.total
        push, version = shadow.acting, server.version
        assert push is not None, "an update without a request"
        if not isinstance(server.method, EASGD):
            age = version - push.read
            self.scene.check(age >= 0, "staleness", f"{age}")
            inner(request)
            counted = server.method.stale.total - before
            self.scene.check(counted == age, "staleness", f"counted {counted}, and is {age}")
        else:
            inner(request)
        self.scene.check(
            server.version == version + 1, "versions", f"{server.version} after {version}"
        )

    def _publish(self, server: ShardServer, inner: Any) -> None:
        inner()
        shadow = self._shadow(server)
        if shadow.version == server.version:
            self._compare(server, shadow)
            return
        push = shadow.acting
        self.scene.check(
            push is not None and server.version == shadow.version + 1,
            "versions",
            f"version {server.version} was published after {shadow.version}",
        )
        assert push is not None
        self.scene.check(
            push.version is None,
            "a push counts once",
            f"the push in version {push.version} was applied again for {server.version}",
        )
        push.version = shadow.version = server.version
        self._apply(server, shadow, push)
        self._compare(server, shadow)

    def _shadow(self, server: ShardServer) -> Shadow:
        rank = server.comm.rank
        if rank not in self._shadows:
            self._shadows[rank] = Shadow(server.shard.clone())
        return self._shadows[rank]

    def _apply(self, server: ShardServer, shadow: Shadow, push: Push) -> None:
        """Apply a push to the shadow by the paper's formula."""
        strategy: Any = server.method
        w, before = shadow.x, shadow.x.clone()
        if isinstance(strategy, EASGD):
            w += strategy.moving_rate * (push.vector - w)
            push.moved = w - before
            return
        if isinstance(strategy, Cyclic) and strategy.moves:
            w += push.vector / push.ring
            return
        kind, user = strategy.server_optimizer, self.schedule.optimizer
        if kind == "adagrad" or (kind == "user" and user == "adam"):
            shadow.predictable = False
            return
        with_momentum = kind == "momentum" or (kind == "user" and user == "momentum")
        momentum, step = 0.9 if with_momentum else 0.0, push.vector
        if momentum:
            if self.scene.incarnation(server.comm.rank) > 1:
                shadow.predictable = False  # a successor starts from older buffers
            shadow.buffer = step if shadow.buffer is None else momentum * shadow.buffer + step
            step = shadow.buffer
        w -= push.lr * step

    def _compare(self, server: ShardServer, shadow: Shadow) -> None:
        if not shadow.predictable:
            shadow.x = server.shard.clone()
        self.scene.check(
            close(server.shard, shadow.x),
            "the shard is the sum of its updates",
            lambda: (
                f"at version {server.version} it is {server.shard.tolist()}"
                f" and not {shadow.x.tolist()}"
            ),
        )

    def ended(self) -> None:
        """A worker that finishes with a version of a shard has the vector of that version."""
        for rank, x in self.scene.finished.items():
            strategy: Any = self.scene.workers[rank].strategy
            for shard, part in enumerate(strategy.parts):
                shadow = self._shadows[self.schedule.workers + shard]
                if strategy.versions[shard] == shadow.version:
                    self.scene.check(
                        close(x[part], shadow.x),
                        "the answer is the servers' model",
                        f"rank {rank} ends with {x[part].tolist()}, not {shadow.x.tolist()}",
                    )
                elif not self.world.lost and not self.world.arrivals:
                    self.scene.check(
                        False,
                        "the answer is the servers' model",
                        f"rank {rank} ends with version {strategy.versions[shard]},"
                        f" the last is {shadow.version}",
                    )


class ElasticMoves(Observer):
    """EASGD: the center moves towards a worker as far as the worker moves towards the center."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._moves: dict[Incarnation, Tensor] = {}
        self._pulls: dict[Incarnation, Tensor] = {}
        self._starts: dict[Incarnation, Tensor] = {}

    def watches(self) -> bool:
        method = self.schedule.method
        plain = isinstance(method, EASGD) and not method.momentum
        return plain and self.schedule.workers > 1

    def attach(self, session: Session) -> None:
        if session.rank >= session.size:
            return
        strategy: Any = session.strategy
        around(strategy, "local_update", lambda inner, g: self._local_update(session, inner, g))
        around(
            strategy, "exchange", lambda inner, v, x, **n: self._exchange(session, inner, v, x, n)
        )
        around(strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))

    def _local_update(self, session: Session, inner: Any, g: Gradient) -> None:
        assert session.stepper is not None
        x, who = (
            session.stepper.replica.flat.x,
            (session.rank, self.scene.incarnation(session.rank)),
        )
        before = x.clone()
        inner(g)
        self._moves[who] = x - before

    def _exchange(self, session: Session, inner: Any, v: Tensor, x: Tensor, numbers: Any) -> None:
        inner(v, x, **numbers)
        replies = self._starts if numbers.get("join") else self._pulls
        replies[session.rank, self.scene.incarnation(session.rank)] = x.clone()

    def _step(self, session: Session, inner: Any, x: Tensor, g: Gradient) -> None:
        who, before = (session.rank, self.scene.incarnation(session.rank)), x.clone()
        self._pulls.pop(who, None)
        self._starts.pop(who, None)
        inner(x, g)
        before = self._starts.get(who, before)  # after a dropped pull it restarts from the center
        expected = before + self._moves[who] - self._pulls.get(who, torch.zeros_like(x))
        self.scene.check(
            close(x, expected),
            "an exchange keeps the sum",
            lambda: f"rank {who[0]} is at {x.tolist()}, not {expected.tolist()}",
        )


class Bound(Observer):
    """SSP: the server lets nobody continue who is further ahead of the slowest than the bound."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._clocks: dict[tuple[int, int], float] = {}
        self._numbers: dict[tuple[int, int], float] = {}
        self._finished: set[tuple[int, int]] = set()
        self._joined: dict[tuple[int, int], int] = {}

    def watches(self) -> bool:
        return isinstance(self.schedule.method, SSP) and self.schedule.workers > 1

    def attach(self, session: Session) -> None:
        if session.rank < session.size:
            return
        when_made(session.strategy, "make_server", self._attach_to_server)

    def _attach_to_server(self, server: Any) -> None:
        around(server, "on_request", lambda inner, *a: self._on_request(server, inner, *a))
        around(server, "reply", lambda inner, src: self._reply(server, inner, src))

    def _on_request(self, server: Any, inner: Any, src: int, request: Request, *rest: Any) -> None:
        shard = server.comm.rank
        if request.join:
            self._finished.discard((shard, src))
            self._joined[shard, src] = self.scene.incarnation(src)
            self._clocks[shard, src] = self._slowest(shard, src)
        elif request.number > self._numbers.get((shard, src), 0):
            self._clocks[shard, src] = self._clocks.get((shard, src), 0) + 1
        self._numbers[shard, src] = request.number
        if request.last:
            self._finished.add((shard, src))
        inner(src, request, *rest)
        if request.join:  # a lost worker that the server still counts may be slower
            clock = server.clocks[src]
            self._clocks[shard, src] = min(self._clocks[shard, src], clock)

    def _slowest(self, shard: int, excluded: int = -1) -> float:
        clocks = [
            self._clocks.get((shard, rank), 0)
            for rank in range(self.schedule.workers)
            if rank != excluded
            and (shard, rank) not in self._finished
            and self._is_here(shard, rank)
        ]
        return min(clocks, default=self._clocks.get((shard, excluded), 0))

    def _is_here(self, shard: int, rank: int) -> bool:
        """Whether a worker is a member, or has told the server that it will be one."""
        incarnation = self._joined.get((shard, rank), 0)
        return rank in self.world.alive() or (
            incarnation > 0 and not self.scene.was_lost(rank, incarnation)
        )

    def _reply(self, server: Any, inner: Any, src: int) -> None:
        shard, bound = server.comm.rank, server.method.bound
        ahead = self._clocks.get((shard, src), 0) - self._slowest(shard, src)
        if (shard, src) not in self._finished:
            self.scene.check(ahead <= bound, "bound", f"rank {src} goes on, {ahead} steps ahead")
        inner(src)


class Tokens(Observer):
    """Cyclic: there is at most one valid token, its generation grows, and it follows the ring."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generation = 0

    def watches(self) -> bool:
        return isinstance(self.schedule.method, Cyclic) and self.schedule.workers > 1

    def attach(self, session: Session) -> None:
        if session.rank == session.size:
            when_made(session.strategy, "make_server", self._attach_to_server)

    def _attach_to_server(self, server: Any) -> None:
        around(server, "reply", lambda inner, *a, **k: self._reply(server, inner, *a, **k))
        around(server, "regenerate", lambda inner: self._regenerate(server, inner))

    def _regenerate(self, server: Any, inner: Any) -> None:
        before, self._generation = self._generation, server.generation + 1
        self.scene.check(
            self._generation > before, "token", f"generation {self._generation} after {before}"
        )
        self.scene.sites["token made anew"] += 1
        inner()

    def _reply(self, server: Any, inner: Any, src: int, *rest: Any, **fields: Any) -> None:
        next_worker = fields.get("next_worker", -1)
        if fields.get("accepted", True) and next_worker >= 0:
            ring = [rank for rank, clock in enumerate(server.clocks) if clock >= 0]
            after = sorted(ring, key=lambda rank: (rank <= src, rank))
            self.scene.check(
                next_worker == after[0], "ring", f"after rank {src} comes {next_worker} of {ring}"
            )
        inner(src, *rest, **fields)

    def after_operation(self) -> None:
        holders = []
        for rank in self.world.alive():
            if rank < self.schedule.workers and rank in self.scene.workers:
                seat: Seat | None = getattr(self.scene.workers[rank].strategy, "seat", None)
                holders += [rank] if seat and seat.generation == self._generation else []
                senders = self.world.inboxes[rank]._queues.get(TOKEN, {})
                holders += [
                    rank
                    for queue in senders.values()
                    for message in queue
                    if unpack(message.header)[0] == self._generation
                ]
        self.scene.check(
            len(holders) <= 1, "token", f"generation {self._generation} is at {holders}"
        )
