"""Cyclic updates: a token goes round, and its holder pushes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.common.options import at_least
from paceline.errors import PeerLost, UsageError
from paceline.strategies.served import ABSENT, GradientServed, Request, ServerStrategy
from paceline.strategies.toolbox.guard import is_sound, norm

if TYPE_CHECKING:
    from torch import Tensor

TOKEN = 3
PLAIN = {"scale": "mean", "local_move": False, "server_optimizer": "user"}
"""What options of gradients are where there are none to push."""


@dataclass(kw_only=True)
class Cyclic(GradientServed):
    r"""Cyclic: workers push to the server in turn, as a token goes round among them.

    Only the holder of the token pushes, so that the server's link is used by one worker at a time
    and what it pushes is exactly p - 1 updates old. Meanwhile the others go on: with the dynamic
    delay a fast worker brings more batches to its turn, and waits for nobody.

    There are two forms. ``move``, the default, is this library's: between its turns a worker steps
    with the user's own optimizer, and the server's model then goes 1/p of the way that it went.
    ``gradient`` is the paper's: a worker adds up gradients at the model that it has read, and the
    server steps with them.

    =======  =====================================================================
    symbol   here
    =======  =====================================================================
    w        the servers' model
    o_i      what worker i read of it at its last turn
    p        the workers in the ring: those that are lost, or at their end, are not
    a_i      the sum of the gradients since worker i's last turn, c_i their number
    =======  =====================================================================

    .. math::
        \text{move: } x_i \leftarrow \mathrm{optimizer}(x_i, g_i(x_i)) \qquad
        \text{with the token: }
        w \leftarrow w + (x_i - o_i) / p,\ x_i, o_i \leftarrow w

    .. math::
        \text{gradient: } a_i \leftarrow a_i + g_i(x_i),\ c_i \leftarrow c_i + 1 \qquad
        \text{with the token: }
        w \leftarrow \mathrm{optimizer}(w, a_i / c_i),\ x_i \leftarrow w,\ a_i, c_i \leftarrow 0

    Args:
        form: ``move`` or ``gradient``.
        max_accumulated: mini-batches after which a worker waits for the token; 1 is the fixed
            cyclic method.
        scale: of gradients: ``mean`` pushes a/c, ``sum`` pushes a.
        local_move: of gradients: whether a worker moves its own model, by lr * g, between turns.
        server_optimizer: of gradients: as for Downpour, weight decay included.
        shards: servers, each with an equal part of the model.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     x = torch.tensor([1.0 + worker.rank])
        ...     model(x).backward()  # gradients 1 and 2
        ...     sgd.step()
        ...     worker.log(weight=model.weight.item())
        >>> fixed = "cyclic(max_accumulated=1)"
        >>> run = pl.simulate(train, workers=2, strategy=fixed)
        >>> [m["weight"] for m in run.metrics]  # each goes half its way
        [-0.5, -1.5]

    Faults: a slow worker lets the others go on, until they have ``max_accumulated`` and wait for
    it (the fixed method always waits). When the holder is dead, or stopped for too long, the server
    makes a new token of a higher generation for the next worker, and refuses pushes under an older
    one; what they brought stays with their worker until its next turn. Who has come to its end is
    skipped. A worker that comes late fetches the model and enters the ring at its place. A lost
    server is followed by another, which goes on where it was, with a new token.

    Bytes: each turn sends and is sent the size of the model (and a few numbers), and passes on a
    token of 16.

    When to use: machines of lastingly unequal speed, and a link to the server that must not choke.
    The token is looked for when a mini-batch ends, so that equal workers bring about p/2 batches to
    each turn. Moves do not mind, and want the learning rate of one large batch (factor 1).
    Gradients do: the means of c batches, p - 1 updates old, want about 1/p of that rate (factor
    1/p), and come c times less far with the same samples; ``max_accumulated=1`` suits them.

    Reference: Hu et al., "Dynamic delay based cyclic gradient update method for distributed
    training", PRCV 2018; fixed: Langford, Smola, Zinkevich, "Slow learners are fast", NIPS 2009.
    """

    paper: ClassVar[str] = "Hu et al., PRCV 2018"
    state: ClassVar[tuple[str, ...]] = (
        "steps",
        "versions",
        "pending",
        "accrued",
        "origin",
        "token",
        "met",
        "called",
    )

    form: Literal["move", "gradient"] = "move"
    max_accumulated: int = 16
    scale: Literal["mean", "sum"] = "mean"
    local_move: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("max_accumulated", self.max_accumulated, 1)
        if self.moves:
            for name, plain in PLAIN.items():
                if (value := getattr(self, name)) != plain:
                    raise UsageError(f"{name} ({value}) must be {plain} unless form is gradient")
        self.origin: Tensor | None = None
        self.token: int | None = None
        self.met = self.called = 0

    @property
    def moves(self) -> bool:
        """Whether workers push how far they went, and not gradients."""
        return self.form == "move"

    @property
    def uses_gradient(self) -> bool:
        return not self.moves

    def lr_factor(self, workers: int) -> float:
        """Moves count for their share; gradients in full, and the older the more workers."""
        return 1.0 if self.moves else super().lr_factor(workers)

    def payload(self, steps: int, nbytes: int, workers: int) -> int | None:
        if self.max_accumulated > 1:
            return None
        turns = workers * (steps + 1)
        tokens = turns - 1
        return turns * self.exchange_bytes(nbytes) + 16 * tokens + nbytes * (workers + self.shards)

    def exchange_bytes(self, nbytes: int) -> int:
        """What one turn sends, beside the token."""
        return 2 * nbytes + self.request_overhead + self.reply_overhead

    def settings(self) -> list[float]:
        return ServerStrategy.settings(self) if self.moves else super().settings()

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self._begin_at(x)
        if self.comm.rank == self.comm.starters()[0]:
            self.token = 0

    def step(self, x: Tensor, g: Tensor | None) -> None:
        self.steps += 1
        if g is not None:
            self.accrue(g, self.local_move)
        elif not self.replica.overflow:
            self.local_update()
            self.pending += 1
        self._look_for_token()
        self.go_on(x)

    def go_on(self, x: Tensor) -> None:
        """Take a turn, if there is a token or it must be waited for; a meeting comes before."""
        while self.token is not None or self.pending >= self.max_accumulated:
            if self.token is None and self.called > self.met:
                return
            if self.token is None:
                self._wait_for_token()
            elif not (self.pending or self.replica.dropped) or self._take_turn(x, last=False):
                return

    def before_meeting(self, number: int) -> None:
        """Who waits for the token, which this worker may have, is told not to."""
        self.met = number
        for peer in self.live_workers():
            if peer != self.comm.rank:
                self.comm.post(self._token(-number), peer, TOKEN)

    def adopt(self, x: Tensor) -> None:
        super().adopt(x)
        self._begin_at(x)

    def join(self, x: Tensor) -> None:
        super().join(x)
        self._begin_at(x)

    def flush(self, x: Tensor) -> None:
        """Wait for the token once more: hand in the rest, and leave the ring."""
        self._look_for_token()
        while self.token is None or not self._take_turn(x, last=True):
            self._wait_for_token()
        self.token = None

    def _look_for_token(self) -> None:
        for _, message in self.comm.poll(self._token(), TOKEN):
            self._receive(message)

    def _wait_for_token(self) -> None:
        src, message = self.comm.recv_or_loss(self._token(), TOKEN)
        if message is not None:
            self._receive(message)
        elif src >= self.workers:  # who follows makes a new token
            self.find_successor(src, self.comm.lost_life(src))

    def _receive(self, message: Tensor) -> None:
        generation = int(message[0])
        if generation < 0:  # a call to a meeting
            self.called = max(self.called, -generation)
            return
        self.token = generation if self.token is None else max(self.token, generation)

    def _take_turn(self, x: Tensor, last: bool) -> bool:
        """Push and fetch, then pass the token on; False when it is not valid any more."""
        assert self.token is not None
        a = self._to_push(x)
        self._push(0, a, last)
        first = self.hear(0, x)
        if not first.accepted:
            self.token = None
            self._go_once_more(a, x)
            return False
        for shard in range(1, self.shards):
            self._push(shard, a, last)
        for shard in range(1, self.shards):
            self.hear(shard, x)
        self.pushed()
        self._begin_at(x)
        self._pass_on(round(first.successor), last)
        return True

    def _to_push(self, x: Tensor) -> Tensor:
        """The way from where this worker has begun; or its gradients since."""
        if self.origin is None:
            a = x if self.accrued is None else self.accrued
            return a / self.pending if self.pending and self.scale == "mean" else a
        way = x - self.origin
        if self.pending and not self._admits(way):
            self.replica.forget_moments()
            self.pending = 0
            x.copy_(self.origin)
            way.zero_()
        return way

    def _admits(self, way: Tensor) -> bool:
        """Whether a way is good; once this worker is set aside, what it went before counts."""
        if self.comm.rank in self.guard.aside:
            return is_sound(way)
        return self.guard.admits(norm(way), self.comm.rank, "move")

    def _begin_at(self, x: Tensor) -> None:
        if self.moves:
            self.origin = x.clone() if self.origin is None else self.origin.copy_(x)

    def _go_once_more(self, way: Tensor, x: Tensor) -> None:
        """Go the way that was refused from the model that the first server has sent instead."""
        if self.origin is not None:
            part = self.parts[0]
            self.origin[part].copy_(x[part])
            x[part].add_(way[part])

    def _push(self, shard: int, a: Tensor, last: bool) -> None:
        assert self.token is not None
        version = self.versions[shard]
        request = Request(version=version, batches=self.pending, token=self.token, last=last)
        self.ask(shard, a, request)

    def _token(self, generation: int = 0, version: int = 0) -> Tensor:
        """The message that a token is."""
        return self.replica.flat.x.new_empty(0).double().new_tensor([generation, version])

    def _pass_on(self, successor: int, last: bool) -> None:
        """Pass the token on; while there is no room for it, keep it for another turn."""
        if successor in (self.comm.rank, -1):
            return
        assert self.token is not None
        generation, self.token = self.token, None
        message = self._token(generation, self.versions[0])
        if self.comm.post(message, successor, TOKEN):
            return
        if not last:
            self.token = generation
            return
        with suppress(PeerLost):
            self.comm.send(message, successor, TOKEN)

    # A server's side -----------------------------------------------------------------------------

    def open(self, w: Tensor, part: slice) -> None:
        if not self.moves:
            super().open(w, part)
        self.holder, self.giver, self.owes = min(self.listed()), -1, False

    def server_state(self) -> dict[str, Any]:
        own = {"holder": self.holder, "giver": self.giver, "owes": self.owes}
        return {**super().server_state(), **own}

    def load_server_state(self, state: dict[str, Any]) -> None:
        super().load_server_state(state)
        self.holder, self.giver, self.owes = state["holder"], state["giver"], state["owes"]

    def take_over(self) -> dict[str, Any]:
        facts = super().take_over()
        alive = self.live_workers()
        for worker in self.listed():
            if worker not in alive:
                self.marks[worker] = ABSENT
        self.holder = min(self.listed(), default=-1)
        self._make_token()
        return facts

    def act(self, src: int, request: Request, vector: Tensor, settings: list[float]) -> None:
        if request.join:
            self._enter(src)
        elif request.token < self.era and self._judges():
            self.reply(src, accepted=False)
            if self.owes and src == self.holder:
                self._give_token()
        else:
            if request.last:
                self.marks[src] = ABSENT
            self._take(src, request, vector, settings)
            if request.last:
                self.publish()
            self.giver, self.holder = src, self._after(src)
            self.reply(src, successor=self.holder)

    def _take(self, src: int, request: Request, vector: Tensor, settings: list[float]) -> None:
        """Move as far as its worker did, divided by those in the ring; or step with a gradient."""
        if not self.moves:
            self.apply(request, vector, settings, self._decays(request))
        elif request.batches:
            self.shelf.vector.add_(vector, alpha=1 / len({*self.listed(), src}))
            self.updated(request)

    def gone(self, src: int) -> None:
        super().gone(src)
        if self.holder == src:
            self.holder = self._after(src)
            self._make_token()
        elif self.giver == src:  # it may not have come to pass the token on
            self._make_token()

    def _enter(self, src: int) -> None:
        self.marks[src] = 0
        self.publish()
        self.reply(src)
        if self.holder < 0:
            self.holder = src
            self._make_token()

    def _make_token(self) -> None:
        """Make a token of a higher generation, which the books keep, and give it to the holder."""
        self.era += 1
        self.publish()
        self.giver = -1
        if self.holder >= 0 and self._judges():
            self._give_token()

    def _give_token(self) -> None:
        """Give the token to the holder; later, if that has not taken its mail yet."""
        message = self._token(self.era, self.version)
        self.owes = not self.desk.post(message, self.holder, TOKEN)

    def _judges(self) -> bool:
        """Whether this is the server that says which token is valid."""
        return self.comm.rank == self.workers

    def _after(self, src: int) -> int:
        """Who comes next in the ring; -1 when nobody is left."""
        ring = self.listed()
        return next((rank for rank in ring if rank > src), min(ring, default=-1))

    def _decays(self, request: Request) -> float:
        return request.batches if self.scale == "sum" else 1
