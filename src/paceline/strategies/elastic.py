"""What both forms of elastic averaging share: steps of a worker that a center pulls at."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.common.options import at_least, one_of
from paceline.errors import UsageError
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


@dataclass(kw_only=True)
class Elastic(Strategy):
    """Elastic averaging; subclasses say where the center is.

    Attributes:
        pending: the steps since the last exchange with the center.
        ahead: whether ``x`` is the look-ahead point of EAMSGD; then ``plain`` is the model.
        velocity: v of EAMSGD.
    """

    uses_gradient = False
    state: ClassVar[tuple[str, ...]] = ("steps", "pending", "velocity", "plain", "ahead")

    interval: int = 4
    alpha: float | None = None
    beta: float = 0.9
    momentum: float = 0.0
    sync: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("sync", self.sync, [self.synchronous])  # its other value is another class
        at_least("interval", self.interval, 1)
        for name in ("alpha", "beta", "momentum"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 0)
        if self.momentum >= 1:
            raise UsageError(f"momentum ({self.momentum}) must be below 1")
        self.steps = self.pending = 0
        self.velocity: Tensor | None = None
        self.plain: Tensor | None = None
        self.ahead = False

    @abstractmethod
    def pull(self, x: Tensor) -> Tensor:
        """Move the center towards ``x``, and return by how much: e = alpha (x - c)."""

    @property
    def defers(self) -> bool:  # type: ignore[override]  # a class attribute elsewhere
        return self.momentum > 0

    @property
    def moving_rate(self) -> float:
        """alpha, given or from beta."""
        return self.beta / self.workers if self.alpha is None else self.alpha

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self._check_momentum()

    def regrouped(self) -> None:
        self._check_momentum()

    def _check_momentum(self) -> None:
        groups = self.replica.optimizer.param_groups
        if self.momentum and any(g.get("momentum") or "betas" in g for g in groups):
            raise UsageError(
                f"momentum ({self.momentum}) must be 0 where the optimizer has momentum of its own"
            )

    def settle(self, x: Tensor) -> None:
        """Move to the look-ahead point, where EAMSGD takes its gradient."""
        if self.momentum and not self.ahead:
            if self.velocity is None:
                self.velocity = x.new_zeros(x.shape)
            self.plain = x.clone()
            x.add_(self.velocity, alpha=self.momentum)  # x_i + delta v
            self.ahead = True

    def step(self, x: Tensor, g: Gradient) -> None:
        here = x if self.plain is None else self.plain
        e = self._exchange(here) if self.steps % self.interval == 0 else None
        self.steps += 1
        self._local_step(x, g)
        if e is not None:
            x.sub_(e)  # x_i <- x_i - e
        self.pending += 1

    def _local_step(self, x: Tensor, g: Gradient) -> None:
        if self.plain is None or self.velocity is None:
            self.local_update(g)  # x_i <- x_i - eta g_i(x_i)
            return
        looked, own = x.clone(), g.part.place
        self.local_update(g)
        v = self.velocity[own]
        v.mul_(self.momentum).add_((x - looked)[own])  # v <- delta v - eta g_i(x_i + delta v)
        x.copy_(self.plain)[own].add_(v)  # x_i <- x_i + v
        self.ahead = False

    def _exchange(self, x: Tensor) -> Tensor:
        self.pending = 0
        return self.pull(x)

    def flush(self, x: Tensor) -> None:
        """Exchange once more, if there were steps since the last time."""
        if self.pending:
            x.sub_(self._exchange(x))

    def leave_look_ahead(self, x: Tensor) -> None:
        """At the end: go back to the model."""
        if self.ahead and self.plain is not None:
            x.copy_(self.plain)
            self.ahead = False

    def begin_anew(self) -> None:
        """Forget what led to a model that the guard has dropped."""
        self.replica.forget_moments()
        self.velocity = self.plain = None
        self.ahead = False
