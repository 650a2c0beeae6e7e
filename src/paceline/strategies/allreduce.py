"""Synchronous SGD by all-reduce."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.model.gradient import Gradient
from paceline.strategies.about import About
from paceline.strategies.lockstep import Lockstep

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class AllReduce(Lockstep):
    r"""Synchronous SGD: every worker steps with the mean gradient of all.

    Workers average their gradients at each step and apply the same update, so that all replicas
    stay equal bit for bit: one optimizer on a batch that is as many times larger.

    ======  ==========================================================
    symbol  here
    ======  ==========================================================
    p       number of workers
    g_i     worker i's mini-batch mean gradient, ``g`` before the call
    n_i     samples in that batch, or in those that a step has gathered
    ======  ==========================================================

    .. math:: x \leftarrow \mathrm{optimizer}\Big(x, \sum_i n_i g_i / \sum_i n_i\Big)

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     x = torch.tensor([float(worker.rank)])
        ...     model(x).backward()  # gradients 0, 1, 2
        ...     sgd.step()
        ...     worker.log(weight=model.weight.item())
        >>> pl.simulate(train, workers=3, strategy="allreduce").metrics[0]["weight"]
        -1.0
    """

    paper = "synchronous SGD, the baseline of all four papers"
    about = About(
        faults="""A slow worker slows all to its pace. A dead or stopped one ends the run,
        naming it; or, with on_loss="continue", the others go on, with the mean over those who
        are left, and take in workers that come, with their state. A worker that runs out of
        data takes part with weight 0 until all have; it ends with the same parameters. A
        gradient that a scaler finds infinite on one worker makes all skip that step; one that
        the guard drops has weight 0.""",
        bytes="""Each worker hands in the size of the gradient at each step.""",
        when_to_use="""Fast links, equal machines, few workers. The learning rate is that of one
        large batch (factor 1).""",
        reference="""The baseline of the papers of the other methods. Goyal et al., "Accurate,
        large minibatch SGD: training ImageNet in 1 hour", 2017, tell how to choose its learning
        rate.""",
    )
    equal_rates = True
    by_part = True

    def step(self, x: Tensor, g: Gradient) -> None:
        self.steps += 1
        self.agree_on_part(g.part)
        _, odd = self.weigh(g.own, g.weight, not g.ordinary)  # g <- sum_i n_i g_i / sum_i n_i
        self.local_update(self._agree(g) if odd else g)  # x <- optimizer(x, g)

    def synchronize(self, x: Tensor, weight: int) -> bool:
        part = self.agree_on_part(None)
        if part is None:
            return False
        flat = self.replica.flat
        nothing = Gradient.nothing(flat.g, len(flat.spans), part)
        whole, odd = self.weigh(nothing.own, 0)
        if odd:
            self._agree(nothing)
        return whole > 0 or odd

    def _agree(self, g: Gradient) -> Gradient:
        """Agree which parameters have a gradient anywhere, and whether any was infinite."""
        contributes = g.weight > 0
        own = [contributes and flag for flag in (g.overflow, *g.present)]
        flags = g.vector.new_tensor(own)
        self.reduce(flags, int(contributes))
        overflow, *present = (flags > 0).tolist()
        self.replica.flat.check_present(present)
        self.replica.flat.show_gradients(present)
        return replace(g, overflow=overflow, dropped=False, present=tuple(present))
