"""One contiguous vector ``x`` of all parameters, and ``g`` of their gradients.

The only file that handles lists of parameters. ``x`` holds, group by group, the parameters that the
user's optimizer trains; each parameter becomes a view of it, with its shape and strides.
:meth:`Flat.gather` fills ``g``: until then autograd keeps its own gradients.

Where parameters have several dtypes, ``x`` has the widest of them. A narrower parameter keeps its
own memory, *apart*. Either it counts, or its place in ``x``: the place while ``x`` is lent to the
method, the parameter at all other times, and while the method has the user's optimizer step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.model.checks import check_device, check_parameter, check_separate, widest_dtype
from paceline.model.early import EARLY_BYTES, EarlyGather, count_users
from paceline.model.part import WHOLE, Part, optimizers_of

Allocate = Callable[[int, Tensor], Tensor]
ALIGNMENT = 64
"""Torch aligns the memory of a tensor to this many bytes."""


NO_GROUP = -1


class Span(NamedTuple):
    """The range of one parameter in the vectors; NO_GROUP: no optimizer has it, so far."""

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
        with_frozen: whether frozen parameters are in the vector, too: those of the optimizer, and
            at its end those of the model that no optimizer has.

    Attributes:
        spans: the parameters, in their order in the vector.
        places: where the parameters of each group are in the vector, as few ranges.
        apart: the parameters that are narrower than the vector.
        is_lent: whether ``x`` counts for them now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        allocate: Allocate,
        aligned: bool = False,
        with_frozen: bool = False,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.with_frozen = with_frozen
        self.spans: list[Span] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._allocate = allocate
        self._lay_out(model, optimizer, aligned)
        self._note_groups(len(optimizer.param_groups))
        self.x = self._bind()

    def _lay_out(self, model: nn.Module, optimizer: Optimizer, aligned: bool) -> None:
        """Give each parameter its range."""
        start, seen = 0, set[int]()
        each = [*self._all(model, optimizer)]
        taken = [p for _, p, _ in each if p.requires_grad or self.with_frozen]
        self._dtype = widest_dtype(taken) if taken else torch.get_default_dtype()
        for name, parameter, group in each:
            if id(parameter) in seen:
                raise UsageError(f"parameter {name} must be in one optimizer only")
            seen.add(id(parameter))
            if not (parameter.requires_grad or self.with_frozen):
                self._frozen.append((name, parameter))
                continue
            check_parameter(name, parameter)
            if aligned:
                start += -start % (ALIGNMENT // self._dtype.itemsize)
            end = start + parameter.numel()
            self.spans.append(Span(name, parameter, start, end, group))
            start = end

    def _all(
        self, model: nn.Module, optimizer: Optimizer
    ) -> Iterator[tuple[str, nn.Parameter, int]]:
        """The parameters of the optimizer, and perhaps those of the model that it lacks."""
        has = set[int]()
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                has.add(id(parameter))
                name = self._names.get(id(parameter), f"group {number}, parameter {index}")
                yield name, parameter, number
        if self.with_frozen and len(optimizers_of(optimizer)) == 1:
            for name, parameter in model.named_parameters():
                if id(parameter) not in has and parameter.is_floating_point():
                    yield name, parameter, NO_GROUP

    def _note_groups(self, groups: int) -> None:
        """Note where each group is; neighbors are one range, with the space between them."""
        self.places: list[list[slice]] = [[] for _ in range(groups)]
        self._kept = 0
        self._without_group = set[int]()
        for number, neighbors in itertools.groupby(self.spans, lambda span: span.group):
            spans = [*neighbors]
            if number == NO_GROUP:
                self._without_group.update(id(span.parameter) for span in spans)
            else:
                self.places[number].append(slice(spans[0].start, spans[-1].end))

    def place(self, group: int) -> slice:
        """Where a group is that was there from the start."""
        ranges = self.places[group]
        return slice(ranges[0].start, ranges[-1].stop) if ranges else slice(0, 0)

    def check_group(self, parameters: Iterable[Tensor]) -> None:
        """Refuse a group of parameters that have no place in the vector."""
        known = {id(span.parameter) for span in self.spans}
        for parameter in parameters:
            name = self._names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
            if id(parameter) not in known:
                raise UsageError(
                    f"parameter {name} has no place in this run, so that add_param_group must be"
                    " called before worker.setup; for frozen parameters of the model begin with"
                    " worker.setup(model, optimizer, with_frozen=True)"
                )

    def regroup(self, optimizer: Optimizer) -> None:
        """Note that the optimizer has more groups now."""
        groups = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self.spans[:] = [
            span._replace(group=groups.get(id(span.parameter), NO_GROUP)) for span in self.spans
        ]
        self._note_groups(len(optimizer.param_groups))

    def trained(self) -> list[bool]:
        """Which parameters may be trained now."""
        return [s.parameter.requires_grad and s.group != NO_GROUP for s in self.spans]

    def parts(self, optimizer: Optimizer) -> tuple[Part, ...]:
        """The part of each optimizer that is joined in this one."""
        optimizers = optimizers_of(optimizer)
        if len(optimizers) == 1:
            return (WHOLE,)
        parts, first = [], 0
        for number, each in enumerate(optimizers):
            groups = range(first, first + len(each.param_groups))
            numbers = [i for i, span in enumerate(self.spans) if span.group in groups]
            if not numbers:
                raise UsageError(f"optimizer {number} has no parameter that requires a gradient")
            place = slice(self.spans[numbers[0]].start, self.spans[numbers[-1]].end)
            parts.append(Part(number, slice(numbers[0], numbers[-1] + 1), place, first))
            first = groups.stop
        return tuple(parts)

    def _bind(self) -> Tensor:
        """Move the parameters into one vector and make them views of it."""
        if not self.spans:
            raise UsageError("the optimizer has no parameter that requires a gradient")
        check_device(self.spans)
        check_separate(self.spans)
        like = self.spans[0].parameter.detach()
        x = self._allocate(self.spans[-1].end, like.new_empty(0, dtype=self._dtype))
        self.apart = [span for span in self.spans if span.parameter.dtype is not self._dtype]
        self._apart, self.is_lent = {id(span.parameter) for span in self.apart}, False
        for span, view in zip(self.spans, self.views(x), strict=True):
            view.copy_(span.parameter.detach())
            if id(span.parameter) not in self._apart:
                span.parameter.data = view
        self._pointers = [span.parameter.data_ptr() for span in self.spans]
        return x

    def views(self, vector: Tensor, group: int | None = None) -> list[Tensor]:
        """``vector`` cut into tensors that are shaped and strided like the parameters.

        With ``group``, the vector is that group's part alone.
        """
        spans = [span for span in self.spans if group in (None, span.group)]
        first = vector.storage_offset() - (0 if group is None else self.place(group).start)
        return [
            vector.as_strided(span.parameter.shape, span.parameter.stride(), first + span.start)
            for span in spans
        ]

    # Parameters apart ----------------------------------------------------------------------------

    def lent(self) -> AbstractContextManager[Tensor]:
        """``x``, for the method: inside, what it holds counts."""
        if not self.apart or self.is_lent:
            return nullcontext(self.x)
        return self._lend()

    @contextmanager
    def _lend(self) -> Iterator[Tensor]:
        self._take()
        self.is_lent = True
        try:
            yield self.x
        finally:
            self.is_lent = False
            self._show()

    @contextmanager
    def given_back(self, gradients: Tensor | None) -> Iterator[None]:
        """While ``x`` is lent: inside, the parameters count, and their gradients are these."""
        self._show()
        self.show_apart(gradients)
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        """Copy the parameters apart into ``x``."""
        for span, place in self._places_apart(self.x):
            place.copy_(span.parameter.detach())

    def _show(self) -> None:
        """Copy ``x`` into the parameters apart; what they round off, it loses."""
        for span, place in self._places_apart(self.x):
            span.parameter.detach().copy_(place)
        self._take()

    def show_apart(self, gradients: Tensor | None) -> None:
        """Copy gathered gradients into those of the parameters apart that have one."""
        for span, place in self._places_apart(gradients):
            if span.parameter.grad is not None:
                span.parameter.grad.copy_(place)

    def take_apart(self, gradients: Tensor | None) -> None:
        """Copy the gradients of the parameters apart to where they are gathered."""
        for span, place in self._places_apart(gradients):
            if span.parameter.grad is not None:
                place.copy_(span.parameter.grad)

    def _places_apart(self, vector: Tensor | None) -> Iterator[tuple[Span, Tensor]]:
        """Each parameter apart, and its place in a vector."""
        for span in self.apart if vector is not None else ():
            assert vector is not None
            first = vector.storage_offset() + span.start
            shape, stride = span.parameter.shape, span.parameter.stride()
            yield span, vector.as_strided(shape, stride, first)

    # Gradients -----------------------------------------------------------------------------------

    @cached_property
    def g(self) -> Tensor:
        """The vector of gradients, allocated at its first use."""
        return self._allocate(self.x.numel(), self.x)

    @cached_property
    def _g_views(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and the part of ``g`` that is for its gradient."""
        return self._view_pairs(self.g)

    @property
    def gradient_parts(self) -> list[Tensor]:
        """The part of ``g`` for the gradient of each parameter."""
        return [view for _, view in self._g_views]

    def gather(self, part: Part = WHOLE) -> Tensor:
        """Copy the gradients into ``g`` and make them views of it.

        A parameter without a gradient gets zeros in ``g``; its ``.grad`` stays None. With ``part``,
        the rest of ``g`` is left as it is.
        """
        g, sources, targets = self.g, [], []
        views = self._g_views if part is WHOLE else self._g_views[part.spans]
        for parameter, view in views:
            grad = parameter.grad
            if grad is view:
                continue
            if grad is None or id(parameter) in self._without_group:
                view.zero_()
            elif grad.layout is not torch.strided:
                raise UsageError(
                    f"the gradient of {self._name(parameter)} is sparse: use sparse=False"
                )
            else:
                sources.append(grad)
                targets.append(view)
                if id(parameter) not in self._apart:
                    parameter.grad = view
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources)
        return g

    def _name(self, parameter: nn.Parameter) -> str:
        return next(span.name for span in self.spans if span.parameter is parameter)

    def gather_early(self, wanted: Callable[[], bool]) -> list[RemovableHandle]:
        """While they are ``wanted``, gather large gradients in backward; returns what ends that."""
        large = [
            (parameter, view)
            for parameter, view in self._g_views
            if view.nbytes >= EARLY_BYTES
            and parameter.requires_grad
            and id(parameter) not in self._apart
        ]
        own = count_users(self.g)
        return [
            parameter.register_post_accumulate_grad_hook(
                EarlyGather(view, lambda: own + self._kept, wanted)
            )
            for parameter, view in large
        ]

    def kept_g(self, place: slice) -> Tensor:
        """A part of ``g`` that somebody keeps, until the groups change."""
        self._kept += 1
        return self.g[place]

    def is_gathered(self, part: Part = WHOLE) -> bool:
        """Whether the gradients of all parameters of a part are views of ``g`` now."""
        if "g" not in vars(self):  # it was never needed
            return False
        return all(parameter.grad is view for parameter, view in self._g_views[part.spans])

    @contextmanager
    def only(self, part: Part, clear: bool) -> Iterator[None]:
        """Inside, only the parameters of one part have gradients; then all have theirs again.

        With ``clear``, the others have zeros in ``g`` meanwhile.
        """
        others = [*self.spans[: part.spans.start], *self.spans[part.spans.stop :]]
        grads = [span.parameter.grad for span in others]
        if clear:
            grads = [self._moved_out(grad) for grad in grads]
            self.g[: part.place.start].zero_()
            self.g[part.place.stop :].zero_()
        try:
            for span in others:
                span.parameter.grad = None
            yield
        finally:
            for span, grad in zip(others, grads, strict=True):
                span.parameter.grad = grad

    def _moved_out(self, grad: Tensor | None) -> Tensor | None:
        """A gradient; a copy of it if it lies in ``g``."""
        if grad is None or grad.untyped_storage().data_ptr() != self.g.untyped_storage().data_ptr():
            return grad
        return grad.clone()

    def present(self) -> tuple[bool, ...]:
        """Which parameters have a gradient now, and an optimizer."""
        has = tuple([span.parameter.grad is not None for span in self.spans])
        if not self._without_group:
            return has
        return tuple([x and s.group != NO_GROUP for x, s in zip(has, self.spans, strict=True)])

    def check_present(self, present: Iterable[bool]) -> None:
        """Refuse gradients of other workers for parameters that no optimizer has here."""
        for span, given in zip(self.spans, present, strict=True):
            if given and span.group == NO_GROUP:
                raise UsageError(
                    f"other workers train parameter {span.name}, and the optimizer of this one does"
                    " not have it: call add_param_group in the same step on all workers"
                )

    def has_sparse(self) -> bool:
        """Whether any gradient is sparse now."""
        grads = (span.parameter.grad for span in self.spans)
        return any(grad is not None and grad.is_sparse for grad in grads)

    def gradients(self) -> list[Tensor]:
        """The values of the gradients as autograd left them, in one dtype."""
        grads = [span.parameter.grad for span in self.spans if span.parameter.grad is not None]
        if self.apart:
            grads = [grad.to(self._dtype) for grad in grads]
        return [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]

    def show_gradients(self, present: Iterable[bool]) -> None:
        """Set ``.grad`` to its part of ``g`` where ``present``, and to None elsewhere."""
        self.set_gradients(self.g, present)

    def set_gradients(self, vector: Tensor, present: Iterable[bool]) -> None:
        """Set ``.grad`` to its part of a vector where ``present``, and to None elsewhere."""
        views = self._g_views if vector is self.g else self._view_pairs(vector)
        for (parameter, view), wanted in zip(views, present, strict=True):
            own = view if id(parameter) not in self._apart else view.to(parameter.dtype)
            parameter.grad = own if wanted else None

    def _view_pairs(self, vector: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        return [*zip((span.parameter for span in self.spans), self.views(vector), strict=True)]

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
                    " unfreeze it before worker.setup, or begin with"
                    " worker.setup(model, optimizer, with_frozen=True)"
                )
