"""What an optimizer does, found out by a step of a copy of it on one number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def decay_is_coupled(optimizer: Optimizer) -> bool:
    """Whether weight decay is part of the gradient, ``g + weight_decay * x``."""
    if "weight_decay" not in optimizer.defaults:
        return True
    try:
        return _try_step(optimizer, 1.0, decay=0.5) == _try_step(optimizer, 1.5, decay=0.0)
    except TypeError:  # its class needs more than groups, so no server can make it either
        return True


def moments_of(optimizer: Optimizer) -> list[str]:
    """The names of the buffers that are shaped like the parameters.

    Every rank must know the names before its own first step.
    """
    number, probe = _probe(optimizer, 0.0, 0.0)
    return [
        name
        for name, value in probe.state[number].items()
        if isinstance(value, Tensor) and value.shape == number.shape and name != "step"
    ]


def _try_step(optimizer: Optimizer, g: float, decay: float) -> float:
    """The result of one step from the number 1."""
    number, _ = _probe(optimizer, 1.0, g, lr=0.5, weight_decay=decay, maximize=False)
    return number.item()


def _probe(
    optimizer: Optimizer, x: float, g: float, **settings: Any
) -> tuple[nn.Parameter, Optimizer]:
    """A copy that has made one step on one number, and that number."""
    group = dict(optimizer.param_groups[0])
    like = group.pop("params")[0]
    known = {name: value for name, value in settings.items() if name in group}
    kind: Any = type(optimizer)

    def stepped(dims: int) -> tuple[nn.Parameter, Optimizer]:
        number = nn.Parameter(torch.full((1,) * dims, x, device=like.device))
        number.grad = torch.full_like(number, g)
        probe: Optimizer = kind([{"params": [number], **group, **known}])
        probe.step()
        return number, probe

    try:
        return stepped(1)
    except ValueError:  # it takes matrices only, as Muon does
        return stepped(like.dim())
