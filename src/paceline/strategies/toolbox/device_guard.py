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
        what: what the guard knows the gradients as.
    """

    def __init__(self, guard: Guard, blamed: Callable[[], bool], what: str = WHAT) -> None:
        self._guard, self._blamed, self._what = guard, blamed, what
        self._filter: Filter | None = None
        self._clipped_to: list[float | None] = []
        self._arriving: Norms | None = None

    def pass_through(self, gradient: Tensor, max_norm: float | None) -> None:
        """Judge the gradient of a step, which is in the same vector each time.

        ``max_norm`` is what the update will clip it to.
        """
        if self._filter is None:
            self._filter = Filter(gradient)
        limit = self._guard.limit(self._what)
        if max_norm is not None and max_norm <= limit:  # clipped, it is harmless if it is finite
            limit = self._filter.largest
        self._filter.apply(limit)
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
        if self._filter is None or not self._clipped_to:
            return
        norms = self._filter.norms[-len(self._clipped_to) :]
        sizes, arrived = norms.to("cpu", non_blocking=True, copy=True), None
        if norms.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(norms.device))
        self._arriving = Norms(sizes, arrived, self._clipped_to)
        self._clipped_to = []

    def _read(self) -> None:
        """Have the guard count the gradients whose norms were fetched."""
        if self._arriving is None:
            return
        (sizes, arrived, clipped_to), self._arriving = self._arriving, None
        if arrived is not None:
            arrived.synchronize()
        for size, max_norm in zip(sizes.tolist(), clipped_to, strict=True):
            clipped = max_norm is not None and size < float("inf")
            norm = min(size, max_norm) if clipped else size
            self._guard.admits(norm, self._guard.rank, self._what, self._blamed)


class Filter:
    """Sets a vector to zero whenever its norm is above a limit, and remembers the last norms.

    On a GPU, all that this asks of the device is one graph, which costs the worker one launch.

    Attributes:
        norms: the last ones, the latest at the end.
        largest: the largest limit.
    """

    def __init__(self, vector: Tensor) -> None:
        self._vector, self._zero = vector, vector.new_zeros(())
        precise = vector.dtype if vector.dtype.itemsize >= 4 else torch.float32
        self.norms = vector.new_zeros(AT_ONCE, dtype=precise)
        self.largest: float = torch.finfo(precise).max
        self._limit, self._limit_there = 0.0, self.norms.new_zeros(())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def apply(self, limit: float) -> None:
        """Look at the vector as it is now."""
        if limit != self._limit:
            self._limit = limit
            self._limit_there.fill_(limit)
        self._calls += 1
        if self._calls == 2 and self._vector.is_cuda:  # the first call has loaded all kernels
            self._graph = self._capture()
        if self._graph is None:
            self._apply()
        else:
            self._graph.replay()

    def _apply(self) -> None:
        size = torch.linalg.vector_norm(self._vector, dtype=self.norms.dtype)
        self.norms.copy_(torch.cat([self.norms[1:], size.view(1)]))
        good = size <= self._limit_there  # NaN is not
        torch.where(good, self._vector, self._zero, out=self._vector)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._vector.device)
        stream.wait_stream(torch.cuda.current_stream(self._vector.device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._apply()
            finally:
                graph.capture_end()
        return graph
