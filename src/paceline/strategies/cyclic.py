"""Cyclic updates: a token goes round, and its holder pushes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.common.options import at_least
from paceline.errors import UsageError
from paceline.strategies.about import About
from paceline.strategies.ring import RingStrategy, TokenServer
from paceline.strategies.server import GradientServer
from paceline.strategies.service import Request
from paceline.strategies.toolbox.guard import is_sound, norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient

PLAIN = {"scale": "mean", "local_move": False, "server_optimizer": "user"}
"""What options of gradients are where there are none to push."""


@dataclass(kw_only=True)
class Cyclic(RingStrategy):
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
    """

    paper: ClassVar[str] = "Hu et al., PRCV 2018"
    about = About(
        faults="""A slow worker lets the others go on, until they have max_accumulated and wait
        for it (the fixed method always waits). When the holder is dead, or stopped for too
        long, the server makes a new token of a higher generation for the next worker, and
        refuses pushes under an older one; what they brought stays with their worker until its
        next turn. Who has come to its end is skipped. A worker that comes late fetches the
        model and enters the ring at its place. A lost server is followed by another, which goes
        on where it was, with a new token.""",
        bytes="""Each turn sends and is sent the size of the model (and a few numbers), and
        passes on a token of 16.""",
        when_to_use="""Machines of lastingly unequal speed, and a link to the server that must
        not choke. The token is looked for when a mini-batch ends, so that equal workers bring
        about p/2 batches to each turn. Moves do not mind, and want the learning rate of one
        large batch (factor 1). Gradients do: the means of c batches, p - 1 updates old, want
        about 1/p of that rate (factor 1/p), and come c times less far with the same samples;
        max_accumulated=1 suits them.""",
        reference="""Hu et al., "Dynamic delay based cyclic gradient update method for
        distributed training", PRCV 2018; fixed: Langford, Smola, Zinkevich, "Slow learners are
        fast", NIPS 2009.""",
    )
    state: ClassVar[tuple[str, ...]] = ("origin",)

    form: Literal["move", "gradient"] = "move"
    max_accumulated: int = 16
    scale: Literal["mean", "sum"] = "mean"
    local_move: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("max_accumulated", self.max_accumulated, 1)
        for name, plain in PLAIN.items() if self.moves else ():
            if (value := getattr(self, name)) != plain:
                raise UsageError(f"{name} ({value}) must be {plain} unless form is gradient")
        self.origin: Tensor | None = None

    @property
    def uses_gradient(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return not self.moves

    @property
    def moves(self) -> bool:
        """Whether workers push their moves, and not gradients."""
        return self.form == "move"

    @property
    def adds_up(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return not self.moves  # which count for their share

    def make_server(self) -> TokenServer:
        return MoveServer(self) if self.moves else TurnServer(self)

    def step(self, x: Tensor, g: Gradient) -> None:
        self.steps += 1
        if not self.moves:
            self.accrue(g, self.local_move)  # a_i <- a_i + g_i, c_i <- c_i + 1
        elif g.usable:
            self.local_update(g)  # x_i <- optimizer(x_i, g_i)
            self.pending += 1
        self.look_for_turn(x, g)

    @property
    def is_full(self) -> bool:
        return self.pending >= self.max_accumulated

    def bring(self, x: Tensor) -> Tensor:
        """The move of this worker since its last turn, or its gradients."""
        if self.origin is None:
            a = x if self.accrued is None else self.accrued
            return self.mean(a) if self.pending and self.scale == "mean" else a  # a_i / c_i
        move = x - self.origin  # x_i - o_i
        if self.pending and not self._admits(move):
            self.replica.forget_moments()
            self.pending = 0
            x.copy_(self.origin)
            move.zero_()
        return move

    def _admits(self, move: Tensor) -> bool:
        """Whether a move is good; what a worker did before it was set aside still counts."""
        if self.comm.rank in self.guard.aside:
            return is_sound(move)
        return self.guard.admits(norm(move), self.comm.rank, "move")

    def begin_at(self, x: Tensor) -> None:
        if self.moves:
            self.origin = x.clone() if self.origin is None else self.origin.copy_(x)  # o_i <- w

    def keep(self, a: Tensor, x: Tensor) -> None:
        """Make the move that was refused again, from the model that the first server sent."""
        if self.origin is not None:
            first = self.parts[0]
            self.origin[first].copy_(x[first])
            x[first].add_(a[first])


class MoveServer(TokenServer):
    """Moves its shard by the move of the token's holder, divided by the workers in the ring."""

    def take(self, worker: int, request: Request, vector: Tensor) -> None:
        if request.batches:
            ring = {*self.present(), worker}  # p workers
            self.shard.add_(vector, alpha=1 / len(ring))  # w <- w + (x_i - o_i) / p
            self.updated(request)


class TurnServer(TokenServer, GradientServer):
    """Steps its shard with the gradients of the token's holder."""

    method: Cyclic

    def take(self, worker: int, request: Request, vector: Tensor) -> None:
        counts_for = request.batches if self.method.scale == "sum" else None
        self.step(request, vector, counts_for)  # w <- optimizer(w, a_i / c_i)
