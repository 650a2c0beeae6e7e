"""The guard of gradients that stay on a worker's GPU: the worker does not wait for the device.

The device itself sets a bad gradient to zero. The guard counts and reports it later: the norms of
some steps travel from the device together, and are read when the next ones are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.strategies.toolbox.guard import Guard

WHAT = "gradient"
"""The kind of the updates that are judged here, as the guard names it."""
AT_ONCE = 16
"""How many norms travel from the device together."""


class Norms(NamedTuple):
    """Norms on their way from the device, and what each update clips its gradient to."""

    sizes: Tensor
    arrived: torch.cuda.Event | None
    clipped_to: list[float | None]


class DeviceGuard:
    """Lets good gradients of one worker through, and makes bad ones zero.

    Args:
        guard: of this rank; it remembers the usual norms.
        blamed: whether this rank is to be blamed for a bad gradient.
    """

    def __init__(self, guard: Guard, blamed: Callable[[], bool]) -> None:
        self._guard, self._blamed = guard, blamed
        self._sizes, self._clipped_to = torch.empty(0), list[float | None]()
        self._zero = torch.zeros(())
        self._arriving: Norms | None = None

    @torch.no_grad()
    def pass_through(self, gradient: Tensor, max_norm: float | None) -> None:
        """Judge the gradient of a step; ``max_norm`` is what the update will clip it to."""
        if not self._clipped_to:
            precise = gradient.dtype if gradient.dtype.itemsize >= 4 else torch.float32
            self._sizes = gradient.new_empty(AT_ONCE, dtype=precise)
            self._zero = gradient.new_zeros(())
        size = self._sizes[len(self._clipped_to)]
        torch.linalg.vector_norm(gradient, dtype=size.dtype, out=size)
        limit = self._guard.limit(WHAT)
        if max_norm is not None and max_norm <= limit:  # clipped, it is harmless if it is finite
            limit = torch.finfo(size.dtype).max
        torch.where(size <= limit, gradient, self._zero, out=gradient)  # NaN is above the limit
        self._clipped_to.append(max_norm)
        if len(self._clipped_to) == AT_ONCE:
            self._fetch()

    def settle(self) -> None:
        """Have the guard count all gradients so far."""
        self._fetch()
        self._read()

    def _fetch(self) -> None:
        """Read the norms that were fetched before, and have the device send the latest ones."""
        self._read()
        if not self._clipped_to:
            return
        sizes, arrived = self._sizes.to("cpu", non_blocking=True), None
        if self._sizes.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(self._sizes.device))
        self._arriving = Norms(sizes, arrived, self._clipped_to)
        self._clipped_to = []

    def _read(self) -> None:
        """Have the guard count the gradients whose norms were fetched."""
        if self._arriving is None:
            return
        (sizes, arrived, clipped_to), self._arriving = self._arriving, None
        if arrived is not None:
            arrived.synchronize()
        for size, max_norm in zip(sizes.tolist(), clipped_to, strict=False):
            clipped = max_norm is not None and size < float("inf")
            norm = min(size, max_norm) if clipped else size
            self._guard.admits(norm, self._guard.rank, WHAT, self._blamed)
