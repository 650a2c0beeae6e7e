"""What a model holds beside its trained parameters: buffers, and parameters that are not trained.

While they train, workers have buffers of their own: each sees other data. The method's answer is
one model, with one set of them. Floating-point buffers of the state dict, the running statistics of
BatchNorm above all, are averaged, each worker's with the samples that it has trained on as its
weight; what BatchNorm counts is added up. All others are those of the first worker.

The running variance of the answer is that of all workers' data together: the mean of the variances,
and the variance of the means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.comm.packet import Packet

STATISTICS = ("running_mean", "running_var")
COUNT = "num_batches_tracked"


class Slot(NamedTuple):
    """A buffer of a module, and how it was in the beginning: the module may replace it."""

    owner: nn.Module
    name: str
    first: Tensor

    def read(self) -> Tensor | None:
        """The buffer as it is now, unless it has another size by now."""
        now, first = getattr(self.owner, self.name, None), self.first
        if not isinstance(now, Tensor) or (now.shape, now.dtype) != (first.shape, first.dtype):
            return None
        return now.detach()

    def write(self, value: Tensor | None) -> None:
        """Set the buffer, unless it has another size by now."""
        now = self.read()
        if now is not None and value is not None:
            now.copy_(value.view(now.shape))


Unit = tuple[Slot, ...]
"""A buffer that is averaged; or a running mean and its variance."""


class Share(NamedTuple):
    """What a worker brings to the average.

    Attributes:
        weight: what its buffers count for.
        values: its buffers, in the order of the slots.
        base: what counts began with, the same on all workers.
        own: where this worker's own counting began.
    """

    weight: int
    values: Sequence[Tensor | None]
    base: Sequence[int]
    own: Sequence[int]


class Rest:
    """The buffers of a worker's model, and its parameters that are not trained.

    Args:
        model: of the worker.
        trained: the identities of its trained parameters.
    """

    def __init__(self, model: nn.Module, trained: Collection[int]) -> None:
        self._units = [*_units(model)]
        self._counts = [*_counts(model)]
        self._slots = [*(slot for unit in self._units for slot in unit), *self._counts]
        averaged = {id(slot.first) for slot in self._slots}
        every = [*model.parameters(), *model.buffers()]
        self._fixed = [t.detach() for t in every if id(t) not in trained and id(t) not in averaged]
        self._own = self._base = self._counted()

    def _counted(self) -> list[int]:
        return [0 if (count := slot.read()) is None else int(count) for slot in self._counts]

    @property
    def averaged(self) -> bool:
        """Whether there are buffers that workers average."""
        return bool(self._slots)

    @property
    def has_fixed(self) -> bool:
        """Whether there is more than those."""
        return bool(self._fixed)

    @property
    def is_empty(self) -> bool:
        """Whether the model has nothing but trained parameters."""
        return not (self._slots or self._fixed)

    # All of it, as bytes -------------------------------------------------------------------------

    def by_dtype(self) -> Iterator[list[Tensor]]:
        """All tensors of the rest, those of one dtype together."""
        every = [*self._fixed, *(slot.first.detach() for slot in self._slots)]
        for dtype in sorted({t.dtype for t in every}, key=str):
            yield [t for t in every if t.dtype is dtype]

    def begin(self) -> None:
        """Begin to count, with the buffers of the first worker."""
        self._own = self._base = self._counted()

    def fixed(self) -> Tensor:
        """What is not averaged, as bytes."""
        return pack(self._fixed)

    def load_fixed(self, content: Tensor) -> None:
        """Take up what :meth:`fixed` gave."""
        unpack(content, self._fixed)

    # The average ---------------------------------------------------------------------------------

    def read(self) -> list[Tensor | None]:
        """A copy of the buffers that are averaged."""
        return [None if (now := slot.read()) is None else now.clone() for slot in self._slots]

    def write(self, values: Sequence[Tensor | None]) -> None:
        """Set them to what :meth:`read` gave."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.write(value)

    def share(self, weight: int) -> Tensor:
        """This worker's part of the sum that :meth:`fit` is given."""
        return self._weigh(Share(weight, [slot.read() for slot in self._slots], [], self._own))

    def share_of(self, packet: Tensor) -> Tensor:
        """The part of another worker, by what it has shown."""
        return self._weigh(self._open(packet))

    def _weigh(self, share: Share) -> Tensor:
        """The weight of each unit; what was counted; then the units, times the weight."""
        weight, values = share.weight, iter(share.values)
        weights, weighted = [], []
        for unit in self._units:
            moments = _moments([next(values) for _ in unit], unit)
            sound = bool(torch.isfinite(moments).all())
            weights.append(weight if sound else 0)
            weighted.append(moments * weight if sound else torch.zeros_like(moments))
        gains = [
            max(int(count) - own, 0) if weight and count is not None else 0
            for count, own in zip(values, share.own, strict=True)
        ]
        return torch.cat([torch.tensor([*weights, *gains], dtype=torch.float64), *weighted])

    def fit(self, total: Tensor) -> None:
        """Set the buffers to the average, by the sum of the workers' shares."""
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

    # For others to see ---------------------------------------------------------------------------

    def packet(self, weight: int) -> Tensor | None:
        """What others may see of the slots; None when one has another size by now."""
        values = [now for slot in self._slots if (now := slot.read()) is not None]
        if len(values) < len(self._slots):
            return None
        return Packet.of([weight, *self._base, *self._own], pack(values)).buffer

    def _open(self, packet: Tensor) -> Share:
        counts = len(self._counts)
        content = Packet(packet, 1 + 2 * counts, torch.uint8)
        weight, *numbers = map(round, content.numbers.tolist())
        values = [torch.empty_like(slot.first, device="cpu") for slot in self._slots]
        unpack(content.vector, values)
        return Share(weight, values, numbers[:counts], numbers[counts:])

    def adopt(self, parcels: Sequence[Tensor]) -> None:
        """Take the average of other workers, by what they have shown, and go on from there."""
        shares = [self._open(packet) for packet in parcels]
        for share in shares[:1]:
            self.write(share.values)  # also where nobody has trained yet
            self._base = [*share.base]
            self.fit(torch.stack([self._weigh(each) for each in shares]).sum(0))
            self._own = self._counted()

    # For checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Sequence[int]]:
        """What a checkpoint holds beside the state of the model: where counts began."""
        return {"base": self._base, "own": self._own}

    def load_state(self, state: dict[str, Sequence[int]]) -> None:
        """Take up what :meth:`state` gave."""
        self._base, self._own = [*state["base"]], [*state["own"]]


def _units(model: nn.Module) -> Iterator[Unit]:
    """The floating-point buffers of the state dict; a mean and its variance go together."""
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

    Not a number, where a buffer has another size by now.
    """
    numbers = [
        torch.full((slot.first.numel(),), torch.nan, dtype=torch.float64)
        if value is None
        else value.reshape(-1).cpu().double()
        for slot, value in zip(unit, values, strict=True)
    ]
    return torch.cat([numbers[0], *(each + numbers[0].square() for each in numbers[1:])])


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of any dtypes as bytes, in memory of the host.

    >>> content = pack([torch.ones(2), torch.tensor(7)])
    >>> out = [torch.zeros(2), torch.tensor(0)]
    >>> unpack(content, out)
    >>> content.numel(), out
    (16, [tensor([1., 1.]), tensor(7)])
    """
    device = tensors[0].device if tensors else None
    parts = [t.reshape(-1).view(torch.uint8).to(device) for t in tensors]
    return torch.cat(parts or [torch.empty(0, dtype=torch.uint8)]).cpu()


def unpack(content: Tensor, tensors: Sequence[Tensor]) -> None:
    """Fill tensors with the bytes that :meth:`pack` made of others like them."""
    parts = content.split([t.nbytes for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Take the running statistics of BatchNorm anew, as means over batches; return how many.

    Every other module is as in evaluation. Modes and momenta are afterwards as before.
    """
    every = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    norms = {norm: norm.momentum for norm in every if norm.running_mean is not None}
    before = [(module, module.training) for module in model.modules()]
    count = 0
    try:
        for module, _ in before:
            module.training = module in norms
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # every batch counts alike
        with torch.no_grad():
            for batch in batches:
                model(batch[0] if isinstance(batch, (list, tuple)) else batch)
                count += 1
    finally:
        for module, training in before:
            module.training = training
        for norm, momentum in norms.items():
            norm.momentum = momentum
    return count
