"""The numbers of an optimizer that a scheduler may change, as a list for a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.model.part import optimizers_of

if TYPE_CHECKING:
    from torch.optim import Optimizer


def read_hyperparameters(optimizer: Optimizer) -> list[float]:
    """The numbers that a scheduler may change (lr, momentum, betas), group after group."""
    numbers: list[float] = []
    for group, name in _settings(optimizer):
        value = group[name]
        numbers += map(float, value if isinstance(value, (tuple, list)) else [value])
    return numbers


def write_hyperparameters(optimizer: Optimizer, numbers: Sequence[float]) -> None:
    """Set the numbers that :func:`read_hyperparameters` returned, in the same order."""
    remaining = iter(numbers)
    for group, name in _settings(optimizer):
        value = group[name]
        if hasattr(value, "fill_"):
            value.fill_(next(remaining))
        elif isinstance(value, (tuple, list)):
            group[name] = tuple(_like(each, next(remaining)) for each in value)
        else:
            group[name] = _like(value, next(remaining))


def _like(before: float, number: float) -> float:
    """A number; a whole one as an int if it was one before, such as a count of iterations."""
    return int(number) if isinstance(before, int) and number == int(number) else number


def _settings(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """Each group, with the name of each of its numbers."""
    for part in optimizers_of(optimizer):
        names = _names(part)
        for group in part.param_groups:
            yield from ((group, name) for name in names)


def _names(optimizer: Optimizer) -> list[str]:
    def is_number(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return all(is_number(item) for item in value)
        if hasattr(value, "fill_"):
            return True
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    return [name for name, value in optimizer.defaults.items() if is_number(value)]
