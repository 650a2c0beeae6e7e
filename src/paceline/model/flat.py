"""One contiguous vector ``x`` of all parameters, and ``g`` of their gradients.

The only file that handles lists of parameters. ``x`` holds, group by group, the parameters that the
user's optimizer trains; each parameter becomes a view of it, with its shape and strides.
:meth:`Flat.gather` fills ``g``: until then autograd keeps its own gradients.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from paceline.errors import UsageError

Allocate = Callable[[int, Tensor], Tensor]
ALIGNMENT = 64
"""Torch aligns the memory of a tensor to this many bytes."""


class Span(NamedTuple):
    """The range of one parameter in the vectors."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int
    group: int


class Flat:
    """The flat parameters of a model and its optimizer.

    Args:
        model: names the parameters in messages.
        optimizer: says which parameters are trained, in which groups.
        allocate: ``allocate(numel, like)`` returns a zeroed vector.
        aligned: whether to align each parameter as torch does. On some processors the last bit of
            a matrix product depends on that.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, allocate: Allocate, aligned: bool = False
    ) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.groups: list[slice] = []
        self.spans: list[Span] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._allocate = allocate
        start = 0
        for number, group in enumerate(optimizer.param_groups):
            first = start
            for index, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"group {number}, parameter {index}")
                if not parameter.requires_grad:
                    self._frozen.append((name, parameter))
                    continue
                _check(name, parameter)
                if aligned:
                    start += -start % (ALIGNMENT // parameter.element_size())
                end = start + parameter.numel()
                self.spans.append(Span(name, parameter, start, end, number))
                start = end
            self.groups.append(slice(first, start))
        self.x = self._bind()

    def _bind(self) -> Tensor:
        """Move the parameters into one vector and make them views of it."""
        if not self.spans:
            raise UsageError("the optimizer has no parameter that requires a gradient")
        _check_same(self.spans)
        _check_separate(self.spans)
        x = self._allocate(self.spans[-1].end, self.spans[0].parameter.detach())
        for span, view in zip(self.spans, self.views(x), strict=True):
            view.copy_(span.parameter.detach())
            span.parameter.data = view
        self._pointers = [span.parameter.data_ptr() for span in self.spans]
        return x

    def views(self, vector: Tensor, group: int | None = None) -> list[Tensor]:
        """``vector`` cut into tensors that are shaped and strided like the parameters.

        With ``group``, the vector is that group's part alone.
        """
        spans = [span for span in self.spans if group in (None, span.group)]
        first = vector.storage_offset() - (0 if group is None else self.groups[group].start)
        return [
            vector.as_strided(span.parameter.shape, span.parameter.stride(), first + span.start)
            for span in spans
        ]

    @cached_property
    def g(self) -> Tensor:
        """The vector of gradients, allocated at its first use."""
        return self._allocate(self.x.numel(), self.x)

    @cached_property
    def _g_views(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and the part of ``g`` that is for its gradient."""
        return [*zip((span.parameter for span in self.spans), self.views(self.g), strict=True)]

    @property
    def gradient_parts(self) -> list[Tensor]:
        """The part of ``g`` for the gradient of each parameter."""
        return [view for _, view in self._g_views]

    def gather(self) -> Tensor:
        """Copy the gradients into ``g`` and make them views of it.

        A parameter without a gradient gets zeros in ``g``; its ``.grad`` stays None.
        """
        g, sources, targets = self.g, [], []
        for parameter, view in self._g_views:
            grad = parameter.grad
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            elif grad.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of {self._name(parameter)} is sparse: use sparse=False"
                )
            else:
                sources.append(grad)
                targets.append(view)
                parameter.grad = view
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return g

    def _name(self, parameter: nn.Parameter) -> str:
        return next(span.name for span in self.spans if span.parameter is parameter)

    def is_gathered(self) -> bool:
        """Whether the gradients of all parameters are views of ``g`` now."""
        if "g" not in vars(self):  # it was never needed
            return False
        return all(parameter.grad is view for parameter, view in self._g_views)

    def present(self) -> tuple[bool, ...]:
        """Which parameters have a gradient now."""
        return tuple(span.parameter.grad is not None for span in self.spans)

    def has_sparse(self) -> bool:
        """Whether any gradient is sparse now."""
        grads = (span.parameter.grad for span in self.spans)
        return any(grad is not None and grad.is_sparse for grad in grads)

    def gradients(self) -> list[Tensor]:
        """The values of the gradients as autograd left them."""
        grads = [span.parameter.grad for span in self.spans if span.parameter.grad is not None]
        return [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]

    def show_gradients(self, present: Iterable[bool]) -> None:
        """Set ``.grad`` to its part of ``g`` where ``present``, and to None elsewhere."""
        for (parameter, view), wanted in zip(self._g_views, present, strict=True):
            parameter.grad = view if wanted else None

    def check(self) -> None:
        """Refuse a parameter that is no longer a view of ``x``, or a frozen one with a gradient."""
        pointers = [span.parameter.data_ptr() for span in self.spans]
        if pointers != self._pointers:
            moved = [p != before for p, before in zip(pointers, self._pointers, strict=True)]
            raise UsageError(
                f"parameter {self.spans[moved.index(True)].name} is no longer a view of the flat"
                " vector: .to(), load_state_dict(assign=True) and vector_to_parameters move"
                " parameters; call them before worker.setup"
            )
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise UsageError(
                    f"parameter {name} was frozen at worker.setup and has a gradient now:"
                    " unfreeze it before worker.setup"
                )


def _check(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter that cannot be a view of one dense vector."""
    if isinstance(parameter, UninitializedParameter):
        raise UsageError(f"parameter {name} has no shape yet: run one forward before worker.setup")
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        raise UsageError(f"parameter {name} ({type(parameter).__name__}) must be a plain parameter")
    if parameter.is_meta:
        raise UsageError(f"parameter {name} is on the meta device: give it memory first")
    if not parameter.is_floating_point():
        raise UsageError(f"parameter {name} ({parameter.dtype}) must be of a real floating dtype")
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    if not dense:
        raise UsageError(f"parameter {name} has gaps or overlaps (strides {parameter.stride()})")


def _check_same(spans: list[Span]) -> None:
    for what in ("dtype", "device"):
        kinds = Counter(str(getattr(span.parameter, what)) for span in spans)
        if len(kinds) > 1:
            counts = ", ".join(f"{kind} ({count} parameters)" for kind, count in kinds.items())
            raise UsageError(
                f"all trained parameters must have one {what}, got {counts};"
                " keep the model in one dtype on one device (torch.autocast does the rest)"
            )


def _check_separate(spans: list[Span]) -> None:
    """Refuse two parameters that share memory; tied weights that are one parameter are fine."""
    ordered = sorted(spans, key=lambda span: span.parameter.data_ptr())
    for before, after in itertools.pairwise(ordered):
        if before.parameter.data_ptr() + before.parameter.nbytes > after.parameter.data_ptr():
            raise UsageError(
                f"parameters {before.name} and {after.name} share memory: tie weights by using"
                " one nn.Parameter in both places"
            )
