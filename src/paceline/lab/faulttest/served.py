"""The laws of methods with servers: what was pushed counts once, and who asked sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from paceline.lab.faulttest.watched import Observer, around, close
from paceline.strategies.cyclic import TOKEN, Cyclic
from paceline.strategies.easgd import EASGD
from paceline.strategies.served import GradientServed, Request, ServerStrategy
from paceline.strategies.ssp import SSP
from paceline.strategies.toolbox.guard import is_sound
from paceline.training.session import Session

Who = tuple[int, int]
"""A rank and which of its lives."""


@dataclass
class Push:
    """What a worker handed to a server, and what became of it.

    Attributes:
        vector: its part of the vector.
        request: the numbers that went with it.
        lr: the rate that it was made with.
        read: the version of the shard that the worker had read last.
        server_life: of the server that it was handed to.
        version: of the shard, once it is in it.
        moved: by how much it moved the shard.
        ring: how many there are to divide a move by.
    """

    vector: Tensor
    request: Request
    lr: float
    read: int
    server_life: int
    version: int | None = None
    moved: Tensor | None = None
    ring: int = 1


@dataclass
class Shadow:
    """What a server's shard must be: the updates in it, made once more."""

    x: Tensor
    version: int = 0
    buffer: Tensor | None = None
    known: bool = True
    acting: Push | None = None


class Pushes(Observer):
    """Each push is applied once, before it is acknowledged; the shard is what they add up to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pushed: dict[tuple[Who, int, int], Push] = {}
        self._read: dict[tuple[Who, int], int] = {}
        self._shadows: dict[int, Shadow] = {}
        self._made: dict[Who, Tensor] = {}

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
            around(strategy, "act", lambda inner, *a: self._act(strategy, inner, *a))
            around(strategy, "repeat", lambda inner, src: self._repeat(inner, src))
            around(strategy, "updated", lambda inner, r: self._updated(strategy, inner, r))
            around(strategy, "publish", lambda inner: self._publish(strategy, inner))
            return
        around(strategy, "ask", lambda inner, *a, **k: self._ask(session, inner, *a, **k))
        around(strategy, "hear", lambda inner, *a: self._hear(session, inner, *a))
        around(strategy, "fetch", lambda inner, *a: self._fetch(session, inner, *a))
        if isinstance(strategy, GradientServed):
            around(strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))
            around(strategy, "local_update", lambda inner: self._local_update(session, inner))
            around(strategy, "flush", lambda inner, x: self._flush(session, inner, x))

    def _who(self, rank: int) -> Who:
        return rank, self.scene.life(rank)

    # Workers -------------------------------------------------------------------------------------

    def _step(self, session: Session, inner: Any, x: Tensor, g: Tensor | None) -> None:
        assert session.stepper is not None
        strategy: Any = session.strategy
        who = self._who(session.rank)
        if g is None and who not in self._made:  # it may have been moved before its first step
            self._make(who, x - strategy.origin)
        elif g is not None and not session.stepper.replica.overflow:  # which counts as none
            decay = 0.1 if self.schedule.optimizer == "decay" else 0.0
            self._make(who, g + decay * x)
        inner(x, g)

    def _local_update(self, session: Session, inner: Any) -> None:
        assert session.stepper is not None
        x = session.stepper.replica.flat.x
        before = x.clone()
        inner()
        self._make(self._who(session.rank), x - before)

    def _make(self, who: Who, what: Tensor) -> None:
        self._made[who] = what + self._made[who] if who in self._made else what

    def _ask(
        self,
        session: Session,
        inner: Any,
        shard: int,
        vector: Tensor,
        request: Request,
        **how: bool,
    ) -> bool:
        strategy: Any = session.strategy
        who, server = self._who(session.rank), session.size + shard
        push = Push(
            vector[strategy.parts[shard]].clone(),
            request,
            strategy.replica.lrs()[0],
            self._read.get((who, shard), 0),
            self.scene.life(server),
        )
        self.scene.check(
            is_sound(push.vector), "finite", lambda: f"rank {who[0]} sends {push.vector.tolist()}"
        )
        self._pushed[who, shard, strategy.asked[shard] + 1] = push
        left: bool = inner(shard, vector, request, **how)
        if not left:
            del self._pushed[who, shard, strategy.asked[shard] + 1]
        return left

    def _hear(self, session: Session, inner: Any, shard: int, x: Tensor) -> Any:
        strategy: Any = session.strategy
        who, number = self._who(session.rank), strategy.asked[shard]
        push = self._pushed[who, shard, number]
        reply = inner(shard, x)
        version = round(reply.version)
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
        self._saw(who, shard, version)
        if not reply.accepted:
            self.scene.sites["push refused"] += 1
        return reply

    def _compare_moves(self, who: Who, push: Push, move: Tensor, server: int) -> None:
        """A worker is told to move as far as the center did; not at all, if that was forgotten."""
        assert push.moved is not None
        forgotten = push.server_life < self.scene.life(server) and not move.any()
        self.scene.check(
            forgotten or close(move, push.moved),
            "an exchange keeps the sum",
            lambda: f"rank {who[0]} moves by {move.tolist()}, the center by {push.moved}",
        )

    def _fetch(self, session: Session, inner: Any, x: Tensor, comm: Any) -> Any:
        reply, strategy = inner(x, comm), cast(ServerStrategy, session.strategy)
        for shard, version in enumerate(strategy.versions):
            self._saw(self._who(session.rank), shard, version)
        return reply

    def _saw(self, who: Who, shard: int, version: int) -> None:
        before = self._read.get((who, shard), 0)
        self.scene.check(
            version >= before, "versions", f"rank {who[0]} saw version {version} after {before}"
        )
        self._read[who, shard] = version

    def _flush(self, session: Session, inner: Any, x: Tensor) -> None:
        """Afterwards, what this life has made is all in the model, or lost with a server."""
        inner(x)
        who, strategy = self._who(session.rank), cast(ServerStrategy, session.strategy)
        expected = self._made.get(who, torch.zeros_like(x))
        moves = isinstance(strategy, Cyclic) and strategy.moves
        mean = isinstance(strategy, Cyclic) and strategy.scale == "mean" and not moves
        total = torch.zeros_like(x)
        for (whose, shard, _), push in self._pushed.items():
            if whose == who and push.request.batches and self._counts(push, session.size + shard):
                times = push.request.batches if mean else 1.0
                total[strategy.parts[shard]] += times * push.vector
        self.scene.check(
            close(total, expected),
            f"every {'move' if moves else 'gradient'} counts once",
            lambda: f"rank {who[0]} made {expected.tolist()}, pushed {total.tolist()}",
        )

    def _counts(self, push: Push, server: int) -> bool:
        """Whether a push is in the model, or was lost with a server that nobody heard of it."""
        unheard = not push.request.reply and push.server_life < self.scene.life(server)
        return push.version is not None or unheard

    # Servers -------------------------------------------------------------------------------------

    def _act(
        self,
        strategy: Any,
        inner: Any,
        src: int,
        request: Request,
        vector: Tensor,
        settings: list[float],
    ) -> None:
        who, number = self._who(src), round(request.number)
        shadow = self._shadow(strategy)
        key = (who, strategy.comm.rank - strategy.workers, number)
        push = self._pushed.get(key)
        if push is None:
            self.scene.check(False, "fence", f"rank {src} never sent the request {number}")
            return
        self.scene.check(
            torch.equal(push.vector, vector), "messages", f"request {number} of rank {src} changed"
        )
        shadow.acting, push.ring = push, len({*strategy.listed(), src})
        inner(src, request, vector, settings)
        shadow.acting = None

    def _repeat(self, inner: Any, src: int) -> None:
        self.scene.sites["push asked again"] += 1
        inner(src)

    def _updated(self, strategy: Any, inner: Any, request: Request) -> None:
        shadow, before = self._shadow(strategy), strategy.stale.total
        push, version = shadow.acting, strategy.version
        assert push is not None, "an update without a request"
        if not isinstance(strategy, EASGD):
            age = version - push.read
            self.scene.check(age >= 0, "staleness", f"{age}")
            inner(request)
            noted = strategy.stale.total - before
            self.scene.check(noted == age, "staleness", f"noted {noted}, and is {age}")
        else:
            inner(request)
        self.scene.check(
            strategy.version == version + 1, "versions", f"{strategy.version} after {version}"
        )

    def _publish(self, strategy: Any, inner: Any) -> None:
        inner()
        shadow = self._shadow(strategy)
        if shadow.version == strategy.version:
            self._compare(strategy, shadow)
            return
        push = shadow.acting
        self.scene.check(
            push is not None and strategy.version == shadow.version + 1,
            "versions",
            f"version {strategy.version} was published after {shadow.version}",
        )
        assert push is not None
        self.scene.check(
            push.version is None,
            "a push counts once",
            f"what is in version {push.version} was applied again for {strategy.version}",
        )
        push.version = shadow.version = strategy.version
        self._apply(strategy, shadow, push)
        self._compare(strategy, shadow)

    def _shadow(self, strategy: Any) -> Shadow:
        rank = strategy.comm.rank
        if rank not in self._shadows:
            self._shadows[rank] = Shadow(strategy.shelf.vector.clone())
        return self._shadows[rank]

    def _apply(self, strategy: Any, shadow: Shadow, push: Push) -> None:
        """Make the update of a push, as the paper has it."""
        w, before = shadow.x, shadow.x.clone()
        if isinstance(strategy, EASGD):
            w += strategy.moving_rate * (push.vector - w)
            push.moved = w - before
            return
        if isinstance(strategy, Cyclic) and strategy.moves:
            w += push.vector / push.ring
            return
        kind, own = strategy.server_optimizer, self.schedule.optimizer
        if kind == "adagrad" or (kind == "user" and own == "adam"):
            shadow.known = False
            return
        momentum = 0.9 if kind == "momentum" or (kind == "user" and own == "momentum") else 0.0
        step = push.vector
        if momentum:
            if self.scene.life(strategy.comm.rank) > 1:
                shadow.known = False  # a successor has the buffers of a while ago
            shadow.buffer = step if shadow.buffer is None else momentum * shadow.buffer + step
            step = shadow.buffer
        w -= push.lr * step

    def _compare(self, strategy: Any, shadow: Shadow) -> None:
        if not shadow.known:
            shadow.x = strategy.shelf.vector.clone()
        self.scene.check(
            close(strategy.shelf.vector, shadow.x),
            "the shard is the sum of its updates",
            lambda: (
                f"at version {strategy.version} it is {strategy.shelf.vector.tolist()}"
                f" and not {shadow.x.tolist()}"
            ),
        )

    def ended(self) -> None:
        """Who ends with a version of the shard ends with that shard."""
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


class Elastic(Observer):
    """EASGD: what a worker moves towards the center, the center moves towards the worker."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._moves: dict[Who, Tensor] = {}
        self._heard: dict[Who, Tensor] = {}
        self._begun: dict[Who, Tensor] = {}

    def watches(self) -> bool:
        method = self.schedule.method
        plain = isinstance(method, EASGD) and not method.sync and not method.momentum
        return plain and self.schedule.workers > 1

    def attach(self, session: Session) -> None:
        if session.rank >= session.size:
            return
        strategy: Any = session.strategy
        around(strategy, "local_update", lambda inner: self._local_update(session, inner))
        around(
            strategy, "exchange", lambda inner, v, x, **n: self._exchange(session, inner, v, x, n)
        )
        around(strategy, "step", lambda inner, x, g: self._step(session, inner, x, g))

    def _local_update(self, session: Session, inner: Any) -> None:
        assert session.stepper is not None
        x, who = session.stepper.replica.flat.x, (session.rank, self.scene.life(session.rank))
        before = x.clone()
        inner()
        self._moves[who] = x - before

    def _exchange(self, session: Session, inner: Any, v: Tensor, x: Tensor, numbers: Any) -> None:
        inner(v, x, **numbers)
        heard = self._begun if numbers.get("join") else self._heard
        heard[session.rank, self.scene.life(session.rank)] = x.clone()

    def _step(self, session: Session, inner: Any, x: Tensor, g: Tensor | None) -> None:
        who, before = (session.rank, self.scene.life(session.rank)), x.clone()
        self._heard.pop(who, None)
        self._begun.pop(who, None)
        inner(x, g)
        before = self._begun.get(who, before)  # whose pulls count for nothing begins anew
        expected = before + self._moves[who] - self._heard.get(who, torch.zeros_like(x))
        self.scene.check(
            close(x, expected),
            "an exchange keeps the sum",
            lambda: f"rank {who[0]} is at {x.tolist()} and not {expected.tolist()}",
        )


class Bound(Observer):
    """SSP: nobody is let go on who is further ahead of the slowest than the bound."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._clocks: dict[tuple[int, int], float] = {}
        self._numbers: dict[tuple[int, int], float] = {}
        self._over: set[tuple[int, int]] = set()
        self._joined: dict[tuple[int, int], int] = {}

    def watches(self) -> bool:
        return isinstance(self.schedule.method, SSP) and self.schedule.workers > 1

    def attach(self, session: Session) -> None:
        if session.rank < session.size:
            return
        strategy: Any = session.strategy
        around(strategy, "act", lambda inner, *a: self._act(strategy, inner, *a))
        around(strategy, "reply", lambda inner, src: self._reply(strategy, inner, src))

    def _act(self, strategy: Any, inner: Any, src: int, request: Request, *rest: Any) -> None:
        shard = strategy.comm.rank
        if request.join:
            self._over.discard((shard, src))
            self._joined[shard, src] = self.scene.life(src)
            self._clocks[shard, src] = self._slowest(shard, src)
        elif request.number > self._numbers.get((shard, src), 0):
            self._clocks[shard, src] = self._clocks.get((shard, src), 0) + 1
        self._numbers[shard, src] = request.number
        if request.last:
            self._over.add((shard, src))
        inner(src, request, *rest)
        if request.join:  # one that the server has not missed yet may be slower
            mark = float(strategy.marks[src])
            self._clocks[shard, src] = min(self._clocks[shard, src], mark)

    def _slowest(self, shard: int, but: int = -1) -> float:
        clocks = [
            self._clocks.get((shard, rank), 0)
            for rank in range(self.schedule.workers)
            if rank != but and (shard, rank) not in self._over and self._is_here(shard, rank)
        ]
        return min(clocks, default=self._clocks.get((shard, but), 0))

    def _is_here(self, shard: int, rank: int) -> bool:
        """Whether a worker is a member, or is about to be one and has told the server so."""
        life = self._joined.get((shard, rank), 0)
        return rank in self.world.alive() or (life > 0 and not self.scene.is_over(rank, life))

    def _reply(self, strategy: Any, inner: Any, src: int) -> None:
        shard = strategy.comm.rank
        ahead = self._clocks.get((shard, src), 0) - self._slowest(shard, src)
        if (shard, src) not in self._over:
            self.scene.check(
                ahead <= strategy.bound, "bound", f"rank {src} goes on, {ahead} steps ahead"
            )
        inner(src)


class Tokens(Observer):
    """Cyclic: one valid token at most, a generation that grows, and the order of the ring."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._era = 0

    def watches(self) -> bool:
        return isinstance(self.schedule.method, Cyclic) and self.schedule.workers > 1

    def attach(self, session: Session) -> None:
        strategy: Any = session.strategy
        if session.rank == session.size:
            around(strategy, "reply", lambda inner, *a, **k: self._reply(strategy, inner, *a, **k))
            around(strategy, "_make_token", lambda inner: self._make(strategy, inner))

    def _make(self, strategy: Any, inner: Any) -> None:
        before, self._era = self._era, strategy.era + 1
        self.scene.check(self._era > before, "token", f"generation {self._era} after {before}")
        self.scene.sites["token made anew"] += 1
        inner()

    def _reply(self, strategy: Any, inner: Any, src: int, *rest: Any, **how: Any) -> None:
        successor = how.get("successor", -1)
        if how.get("accepted", True) and successor >= 0:
            ring = [rank for rank, mark in enumerate(strategy.marks.tolist()) if mark >= 0]
            after = sorted(ring, key=lambda rank: (rank <= src, rank))
            self.scene.check(
                successor == after[0], "ring", f"after rank {src} comes {successor} of {ring}"
            )
        inner(src, *rest, **how)

    def looked(self) -> None:
        held = []
        for rank in self.world.alive():
            if rank < self.schedule.workers and rank in self.scene.workers:
                strategy: Any = self.scene.workers[rank].strategy
                held += [rank] if strategy.token == self._era else []
                senders = self.world.inboxes[rank]._queues.get(TOKEN, {})
                held += [
                    rank
                    for queue in senders.values()
                    for message in queue
                    if int(message.x[0]) == self._era
                ]
        self.scene.check(len(held) <= 1, "token", f"of generation {self._era} have one: {held}")
