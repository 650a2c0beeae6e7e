"""AD-PSGD: asynchronous pairwise averaging that conserves the sum of the pair."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.common.options import at_least
from paceline.strategies.about import About
from paceline.strategies.offers import OfferStrategy
from paceline.strategies.pairs import Note, pick
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient

OFFER, MOVE = 1, 2


@dataclass(kw_only=True)
class ADPSGD(OfferStrategy):
    r"""AD-PSGD: a worker and a peer become their mean, and nobody waits for it.

    A worker offers its model to a random peer and goes on. The peer, at its next step, moves half
    of the way to the offer and sends back the same move the other way, which the worker makes when
    it arrives. Both moves are one exchange, made whole or not at all: their sum does not change.
    When neither has moved in between, both are at their mean; steps made meanwhile are kept. One
    offer is open at a time: on a slow link, several from one model would move it too far.

    ======  ===========================================================
    symbol  here
    ======  ===========================================================
    gamma   the learning rate of the user's optimizer
    j       the peer of worker i, from ``topology``; never i itself
    ======  ===========================================================

    .. math::
        x_i, x_j \leftarrow \tfrac{1}{2} (x_i + x_j) \ \text{ (as one)}, \qquad
        x_i \leftarrow \mathrm{optimizer}(x_i, g_i(x_i'))

    where :math:`x_i'` is the model as the gradient was taken, before the exchange.

    Args:
        interval: steps between offers; while one is open, none is made.
        topology: who may be picked: ``complete``, ``ring`` or ``exponential``.

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
        >>> run = pl.simulate(train, workers=2, strategy="adpsgd")
        >>> [m["weight"] for m in run.metrics]
        [-1.5, -1.5]
    """

    paper = "Lian, Zhang, Zhang, Liu, ICML 2018"
    about = About(
        faults="""A slow worker answers late and delays nobody. One that is dead or stopped, or
        has come to the end of its data, is not picked. An offer that a dead one has not
        answered moves nobody; one at its end answers at the very end, and its offerer makes
        others meanwhile. A worker that comes late takes the model of a live peer and takes
        part.""",
        bytes="""One model each way for each exchange (with 16 bytes more), whatever the number
        of workers; and one model each at the end, for the mean.""",
        when_to_use="""Machines of unequal speed, links with no center. Unlike gossip it keeps
        the mean of all models, and so drifts less. The learning rate is that of a worker's own
        batch (factor 1).""",
        reference="""Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic
        gradient descent", ICML 2018, algorithm 1; there a thread on each worker averages in its
        place.""",
    )
    interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("interval", self.interval, 1)

    def step(self, x: Tensor, g: Gradient) -> None:
        self._attend(x)
        if self.steps % self.interval == 0:
            self._offer(x)
        self.local_update(g)  # with the gradient of the model as it was before the exchange
        self.steps += 1
        self.show(x)

    def finish(self, x: Tensor) -> None:
        """Answer what still comes until no offer is open anywhere; then take the mean."""
        while self.among_live(self.count_open):
            self._attend(x)
        self.take_mean(x, self.steps > 0)

    def _attend(self, x: Tensor) -> None:
        """Make the moves that came back, then answer the offers of others."""
        for peer, move, header in self.comm.board.poll(x, MOVE):
            if self.guard.admits(norm(move), peer, "move"):
                x.add_(move)  # x_i <- x_i + (x_j - x_i) / 2
            self.answered(peer)
            self.stale.note(self.steps - Note.of(header).steps)
        for peer, theirs, header in self.comm.board.poll(x, OFFER):
            move = (x - theirs).div_(2 if self.steps else math.inf)  # idle, it has nothing to give
            if not self.trusts(peer, move, theirs, x):
                move.zero_()
            if self.comm.board.post(move, peer, MOVE, header):
                x.sub_(move)  # x_j <- x_j - (x_j - x_i) / 2

    def _offer(self, x: Tensor) -> None:
        """Offer this model to a peer, unless another has still to answer."""
        if (partners := self.free_partners()) is not None:
            peer = pick(self.topology, partners, self.seed, self.comm.rank, self.steps)
            if peer is not None:
                self.offer(x, peer, OFFER)
