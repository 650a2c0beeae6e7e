"""Steps of torch's own optimizers without what torch wraps around each: hooks and profiling.

For a small model that takes as long as the step itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer


class BareStep:
    """Steps an optimizer of torch, bare where nothing is hooked to it but our own hook."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = inspect.unwrap(type(optimizer).step)

    @staticmethod
    def suits(optimizer: Optimizer) -> bool:
        """Whether the optimizer is torch's own, and its steps have no gradients."""
        own = type(optimizer).__module__.startswith("torch.optim.")
        return own and not any(group.get("differentiable") for group in optimizer.param_groups)

    def step(self) -> None:
        """Make one step."""
        if not self._is_bare():
            return self._optimizer.step()
        with torch.no_grad():
            self._step(self._optimizer)

    def _is_bare(self) -> bool:
        own = vars(self._optimizer)  # a scheduler replaces the method
        hooks: list[Any] = [own["_optimizer_step_pre_hooks"], own["_optimizer_step_post_hooks"]]
        hooks += [torch_optimizer._global_optimizer_pre_hooks]
        hooks += [torch_optimizer._global_optimizer_post_hooks]
        return sum(map(len, hooks)) <= 1 and "step" not in own
