"""One forward of several workers as one, and the backward passes through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from paceline.sim.batching.rules import Rules

Tensors = dict[str, Tensor]
Restored = Callable[[Sequence[Tensor]], Any]
"""Makes the result of a model from the tensors in it."""
PLAIN = (type(None), bool, int, float, str)


class Cannot(Exception):
    """Why calls cannot be computed together."""


class Place(NamedTuple):
    """Where a trained parameter lies in the flat vector."""

    number: int
    start: int
    shape: torch.Size
    strides: tuple[int, ...]


class Arguments(NamedTuple):
    """The arguments of a call of the model, with its tensors taken out.

    Attributes:
        rest: all leaves of the arguments; an Ellipsis stands for each tensor.
    """

    spec: TreeSpec
    rest: tuple[Any, ...]

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> tuple[Arguments, list[Tensor]]:
        """The arguments, and the tensors in them."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # as most models are called
            return _ONE_TENSOR, [args[0]]
        leaves, spec = tree_flatten((args, kwargs))
        rest = tuple(... if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return cls(spec, rest), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The positional and the named arguments, with these tensors in their places."""
        given = iter(tensors)
        leaves = [next(given) if leaf is ... else leaf for leaf in self.rest]
        return tree_unflatten(leaves, self.spec)


_ONE_TENSOR = Arguments(tree_flatten(((0,), {}))[1], (...,))


class Program(NamedTuple):
    """What all calls of one kind compute.

    Attributes:
        template: a copy of the model; the parameters and buffers in it are not used.
        trained: the place of each trained parameter, by all of its names.
        autocast: the dtype of ``torch.autocast``; None where it is off.
    """

    template: nn.Module
    trained: dict[str, Place]
    arguments: Arguments
    autocast: torch.dtype | None

    def run(self, own: Tensors, rest: Tensors, inputs: Sequence[Tensor]) -> tuple[Any, Tensors]:
        """The model's result with the tensors of one worker, and its buffers after that."""
        state = {**own, **rest}
        args, kwargs = self.arguments.with_tensors(inputs)
        out = functional_call(self.template, state, args, kwargs, tie_weights=False)
        return out, {name: state[name] for name in rest}

    def leaves(self, x: Tensor) -> list[Tensor]:
        """The trained parameters in vectors ``x``, the rows of a matrix, as leaves of a graph."""
        places = sorted({*self.trained.values()})
        return [
            x.as_strided((len(x), *shape), (x.stride(0), *strides), x.storage_offset() + start)
            .detach()
            .requires_grad_()
            for _, start, shape, strides in places
        ]

    def named(self, leaves: Sequence[Tensor]) -> Tensors:
        """The leaves under all names of their parameters."""
        return {name: leaves[place.number] for name, place in self.trained.items()}

    def casting(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast, as it was around the calls."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)


class Joint:
    """One forward of several workers.

    Args:
        program: what they compute.
        x: the flat vector of each worker.
        rest: the buffers and frozen parameters of each.
        inputs: the tensors in the arguments of each.

    Attributes:
        outputs: the tensors in the result, each with one row for each worker.
        varying: which of them have a gradient.
        leaves: the trained parameters, likewise.
        rest: the buffers and frozen parameters after the forward, likewise.
        restored: makes a worker's result from its rows.
    """

    def __init__(
        self,
        program: Program,
        x: Sequence[Tensor],
        rest: Sequence[Tensors],
        inputs: Sequence[Sequence[Tensor]],
    ) -> None:
        self.size = len(x)
        stacked = {name: torch.stack([own[name] for own in rest]) for name in rest[0]}
        given = [torch.stack(each) for each in zip(*inputs, strict=True)]
        with torch.no_grad():
            self.leaves = program.leaves(torch.stack([*x]))
        self.outputs, self.rest, self.restored = compute_together(
            program, self.leaves, stacked, given
        )
        self.varying = [output.requires_grad for output in self.outputs]

    def backward(
        self, rows: Sequence[int], grads: Sequence[Sequence[Tensor | None]], again: bool
    ) -> list[tuple[Tensor | None, ...]]:
        """The gradients of these rows, given those of their outputs.

        All rows have a gradient for the same outputs. With ``again``, others are still to come.
        """
        used = [i for i, grad in enumerate(grads[0]) if grad is not None]
        whole = [self._spread(self.outputs[i], rows, [grad[i] for grad in grads]) for i in used]
        found = torch.autograd.grad(
            [self.outputs[i] for i in used],
            self.leaves,
            whole,
            retain_graph=again,
            allow_unused=True,
        )
        return [tuple(None if g is None else g[row] for g in found) for row in rows]

    def _spread(
        self, output: Tensor, rows: Sequence[int], grads: Sequence[Tensor | None]
    ) -> Tensor:
        """The gradients of the rows of one output; zeros for rows that are not among these."""
        known = {row: grad for row, grad in zip(rows, grads, strict=True) if grad is not None}
        zero = torch.zeros_like(output[0])
        return torch.stack([known.get(row, zero) for row in range(self.size)])


def compute_together(
    program: Program, leaves: Sequence[Tensor], rest: Tensors, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], Tensors, Restored]:
    """The outputs of several workers, their buffers after that, and what restores a result."""
    restored: Restored = tuple

    def one(own: Tensors, rest: Tensors, *inputs: Tensor) -> tuple[list[Tensor], Tensors]:
        nonlocal restored
        out, after = program.run(own, rest, inputs)
        spec, others, tensors = _taken_apart(out)
        restored = partial(_put_together, spec, others)
        return tensors, after

    with torch.enable_grad(), program.casting(leaves[0].device), Rules():
        together = vmap(one, randomness="different")
        outputs, after = together(program.named(leaves), rest, *inputs)
    return outputs, after, restored


def tensors_in(out: Any) -> list[Tensor]:
    """The tensors in the result of a model."""
    return [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]


def _taken_apart(out: Any) -> tuple[TreeSpec, list[Any], list[Tensor]]:
    leaves, spec = tree_flatten(out)
    others = [... if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for other in others:
        if other is not ... and not isinstance(other, PLAIN):
            raise Cannot(f"model(x) returns a {type(other).__name__}")
    return spec, others, tensors_in(out)


def _put_together(spec: TreeSpec, others: Sequence[Any], rows: Sequence[Tensor]) -> Any:
    given = iter(rows)
    return tree_unflatten([next(given) if leaf is ... else leaf for leaf in others], spec)
