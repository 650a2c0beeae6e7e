"""DiLoCo: many local steps, then an outer Nesterov step on their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.common.options import positive
from paceline.errors import UsageError
from paceline.strategies.about import About
from paceline.strategies.lockstep import Periodic

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class DiLoCo(Periodic):
    r"""DiLoCo: local steps with the user's optimizer, an outer momentum step on their mean.

    Each worker trains alone for H steps. What all of them moved, on average, is the gradient of an
    outer optimizer, whose momentum carries the model further than plain averaging does.

    ========  =====================================================================
    symbol    here
    ========  =====================================================================
    H         ``interval`` (500 in the paper)
    theta     ``reference``, the model that all agree on
    outer lr  ``outer_lr``; the inner one is that of the user's optimizer
    mu        ``outer_momentum``, Nesterov's, in torch's form
    n_i       samples of worker i since the last outer step
    ========  =====================================================================

    .. math::
        \Delta = \sum_i n_i (\theta - x_i) / \sum_i n_i, \quad
        v \leftarrow \mu v + \Delta, \quad
        \theta \leftarrow \theta - \eta (\Delta + \mu v), \quad x_i \leftarrow \theta

    Args:
        interval: steps between outer steps.
        outer_lr: learning rate of the outer step; 1 with no momentum averages the models.
        outer_momentum: Nesterov momentum of the outer step.

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
        >>> method = "diloco(interval=1, outer_lr=0.5)"
        >>> run = pl.simulate(train, workers=2, strategy=method)
        >>> [round(m["weight"], 3) for m in run.metrics]  # 0.5 * (1.5 + 0.9 * 1.5)
        [-1.425, -1.425]
    """

    paper = "Douillard et al., 2023"
    about = About(
        faults="""A slow worker slows all to its pace at each outer step. A dead or stopped one
        ends the run, naming it; or, with on_loss="continue", the others go on, without its last
        steps, and take in workers that come. A worker that runs out of data adds its last steps
        to the next outer step and then takes part with weight 0; it ends with the same
        parameters.""",
        bytes="""Each worker hands in the size of the model every H steps.""",
        when_to_use="""Very slow links and equal machines. The inner learning rate does not
        depend on the number of workers (factor 1). But the outer momentum carries every outer
        step up to 1 / (1 - mu) times as far, so that it wants to be about half of what plain
        averaging (sasgd) bears: at the same rate this method loses 3 to 4 points of accuracy on
        the built-in task, and at half of it none. outer_lr=1, outer_momentum=0 is plain
        averaging.""",
        reference="""Douillard et al., "DiLoCo: distributed low-communication training of
        language models", 2023, algorithm 1.""",
    )
    uses_gradient = False
    state = ("reference", "velocity")

    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("outer_lr", self.outer_lr)
        if not 0 <= self.outer_momentum < 1:
            raise UsageError(f"outer_momentum ({self.outer_momentum}) must be from 0 to below 1")
        self.reference: Tensor | None = None
        self.velocity: Tensor | None = None

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self.reference = x.clone()

    def synchronize(self, x: Tensor, weight: int) -> bool:
        assert self.reference is not None
        moved = self.reference - x
        weight, dropped = self.judge(moved, weight)
        whole, anyone_dropped = self.weigh(moved, weight, dropped)  # Delta <- mean of x' - x_i
        if whole:
            self._outer_step(self.reference, moved)  # x' <- OuterOpt(x', Delta)
        if whole or anyone_dropped:
            x.copy_(self.reference)  # x_i <- x'
        return whole > 0 or anyone_dropped

    def _outer_step(self, reference: Tensor, moved: Tensor) -> None:
        """Make one step of torch's SGD with Nesterov momentum."""
        import torch
        from torch import nn

        theta = nn.Parameter(reference)
        theta.grad = moved
        nesterov = self.outer_momentum > 0
        outer = torch.optim.SGD(
            [theta], lr=self.outer_lr, momentum=self.outer_momentum, nesterov=nesterov
        )
        if nesterov:
            outer.state[theta]["momentum_buffer"] = self.velocity
        outer.step()
        self.velocity = outer.state[theta].get("momentum_buffer")
