"""This rank's copy of the model: the flat vectors, and the user's own optimizer on them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.model.flat import Allocate, Flat
from paceline.model.gradient import Gradient


class Replica:
    """What a strategy may touch of the user's model and optimizer.

    Attributes:
        flat: the parameters and gradients as vectors.
        optimizer: the user's own.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, allocate: Allocate, aligned: bool = False
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates its loss many times a step; use a first-order method")
        self.flat = Flat(model, optimizer, allocate, aligned)
        self.optimizer = optimizer
        self._updating = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_others)

    def local_update(self, g: Gradient) -> None:
        """Clip if asked to, then run the user's optimizer, if the gradient is usable."""
        if g.usable:
            self.clip(g)
            self._updating = True
            try:
                self.optimizer.step()
            finally:
                self._updating = False

    def _refuse_others(self, *_: Any) -> None:
        """Refuse a step of the user's own optimizer that the strategy has not asked for."""
        if not self._updating:
            raise UsageError(
                "step() was called of the optimizer that worker.setup was given; use the one that"
                " it returned: model, optimizer = worker.setup(model, optimizer)"
            )

    def release(self) -> None:
        """Leave the user's optimizer to the user, after the end."""
        self._hook.remove()

    def clip(self, g: Gradient) -> Gradient:
        """The gradient, clipped if ``worker.clip_gradients`` was called for it; clip it once."""
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
        """The learning rate of each parameter group; ``flat.groups`` are their parts of ``x``."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def base_lrs(self) -> list[float]:
        """The learning rate of each group that its scheduler starts from, if there is one yet."""
        groups = self.optimizer.param_groups
        return [float(group.get("initial_lr", group["lr"])) for group in groups]

    def is_plain_sgd(self) -> bool:
        """Whether a local step is ``x - lr * (g + weight_decay * x)`` and no more."""
        return type(self.optimizer) is torch.optim.SGD and not any(
            group["momentum"] or group["maximize"] for group in self.optimizer.param_groups
        )

    def stands_still(self) -> bool:
        """Whether a learning rate is 0, and no scheduler is there to raise it."""
        return any(
            lr == 0 and not group.get("initial_lr", 0)
            for lr, group in zip(self.lrs(), self.optimizer.param_groups, strict=True)
        )

    def accumulate(self, g: Gradient, total: Tensor) -> Gradient:
        """Clip ``g``; if it is usable, add what plain SGD steps along, ``g + weight_decay * x``."""
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

        Otherwise it is AdamW's: a step shrinks the parameters by ``lr * weight_decay``. Found by
        steps of copies of the optimizer on one number.
        """
        if "weight_decay" not in self.optimizer.defaults:
            return True
        try:
            return self._try_step(g=1.0, decay=0.5) == self._try_step(g=1.5, decay=0.0)
        except TypeError:  # it cannot be made from groups alone, as a server has to
            return True

    def _try_step(self, g: float, decay: float) -> float:
        """Where a new optimizer of the user's class takes the number 1 in one step."""
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

        Found by a step of a copy of the optimizer on one number, so that every rank knows them
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
        """Gather one buffer of the optimizer into a vector; where there is none, zeros."""
        for span, view in zip(self.flat.spans, self.flat.views(out), strict=True):
            buffer = self.optimizer.state[span.parameter].get(name)
            if buffer is None:
                view.zero_()
            else:
                view.copy_(buffer)

    def write_moment(self, name: str, vector: Tensor) -> None:
        """Spread a vector over the optimizer's buffers, where they exist."""
        for span, view in zip(self.flat.spans, self.flat.views(vector), strict=True):
            buffer = self.optimizer.state[span.parameter].get(name)
            if buffer is not None:
                buffer.copy_(view)

    def forget_moments(self) -> None:
        """Let the optimizer start again without its buffers."""
        for span in self.flat.spans:
            self.optimizer.state.pop(span.parameter, None)
