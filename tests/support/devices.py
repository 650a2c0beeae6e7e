"""A second device that needs no hardware."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class Elsewhere(Tensor):
    """A tensor on another device than the CPU, as if on a GPU.

    It can be copied to the CPU and back. Any other operation on tensors of both devices raises an
    error, unless the tensor on the CPU is a single number.
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
        leaves = tree_flatten((args, kwargs))[0]
        on_cpu = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, cls) and t.dim()]
        if on_cpu and func not in _COPIES:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        target = torch.device((kwargs or {}).get("device") or "meta")
        plain = {k: v for k, v in (kwargs or {}).items() if k != "device"}
        inner_args, inner_kwargs = tree_map_only(cls, lambda t: t.inner, (args, plain))
        result = func(*inner_args, **inner_kwargs)
        if func._schema.name.endswith("_"):
            return args[0]
        return result if target.type == "cpu" else tree_map_only(Tensor, cls, result)
