"""What many workers of one process read, on their device: data sets, and the order of samples.

A copy from ordinary memory of the host waits until the device has done all that it was asked for.
So what many workers read is copied once, and the rest through memory that the device reads itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_BYTES = 8 << 30
"""How much of the device's memory data sets may take; larger ones stay with the host."""
ORDERS = 1024
"""How many orders of samples are kept: each worker may have one of its own."""


class Copied(NamedTuple):
    """A tensor of the host, its version when it was copied, and the copy."""

    source: Tensor
    version: int
    copy: Tensor


class Resident:
    """What the workers of a simulation read on their device.

    Args:
        device: of all workers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[tuple[object, ...], Copied] = {}
        self._orders: OrderedDict[int, tuple[NDArray[np.int64], Tensor]] = OrderedDict()
        self._bytes = 0

    def rows(self, tensors: Iterable[Tensor], indices: NDArray[np.int64]) -> list[Tensor]:
        """These rows of each tensor, on the device."""
        chosen = self._there(indices)
        return [self._rows(tensor, chosen, indices) for tensor in tensors]

    def _rows(self, tensor: Tensor, chosen: Tensor, indices: NDArray[np.int64]) -> Tensor:
        copy = self._copy_of(tensor)
        if copy is None:
            return self.moved(tensor[torch.tensor(indices)])
        return copy.index_select(0, chosen)

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; nobody waits for it."""
        if self._device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _copy_of(self, tensor: Tensor) -> Tensor | None:
        """The copy of a tensor, as it is now; None if it is too large to be there.

        Workers may each have a tensor of their own of the same memory.
        """
        if tensor.device == self._device:
            return tensor
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        known = self._copies.get(place)
        if known is not None and known.version == tensor._version:
            return known.copy
        if known is None:
            if self._bytes + tensor.nbytes > MOST_BYTES:
                return None
            self._bytes += tensor.nbytes
        copied = Copied(tensor, tensor._version, tensor.to(self._device))
        self._copies[place] = copied
        return copied.copy

    def _there(self, indices: NDArray[np.int64]) -> Tensor:
        """The indices on the device: a part of the order that they are a part of."""
        order = indices.base if isinstance(indices.base, np.ndarray) else indices
        is_part = order.dtype == indices.dtype and order.ndim == 1 and order.flags.c_contiguous
        if not (is_part and indices.flags.c_contiguous):
            return self.moved(torch.tensor(indices))
        known = self._orders.get(id(order))
        if known is None:
            known = self._orders[id(order)] = order, self.moved(torch.tensor(order))
            if len(self._orders) > ORDERS:
                self._orders.popitem(last=False)
        else:
            self._orders.move_to_end(id(order))
        first = (indices.ctypes.data - order.ctypes.data) // indices.itemsize
        return known[1][first : first + len(indices)]
