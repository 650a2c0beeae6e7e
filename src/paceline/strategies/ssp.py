"""Stale synchronous parallel: asynchronous SGD with a bound on how far workers drift apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.common.options import at_least
from paceline.strategies.about import About
from paceline.strategies.served import PushStrategy
from paceline.strategies.server import ABSENT, GradientServer
from paceline.strategies.service import Request

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


@dataclass(kw_only=True)
class SSP(PushStrategy):
    r"""SSP: each worker runs at its own pace, at most ``bound`` steps ahead of the slowest.

    Every step pushes its gradient to the server and reads the model back. A worker that is too far
    ahead gets its model only when the slowest has caught up, so that every read holds all updates
    older than the bound.

    ======  ====================================================
    symbol  here
    ======  ====================================================
    s       ``bound``; 0 is synchronous SGD
    c_i     the clock of worker i: its steps so far
    u       the update of a step, what the optimizer makes of g
    ======  ====================================================

    .. math::
        w \leftarrow \mathrm{optimizer}(w, g_i(x_i)), \quad c_i \leftarrow c_i + 1, \qquad
        x_i \leftarrow w \ \text{ as soon as }\ c_i - \min_j c_j \le s

    Args:
        bound: how many steps a worker may be ahead of the slowest.
        server_optimizer: as for Downpour, weight decay included.
        shards: servers, each with an equal part of the model.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     model, sgd = worker.setup(model, sgd)
        ...     x = torch.tensor([1.0 + worker.rank])
        ...     model(x).backward()  # gradients 1 and 2
        ...     sgd.step()
        ...     worker.log(weight=model.weight.item())
        >>> run = pl.simulate(train, workers=2, strategy="ssp(bound=0)")
        >>> [m["weight"] for m in run.metrics]  # as one step with the mean and lr 1
        [-1.5, -1.5]
    """

    paper: ClassVar[str] = "Ho et al., NIPS 2013"
    about = About(
        faults="""A slow worker holds the others back once they are bound steps ahead: that is
        the method's rule. One that is dead or has left holds back nobody. A worker that comes
        late starts at the slowest clock. A lost server is followed by another, which goes on
        where it was.""",
        bytes="""Each worker sends and is sent the size of the model at each step (and a few
        numbers).""",
        when_to_use="""Machines whose speed varies from moment to moment, but not lastingly.
        Pushes add up, so the learning rate wants to be about 1/p of that of one large batch
        (factor 1/p).""",
        reference="""Ho et al., "More effective distributed ML via a stale synchronous parallel
        parameter server", NIPS 2013.""",
    )

    bound: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("bound", self.bound, 0)

    @property
    def drift(self) -> int | None:
        return self.bound + 1

    def make_server(self) -> ClockServer:
        return ClockServer(self)

    def step(self, x: Tensor, g: Gradient) -> None:
        self.steps += 1
        update = self.prepared(g) if g.usable else x
        self.exchange(update, x, batches=g.usable)  # x_i <- w
        self.pushed()

    def flush(self, x: Tensor) -> None:
        self.exchange(x, x, batches=0, last=1)


class ClockServer(GradientServer):
    """Replies to a worker once it is at most ``bound`` steps ahead of the slowest."""

    method: SSP

    def __init__(self, method: SSP) -> None:
        super().__init__(method)
        self.waiting: set[int] = set()

    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        if request.join:
            self.clocks[worker] = ABSENT  # it may have one from before
        self.clocks[worker] = self._slowest() if request.join else self.clocks[worker] + 1
        self.step(request, vector)  # w <- optimizer(w, g_i)
        if request.last:
            self.on_leave(worker)
        if not request.batches:
            self.publish()  # the clocks have changed, and a new server must know them
        self._reply_later(worker)

    def on_leave(self, worker: int) -> None:
        super().on_leave(worker)
        self.waiting.discard(worker)
        self._release()

    def on_repeat(self, worker: int) -> None:
        self._reply_later(worker)

    def _reply_later(self, worker: int) -> None:
        self.waiting.add(worker)
        self._release()

    def _slowest(self) -> int:
        return min((self.clocks[worker] for worker in self.present()), default=0)

    def _release(self) -> None:
        """Reply to the workers that are no longer too far ahead."""
        slowest = self._slowest()
        for worker in sorted(self.waiting):
            if self.clocks[worker] - slowest <= self.method.bound:  # c_i - min_j c_j <= s
                self.waiting.discard(worker)
                self.reply(worker)
