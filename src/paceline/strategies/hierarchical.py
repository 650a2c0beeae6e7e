"""Hierarchical SASGD: averages inside groups, and more rarely over all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.common.options import at_least
from paceline.errors import UsageError
from paceline.strategies.about import About
from paceline.strategies.lockstep import Lockstep, agree_on_unit
from paceline.strategies.toolbox.topology import groups

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm
    from paceline.model.gradient import Gradient


@dataclass(kw_only=True)
class Hierarchical(Lockstep):
    r"""Hierarchical SASGD: groups average often, all workers average seldom.

    Where links inside a machine or a rack are fast and those between are slow, most averaging
    stays inside. This is the Hier-AVG form of the method.

    ======  =====================================================
    symbol  here
    ======  =====================================================
    S       ``group_size``: consecutive workers
    K1      ``group_interval``: steps between averages of a group
    K2      ``interval``: steps between averages of all
    n_j     samples of worker j since its last average
    ======  =====================================================

    .. math::
        x_i \leftarrow \mathrm{optimizer}(x_i, g_i), \qquad
        x_i \leftarrow
        \begin{cases}
            \sum_j n_j x_j / \sum_j n_j & \text{every } K_2 \text{ steps} \\
            \text{the same over the group} & \text{every } K_1 \text{ steps otherwise}
        \end{cases}

    Args:
        group_size: workers in a group; the last group may be smaller.
        group_interval: steps between averages inside a group.
        interval: steps between averages over all workers; a multiple of ``group_interval``.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     x = torch.tensor([float(worker.rank)])
        ...     model(x).backward()  # gradients 0, 1, 2, 3
        ...     sgd.step()
        ...     worker.log(weight=model.weight.item())
        >>> method = "hierarchical(group_size=2, group_interval=1, interval=4)"
        >>> run = pl.simulate(train, workers=4, strategy=method)
        >>> sorted(m["weight"] for m in run.metrics)  # two groups
        [-2.5, -2.5, -0.5, -0.5]
    """

    paper = "Cong, Bhardwaj, ICMLA 2017; Hier-AVG: Zhou, Cong, 2019"
    about = About(
        faults="""A slow worker slows its group at each average of the group, and all at each
        average of all. A dead or stopped one ends the run, naming it; or, with
        on_loss="continue", the others go on, without its last steps, and take in workers that
        come after an average of all. A worker that runs out of data adds its last steps to the
        next averages and then takes part with weight 0; it ends with the same parameters.""",
        bytes="""Each worker hands in the size of the model every group_interval steps; every
        interval steps it goes to all, else no further than its group.""",
        when_to_use="""Two tiers of links, equal machines. The learning rate is that of one
        large batch (factor 1); longer intervals want smaller ones.""",
        reference="""Cong, Bhardwaj, "A hierarchical, bulk-synchronous stochastic gradient
        descent algorithm for deep-learning applications on GPU clusters", ICMLA 2017, in the
        form of Zhou and Cong, "A distributed hierarchical SGD algorithm with sparse global
        reduction" (Hier-AVG), 2019.""",
    )
    uses_gradient = False
    state = ("group_unit", "in_group", "in_all", "met")

    group_size: int = 4
    group_interval: int = 4
    interval: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("group_size", self.group_size, 1)
        at_least("group_interval", self.group_interval, 1)
        at_least("interval", self.interval, 1)
        if self.interval % self.group_interval:
            raise UsageError(
                f"group_interval ({self.group_interval}) must divide interval ({self.interval})"
            )
        self.in_group = self.in_all = self.met = self.group_unit = 0

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self._find_group()

    def join(self, x: Tensor) -> None:
        self._find_group()

    def grown(self) -> None:
        self.group_unit = 0  # that of the member whose state a joiner has may be of another group

    def _find_group(self) -> None:
        mine = next(g for g in groups(self.workers, self.group_size) if self.comm.rank in g)
        self.group: Comm = self.comm.group(mine)

    def step(self, x: Tensor, g: Gradient) -> None:
        self.local_update(g)  # x_i <- x_i - gamma g_i
        self.steps += 1
        self.in_group += g.samples
        self.in_all += g.samples
        if self.steps % self.group_interval == 0:
            self._average_next(x)

    def finish(self, x: Tensor) -> None:
        """Go on averaging as the others do, until nobody has anything new for all."""
        while self._average_next(x):
            pass

    def _average_next(self, x: Tensor) -> bool:
        """Average in the group or over all, whichever is due; False after the last of all."""
        self.met += 1
        if not self._is_for_all(self.met):
            self._average_group(x, self.in_group)
            self.in_group = 0
            return True
        alone = self.group.size == 1  # then an average in the group is none
        goes_on = self.synchronize(x, self.in_all if alone else self.in_group or self.in_all)
        self.in_group = self.in_all = 0
        return goes_on

    def _is_for_all(self, number: int) -> bool:
        return number * self.group_interval % self.interval == 0

    def synchronize(self, x: Tensor, weight: int) -> bool:
        return self.average_models(x, *self.judge(x, weight))  # x_i <- mean over all workers

    def _average_group(self, x: Tensor, weight: int) -> None:
        weight, _ = self.judge(x, weight)
        v = x if weight else x.new_zeros(x.shape)
        self.group_unit = self.group_unit or agree_on_unit(self.group, v, weight)
        unit = self.group_unit or 1
        if weight not in (0, unit):
            v.mul_(weight / unit)
        if self.group.all_reduce(v, weight, lambda total: unit / total).weight:
            x.copy_(v)  # x_i <- mean over the group
