"""The parts of a run with several optimizers: the parameters of each one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Part(NamedTuple):
    """The parameters of one optimizer.

    Attributes:
        number: of the optimizer.
        spans: which they are of all parameters.
        place: where they are in the vector.
        first_group: the number of its first parameter group among all.
    """

    number: int = 0
    spans: slice = slice(None)
    place: slice = slice(None)
    first_group: int = 0


WHOLE = Part()
"""The only part of a run with one optimizer."""


def optimizers_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that are joined in one; that one itself where none are."""
    joined: tuple[Optimizer, ...] = getattr(optimizer, "joined", (optimizer,))
    return joined
