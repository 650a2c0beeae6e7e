"""Exchange weights with plain PyTorch, whatever wraps the module."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.checkpoint.states import check_header, load_state
from paceline.checkpoint.store import first_rank
from paceline.errors import UsageError

PREFIXES = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before each name."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file, or those of the first rank in a checkpoint's folder.

    Names are those of the plain module: the prefixes of wrappers are removed.
    """
    if (rank := first_rank(path)) is not None:
        weights: dict[str, Tensor] = load_state(path, f"rank{rank}")["model"]
        return plain_names(weights)
    try:
        check_header(path)
        return plain_names(load_file(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(
            f"weights ({path}) must be a safetensors file, or the folder of a checkpoint: {error}"
        ) from None


def plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of the plain module.

    >>> plain_names({"module._orig_mod.0.weight": 1, "module._orig_mod.0.bias": 2})
    {'0.weight': 1, '0.bias': 2}
    """
    for prefix in PREFIXES:
        if weights and all(name.startswith(prefix) for name in weights):
            return plain_names({name.removeprefix(prefix): w for name, w in weights.items()})
    return weights
