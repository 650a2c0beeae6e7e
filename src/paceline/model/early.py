"""Gathers gradients while backward makes them: those of a large model should not exist twice."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

EARLY_BYTES = 1 << 20
"""Gradients from this size on are gathered early. One copy of all smaller ones is faster."""


class EarlyGather:
    """Copies the gradient of one parameter to its place as soon as backward has made it.

    Where anybody still holds what is there, from an earlier backward, the new one stays by itself
    until the step.

    Args:
        place: of the gradient, in the vector of all.
        users: how many tensors of this library's own share the memory of that vector.
        wanted: whether gradients are to be gathered now.
    """

    def __init__(self, place: Tensor, users: Callable[[], int], wanted: Callable[[], bool]) -> None:
        self._place, self._users, self._wanted = place, users, wanted
        self._references = 0

    def __call__(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None or grad is self._place or grad.requires_grad:
            return
        if grad.layout == torch.strided and self._wanted() and self._is_free():
            parameter.grad = self._place.copy_(grad)

    def _is_free(self) -> bool:
        """Whether nobody holds the place, or a view of it; before the first time, nobody can."""
        references = sys.getrefcount(self._place)
        self._references = self._references or references
        return references <= self._references and count_users(self._place) <= self._users()


def count_users(x: Tensor) -> int:
    """How many tensors share the memory of this one."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)
