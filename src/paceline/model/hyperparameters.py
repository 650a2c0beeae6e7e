"""The numbers of an optimizer that a scheduler may change, as a list for a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def read_hyperparameters(optimizer: Optimizer) -> list[float]:
    """The numbers that a scheduler may change (lr, momentum, betas), group after group."""
    names = _names(optimizer)
    values = [group[name] for group in optimizer.param_groups for name in names]
    return [float(number) for value in values for number in _numbers(value)]


def write_hyperparameters(optimizer: Optimizer, numbers: Sequence[float]) -> None:
    """Set the numbers that :func:`read_hyperparameters` returned, in the same order."""
    remaining = iter(numbers)
    for group in optimizer.param_groups:
        for name in _names(optimizer):
            value = group[name]
            if hasattr(value, "fill_"):
                value.fill_(next(remaining))
            elif isinstance(value, (tuple, list)):
                group[name] = tuple(next(remaining) for _ in value)
            else:
                group[name] = next(remaining)


def _names(optimizer: Optimizer) -> list[str]:
    """The settings that consist of numbers; a flag is none."""
    kinds = (int, float, Tensor)
    return [
        name
        for name, value in optimizer.defaults.items()
        if all(isinstance(n, kinds) and not isinstance(n, bool) for n in _numbers(value))
    ]


def _numbers(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]
