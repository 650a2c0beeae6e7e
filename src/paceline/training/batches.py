"""The batches of a DataLoader that reads in this process, without its machinery.

They hold the same samples in the same order, and as many random numbers are drawn. A DataLoader
takes longer to hand on a small batch than to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map as collated_by

Read = Callable[[Any], Any]
"""Makes a batch of the numbers of its samples: an array, or a list."""


class Batches:
    """The batches of a map-style loader whose batch sampler draws ``indices`` anew each time."""

    def __init__(self, loader: DataLoader[Any], indices: Callable[[], Iterator[Any]]) -> None:
        self._indices, self._generator = indices, loader.generator
        self._read = reader(loader)

    def __iter__(self) -> Iterator[Any]:
        drawn = self._indices()
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)  # as a DataLoader
        return map(self._read, drawn)


def reads_here(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads in this process, and hands on what it has read as it is."""
    return not (loader.num_workers or loader.pin_memory)


def reader(loader: DataLoader[Any]) -> Read:
    """What reads batches as the loader would, in this process."""
    data: Any = loader.dataset
    many, collate = getattr(data, "__getitems__", None), loader.collate_fn
    samples: Read = many or (lambda numbers: [data[number] for number in numbers])

    def read(indices: Any) -> Any:
        return collate(samples(as_list(indices)))

    if collate is default_collate and _is_of_rows(data):
        return partial(_rows_of, data.tensors, read)
    return read


def _is_of_rows(data: Any) -> bool:
    """Whether the default batches of a data set are rows of its tensors."""
    if type(data) is not TensorDataset or not all(map(_is_plain, data.tensors)):
        return False
    return not any(issubclass(tuple, kind) for kind in collated_by)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its rows, stacked one by one, are the same as picked at once."""
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.is_contiguous()


def _rows_of(tensors: Iterable[Tensor], read: Read, indices: Any) -> Any:
    """These rows of each tensor."""
    if isinstance(indices, list):  # of a batch sampler of the user's own: they may be anything
        return read(indices)
    chosen = torch.tensor(indices)
    return [tensor[chosen] for tensor in tensors]


def as_list(indices: Any) -> list[int]:
    """The numbers of samples, as a data set expects them."""
    numbers: list[int] = indices if isinstance(indices, list) else indices.tolist()
    return numbers
