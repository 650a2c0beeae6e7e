"""Batching rules that are faster than those of ``torch.func.vmap``, or that it lacks.

Workers are merged into the channels where an operation has channels (a convolution: as groups),
into the batch where it has no weights (attention), and a linear layer is one batched product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as f
from torch import Tensor
from torch.overrides import TorchFunctionMode

Dims = tuple[int | None, ...]
"""For each argument, which dimension counts the workers; None if it is the same for all."""


class Rule(torch.autograd.Function):
    """An operation under ``vmap``; torch's own autograd goes through what :meth:`vmap` calls."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*_: Any) -> Any:
        raise AssertionError("a rule is followed only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Linear(Rule):
    """One batched product."""

    @staticmethod
    def vmap(info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        count = info.batch_size
        x, weight = _first(x, dims[0], count), _first(weight, dims[1], count)
        flat = x.reshape(count, -1, x.shape[-1])
        if bias is None:
            out = torch.bmm(flat, weight.transpose(1, 2))
        else:
            own = _first(bias, dims[2], count).unsqueeze(1)
            out = torch.baddbmm(own, flat, weight.transpose(1, 2))
        return out.view(*x.shape[:-1], weight.shape[1]), 0


class Conv2d(Rule):
    """One convolution with the channels of each worker as groups."""

    @staticmethod
    def vmap(
        info: Any,
        dims: Dims,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> Any:
        count = info.batch_size
        merged = _in_channels(x, dims[0], count)
        weight = _first(weight, dims[1], count).flatten(0, 1)
        own = None if bias is None else _first(bias, dims[2], count).flatten(0, 1)
        out = f.conv2d(merged, weight, own, stride, padding, dilation, count * groups)
        return out.unflatten(1, (count, -1)), 1


class BatchNorm(Rule):
    """One normalization with the channels of all workers."""

    @staticmethod
    def vmap(
        info: Any,
        dims: Dims,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Any:
        count = info.batch_size
        weight, bias = _vector(weight, dims[3], count), _vector(bias, dims[4], count)
        mean = None if mean is None else mean.view(-1)  # a view: it is changed in place
        var = None if var is None else var.view(-1)
        merged = _in_channels(x, dims[0], count)
        out = f.batch_norm(merged, mean, var, weight, bias, training, momentum, eps)
        return out.unflatten(1, (count, -1)), 1


class GroupNorm(Rule):
    """One normalization with the groups of all workers."""

    @staticmethod
    def vmap(
        info: Any,
        dims: Dims,
        x: Tensor,
        groups: int,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Any:
        count = info.batch_size
        weight, bias = _vector(weight, dims[2], count), _vector(bias, dims[3], count)
        out = f.group_norm(_in_channels(x, dims[0], count), count * groups, weight, bias, eps)
        return out.unflatten(1, (count, -1)), 1


class Attention(Rule):
    """One attention over the samples of all workers."""

    @staticmethod
    def vmap(
        info: Any,
        dims: Dims,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
        gqa: bool,
    ) -> Any:
        count = info.batch_size
        query, key, value = (
            _first(t, d, count) for t, d in zip((query, key, value), dims, strict=False)
        )
        if mask is not None:
            mask = _of_samples(mask, dims[3], count, query.shape[1])
        query, key, value = (part.flatten(0, 1) for part in (query, key, value))
        out = f.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa
        )
        return out.unflatten(0, (count, -1)), 0


def _first(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    """The tensor with the workers as its first dimension."""
    return tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _of_samples(mask: Tensor, dim: int | None, count: int, samples: int) -> Tensor:
    """A mask of attention for the samples of all workers."""
    if dim is None and mask.dim() < 4:
        return mask
    own = _first(mask, dim, count)
    own = own.view(count, *[1] * (5 - own.dim()), *own.shape[1:])
    return own.expand(count, samples, *own.shape[2:]).flatten(0, 1)


def _vector(tensor: Tensor | None, dim: int | None, count: int) -> Tensor | None:
    """The vectors of all workers, one after the other."""
    return None if tensor is None else _first(tensor, dim, count).reshape(-1)


def _in_channels(x: Tensor, dim: int | None, count: int) -> Tensor:
    """Samples x channels, with the channels of each worker one after the other."""
    return _first(x, dim, count).movedim(0, 1).flatten(1, 2)


# When they are followed --------------------------------------------------------------------------


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _apply(Linear, input, weight, bias) if _varies(weight) else NotImplemented


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if input.dim() != 4 or not _varies(weight):
        return NotImplemented
    return _apply(Conv2d, input, weight, bias, stride, padding, dilation, groups)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    running = [tensor for tensor in (running_mean, running_var) if tensor is not None]
    if input.dim() < 2 or not _varies(input) or not all(map(_varies, running)):
        return NotImplemented
    affine = weight, bias
    return _apply(BatchNorm, input, running_mean, running_var, *affine, training, momentum, eps)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not _varies(input):
        return NotImplemented
    return _apply(GroupNorm, input, num_groups, weight, bias, eps)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    varying = all(map(_varies, (query, key, value)))
    if query.dim() != 4 or not varying:
        return NotImplemented
    more = attn_mask, dropout_p, is_causal, scale, enable_gqa
    return _apply(Attention, query, key, value, *more)


def _apply(rule: Any, *args: Any) -> Any:
    return rule.apply(*args)


def _varies(tensor: Tensor) -> bool:
    """Whether each worker has its own."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


RULES: dict[Any, Callable[..., Any]] = {
    f.linear: _linear,
    f.conv2d: _conv2d,
    torch.conv2d: _conv2d,
    f.batch_norm: _batch_norm,
    f.group_norm: _group_norm,
    f.scaled_dot_product_attention: _attention,
}
"""The rule of each function of torch; it returns NotImplemented where torch's own must do."""


class Rules(TorchFunctionMode):
    """Inside, functions of torch follow :data:`RULES`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result
