"""Elastic averaging: workers are tied to a center by springs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.strategies.about import About
from paceline.strategies.elastic import Elastic
from paceline.strategies.served import ServerStrategy
from paceline.strategies.server import ShardServer
from paceline.strategies.service import Request
from paceline.strategies.toolbox.guard import distance, norm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class EASGD(Elastic, ServerStrategy):
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
    """

    paper = "Zhang, Choromanska, LeCun, NIPS 2015"
    about = About(
        faults="""A slow worker exchanges less often and delays nobody. The center goes on
        without a dead or stopped one; what it had found since its last exchange is lost. A
        worker that comes late starts at the center. A lost server is followed by another, with
        the center as it was last published. With sync, a slow worker slows all, a lost one ends
        the run, naming it, or is left out with on_loss="continue", and one that runs out of
        data takes part with weight 0.""",
        bytes="""Each worker sends and is sent the size of the model every tau steps (with sync
        it hands it in), and a few numbers.""",
        when_to_use="""Unequal machines and slow links, with a long interval. The learning rate
        is that of one worker's own batch (factor 1 or less); a large alpha with many workers is
        unstable.""",
        reference="""Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", NIPS
        2015, algorithms 1 and 2.""",
    )

    def make_server(self) -> CenterServer:
        return CenterServer(self)

    def finish(self, x: Tensor) -> None:
        self.leave_look_ahead(x)
        super().finish(x)

    def pull(self, x: Tensor) -> Tensor:
        e = x.clone()
        if self.guard.admits(norm(x), self.comm.rank, "model"):
            self.exchange(x, e)  # e = alpha (x_i - c), c <- c + e
            return e
        self.begin_anew()
        self.join(self.replica.flat.x)  # x_i <- c
        return e.zero_()


class CenterServer(ShardServer):
    """Holds a part of the center: a request moves it, and the reply says by how much."""

    method: EASGD

    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        if request.join:
            self.reply(worker)
        elif not request.batches:
            self.reply(worker, self.shard.new_zeros(self.shard.shape))
        else:
            e = (vector - self.shard).mul_(self.method.moving_rate)  # e = alpha (x_i - c)
            self.shard.add_(e)  # c <- c + e
            self.updated(request._replace(version=self.version))  # this update is never stale
            self.reply(worker, e)

    def size_of(self, vector: Tensor) -> float:
        return distance(vector, self.shard) * self.method.moving_rate

    def on_repeat(self, worker: int) -> None:
        """The move of the first reply is not known any more: the worker misses this exchange."""
        self.reply(worker, self.shard.new_zeros(self.shard.shape))
