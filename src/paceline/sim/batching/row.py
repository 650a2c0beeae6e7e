"""One worker's row of the matrices: its parameters, its gradient, its buffers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.sim.batching.enrollment import Enrollment
from paceline.sim.batching.joint import Place
from paceline.sim.batching.recorded import part_of
from paceline.sim.batching.rows import Rows

WATCHED = 2
"""How often a worker's backward is watched, before its gradients are set without autograd."""
_HOOKS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


class Row:
    """What of a worker lies in matrices, so that joint computations need not collect it.

    Their gradients are then in its row. After some steps they need not go through autograd either:
    a loop whose ``backward`` has left them in ``.grad`` so far is taken to do so from then on.

    Args:
        rows: the matrices.
        rank: of the worker.
        own: its model.
        places: of its trained parameters.
    """

    def __init__(self, rows: Rows, rank: int, own: Enrollment, places: Sequence[Place]) -> None:
        self._model, self._x, self._steps = own.model, own.x, own.steps
        self._parameters = [parameter for parameter, _ in own.trained]
        self._places = places
        self._g, self._parts = own.gradient()
        self._addresses = [part.data_ptr() for part in self._parts]
        self._rest = _Rest(rows, rank, own.model, {id(p) for p in self._parameters})
        self.fits = self._rest.fits and rows.holds(rank, self._x, self._g)
        self.anchor = torch.zeros((), device=self._x.device, requires_grad=True)
        self._seen = 0
        self._direct = self._delivered = self._at_step = 0
        self._size: tuple[int, Callable[[], float]] | None = None
        if self.fits:
            rows.fill_spare(self._x)

    def bind(self) -> bool:
        """Have the row hold the buffers as they are now; whether that can be."""
        self.fits = self.fits and self._rest.bind()
        return self.fits

    def release(self) -> None:
        """Give the model memory of its own."""
        self._rest.release()
        x = self._x.clone()
        for parameter, place in zip(self._parameters, self._places, strict=True):
            parameter.data = part_of(x, place)

    # Gradients -----------------------------------------------------------------------------------

    def is_direct(self) -> bool:
        """Whether gradients need not go through autograd: nobody else looks at them there."""
        if not self.fits or self._seen < WATCHED:
            return False
        if not all(parameter.requires_grad for parameter in self._parameters):
            return False
        return not any(any(map(hooks, self._parameters)) for hooks in _HOOKS)

    def note_direct(self) -> None:
        """Note that a result was handed out whose backward does not go through the parameters."""
        self._direct += 1

    def check_steps(self) -> None:
        """Refuse a step with gradients that ``backward`` has not left in ``.grad``."""
        steps = self._steps()
        if steps == self._at_step:
            return
        if self._direct and not self._delivered:
            raise UsageError(
                "a step was made without loss.backward() after model(x), where each one before had"
                ' it: use batched="off" for a loop that takes torch.autograd.grad now and then'
            )
        self._direct = self._delivered = 0
        self._at_step = steps

    def make_room(self) -> None:
        """Before a gradient is computed into the row: move there what ``.grad`` has of it."""
        self._size = None
        self._delivered += 1
        pairs = zip(self._parameters, self._addresses, strict=True)
        if any(p.grad is not None and p.grad.data_ptr() == at for p, at in pairs):
            kept = self._g.clone()
            for parameter, at, place in zip(
                self._parameters, self._addresses, self._places, strict=True
            ):
                if parameter.grad is not None and parameter.grad.data_ptr() == at:
                    parameter.grad = part_of(kept, place)

    def parts(self, reached: Sequence[bool]) -> list[Tensor | None]:
        """The gradient in the row, for autograd: a copy."""
        own = self._g.clone()
        pairs = zip(self._places, reached, strict=True)
        return [part_of(own, place) if there else None for place, there in pairs]

    def take(self, found: Sequence[Tensor | None]) -> None:
        """Have the row hold a gradient that was computed elsewhere, and set it."""
        pairs = [(p, f) for p, f in zip(self._parts, found, strict=True) if f is not None]
        if pairs:
            torch._foreach_copy_([part for part, _ in pairs], [given for _, given in pairs])
        self.show([given is not None for given in found])

    def show(self, reached: Sequence[bool], size: Callable[[], float] | None = None) -> None:
        """Set ``.grad`` to the gradient in the row, or add that; its norm is ``size``."""
        added = False
        for parameter, part, there in zip(self._parameters, self._parts, reached, strict=True):
            if not there:
                continue
            if parameter.grad is None:
                parameter.grad = part
            else:
                parameter.grad.add_(part)
                added = True
        if size is not None and not added:
            self._size = self._g._version, size

    def size(self) -> float | None:
        """The norm of the gradient, if it is known and the gradient is as it was computed."""
        known, self._size = self._size, None
        return known[1]() if known is not None and known[0] == self._g._version else None

    def watch(self, found: Sequence[Tensor | None]) -> None:
        """See whether this backward leaves a gradient in ``.grad``, as almost all do."""
        first = next((i for i, given in enumerate(found) if given is not None), None)
        if first is None or not 0 <= self._seen < WATCHED:
            return
        parameter = self._parameters[first]
        before = parameter.grad, None if parameter.grad is None else parameter.grad._version

        def look() -> None:
            grad = parameter.grad
            same = grad is before[0] and (grad is None or grad._version == before[1])
            self._seen = -1 if same else self._seen + 1

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(look)


class _Rest:
    """The buffers and frozen parameters of one worker, as parts of its row."""

    def __init__(self, rows: Rows, rank: int, model: nn.Module, trained: set[int]) -> None:
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self._frozen: list[tuple[nn.Parameter, Tensor]] = []
        self._model, seen = model, set[int]()
        self.fits = True
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in (*module._buffers.items(), *module._parameters.items()):
                if tensor is None or id(tensor) in trained:
                    continue
                name = f"{prefix}.{key}".lstrip(".")
                row = None if id(tensor) in seen else rows.adopt(rank, name, tensor)
                seen.add(id(tensor))
                if row is None:  # one that has two names, or another shape than those of others
                    self.fits = False
                elif isinstance(tensor, nn.Parameter):
                    self._frozen.append((tensor, row))
                else:
                    self._buffers.append((module._buffers, key, row))
        self._owners = [module._buffers for module in model.modules()]
        self._count = sum(map(len, self._owners))
        if self.fits:
            self._move()

    def _move(self) -> None:
        for owner, key, row in self._buffers:
            owner[key] = row
        for parameter, row in self._frozen:
            parameter.data = row

    def bind(self) -> bool:
        """Move there what was replaced; False if there are others than at first."""
        if sum(map(len, self._owners)) != self._count:
            return False
        for owner, key, row in self._buffers:
            now = owner.get(key)
            if now is not row:
                if now is None or (now.shape, now.dtype) != (row.shape, row.dtype):
                    return False
                row.copy_(now.detach())
                owner[key] = row
        return all(p.data_ptr() == row.data_ptr() for p, row in self._frozen)

    def release(self) -> None:
        """Give the model buffers of its own again."""
        if not self.fits:
            return
        for owner, key, row in self._buffers:
            if owner.get(key) is row:
                owner[key] = row.clone()
        for parameter, row in self._frozen:
            if parameter.data_ptr() == row.data_ptr():
                parameter.data = row.clone()
