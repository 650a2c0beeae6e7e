"""One forward and one backward of several workers, recorded for any workers of one kind of call.

It reads and writes rows of matrices, whose numbers lie in a fixed place, as do the inputs and the
gradients of the outputs. A worker's gradient is in its row when the backward is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.sim.batching.joint import Place, Program, Restored, compute_together
from paceline.sim.batching.rows import Rows

if TYPE_CHECKING:
    from paceline.sim.batching.graphs import Recorder


class Tape(NamedTuple):
    """What a forward leaves for the backward."""

    leaves: Sequence[Tensor]
    outputs: Sequence[Tensor]


class Sizes(NamedTuple):
    """The norms of some gradients, on their way to the host."""

    norms: Tensor
    arrived: torch.cuda.Event | None

    def of(self, number: int) -> Callable[[], float]:
        """Tells one norm; the first who asks waits for all."""
        return partial(self._of, number)

    def _of(self, number: int) -> float:
        if self.arrived is not None:
            self.arrived.synchronize()
        return float(self.norms[number])


class Recorded:
    """One forward and one backward of ``size`` workers or fewer.

    Args:
        program: what they compute.
        rows: of all workers.
        size: the most workers that it has room for; an attribute, too.
        inputs: the tensors in the arguments of one call.
        recorder: records the two computations.

    Attributes:
        outputs: the tensors in the result, each with one row for each worker.
        restored: makes a worker's result from its rows.
    """

    def __init__(
        self,
        program: Program,
        rows: Rows,
        size: int,
        inputs: Sequence[Tensor],
        recorder: Recorder,
    ) -> None:
        assert rows.x is not None and rows.g is not None
        self._program, self._rows, self.size = program, rows, size
        self._x, self._g = rows.x, rows.g
        self._places = sorted({*program.trained.values()})
        self._rest = {name: rows.rest[name] for name in _names_of_rest(program)}
        self._buffers = {name for name, _ in program.template.named_buffers(remove_duplicate=False)}
        self._numbers = torch.full((size,), rows.spare, device=self._x.device)
        self._inputs = [each.new_zeros(size, *each.shape) for each in inputs]
        self._grads: list[Tensor | None] = []
        self._generator = generator_of(self._x.device)
        self._drawn = self._generator.get_state()
        self._ranks: list[int] = []
        self._spent = False
        self.restored: Restored = tuple
        self._tape = Tape((), ())
        self._reached = self._look()
        self._there, self._back = recorder.record(self._forward, self._make_room, self._backward)
        self.outputs = [output.detach() for output in self._there.results]
        self.varying = [bool(output.requires_grad) for output in self._there.results]
        self._tape = Tape((), ())

    # What is recorded ----------------------------------------------------------------------------

    def _forward(self) -> Sequence[Tensor]:
        rest = {name: matrix.index_select(0, self._numbers) for name, matrix in self._rest.items()}
        leaves = self._program.leaves(self._x.index_select(0, self._numbers))
        inputs = [_laid(each) for each in self._inputs]
        outputs, after, self.restored = compute_together(self._program, leaves, rest, inputs)
        with torch.no_grad():
            for name in self._buffers:
                self._rest[name].index_copy_(0, self._numbers, after[name].detach())
        self._tape = Tape(leaves, outputs)
        return outputs

    def _make_room(self) -> None:
        """For the gradients of the outputs."""
        self._grads = [
            torch.zeros_like(output, requires_grad=False) if output.requires_grad else None
            for output in self._tape.outputs
        ]

    def _backward(self) -> Sequence[Tensor]:
        given = [
            (output, grad)
            for output, grad in zip(self._tape.outputs, self._grads, strict=True)
            if grad is not None
        ]
        outputs, grads = zip(*given, strict=True)
        found: Sequence[Tensor | None] = torch.autograd.grad(
            outputs, self._tape.leaves, grads, allow_unused=True
        )
        self._tape = Tape((), ())
        for place, grad in zip(self._places, found, strict=True):
            target = _part_of_each(self._g, place)
            if grad is None:
                target.index_fill_(0, self._numbers, 0)
            else:
                target.index_copy_(0, self._numbers, grad)
        precise = self._g.dtype if self._g.dtype.itemsize >= 4 else torch.float32
        mine = self._g.index_select(0, self._numbers)
        return [torch.linalg.vector_norm(mine, dim=1, dtype=precise)]

    def _look(self) -> list[tuple[bool, ...]]:
        """For each output, the parameters that it depends on; those of the row of nobody."""
        self._forward()
        leaves, outputs = self._tape
        return [
            tuple(found is not None for found in _gradients(output, leaves))
            if output.requires_grad
            else (False,) * len(leaves)
            for output in outputs
        ]

    # For workers ---------------------------------------------------------------------------------

    def forward(self, ranks: Sequence[int], inputs: Sequence[Sequence[Tensor]]) -> None:
        """Compute the results of these workers, at most as many as there is room for."""
        self._ranks, self._spent = [*ranks], False
        self._choose(ranks)
        for place, own in zip(self._inputs, zip(*inputs, strict=True), strict=True):
            torch.stack(own, out=place[: len(ranks)])
        self._drawn = self._generator.get_state()
        self._there.replay()

    def _repeat(self, numbers: Collection[int]) -> None:
        """Compute the results of some workers again: a backward leaves nothing for a second one."""
        spare, now = self._rows.spare, self._generator.get_state()
        self._choose([rank if n in numbers else spare for n, rank in enumerate(self._ranks)])
        kept = [matrix.index_select(0, self._numbers) for matrix in self._rest.values()]
        self._generator.set_state(self._drawn)
        self._there.replay()
        self._generator.set_state(now)
        for matrix, before in zip(self._rest.values(), kept, strict=True):
            matrix.index_copy_(0, self._numbers, before)

    def _choose(self, ranks: Sequence[int]) -> None:
        spare = [self._rows.spare] * (self.size - len(ranks))
        chosen = torch.tensor([*ranks, *spare])
        if self._numbers.is_cuda:  # a new one each time: it is read when this has returned
            chosen = chosen.pin_memory()
        self._numbers.copy_(chosen, non_blocking=True)

    def backward(self, grads: Mapping[int, Sequence[Tensor | None]]) -> Sizes:
        """Compute gradients, given those of the outputs by the worker's number; their norms."""
        if self._spent:
            self._repeat(grads)
        self._spent = True
        for number, place in enumerate(self._grads):
            if place is None:
                continue
            zero = torch.zeros_like(place[0])
            given = [grads[row][number] if row in grads else None for row in range(self.size)]
            torch.stack([zero if grad is None else grad for grad in given], out=place)
        self._back.replay()
        return self._sizes()

    def _sizes(self) -> Sizes:
        """The norms, which are sent to the host together."""
        norms = self._back.results[0]
        if not norms.is_cuda:
            return Sizes(norms.clone(), None)
        host = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
        host.copy_(norms, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(norms.device))
        return Sizes(host, arrived)

    def parts(self, row: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the parameters in a row, given those of the outputs."""
        pairs = zip(self._places, self.reached(grads), strict=True)
        return [part_of(row, place) if there else None for place, there in pairs]

    def reached(self, grads: Sequence[Tensor | None]) -> tuple[bool, ...]:
        """Which parameters have a gradient, given those of the outputs."""
        used = [r for r, grad in zip(self._reached, grads, strict=True) if grad is not None]
        return used[0] if len(used) == 1 else tuple(map(any, zip(*used, strict=True)))


def _names_of_rest(program: Program) -> list[str]:
    """All names of the buffers and of the frozen parameters."""
    template = program.template
    frozen = (name for name, _ in template.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in template.named_buffers(remove_duplicate=False))
    return [*(name for name in frozen if name not in program.trained), *buffers]


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that random layers draw from."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def part_of(row: Tensor, place: Place) -> Tensor:
    """A parameter's part of a row."""
    return row.as_strided(place.shape, place.strides, row.storage_offset() + place.start)


def _part_of_each(matrix: Tensor, place: Place) -> Tensor:
    """A parameter's part of each row."""
    shape, strides = (len(matrix), *place.shape), (matrix.stride(0), *place.strides)
    return matrix.as_strided(shape, strides, matrix.storage_offset() + place.start)


def _gradients(output: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    zeros = torch.zeros_like(output)
    return torch.autograd.grad(output, leaves, zeros, retain_graph=True, allow_unused=True)


def _laid(inputs: Tensor) -> Tensor:
    """Images so that those of all workers, with workers as channels, are channels-last.

    That is how a GPU convolves them fastest.
    """
    if inputs.dim() != 5 or not inputs.is_floating_point():
        return inputs
    return inputs.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)
