"""Downpour: asynchronous SGD with a parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.common.options import at_least
from paceline.strategies.about import About
from paceline.strategies.served import PushStrategy
from paceline.strategies.server import GradientServer
from paceline.strategies.service import Request

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


@dataclass(kw_only=True)
class Downpour(PushStrategy):
    r"""Downpour: workers push gradients to a server and fetch its model, none waits for another.

    Each worker adds up its gradients, pushes the sum every ``push_interval`` steps and takes the
    server's model every ``fetch_interval`` steps. The server applies each push as it comes.

    ========  =====================================================================
    symbol    here
    ========  =====================================================================
    n_push    ``push_interval``
    n_fetch   ``fetch_interval``
    alpha     the learning rate of the user's optimizer: the local move
    eta       the same, sent along with each push: the server's step
    w         the servers' model, cut into ``shards``
    ========  =====================================================================

    .. math::
        a_i \leftarrow a_i + g_i(x_i), \quad x_i \leftarrow x_i - \alpha g_i(x_i), \qquad
        \text{push: } w \leftarrow \mathrm{optimizer}(w, a_i),\ a_i \leftarrow 0, \qquad
        \text{fetch: } x_i \leftarrow w

    Weight decay belongs to each gradient: g_i has it in it, at the model x_i, for those parameters
    that have a gradient. Only a decay that is no part of a gradient, as AdamW's, is made by the
    server, once for each gradient of a push.

    Args:
        push_interval: steps between pushes.
        fetch_interval: steps between fetches.
        phase: ``full`` pushes after n, 2n, ... steps; ``paper`` after 1, n + 1, 2n + 1, ...
        local_move: whether a worker moves its own model between fetches; when not given, unless
            the server's optimizer is an adaptive one.
        server_optimizer: ``user`` is the class of the user's own, with its parameter groups;
            ``sgd``, ``momentum`` and ``adagrad`` take only the learning rate from it (and gradients
            its weight decay).
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
        ...     worker.finish()
        ...     worker.log(weight=model.weight.item())
        >>> run = pl.simulate(train, workers=2, strategy="downpour")
        >>> [m["weight"] for m in run.metrics]  # every push counts in full
        [-3.0, -3.0]
    """

    paper: ClassVar[str] = "Dean et al., NIPS 2012"
    about = About(
        faults="""A slow worker pushes less often and delays nobody. The server goes on without
        a dead or stopped one; what it had not pushed is lost. A worker that comes late fetches
        the model and takes part. A lost server is followed by another, which goes on where it
        was.""",
        bytes="""Each worker sends the size of the model every push_interval steps and is sent
        it every fetch_interval steps (and a few numbers with each).""",
        when_to_use="""Machines of unequal speed and a link to the server that carries them all.
        Pushes add up, so the learning rate wants to be about 1/p of that of one large batch
        (factor 1/p).""",
        reference="""Dean et al., "Large scale distributed deep networks", NIPS 2012, algorithm
        7.1 of its appendix; phase="paper" is its listing to the letter.""",
    )
    state: ClassVar[tuple[str, ...]] = ("unconfirmed",)

    push_interval: int = 1
    fetch_interval: int = 1
    phase: Literal["full", "paper"] = "full"
    local_move: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("push_interval", self.push_interval, 1)
        at_least("fetch_interval", self.fetch_interval, 1)
        self.unconfirmed = False

    def make_server(self) -> DownpourServer:
        return DownpourServer(self)

    def step(self, x: Tensor, g: Gradient) -> None:
        push, fetch = self._pushes(self.steps), self._fetches(self.steps)
        self.steps += 1
        moves = not self.adapts if self.local_move is None else self.local_move
        self.accrue(g, moves)  # a_i <- a_i + g_i, x_i <- x_i - alpha g_i
        if push and fetch:
            self._push(x)
        elif push:
            self._push_and_go_on()
        elif fetch:
            self.fetch(x, self.comm)  # x_i <- w

    def flush(self, x: Tensor) -> None:
        if self.pending or self.unconfirmed:
            self._push(x)

    def _pushes(self, step: int) -> bool:
        return (step + (self.phase == "full")) % self.push_interval == 0

    def _fetches(self, step: int) -> bool:
        return (step + 1) % self.fetch_interval == 0

    def _push(self, x: Tensor) -> None:
        """Push what has accrued, and take the model that the servers reply with."""
        accrued = x if self.accrued is None else self.accrued
        self.exchange(accrued, x, batches=self.pending)  # w <- optimizer(w, a_i), x_i <- w
        self.pushed()  # a_i <- 0
        self.unconfirmed = False

    def _push_and_go_on(self) -> None:
        """Push without waiting; if the server's mailbox is full, go on adding up."""
        if self.accrued is None or not self.pending:
            return
        for shard, version in enumerate(self.versions):
            request = Request(reply=0, version=version, batches=self.pending)
            if not self.send_request(shard, self.accrued, request, must=shard > 0):
                return
        self.pushed()  # a_i <- 0
        self.unconfirmed = True


class DownpourServer(GradientServer):
    """Applies each push as it comes."""

    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        self.step(request, vector, request.batches)  # w <- optimizer(w, a_i)
        if request.reply:
            self.reply(worker)
