"""Computations that a GPU repeats by itself: it is told once what to do, and then only to do it.

To tell it takes the host many times as long as the computation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[], Sequence[Tensor]]
"""Computes, from tensors in fixed places, and returns the results."""


class Graph(Protocol):
    """A computation that can be repeated.

    Attributes:
        results: they are in the same places each time.
    """

    results: Sequence[Tensor]

    def replay(self) -> None:
        """Compute the results anew, from what is in the places of the inputs now."""


class Recorder(Protocol):
    """Records computations."""

    def record(
        self, forward: Compute, between: Callable[[], None], backward: Compute
    ) -> tuple[Graph, Graph]:
        """Record two computations, of which the second goes on from what the first one leaves.

        What happens ``between`` them is not recorded. To record computes nothing.
        """


class CudaGraph:
    """A CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Sequence[Tensor]) -> None:
        self._graph, self.results = graph, results

    def replay(self) -> None:
        """Have the device compute the results anew."""
        self._graph.replay()


class CudaGraphs:
    """Records CUDA graphs of one device, each pair with memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(
        self, forward: Compute, between: Callable[[], None], backward: Compute
    ) -> tuple[Graph, Graph]:
        """Record two computations on a stream of their own."""
        stream = torch.cuda.Stream(self._device)
        self._warm_up(stream, forward, between, backward)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        mode, collects = "thread_local", gc.isenabled()
        gc.collect()
        gc.disable()  # to free an earlier graph while one is recorded would spoil it
        try:
            with torch.cuda.graph(first, stream=stream, capture_error_mode=mode):
                results = forward()
            between()
            with torch.cuda.graph(second, first.pool(), stream, capture_error_mode=mode):
                more = backward()
        finally:
            if collects:
                gc.enable()
        return CudaGraph(first, results), CudaGraph(second, more)

    def _warm_up(
        self,
        stream: torch.cuda.Stream,
        forward: Compute,
        between: Callable[[], None],
        backward: Compute,
    ) -> None:
        """Compute once for nothing: what is loaded and chosen then cannot be while it records."""
        present = torch.cuda.current_stream(self._device)
        stream.wait_stream(present)
        with torch.cuda.stream(stream):
            forward()
            between()
            backward()
        present.wait_stream(stream)
        torch.cuda.synchronize(self._device)
