"""What a worker tells of itself, to have its gradients computed with those of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn


class Enrollment(NamedTuple):
    """One worker's model.

    Attributes:
        model: the model.
        x: the flat vector of its trained parameters.
        trained: these parameters, in their order in ``x``, and where each begins.
        foresee_s: how long the next step's gradient takes at least; None if no step may follow.
        ignored: hooks of this type on the model's modules are Paceline's own.
        gradient: returns the flat vector of the gradients, and the part of each parameter in it.
        steps: how many steps the worker has made.
        why_not: why its gradients must be computed alone; None if they need not be.
    """

    model: nn.Module
    x: Tensor
    trained: Sequence[tuple[nn.Parameter, int]]
    foresee_s: Callable[[], float | None]
    ignored: type
    gradient: Callable[[], tuple[Tensor, Sequence[Tensor]]]
    steps: Callable[[], int]
    why_not: str | None = None
