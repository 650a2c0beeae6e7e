"""The rest of a model beside its trained parameters: buffers, and parameters that are frozen.

During training each worker has its own buffers, because it sees different data. The method's answer
is one model with one set of buffers. Floating-point buffers of the state dict (above all the
running statistics of BatchNorm) are averaged, weighted by the samples that each worker trained on.
The batch counts of BatchNorm are added up. Everything else comes from the first worker.

The running variance of the answer is that of all workers' data together: the mean of the variances
plus the variance of the means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

if TYPE_CHECKING:
    from paceline.sim.resident import Resident

STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


class Slot(NamedTuple):
    """A buffer of a module and its initial tensor; the module may replace the tensor later."""

    owner: nn.Module
    name: str
    first: Tensor

    def read(self) -> Tensor | None:
        """The current buffer; None if its size or dtype has changed."""
        now, first = getattr(self.owner, self.name, None), self.first
        if not isinstance(now, Tensor) or (now.shape, now.dtype) != (first.shape, first.dtype):
            return None
        return now.detach()

    def write(self, value: Tensor | None) -> None:
        """Set the buffer, unless its size or dtype has changed."""
        now = self.read()
        if now is not None and value is not None:
            now.copy_(value.view(now.shape))


Unit = tuple[Slot, ...]
"""One averaged buffer, or a running mean together with its variance."""


class Share(NamedTuple):
    """What a worker contributes to the average.

    Attributes:
        weight: the weight of its buffers.
        values: its buffers, in the order of the slots.
        base: the batch counts at the start of the run, the same on all workers.
        own: the batch counts at which this worker started.
    """

    weight: int
    values: Sequence[Tensor | None]
    base: Sequence[int]
    own: Sequence[int]


class Rest:
    """The buffers of a worker's model, and its parameters that are not trained.

    Args:
        model: the worker's model.
        trained: the ids of its trained parameters.

    Attributes:
        averaged: whether there are buffers that workers average.
        is_empty: whether the model has nothing but trained parameters.
    """

    def __init__(self, model: nn.Module, trained: Collection[int]) -> None:
        self._units = [*_units(model)]
        self._counts = [*_counts(model)]
        self._slots = [*(slot for unit in self._units for slot in unit), *self._counts]
        averaged = {id(slot.first) for slot in self._slots}
        every = [*model.parameters(), *model.buffers()]
        self._fixed = [t.detach() for t in every if id(t) not in trained and id(t) not in averaged]
        self.averaged, self.is_empty = bool(self._slots), not (self._slots or self._fixed)
        self.begin()

    def _counted(self) -> list[int]:
        return [0 if (count := slot.read()) is None else int(count) for slot in self._counts]

    # All of it, as bytes -------------------------------------------------------------------------

    def by_dtype(self) -> Iterator[list[Tensor]]:
        """All buffers and frozen parameters, grouped by dtype."""
        tensors = [*self._fixed, *(slot.first.detach() for slot in self._slots)]
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            yield [t for t in tensors if t.dtype is dtype]

    def begin(self) -> None:
        """Start counting batches from the current buffers, which are those of the first worker."""
        self._own = self._base = self._counted()

    def fixed(self) -> Tensor:
        """The tensors that are not averaged, as bytes."""
        return pack(self._fixed)

    def load_fixed(self, content: Tensor) -> None:
        """Set the tensors that are not averaged from the bytes of :meth:`fixed`."""
        unpack(content, self._fixed)

    # The average ---------------------------------------------------------------------------------

    def read(self) -> list[Tensor | None]:
        """A copy of the buffers that are averaged."""
        return [None if (now := slot.read()) is None else now.clone() for slot in self._slots]

    def write(self, values: Sequence[Tensor | None]) -> None:
        """Set the buffers that are averaged to what :meth:`read` returned."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.write(value)

    def share(self, weight: int) -> Tensor:
        """This worker's term of the sum that :meth:`fit` takes."""
        return self._weigh(Share(weight, [slot.read() for slot in self._slots], [], self._own))

    def share_of(self, packet: Tensor) -> Tensor:
        """The term of another worker, from the packet that it published."""
        return self._weigh(self._open(packet))

    def _weigh(self, share: Share) -> Tensor:
        """The weight of each unit, the counted batches, then each unit times its weight."""
        weight, values = share.weight, iter(share.values)
        weights, weighted = [], []
        for unit in self._units:
            moments = _moments([next(values) for _ in unit], unit)
            finite = bool(torch.isfinite(moments).all())
            weights.append(weight if finite else 0)
            weighted.append(moments * weight if finite else torch.zeros_like(moments))
        gains = [
            max(int(count) - own, 0) if weight and count is not None else 0
            for count, own in zip(values, share.own, strict=True)
        ]
        return torch.cat([torch.tensor([*weights, *gains], dtype=torch.float64), *weighted])

    def fit(self, total: Tensor) -> None:
        """Set the buffers to the average, given the sum of the workers' terms."""
        units, counts = len(self._units), len(self._counts)
        weights, gains, *sums = total.split(
            [units, counts, *(sum(s.first.numel() for s in unit) for unit in self._units)]
        )
        if not weights.any():
            return
        for unit, weight, summed in zip(self._units, weights.tolist(), sums, strict=True):
            if weight:
                parts = (summed / weight).split([slot.first.numel() for slot in unit])
                unit[0].write(parts[0])
                for slot in unit[1:]:
                    slot.write((parts[1] - parts[0].square()).clamp_(min=0))
        for slot, base, gain in zip(self._counts, self._base, gains.tolist(), strict=True):
            slot.write(torch.tensor(base + round(gain)))

    # For other workers ---------------------------------------------------------------------------

    def packet(self, weight: int, resident: Resident | None = None) -> Tensor | None:
        """The buffers that others may read; None if the size of one has changed.

        Of workers with ``resident``, it stays on their device.
        """
        values = [now for slot in self._slots if (now := slot.read()) is not None]
        if len(values) < len(self._slots):
            return None
        numbers = torch.tensor([weight, *self._base, *self._own], dtype=torch.int64)
        if resident is None:
            return pack([*values, numbers])
        return pack([*values, resident.moved(numbers)], stay=True)

    def _open(self, packet: Tensor) -> Share:
        counts = len(self._counts)
        values = [torch.empty_like(slot.first, device="cpu") for slot in self._slots]
        numbers = torch.empty(1 + 2 * counts, dtype=torch.int64)
        unpack(packet, [*values, numbers])
        weight, *both = numbers.tolist()
        return Share(weight, values, both[:counts], both[counts:])

    def adopt(self, packets: Sequence[Tensor]) -> None:
        """Start from the average of other workers' published packets."""
        shares = [self._open(packet) for packet in packets]
        for share in shares[:1]:
            self.write(share.values)  # the average has no weight if no worker has trained yet
            self._base = [*share.base]
            self.fit(torch.stack([self._weigh(each) for each in shares]).sum(0))
            self._own = self._counted()

    # For checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Sequence[int]]:
        """The initial batch counts, which a checkpoint holds beside the model's state."""
        return {"base": self._base, "own": self._own}

    def load_state(self, state: dict[str, Sequence[int]]) -> None:
        """Restore what :meth:`state` returned."""
        self._base, self._own = [*state["base"]], [*state["own"]]


def _units(model: nn.Module) -> Iterator[Unit]:
    """The floating-point buffers of the state dict; a mean and its variance form one unit."""
    for module in model.modules():
        persistent = {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
        }
        if isinstance(module, _NormBase) and persistent.keys() >= set(STATISTICS):
            yield tuple(Slot(module, name, persistent.pop(name)) for name in STATISTICS)
        for name, buffer in persistent.items():
            yield (Slot(module, name, buffer),)


def _counts(model: nn.Module) -> Iterator[Slot]:
    for module in model.modules():
        if isinstance(module, _NormBase) and (count := module.num_batches_tracked) is not None:
            yield Slot(module, COUNT, count)


def _moments(values: Sequence[Tensor | None], unit: Unit) -> Tensor:
    """A unit in double precision, with the mean square in place of the variance.

    A buffer whose size has changed becomes NaN.
    """
    numbers = [
        torch.full((slot.first.numel(),), torch.nan, dtype=torch.float64)
        if value is None
        else value.reshape(-1).cpu().double()
        for slot, value in zip(unit, values, strict=True)
    ]
    return torch.cat([numbers[0], *(each + numbers[0].square() for each in numbers[1:])])


def pack(tensors: Sequence[Tensor], stay: bool = False) -> Tensor:
    """Tensors of any dtypes as bytes, in host memory; or, to ``stay``, on the first one's device.

    >>> content = pack([torch.ones(2), torch.tensor(7)])
    >>> out = [torch.zeros(2), torch.tensor(0)]
    >>> unpack(content, out)
    >>> content.numel(), out
    (16, [tensor([1., 1.]), tensor(7)])
    """
    device = tensors[0].device if tensors else None
    runs = [[*run] for _, run in groupby(tensors, attrgetter("dtype", "device"))]
    joined = [torch.cat([tensor.reshape(-1) for tensor in run]) for run in runs]
    parts = [each.view(torch.uint8).to(device) for each in joined]
    content = torch.cat(parts or [torch.empty(0, dtype=torch.uint8)])
    return content if stay else content.cpu()


def unpack(content: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill tensors with the bytes that :meth:`pack` made from tensors of the same layout."""
    parts = content.split([t.nbytes for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Recompute the running statistics of BatchNorm over ``batches``; return how many there were.

    All other modules are in evaluation mode meanwhile. Modes and momenta are restored.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    norms = {norm: norm.momentum for norm in layers if norm.running_mean is not None}
    modes = [(module, module.training) for module in model.modules()]
    count = 0
    try:
        for module, _ in modes:
            module.training = module in norms
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # every batch has the same weight
        with torch.no_grad():
            for batch in batches:
                model(batch[0] if isinstance(batch, (list, tuple)) else batch)
                count += 1
    finally:
        for module, training in modes:
            module.training = training
        for norm, momentum in norms.items():
            norm.momentum = momentum
    return count
