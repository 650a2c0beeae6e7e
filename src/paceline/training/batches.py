"""The batches of a DataLoader that reads in this process, without its machinery.

They hold the same samples in the same order, and as many random numbers are drawn. A DataLoader
takes longer to hand on a small batch than to read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map as collated_by

if TYPE_CHECKING:
    from paceline.sim.resident import Resident

Read = Callable[[Any], Any]
"""Makes a batch of the numbers of its samples: an array, or a list."""
RowsOf = Callable[[Iterable[Tensor], Any], list[Tensor]]


class Batches:
    """The batches of a map-style loader.

    Args:
        loader: the loader.
        indices: draws those of its batches, anew each time.
        resident: reads rows of tensors on the workers' device, where they share one.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        indices: Callable[[], Iterator[Any]],
        resident: Resident | None = None,
    ) -> None:
        self._indices, self._generator = indices, loader.generator
        self._read = reader(loader, resident)

    def __iter__(self) -> Iterator[Any]:
        drawn = self._indices()
        torch.empty((), dtype=torch.int64).random_(generator=self._generator)  # as a DataLoader
        return map(self._read, drawn)


def reads_here(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads in this process, and hands on what it has read as it is."""
    return not (loader.num_workers or loader.pin_memory)


def reader(loader: DataLoader[Any], resident: Resident | None = None) -> Read:
    """What reads batches as the loader would, in this process."""
    data: Any = loader.dataset
    many, collate = getattr(data, "__getitems__", None), loader.collate_fn
    samples: Read = many or (lambda numbers: [data[number] for number in numbers])

    def read(indices: Any) -> Any:
        return collate(samples(as_list(indices)))

    if collate is default_collate and _is_of_rows(data):
        rows_of = _rows_of if resident is None else resident.rows
        return partial(_rows_or_all, rows_of, data.tensors, read)
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


def _rows_or_all(rows_of: RowsOf, tensors: Sequence[Tensor], read: Read, indices: Any) -> Any:
    """These rows of each tensor; what :data:`Read` has where a user's own sampler has a say."""
    return read(indices) if isinstance(indices, list) else rows_of(tensors, indices)


def _rows_of(tensors: Iterable[Tensor], indices: Any) -> list[Tensor]:
    """These rows of each tensor."""
    chosen = torch.tensor(indices)
    return [tensor[chosen] for tensor in tensors]


def as_list(indices: Any) -> list[int]:
    """The numbers of samples, as a data set expects them."""
    numbers: list[int] = indices if isinstance(indices, list) else indices.tolist()
    return numbers
