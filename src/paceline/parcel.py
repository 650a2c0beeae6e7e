"""A few numbers and a vector in one message."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Parcel:
    """Numbers in double precision and a vector, as views of one message of bytes.

    Example:
        >>> parcel = Parcel.of([0.1, 7], torch.ones(3))
        >>> arrived = Parcel(parcel.buffer.clone(), 2, torch.float32)
        >>> arrived.numbers.tolist(), arrived.vector.tolist()
        ([0.1, 7.0], [1.0, 1.0, 1.0])
    """

    def __init__(self, buffer: Tensor, numbers: int, dtype: torch.dtype) -> None:
        self.buffer = buffer
        self.numbers = buffer[: 8 * numbers].view(torch.float64)
        self.vector = buffer[8 * numbers :].view(dtype)

    @classmethod
    def empty(cls, numbers: int, like: Tensor) -> Parcel:
        """Room for so many numbers and a vector that is ``like`` another."""
        size = 8 * numbers + like.nbytes
        return cls(torch.zeros(size, dtype=torch.uint8, device=like.device), numbers, like.dtype)

    @classmethod
    def of(cls, numbers: Iterable[float], vector: Tensor) -> Parcel:
        """A message of these."""
        values = torch.tensor([*numbers], dtype=torch.float64)
        parcel = cls.empty(len(values), vector)
        parcel.numbers.copy_(values)
        parcel.vector.copy_(vector)
        return parcel
