"""Steps of the user's optimizer on whole vectors, in place of one parameter after the other.

On a GPU a step takes the longer, the more tensors there are; their size matters little. An
optimizer that treats every number by itself does the same to a vector as to the parameters in it.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import defaultdict
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn, optim

from paceline.model.flat import Flat
from paceline.model.part import WHOLE, Part

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
)
"""Torch's optimizers that treat every number by itself."""
FUSED = (optim.SGD, optim.Adam, optim.AdamW)
"""Those that a GPU can step in one go."""
State = dict[str, Any]


def may_fuse(optimizer: optim.Optimizer) -> bool:
    """Whether the optimizer has a fused form, and its user has chosen none."""
    groups = optimizer.param_groups
    chosen = any(group.get(name) is not None for group in groups for name in ("foreach", "fused"))
    return type(optimizer) in FUSED and not chosen


class JointStep:
    """Steps each parameter group as one vector, wherever that makes no difference.

    A second optimizer does so, with the options of the user's. The state stays in the user's, under
    each parameter: its tensors are views of those of the vectors. Where parameters of a group
    differ (one has no gradient, or has missed a step), the user's optimizer steps them one by one.

    Args:
        flat: the parameters, and their gradients.
        optimizer: the user's.
        part: the parameters of this optimizer.
    """

    def __init__(self, flat: Flat, optimizer: optim.Optimizer, part: Part = WHOLE) -> None:
        self._flat, self._optimizer, self._part = flat, optimizer, part
        self._step = inspect.unwrap(type(optimizer).step)  # without hooks and profiling
        self._fuses = flat.x.is_cuda and may_fuse(optimizer)
        self._shown: list[Any] | None = None
        self._known: list[Any] = []

    @staticmethod
    def suits(flat: Flat, optimizer: optim.Optimizer) -> bool:
        """Whether these steps are the same, and faster."""
        plain = not any(group.get("differentiable") for group in optimizer.param_groups)
        whole = all(len(ranges) <= 1 for ranges in flat.places)
        suits = type(optimizer) in ELEMENTWISE and plain and whole and not flat.apart
        return flat.x.is_cuda and suits

    def step(self) -> None:
        """Make one step."""
        optimizer = self._optimizer
        hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        joint = (
            hooks <= 1 and self._flat.is_gathered(self._part) and self._take()
        )  # one hook is our own
        if not joint:
            self._shown = None
            return optimizer.step()
        for group in self._groups:
            options = optimizer.param_groups[group.number - self._part.first_group]
            group.options.update(options, params=[group.vector])
            if self._fuses:
                group.options["fused"] = True
        with torch.no_grad():
            self._step(self._joint)
        self._show()

    @cached_property
    def _groups(self) -> list[JointGroup]:
        numbers = sorted({span.group for span in self._flat.spans[self._part.spans]})
        return [JointGroup(self._flat, number) for number in numbers]

    @cached_property
    def _joint(self) -> optim.Optimizer:
        """The optimizer of the vectors."""
        joint = copy.copy(self._optimizer)
        joint.param_groups, joint.state = (
            [group.options for group in self._groups],
            defaultdict(dict),
        )
        return joint

    def _take(self) -> bool:
        """Give the vectors the state of their parameters; False if that cannot be."""
        state = self._optimizer.state
        if self._shown is not None and _same(_values(state), self._shown):
            return True
        states = [
            group.join([state.get(p, {}) for p in group.parameters], self._fuses)
            for group in self._groups
        ]
        if any(None in joined.values() for joined in states):
            return False
        self._joint.state.update(zip((g.vector for g in self._groups), states, strict=True))
        self._show_anew()
        return True

    def _show(self) -> None:
        """Show the state of the vectors, after a step, as that of their parameters."""
        if not _same(_values(self._joint.state), self._known):
            self._show_anew()
        for group in self._groups:
            group.show_numbers(self._joint.state[group.vector])

    def _show_anew(self) -> None:
        self._known = _values(self._joint.state)
        for group in self._groups:
            if joined := self._joint.state[group.vector]:
                group.show(joined, self._optimizer.state)
        self._shown = _values(self._optimizer.state)


class JointGroup:
    """One parameter group as a vector.

    Attributes:
        number: of the group.
        parameters: of the group.
        vector: all of them, with their gradients.
        options: of the vector's optimizer.
    """

    def __init__(self, flat: Flat, number: int) -> None:
        self._flat, self.number = flat, number
        self.parameters = [span.parameter for span in flat.spans if span.group == number]
        part = flat.place(number)
        self.vector = nn.Parameter(flat.x[part])
        self.vector.grad = flat.kept_g(part)
        self.options: dict[str, Any] = {"params": [self.vector]}
        self._numbers: dict[str, list[Tensor]] = {}

    def join(self, states: list[State], fused: bool) -> State:
        """The state of the vector; it has None for what differs among the parameters.

        A ``fused`` step has its numbers where the vector is.
        """
        names = {name for state in states for name in state}
        return {name: self._join([state.get(name) for state in states], fused) for name in names}

    def _join(self, values: list[Any], fused: bool) -> Tensor | None:
        if not all(isinstance(value, Tensor) for value in values):
            return None
        first, shapes = values[0], [parameter.shape for parameter in self.parameters]
        if [value.shape for value in values] != shapes:
            numbers = all(value.dim() == 0 and (fused or not value.is_cuda) for value in values)
            there = first.to(self.vector.device) if fused else first
            return there if numbers and all(value == first for value in values) else None
        joined = torch.zeros_like(self.vector.detach(), dtype=first.dtype)
        torch._foreach_copy_(self._flat.views(joined, self.number), values)
        return joined

    def show(self, joined: State, state: dict[Any, State]) -> None:
        """Show the state of the vector as that of each parameter: a part of it, or a copy."""
        self._numbers = {}
        for name, value in joined.items():
            if value.dim():
                parts = self._flat.views(value, self.number)
            else:
                self._numbers[name] = [value.clone() for _ in self.parameters[1:]]
                parts = [value, *self._numbers[name]]
            for parameter, part in zip(self.parameters, parts, strict=True):
                state[parameter][name] = part

    def show_numbers(self, joined: State) -> None:
        """Show how the numbers have changed."""
        for name, copies in self._numbers.items():
            torch._foreach_copy_(copies, [joined[name]] * len(copies))


def _values(state: dict[Any, State]) -> list[Any]:
    """All that a state holds."""
    return [*chain.from_iterable(map(dict.values, state.values()))]


def _same(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))
