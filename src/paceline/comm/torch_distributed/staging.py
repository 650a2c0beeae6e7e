"""Vectors of a GPU on their way through gloo: in page-locked memory, which a GPU copies itself."""

from __future__ import annotations

import torch
from torch import Tensor


def host_copy(x: Tensor) -> Tensor:
    """A copy of ``x`` in the host's memory."""
    return host_vector(x.numel(), x.dtype, x.is_cuda).copy_(x.detach())


def host_vector(numel: int, dtype: torch.dtype, for_gpu: bool | None = None) -> Tensor:
    """Memory of the host, page-locked if a GPU copies from it or into it.

    Where that is not said, a process that uses a GPU is taken to do so.
    """
    pin = torch.cuda.is_initialized() if for_gpu is None else for_gpu
    return torch.empty(numel, dtype=dtype, pin_memory=pin)
