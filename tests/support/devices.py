"""A second device that needs no hardware."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Elsewhere(Tensor):
    """A tensor that lies on another device than the CPU, as one on a GPU does.

    Its numbers are there and can be copied to the CPU and back. What else takes tensors of both
    devices is refused, unless that of the CPU is a single number.
    """

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), None, inner.dtype,
            device="meta",
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_flatten((args, kwargs))[0]
        here = [t for t in given if isinstance(t, Tensor) and not isinstance(t, cls) and t.dim()]
        if here and func not in _COPIES:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        target = torch.device((kwargs or {}).get("device") or "meta")
        plain = {k: v for k, v in (kwargs or {}).items() if k != "device"}
        inner_args, inner_kwargs = tree_map_only(cls, lambda t: t.inner, (args, plain))
        result = func(*inner_args, **inner_kwargs)
        if func._schema.name.endswith("_"):
            return args[0]
        return result if target.type == "cpu" else tree_map_only(Tensor, cls, result)
