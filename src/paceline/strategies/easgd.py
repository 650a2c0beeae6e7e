"""Elastic averaging: workers are tied to a center by springs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.common.options import at_least, finite
from paceline.errors import UsageError
from paceline.strategies.base import WORKER, Strategy
from paceline.strategies.served import ServerStrategy
from paceline.strategies.server import ShardServer
from paceline.strategies.service import Request
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


@dataclass(kw_only=True)
class EASGD(ServerStrategy):
    r"""EASGD: each worker explores on its own, pulled to a center that is pulled to all of them.

    Every ``interval`` steps a worker moves a little towards the center, and the center as much
    towards the worker. The center, an average over workers and time, is the answer.

    ========  =======================================================================
    symbol    here
    ========  =======================================================================
    tau       ``interval``
    alpha     ``alpha``; ``beta`` / p when not given
    eta       the learning rate of the user's optimizer
    delta     ``momentum``; with it, this is EAMSGD
    c         the center, on the servers; with ``sync``, a copy on every worker
    ========  =======================================================================

    .. math::
        e = \alpha (x_i - c), \quad c \leftarrow c + e, \quad
        x_i \leftarrow x_i - \eta g_i(x_i) - e

    Both terms are of the same x. EAMSGD takes the gradient at a look-ahead point:
    :math:`v \leftarrow \delta v - \eta g_i(x_i + \delta v)`, :math:`x_i \leftarrow x_i + v - e`.

    Args:
        interval: steps between exchanges with the center.
        alpha: the share of the distance that an exchange moves both.
        beta: alpha times the number of workers, where alpha is not given.
        momentum: delta of EAMSGD; the user's optimizer must then have none of its own.
        sync: exchange all at once, by an all-reduce and without a server.
        shards: servers, each with an equal part of the center.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     model(torch.tensor([1.0])).backward()
        ...     sgd.step()
        ...     worker.log(weight=model.weight.item())
        ...     worker.finish()
        ...     worker.log(center=model.weight.item())
        >>> method = "easgd(alpha=0.25, sync=true)"
        >>> run = pl.simulate(train, workers=2, strategy=method)
        >>> [m.get("weight") or m["center"] for m in run.metrics]  # both pull it
        [-1.0, -1.0, -0.5, -0.5]

    Faults: a slow worker exchanges less often and delays nobody. The center goes on without a dead
    or stopped one; what it had found since its last exchange is lost. A worker that comes late
    starts at the center. A lost server is followed by another, with the center as it was last
    published. With ``sync``, a slow worker slows all, a lost one ends the run, naming it, or is
    left out with ``on_loss="continue"``, and one that runs out of data takes part with weight 0.

    Bytes: each worker sends and is sent the size of the model every tau steps (with ``sync`` it
    hands it in), and a few numbers.

    When to use: unequal machines and slow links, with a long interval. The learning rate is that
    of one worker's own batch (factor 1 or less); a large alpha with many workers is unstable.

    Reference: Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NIPS 2015,
    algorithms 1 and 2.
    """

    paper: ClassVar[str] = "Zhang, Choromanska, LeCun, NIPS 2015"
    state: ClassVar[tuple[str, ...]] = (
        "steps",
        "versions",
        "pending",
        "center",
        "velocity",
        "plain",
        "ahead",
    )

    interval: int = 4
    alpha: float | None = None
    beta: float = 0.9
    momentum: float = 0.0
    sync: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("interval", self.interval, 1)
        for name in ("alpha", "beta", "momentum"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 0)
                finite(name, value)
        if self.momentum >= 1:
            raise UsageError(f"momentum ({self.momentum}) must be below 1")
        self.pending = 0
        self.ahead = False
        self.center: Tensor | None = None
        self.velocity: Tensor | None = None
        self.plain: Tensor | None = None

    @property
    def synchronous(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return self.sync

    @property
    def defers(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return self.momentum > 0

    @property
    def uses_gradient(self) -> bool:
        return False

    @property
    def moving_rate(self) -> float:
        """alpha, given or from beta."""
        return self.beta / self.workers if self.alpha is None else self.alpha

    def roles(self, workers: int) -> tuple[str, ...]:
        return (WORKER,) * workers if self.sync else super().roles(workers)

    def payload(self, steps: int, nbytes: int, workers: int) -> int:
        exchanges = -(-steps // self.interval) + (steps > 0)
        if self.sync:
            return nbytes * workers * (1 + exchanges)
        each = 2 * nbytes + self.request_overhead + self.reply_overhead
        return workers * exchanges * each + nbytes * (workers + self.shards)

    def make_server(self) -> CenterServer:
        return CenterServer(self)

    def adopt(self, x: Tensor) -> None:
        if self.sync:
            Strategy.adopt(self, x)
        else:
            super().adopt(x)

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        groups = self.replica.optimizer.param_groups
        if self.momentum and any(g.get("momentum") or "betas" in g for g in groups):
            raise UsageError(
                f"momentum ({self.momentum}) must be 0 where the optimizer has momentum of its own"
            )
        if self.sync:
            self.center = x.clone()

    def settle(self, x: Tensor) -> None:
        """Move to the look-ahead point, where EAMSGD takes its gradient."""
        if self.momentum and not self.ahead:
            if self.velocity is None:
                self.velocity = x.new_zeros(x.shape)
            self.plain = x.clone()
            x.add_(self.velocity, alpha=self.momentum)
            self.ahead = True

    def step(self, x: Tensor, g: Gradient) -> None:
        here = x if self.plain is None else self.plain
        e = self._elastic(here) if self.steps % self.interval == 0 else None
        self.steps += 1
        if self.plain is None or self.velocity is None:
            self.local_update(g)
        else:
            looked = x.clone()
            self.local_update(g)
            self.velocity.mul_(self.momentum).add_(x - looked)
            x.copy_(self.plain).add_(self.velocity)
            self.ahead = False
        if e is not None:
            x.sub_(e)
        self.pending += 1

    def finish(self, x: Tensor) -> None:
        if self.ahead and self.plain is not None:
            x.copy_(self.plain)
            self.ahead = False
        if self.center is None:
            super().finish(x)
            return
        self.flush(x)
        while self._meet(x, 0)[0]:
            pass
        x.copy_(self.center)

    def flush(self, x: Tensor) -> None:
        if self.pending:
            x.sub_(self._elastic(x))

    def answer(self, x: Tensor) -> Tensor:
        return super().answer(x) if self.center is None else self.center

    def _elastic(self, x: Tensor) -> Tensor:
        """Move the center, and return by how much this worker has to move the other way."""
        self.pending = 0
        if self.center is not None:
            return self._meet(x, 1)[1]
        e = x.clone()
        if self.guard.admits(norm(x), self.comm.rank, "model"):
            self.exchange(x, e)
            return e
        self._begin_anew()
        return e.zero_()

    def _begin_anew(self) -> None:
        """Leave a model that the guard has dropped, and go on from the center."""
        self.replica.forget_moments()
        self.velocity = self.plain = None
        self.ahead = False
        if self.center is None:
            self.join(self.replica.flat.x)
        else:
            self.replica.flat.x.copy_(self.center)

    def _meet(self, x: Tensor, weight: int) -> tuple[int, Tensor]:
        """Move every copy of the center by the pulls of all workers."""
        assert self.center is not None
        e = (x - self.center) * self.moving_rate
        if weight and not self.guard.admits(norm(e), self.comm.rank, "pull"):
            e.zero_()
            self._begin_anew()
        pulls = e.clone()
        total = self.comm.all_reduce(pulls, weight)
        if total:
            self.center.add_(pulls)
        return total, e


class CenterServer(ShardServer):
    """Holds a part of the center: an exchange moves it, and tells the worker by how much."""

    method: EASGD

    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        if request.join:
            self.reply(worker)
        elif not request.batches:
            self.reply(worker, self.shard.new_zeros(self.shard.shape))
        else:
            e = (vector - self.shard).mul_(self.method.moving_rate)  # e = alpha (x_i - c)
            self.shard.add_(e)  # c <- c + e
            self.updated(request._replace(version=self.version))  # read and moved in one
            self.reply(worker, e)

    def size_of(self, vector: Tensor) -> float:
        return norm(vector - self.shard) * self.method.moving_rate

    def on_repeat(self, worker: int) -> None:
        """By how much the worker was to move is lost: it does not, and one exchange is missed."""
        self.missed += 1
        self.reply(worker, self.shard.new_zeros(self.shard.shape))
