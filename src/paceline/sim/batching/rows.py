"""Parameters, gradients and buffers of all workers, as rows of matrices.

So a recorded computation finds those of any workers in fixed places, by the numbers of their rows.
The last row belongs to nobody: it fills up a computation that has room for more workers, and may
hold anything.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

ALIGNED = 32
"""Rows begin at multiples of so many numbers, as kernels for vectors like it."""


class Rows:
    """The matrices of a run.

    Args:
        workers: how many there are; their ranks are the numbers of their rows.

    Attributes:
        spare: the row that belongs to nobody.
        x, g: the parameters and the gradients; None until they are asked for.
        rest: the buffers and frozen parameters, by name.
    """

    def __init__(self, workers: int) -> None:
        self.spare = workers
        self.x: Tensor | None = None
        self.g: Tensor | None = None
        self.rest: dict[str, Tensor] = {}
        self._given: Counter[int] = Counter()

    def allocate(self, rank: int, numel: int, like: Tensor) -> Tensor:
        """A zeroed vector: the first one of a worker is for its parameters, the next for gradients.

        Vectors of other sizes than those of the first worker are no rows.
        """
        number = self._given[rank]
        self._given[rank] += 1
        if rank >= self.spare or number > 1:
            return like.new_zeros(numel)
        if number == 0:
            self.x = matrix = self._matrix(numel, like) if self.x is None else self.x
        else:
            self.g = matrix = self._matrix(numel, like) if self.g is None else self.g
        same = (matrix.shape[1], matrix.dtype, matrix.device) == (numel, like.dtype, like.device)
        return matrix[rank].data if same else like.new_zeros(numel)  # .data: a version of its own

    def _matrix(self, numel: int, like: Tensor) -> Tensor:
        return like.new_zeros(self.spare + 1, numel + -numel % ALIGNED)[:, :numel]

    def holds(self, rank: int, x: Tensor, g: Tensor) -> bool:
        """Whether the vectors of a worker are its rows."""
        if self.x is None or self.g is None:
            return False
        rows = self.x[rank].data_ptr(), self.g[rank].data_ptr()
        return (x.data_ptr(), g.data_ptr()) == rows

    def adopt(self, rank: int, name: str, tensor: Tensor) -> Tensor | None:
        """The row that holds a buffer or a frozen parameter from now on; None if it fits none."""
        if name not in self.rest:
            self.rest[name] = tensor.new_zeros(self.spare + 1, *tensor.shape)
            self.rest[name][self.spare] = tensor.detach()
        matrix = self.rest[name]
        if (matrix.shape[1:], matrix.dtype) != (tensor.shape, tensor.dtype):
            return None
        row = matrix[rank].data
        row.copy_(tensor.detach())
        return row

    def fill_spare(self, x: Tensor) -> None:
        """Have the row of nobody hold parameters with which one can compute."""
        assert self.x is not None
        self.x[self.spare].copy_(x)
