"""Steps of a method for a loop that stays as it is and calls its own optimizer's ``step``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.training.optimizer import PacedOptimizer
from paceline.training.worker import Worker

Call = tuple[tuple[Any, ...], dict[str, Any]]
_SCALING = ("grad_scale", "found_inf")
"""What a gradient scaler leaves on an optimizer during its step."""


@contextmanager
def paced_steps(
    worker: Worker, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Inside, each ``optimizer.step()`` is a step of the method; at the end, finish the worker.

    A hook makes the step of the method, which calls the optimizer as it needs to. What is left of
    the call then goes to a copy of the optimizer that has no parameters.
    """
    _, given = worker.setup([*models], [*optimizers])
    pairs = zip(optimizers, given, strict=True)
    stand_ins = {id(optimizer): (paced, _idle(optimizer)) for optimizer, paced in pairs}

    def step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        optimizer = args[0]
        paced, idle = stand_ins[id(optimizer)]
        closure = args[1] if len(args) == 2 else kwargs.get("closure")
        if len(args) > 2 or not set(kwargs) <= {"closure"}:
            raise UsageError("optimizer.step() takes a closure, and nothing else, inside pl.paced")
        with _within_step(optimizer, paced):
            loss = paced.step(closure)
        return (idle,), {} if closure is None else {"closure": lambda: loss}

    worker.redirect_steps(step)
    with ExitStack() as undo:
        for optimizer in optimizers:
            undo.callback(_support_scaling(optimizer))
        yield
        worker.finish()


def _idle(optimizer: Optimizer) -> Optimizer:
    """A copy of an optimizer that has no parameters and no hooks."""
    idle = object.__new__(type(optimizer))
    vars(idle).update({**vars(optimizer), **_hooks(), "param_groups": []})
    return idle


def _support_scaling(optimizer: Any) -> Callable[[], None]:
    """Have gradient scalers treat an optimizer as a PacedOptimizer; returns what undoes that."""
    before = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True
    return lambda: setattr(optimizer, "_step_supports_amp_scaling", before)


def _hooks() -> dict[str, Any]:
    """The attributes of an optimizer that has no hooks."""
    return {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}


@contextmanager
def _within_step(optimizer: Optimizer, paced: PacedOptimizer) -> Iterator[None]:
    """Inside, the optimizer has no hooks, which the loop's call has; ``paced`` undoes a scale."""
    own = vars(optimizer)
    scaling = {name: own.pop(name) for name in _SCALING if name in own}
    former = {name: own[name] for name in _hooks()} | scaling
    own.update(_hooks())
    vars(paced).update(scaling)
    try:
        yield
    finally:
        own.update(former)
        for name in scaling:
            del vars(paced)[name]
