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
from paceline.model.flat import Allocate, Flat, Span
from paceline.model.gradient import Gradient
from paceline.model.joint_step import JointStep
from paceline.model.part import Part, optimizers_of
from paceline.model.probe import decay_is_coupled, moments_of

DirectStep = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""What is called with the arguments of a step; it returns those for the optimizer's own code."""


class Replica:
    """The part of the user's model and optimizer that a strategy may access.

    Attributes:
        flat: the parameters and gradients as vectors.
        optimizer: the user's optimizer; of several, all of them joined.
        optimizers: the user's optimizer, or optimizers.
        parts: the parameters of each of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        allocate: Allocate,
        aligned: bool = False,
        with_frozen: bool = False,
    ) -> None:
        self.optimizer, self.optimizers = optimizer, optimizers_of(optimizer)
        if any(isinstance(each, torch.optim.LBFGS) for each in self.optimizers):
            raise UsageError("LBFGS evaluates its loss many times a step; use a first-order method")
        self.flat = Flat(model, optimizer, allocate, aligned, with_frozen)
        self.parts = self.flat.parts(optimizer)
        self._steppers = self._make_steppers()
        self._updating = False
        self._on_direct_step: DirectStep = _refuse_direct_step
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in self.optimizers]

    def _make_steppers(self) -> list[JointStep | BareStep | Optimizer]:
        """What steps the parameters of each optimizer."""
        pairs = zip(self.optimizers, self.parts, strict=True)
        return [self._make_stepper(optimizer, part) for optimizer, part in pairs]

    def _make_stepper(self, optimizer: Optimizer, part: Part) -> JointStep | BareStep | Optimizer:
        if JointStep.suits(self.flat, optimizer):
            return JointStep(self.flat, optimizer, part)
        return BareStep(optimizer) if BareStep.suits(optimizer) else optimizer

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Have the optimizer train more of the parameters that are in the vector."""
        parameters = group["params"]
        listed = [parameters] if isinstance(parameters, Tensor) else [*parameters]
        self.flat.check_group(listed)
        self.optimizer.add_param_group({**group, "params": listed})
        self.flat.regroup(self.optimizer)
        self._steppers = self._make_steppers()

    def gather_early(self, wanted: Callable[[], bool]) -> None:
        """From now on, gather large gradients while backward makes them, if they are wanted."""
        self._hooks += self.flat.gather_early(wanted)

    @property
    def several(self) -> bool:
        """Whether there are several optimizers."""
        return len(self.parts) > 1

    def local_update(self, g: Gradient) -> None:
        """If the gradient is usable: clip it if requested, then step the user's optimizer."""
        if g.usable and self.flat.is_lent:
            with self.flat.given_back(g.gathered):
                self._update(g)
        elif g.usable:
            self._update(g)

    def _update(self, g: Gradient) -> None:
        self._clip(g)
        self._updating = True
        try:
            self._steppers[g.part.number].step()
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
        """After the run, let the user call the optimizer again, and leave no hook."""
        for hook in self._hooks:
            hook.remove()

    def clip(self, g: Gradient) -> Gradient:
        """The gradient, clipped (once) if ``worker.clip_gradients`` was called for it."""
        if g.max_norm is None:
            return g
        self.flat.show_apart(g.gathered)
        self._clip(g)
        self.flat.take_apart(g.gathered)
        return replace(g, max_norm=None)

    def _clip(self, g: Gradient) -> None:
        if g.max_norm is not None:
            parameters = [span.parameter for span in self.flat.spans[g.part.spans]]
            torch.nn.utils.clip_grad_norm_(parameters, g.max_norm)

    def plain_move(self, v: Tensor) -> None:
        """``x - lr * v``, each group with its own learning rate."""
        pairs = zip(self.lrs(), self.optimizer.param_groups, strict=True)
        rates = [-lr if group.get("maximize") else lr for lr, group in pairs]
        self.descend(self.flat.x, v, rates)

    def descend(self, x: Tensor, v: Tensor, rates: list[float]) -> None:
        """``x - rate * v``, each parameter group with its own rate."""
        for ranges, rate in zip(self.flat.places, rates, strict=True):
            for part in ranges:
                x[part].sub_(v[part], alpha=rate)

    def lrs(self) -> list[float]:
        """The learning rate of each parameter group, in the order of ``flat.places``."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def base_lrs(self) -> list[float]:
        """The initial learning rate of each group, from its scheduler if it has one."""
        groups = self.optimizer.param_groups
        return [float(group.get("initial_lr", group["lr"])) for group in groups]

    def is_plain_sgd(self) -> bool:
        """Whether a local step is ``x - lr * (g + weight_decay * x)`` and no more."""
        return all(type(each) is torch.optim.SGD for each in self.optimizers) and not any(
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
        parts = [(part, number) for number, ranges in enumerate(flat.places) for part in ranges]
        if not all(present):
            spans = itertools.compress(flat.spans, present)
            parts = [(slice(span.start, span.end), span.group) for span in spans]
        for part, number in parts:
            if decay := groups[number].get("weight_decay"):
                v[part].add_(
                    flat.x[part], alpha=-decay if groups[number].get("maximize") else decay
                )

    def decay_is_coupled(self) -> list[bool]:
        """Whether each optimizer's weight decay is that of :meth:`decayed`: part of the gradient.

        Otherwise it is AdamW's: a step shrinks the parameters by ``lr * weight_decay``.
        """
        return [decay_is_coupled(each) for each in self.optimizers]

    def moments(self) -> list[str]:
        """The names of the optimizers' buffers that are shaped like the parameters."""
        return [*dict.fromkeys(name for each in self.optimizers for name in moments_of(each))]

    def read_moment(self, name: str, out: Tensor) -> None:
        """Gather one buffer of the optimizer into a vector, with zeros where it does not exist."""
        for span, view in zip(self.flat.spans, self.flat.views(out), strict=True):
            buffer = self.state_of(span).get(name)
            if buffer is None:
                view.zero_()
            else:
                view.copy_(buffer)

    def write_moment(self, name: str, vector: Tensor) -> None:
        """Copy a vector into the optimizer's buffers, where they exist."""
        for span, view in zip(self.flat.spans, self.flat.views(vector), strict=True):
            buffer = self.state_of(span).get(name)
            if buffer is not None:
                buffer.copy_(view)

    def forget_moments(self) -> None:
        """Delete the optimizer's buffers; it starts again without them."""
        for span in self.flat.spans:
            for each in self.optimizers:
                each.state.pop(span.parameter, None)

    def state_of(self, span: Span) -> dict[str, Any]:
        """What the optimizer of a parameter remembers of it."""
        found = (
            each.state[span.parameter] for each in self.optimizers if span.parameter in each.state
        )
        return next(found, {})


def _refuse_direct_step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise UsageError(
        "step() was called on the optimizer that was given to worker.setup; call it on the"
        " one that it returned: model, optimizer = worker.setup(model, optimizer)"
    )
