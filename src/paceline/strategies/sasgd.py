"""SASGD: bulk-synchronous SGD with sparse aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.common.options import at_least, positive
from paceline.strategies.about import About
from paceline.strategies.lockstep import Periodic
from paceline.strategies.toolbox import aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


@dataclass(kw_only=True)
class SASGD(Periodic):
    r"""SASGD: local steps, and an aggregation of all workers every ``interval`` steps.

    Each worker trains alone for T steps; then the sum of what all of them gathered moves the last
    agreed model, and everyone goes on from there. Communication falls by T.

    ========  ====================================================================
    symbol    here
    ========  ====================================================================
    T         ``interval``
    gamma     the learning rate of the user's optimizer: the local steps
    gamma_p   ``global_lr``; gamma / p when not given, which averages the models
    n_i       samples of worker i since the last aggregation
    x'        ``reference``, the last agreed model
    ========  ====================================================================

    .. math::
        x_i \leftarrow x_i - \gamma g_i \quad (T \text{ times}), \qquad
        x' \leftarrow x' - \gamma_p \sum_i \frac{n_i}{\bar n} \sum_{k=1}^{T} g_i^{(k)}, \qquad
        x_i \leftarrow x'

    where :math:`\bar n` is the mean of those n_i that are not 0: the average is by samples. That is
    the form on plain SGD. With momentum, with Adam, or with a learning rate that changes
    inside an interval, the pseudo-gradient :math:`x' - x_i` stands for :math:`\gamma` times the sum
    of gradients; on plain SGD the two are equal.

    Args:
        interval: steps between aggregations.
        global_lr: learning rate of the aggregated step; averages the models when not given. It
            belongs to the learning rate that the optimizer begins with, and follows a scheduler: as
            that falls to a tenth, or to 0, so does this. Where the optimizer's is always 0, it is
            constant.
        form: ``gradient`` accumulates gradients, ``pseudo`` takes the difference of models;
            ``auto`` is ``gradient`` on plain SGD, until a learning rate changes in an interval.
        momentum: what happens to the optimizer's buffers at an aggregation: ``keep`` them local,
            ``reset`` them, or ``average`` them too.
        warmup: first steps that aggregate every time; with them, this is post-local SGD.

    Example:
        >>> import paceline as pl, torch
        >>> def train(worker):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     model, sgd = worker.setup(model, sgd)
        ...     for step in range(2):
        ...         sgd.zero_grad()
        ...         x = torch.tensor([float(worker.rank)])
        ...         model(x).backward()  # gradients 0 and 1
        ...         sgd.step()
        ...         worker.log(weight=model.weight.item())
        >>> run = pl.simulate(train, workers=2, strategy="sasgd(interval=2)")
        >>> [(m["rank"], m["weight"]) for m in run.metrics]
        [(0, 0.0), (1, -1.0), (0, -1.0), (1, -1.0)]
    """

    paper = "Cong, Bhardwaj, Feng, ICPP 2017"
    about = About(
        faults="""A slow worker slows all to its pace at each aggregation. A dead or stopped one
        ends the run, naming it; or, with on_loss="continue", the others go on, without its last
        steps, and take in workers that come. A worker that runs out of data adds its last steps
        to the next aggregation and then takes part with weight 0; it ends with the same
        parameters.""",
        bytes="""Each worker hands in the size of the model every T steps (with
        momentum="average" also that of each buffer).""",
        when_to_use="""Slow links and equal machines. The learning rate is that of one large
        batch (factor 1); longer intervals want smaller ones.""",
        reference="""Cong, Bhardwaj, Feng, "An efficient, distributed stochastic gradient
        descent algorithm for deep-learning applications", ICPP 2017. With global_lr not given:
        local SGD (Stich 2019), K-AVG (Zhou and Cong 2018); with warmup: post-local SGD (Lin et
        al. 2020).""",
    )
    state = ("lrs", "base_lrs", "lr_changed", "reference", "gradients")

    global_lr: float | None = None
    form: aggregation.Form = "auto"
    momentum: Literal["keep", "reset", "average"] = "keep"
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("warmup", self.warmup, 0)
        if self.global_lr is not None:
            positive("global_lr", self.global_lr)
        self.lrs = self.base_lrs = list[float]()
        self.lr_changed = self._regrouped = False
        self.reference: Tensor | None = None
        self.gradients: Tensor | None = None

    @property
    def uses_gradient(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return self.gradients is not None

    @property
    def equal_rates(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return self.gradients is not None or self.global_lr is not None

    @property
    def is_due(self) -> bool:
        return self.steps <= self.warmup or super().is_due

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self.lrs, self.base_lrs = self.replica.lrs(), self.replica.base_lrs()
        if aggregation.sums_gradients(self.form, self.replica):
            self.gradients = x.new_zeros(x.shape)
        if self.equal_rates:
            self.reference = x.clone()

    @property
    def fixed_groups(self) -> str:  # type: ignore[override]  # a class attribute elsewhere
        why = "SASGD with global_lr moves all workers by the rates of the groups at the start"
        return why if self.global_lr is not None else ""

    def regrouped(self) -> None:
        """Go over to the mean of the models: others may have other groups."""
        self._regrouped = True

    def local_step(self, x: Tensor, g: Gradient) -> None:
        lrs = self.replica.lrs()
        self.lrs = self.lrs if self.pending else lrs
        self.lr_changed = lrs != self.lrs or (self.lr_changed and self.pending > 0)
        if self.gradients is not None:
            g = self.replica.accumulate(g, self.gradients)  # gs <- gs + g
        self.local_update(g)  # x <- x - gamma g

    def synchronize(self, x: Tensor, weight: int) -> bool:
        weight, dropped = self.judge(x, weight)
        goes_on = (gs := self.gradients) is not None and self._sum_gradients(gs, x, weight, dropped)
        if self.gradients is None:
            goes_on = self._sum_moves(x, weight, dropped)
        if goes_on:
            self.treat_moments(self.momentum, x, weight)
        return goes_on

    def _sum_gradients(self, gs: Tensor, x: Tensor, weight: int, dropped: bool) -> bool:
        """The paper's form; given up for good when a learning rate changed in the interval.

        Also when the guard dropped a contribution: the other form tells that apart from a worker
        at its end.
        """
        odd = self.lr_changed or dropped or self._regrouped
        whole, odd = self.weigh(gs, weight, odd, mean=False)  # gs <- sum gs
        if odd:
            self.gradients = None
        elif whole:
            self._move_reference(x, gs, weight, whole)
            gs.zero_()  # gs <- 0
        return whole > 0

    def _sum_moves(self, x: Tensor, weight: int, dropped: bool) -> bool:
        """The pseudo-gradient form; where that is the mean of the models, the mean itself."""
        if self.global_lr is None or self.reference is None:
            return self.average_models(x, weight, dropped)
        moved = self.reference - x  # gamma gs
        whole, anyone_dropped = self.weigh(moved, weight, dropped, mean=False)
        if whole:
            self._move_reference(x, moved, weight, whole)
        elif anyone_dropped:
            x.copy_(self.reference)
        return whole > 0 or anyone_dropped

    def _move_reference(self, x: Tensor, total: Tensor, weight: int, whole: float) -> None:
        assert self.reference is not None
        gamma_p = [lr / whole for lr in self.lrs]
        if self.global_lr is not None:
            rate = self.global_lr * (self.count_contributors(x, weight) / whole)
            gamma_p = aggregation.rates(rate, self.lrs, self.base_lrs, self.gradients is None)
        self.replica.descend(self.reference, total, gamma_p)  # x' <- x' - gamma_p sum gs
        x.copy_(self.reference)  # x <- x'
