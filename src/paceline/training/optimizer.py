"""The optimizer that ``worker.setup`` returns: it passes each step on to the stepper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.model.part import WHOLE, Part
from paceline.training.stepper import Stepper


class PacedOptimizer(Optimizer):
    """The user's own optimizer, paced by a strategy.

    A ``torch.optim.Optimizer`` in every respect: schedulers and gradient scalers take it, and its
    ``param_groups``, ``state`` and ``defaults`` are those of the optimizer inside.
    """

    inner: Optimizer
    _stepper: Stepper
    _part: Part
    _step_supports_amp_scaling = True
    """A scaler passes on what it found instead of skipping a step, so that ranks can agree."""

    def __init__(self, inner: Optimizer, stepper: Stepper, part: Part = WHOLE) -> None:
        # Optimizer.__init__ would copy the groups; __setstate__ only makes the hooks.
        super().__setstate__({"inner": inner, "_stepper": stepper, "_part": part})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch: an attribute
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]  # torch: an attribute
        """The inner optimizer's state."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # torch: an attribute
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the strategy; a ``closure`` is evaluated once, before it.

        Of several optimizers, the step is for the parameters of this one.
        """
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return self._step_with_hooks(closure)
        if closure is not None:
            return self._step(closure)
        return self._stepper.step(self._take_overflow(), self._part)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it as it has the inner one's

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepper.step(self._take_overflow(), self._part)
        return loss

    _step_with_hooks = Optimizer.profile_hook_step(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients."""
        is_torch_s = getattr(self.inner.zero_grad, "__func__", None) is Optimizer.zero_grad
        if not (set_to_none and is_torch_s):
            return self.inner.zero_grad(set_to_none)
        for group in self.param_groups:  # as torch does, without a word to its profiler
            for parameter in group["params"]:
                parameter.grad = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters, of those that ``worker.setup`` was given ``with_frozen=True``.

        With a synchronous method, in the same step on all workers.
        """
        self._stepper.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.inner.load_state_dict(state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are plain optimizers, which no run knows of."""
        return _itself, (self.inner,)

    def __repr__(self) -> str:
        return f"Paced{self.inner!r}"

    def _take_overflow(self) -> bool:
        """Undo a gradient scaler's scale; returns whether it found an infinite gradient.

        During a step a scaler sets both as attributes.
        """
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            for grad in grads:
                if grad is not None:
                    grad.div_(scale)
        return bool(getattr(self, "found_inf", False))


def _itself(optimizer: Optimizer) -> Optimizer:
    """What a copy of a paced optimizer is made by: its argument has been copied by then."""
    return optimizer
