"""The numbers of an optimizer that a scheduler may change, as a list for a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


def read_hyperparameters(optimizer: Optimizer) -> list[float]:
    """The numbers that a scheduler may change (lr, momentum, betas), group after group."""
    numbers: list[float] = []
    for group in optimizer.param_groups:
        for name in _names(optimizer):
            value = group[name]
            numbers += map(float, value if isinstance(value, (tuple, list)) else [value])
    return numbers


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
    def is_number(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(is_number(item) for item in value)
        if hasattr(value, "fill_"):
            return True
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    return [name for name, value in optimizer.defaults.items() if is_number(value)]
