"""Where a worker's own autograd graph ends: at the result of ``model(x)``."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

Delivered = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]


class Boundary(torch.autograd.Function):
    """Gives a worker its rows of a joint forward; their backward is a joint one.

    Its inputs are the worker's parameters, so that autograd treats their gradients as ever.
    """

    @staticmethod
    def forward(
        ctx: Any, deliver: Delivered, rows: Sequence[Tensor], fixed: Sequence[Tensor], *_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.deliver = deliver
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fixed)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                'create_graph=True goes through model(x) twice: use batched="off" for this loop'
            )
        deliver, ctx.deliver = ctx.deliver, _refuse_again
        return None, None, None, *deliver(grads)


def _refuse_again(grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    raise UsageError(
        "a second backward goes through the result of one model(x): add the losses up before"
        ' backward, or use batched="off" for this loop'
    )


class Forward:
    """``model.forward`` of a worker; in copies of the model, the plain one."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_forward(memo[id(self._model)])

    def __reduce__(self) -> Any:
        return _plain_forward, (self._model,)


def _plain_forward(model: nn.Module) -> Any:
    return types.MethodType(type(model).forward, model)
