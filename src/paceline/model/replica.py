"""This rank's copy of the model: the flat vectors, and the user's optimizer on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.model.bare_step import BareStep
from paceline.model.flat import Allocate, Flat
from paceline.model.gradient import Gradient
from paceline.model.joint_step import JointStep

DirectStep = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""What is called with the arguments of a step; it returns those for the optimizer's own code."""


class Replica:
    """The part of the user's model and optimizer that a strategy may access.

    Attributes:
        flat: the parameters and gradients as vectors.
        optimizer: the user's optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, allocate: Allocate, aligned: bool = False
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates its loss many times a step; use a first-order method")
        self.flat = Flat(model, optimizer, allocate, aligned)
        self.optimizer = optimizer
        self._stepper: JointStep | BareStep | Optimizer = optimizer
        if JointStep.suits(self.flat, optimizer):
            self._stepper = JointStep(self.flat, optimizer)
        elif BareStep.suits(optimizer):
            self._stepper = BareStep(optimizer)
        self._updating = False
        self._on_direct_step: DirectStep = _refuse_direct_step
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def local_update(self, g: Gradient) -> None:
        """If the gradient is usable: clip it if requested, then step the user's optimizer."""
        if g.usable:
            self.clip(g)
            self._updating = True
            try:
                self._stepper.step()
            finally:
                self._updating = False

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let only :meth:`local_update` step the user's optimizer."""
        return None if self._updating else self._on_direct_step(args, kwargs)

    def redirect(self, act: DirectStep) -> None:
        """Call ``act`` for steps outside of :meth:`local_update`, in place of refusing them."""
        self._on_direct_step = act

    def release(self) -> None:
        """After the run, let the user call the optimizer again."""
        self._hook.remove()

    def clip(self, g: Gradient) -> Gradient:
        """The gradient, clipped (once) if ``worker.clip_gradients`` was called for it."""
        if g.max_norm is None:
            return g
        parameters = [span.parameter for span in self.flat.spans]
        torch.nn.utils.clip_grad_norm_(parameters, g.max_norm)
        return replace(g, max_norm=None)

    def plain_move(self, v: Tensor) -> None:
        """``x - lr * v``, each group with its own learning rate."""
        pairs = zip(self.lrs(), self.optimizer.param_groups, strict=True)
        rates = [-lr if group.get("maximize") else lr for lr, group in pairs]
        self.descend(self.flat.x, v, rates)

    def descend(self, x: Tensor, v: Tensor, rates: list[float]) -> None:
        """``x - rate * v``, each parameter group with its own rate."""
        for part, rate in zip(self.flat.groups, rates, strict=True):
            x[part].sub_(v[part], alpha=rate)

    def lrs(self) -> list[float]:
        """The learning rate of each parameter group, in the order of ``flat.groups``."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def base_lrs(self) -> list[float]:
        """The initial learning rate of each group, from its scheduler if it has one."""
        groups = self.optimizer.param_groups
        return [float(group.get("initial_lr", group["lr"])) for group in groups]

    def is_plain_sgd(self) -> bool:
        """Whether a local step is ``x - lr * (g + weight_decay * x)`` and no more."""
        return type(self.optimizer) is torch.optim.SGD and not any(
            group["momentum"] or group["maximize"] for group in self.optimizer.param_groups
        )

    def stands_still(self) -> bool:
        """Whether a learning rate is 0 and no scheduler can raise it."""
        return any(
            lr == 0 and not group.get("initial_lr", 0)
            for lr, group in zip(self.lrs(), self.optimizer.param_groups, strict=True)
        )

    def accumulate(self, g: Gradient, total: Tensor) -> Gradient:
        """Clip ``g``; if it is usable, add ``g + weight_decay * x`` (plain SGD) to ``total``."""
        g = self.clip(g)
        if g.usable:
            total.add_(g.vector)
            self._add_decay(total, g.present)
        return g

    def decayed(self, g: Gradient) -> Tensor:
        """The gradient with weight decay in it, as SGD adds it: ``g + weight_decay * x``.

        A parameter that has no gradient does not decay.
        """
        if not any(group.get("weight_decay") for group in self.optimizer.param_groups):
            return g.vector
        v = g.vector.clone()
        self._add_decay(v, g.present)
        return v

    def _add_decay(self, v: Tensor, present: tuple[bool, ...]) -> None:
        """Add ``weight_decay * x``, for those parameters that have a gradient."""
        flat, groups = self.flat, self.optimizer.param_groups
        parts = list(zip(flat.groups, range(len(groups)), strict=True))
        if not all(present):
            spans = itertools.compress(flat.spans, present)
            parts = [(slice(span.start, span.end), span.group) for span in spans]
        for part, number in parts:
            if decay := groups[number].get("weight_decay"):
                v[part].add_(
                    flat.x[part], alpha=-decay if groups[number].get("maximize") else decay
                )

    def decay_is_coupled(self) -> bool:
        """Whether the optimizer's weight decay is that of :meth:`decayed`: a part of the gradient.

        Otherwise it is AdamW's: a step shrinks the parameters by ``lr * weight_decay``. This tries
        a step of copies of the optimizer on one number.
        """
        if "weight_decay" not in self.optimizer.defaults:
            return True
        try:
            return self._try_step(g=1.0, decay=0.5) == self._try_step(g=1.5, decay=0.0)
        except TypeError:  # its class needs more than groups, so no server can make it either
            return True

    def _try_step(self, g: float, decay: float) -> float:
        """The result of one step of a copy of the user's optimizer from the number 1."""
        number = nn.Parameter(torch.ones(1, device=self.flat.x.device))
        number.grad = torch.full_like(number, g)
        self._probe(number, lr=0.5, weight_decay=decay, maximize=False)
        return number.item()

    def _probe(self, number: nn.Parameter, **settings: Any) -> Optimizer:
        """A copy of the user's optimizer that has made one step on ``number``."""
        group = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        known = {name: value for name, value in settings.items() if name in group}
        kind: Any = type(self.optimizer)
        probe: Optimizer = kind([{"params": [number], **group, **known}])
        probe.step()
        return probe

    def moments(self) -> list[str]:
        """The names of the optimizer's buffers that are shaped like the parameters.

        This tries a step of a copy of the optimizer on one number: every rank must know the names
        before its own first step.
        """
        number = nn.Parameter(torch.zeros(1))
        number.grad = torch.zeros(1)
        return [
            name
            for name, value in self._probe(number).state[number].items()
            if isinstance(value, Tensor) and value.shape == number.shape and name != "step"
        ]

    def read_moment(self, name: str, out: Tensor) -> None:
        """Gather one buffer of the optimizer into a vector, with zeros where it does not exist."""
        for span, view in zip(self.flat.spans, self.flat.views(out), strict=True):
            buffer = self.optimizer.state[span.parameter].get(name)
            if buffer is None:
                view.zero_()
            else:
                view.copy_(buffer)

    def write_moment(self, name: str, vector: Tensor) -> None:
        """Copy a vector into the optimizer's buffers, where they exist."""
        for span, view in zip(self.flat.spans, self.flat.views(vector), strict=True):
            buffer = self.optimizer.state[span.parameter].get(name)
            if buffer is not None:
                buffer.copy_(view)

    def forget_moments(self) -> None:
        """Delete the optimizer's buffers; it starts again without them."""
        for span in self.flat.spans:
            self.optimizer.state.pop(span.parameter, None)


def _refuse_direct_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise UsageError(
        "step() was called on the optimizer that was given to worker.setup; call it on the"
        " one that it returned: model, optimizer = worker.setup(model, optimizer)"
    )
