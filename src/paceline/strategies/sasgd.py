"""SASGD: bulk-synchronous SGD with sparse aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.common.options import above, at_least, finite
from paceline.errors import UsageError
from paceline.strategies.lockstep import Lockstep

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


@dataclass(kw_only=True)
class SASGD(Lockstep):
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

    Faults: a slow worker slows all to its pace at each aggregation. A dead or stopped one ends the
    run, naming it; or, with ``on_loss="continue"``, the others go on, without its last steps. A
    worker that runs out of data adds its last steps to the next aggregation and then takes part
    with weight 0; it ends with the same parameters.

    Bytes: each worker hands in the size of the model every T steps (with ``momentum="average"``
    also that of each buffer).

    When to use: slow links and equal machines. The learning rate is that of one large batch
    (factor 1); longer intervals want smaller ones.

    Reference: Cong, Bhardwaj, Feng, "An efficient, distributed stochastic gradient descent
    algorithm for deep-learning applications", ICPP 2017. With ``global_lr`` not given: local SGD
    (Stich 2019), K-AVG (Zhou and Cong 2018); with ``warmup``: post-local SGD (Lin et al. 2020).
    """

    paper: ClassVar[str] = "Cong, Bhardwaj, Feng, ICPP 2017"
    state: ClassVar[tuple[str, ...]] = (
        "steps",
        "unit",
        "pending",
        "samples",
        "base_lrs",
        "lrs",
        "lr_changed",
        "reference",
        "gradients",
    )

    interval: int = 16
    global_lr: float | None = None
    form: Literal["auto", "gradient", "pseudo"] = "auto"
    momentum: Literal["keep", "reset", "average"] = "keep"
    warmup: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("interval", self.interval, 1)
        at_least("warmup", self.warmup, 0)
        if self.global_lr is not None:
            above("global_lr", self.global_lr, 0)
            finite("global_lr", self.global_lr)
        self.pending = self.samples = 0
        self.base_lrs: list[float] = []
        self.lrs: list[float] = []
        self.lr_changed = False
        self.reference: Tensor | None = None
        self.gradients: Tensor | None = None

    @property
    def uses_gradient(self) -> bool:
        return self.gradients is not None

    @property
    def equal_rates(self) -> bool:
        return self.gradients is not None or self.global_lr is not None

    def payload(self, steps: int, nbytes: int, workers: int) -> int:
        warm = min(steps, self.warmup)
        meetings = warm + -(-(steps - warm) // self.interval)
        vectors = 1 + (len(self.replica.moments()) if self.momentum == "average" else 0)
        counts = 0 if self.global_lr is None else meetings * self.replica.flat.x.element_size()
        return workers * (nbytes * (1 + meetings * vectors) + counts)

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self.lrs, self.base_lrs = self.replica.lrs(), self.replica.base_lrs()
        if self._accumulates():
            self.gradients = x.new_zeros(x.shape)
        if self._accumulates() or self.global_lr is not None:
            self.reference = x.clone()

    def step(self, x: Tensor, g: Gradient) -> None:
        lrs = self.replica.lrs()
        if self.pending == 0:
            self.lrs, self.lr_changed = lrs, False
        self.lr_changed |= lrs != self.lrs
        if self.gradients is not None:
            g = self.replica.clip(g)
            self.replica.accumulate_gradient(g, self.gradients)  # gs <- gs + g
        self.local_update(g)  # x <- x - gamma g
        self.steps += 1
        self.pending += 1
        self.samples += g.samples
        if self.steps <= self.warmup or self.pending == self.interval:
            self.meet(x, self.samples)

    def finish(self, x: Tensor) -> None:
        if self.pending:
            self.meet(x, self.samples)
        super().finish(x)

    def meet(self, x: Tensor, weight: int) -> bool:
        weight, dropped = self.judge(x, weight)
        going_on = self._sum_gradients(x, weight, dropped)
        if self.gradients is None:
            going_on = self._combine_models(x, weight, dropped)
        if going_on and self.momentum == "reset":
            self.replica.forget_moments()
        elif going_on and self.momentum == "average":
            self._average_moments(x, weight)
        self.pending = self.samples = 0
        return going_on

    def _sum_gradients(self, x: Tensor, weight: int, dropped: bool) -> bool:
        """The listing's form; given up for good when a learning rate changed in the interval.

        Or when one is dropped: the other form tells that apart from a worker at its end.
        """
        if self.gradients is None or self.reference is None:
            return False
        odd = self.lr_changed or dropped
        whole, changed = self.weigh(self.gradients, weight, odd, mean=False)
        if changed:
            self.gradients = None
        elif whole:
            times = self._count(x, weight) / whole
            groups = zip(self.replica.flat.groups, self.lrs, self.base_lrs, strict=True)
            for part, lr, base in groups:
                gamma_p = lr / whole
                if self.global_lr is not None:
                    gamma_p = self.global_lr * times * (lr / base if base else 1)
                self.reference[part].sub_(self.gradients[part], alpha=gamma_p)
            x.copy_(self.reference)
            self.gradients.zero_()
        return whole > 0

    def _combine_models(self, x: Tensor, weight: int, dropped: bool) -> bool:
        """The pseudo-gradient form; where it is the mean of the models, that mean itself.

        What a worker has moved is its learning rate times its gradients: to divide it by the rate
        that the optimizer began with has ``global_lr`` follow the present one.
        """
        if self.global_lr is None or self.reference is None:
            v = x if weight else x.new_zeros(x.shape)
            whole, anyone_dropped = self.weigh(v, weight, dropped)
            if whole:
                x.copy_(v)
            return whole > 0 or anyone_dropped
        v = self.reference - x
        whole, anyone_dropped = self.weigh(v, weight, dropped, mean=False)
        if whole:
            times = self._count(x, weight) / whole
            for part, base in zip(self.replica.flat.groups, self.base_lrs, strict=True):
                if base == 0:
                    raise UsageError(
                        "global_lr with lr (0) accumulates gradients, which needs learning rates"
                        " that stay as they are"
                    )
                self.reference[part].sub_(v[part], alpha=self.global_lr * times / base)
        if whole or anyone_dropped:
            x.copy_(self.reference)
        return whole > 0 or anyone_dropped

    def _count(self, x: Tensor, weight: int) -> int:
        """How many workers contribute, where the sum is over them and not over samples."""
        if self.global_lr is None:
            return 1
        count, _ = self.reduce(x.new_zeros(1), int(weight > 0))
        return count

    def _average_moments(self, x: Tensor, weight: int) -> None:
        for name in self.replica.moments():
            v = x.new_zeros(x.shape)
            self.replica.read_moment(name, v)
            self.weigh(v, weight)
            self.replica.write_moment(name, v)

    def _accumulates(self) -> bool:
        """Whether this run begins with the listing's form."""
        plain = self.replica.is_plain_sgd()
        if self.form == "gradient" and not plain:
            raise UsageError("form (gradient) must be pseudo or auto unless plain SGD is used")
        if self.replica.stands_still():
            if not plain:
                raise UsageError("lr (0) accumulates gradients, which needs SGD without momentum")
            return True
        return plain if self.form == "auto" else self.form == "gradient"
