"""A few numbers and a vector in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Parcel:
    """Numbers in double precision and a vector, as views of one message of bytes.

    Example:
        >>> import torch
        >>> parcel = Parcel.of([0.1, 7], torch.ones(3))
        >>> arrived = Parcel(parcel.buffer.clone(), 2, torch.float32)
        >>> arrived.numbers.tolist(), arrived.vector.tolist()
        ([0.1, 7.0], [1.0, 1.0, 1.0])
    """

    def __init__(self, buffer: Tensor, numbers: int, kind: dtype) -> None:
        import torch

        self.buffer = buffer
        self.numbers = buffer[: 8 * numbers].view(torch.float64)
        self.vector = buffer[8 * numbers :].view(kind)

    @classmethod
    def empty(cls, numbers: int, like: Tensor) -> Parcel:
        """Room for so many numbers and a vector that is ``like`` another."""
        import torch

        buffer = like.new_empty(8 * numbers + like.nbytes, dtype=torch.uint8)
        return cls(buffer, numbers, like.dtype)

    @classmethod
    def of(cls, numbers: Sequence[float], vector: Tensor) -> Parcel:
        """A message of these."""
        parcel = cls.empty(len(numbers), vector)
        parcel.write(numbers)
        parcel.vector.copy_(vector)
        return parcel

    def write(self, numbers: Sequence[float]) -> None:
        """Set the numbers."""
        self.numbers.copy_(self.numbers.new_tensor(numbers))
