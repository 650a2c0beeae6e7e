"""A few numbers and a vector in one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Packet:
    """Numbers in double precision and a vector, as views of one message of bytes.

    Example:
        >>> import torch
        >>> parcel = Packet.of([0.1, 7], torch.ones(3))
        >>> arrived = Packet(parcel.buffer.clone(), 2, torch.float32)
        >>> arrived.numbers.tolist(), arrived.vector.tolist()
        ([0.1, 7.0], [1.0, 1.0, 1.0])
    """

    def __init__(self, buffer: Tensor, numbers: int, kind: dtype) -> None:
        import torch

        self.buffer = buffer
        self.numbers = buffer[: 8 * numbers].view(torch.float64)
        self.vector = buffer[8 * numbers :].view(kind)

    @classmethod
    def empty(cls, numbers: int, like: Tensor) -> Packet:
        """Room for so many numbers and a vector that is ``like`` another."""
        import torch

        buffer = like.new_empty(8 * numbers + like.nbytes, dtype=torch.uint8)
        return cls(buffer, numbers, like.dtype)

    @classmethod
    def of(cls, numbers: Sequence[float], vector: Tensor) -> Packet:
        """A message of these."""
        packet = cls.empty(len(numbers), vector)
        packet.write(numbers)
        packet.vector.copy_(vector)
        return packet

    def write(self, numbers: Sequence[float]) -> None:
        """Set the numbers."""
        self.numbers.copy_(self.numbers.new_tensor(numbers))
