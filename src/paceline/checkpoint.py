"""Parameters and optimizer state as files that hold numbers and nothing else.

A rank's state is two files: ``NAME.safetensors`` with every tensor, ``NAME.json`` with all that is
not one. No pickle, neither way. A file is written under another name, flushed to the disk and then
renamed, so that a crash leaves the old one or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import UsageError


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name; views and tied tensors are written as what they hold."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    _replace(path, lambda temporary: save_file(plain, temporary))


def save_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write a nested state of tensors, numbers, texts, lists and dicts."""
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / f"{name}.safetensors")
    text = json.dumps(tree)
    _replace(folder / f"{name}.json", lambda temporary: temporary.write_text(text))


def load_state(folder: Path, name: str) -> dict[str, Any]:
    """Read what :func:`save_state` wrote."""
    try:
        tree = json.loads((folder / f"{name}.json").read_text())
        tensors = load_file(folder / f"{name}.safetensors")
    except OSError as error:
        raise UsageError(
            f"no saved state in {folder}: {error.strerror}: {error.filename}"
        ) from None
    unpacked: dict[str, Any] = _unpack(tree, tensors)
    return unpacked


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, its tensors put aside; dict keys keep their type."""
    if isinstance(value, Tensor):
        key = str(len(tensors))
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, Mapping):
        return {"dict": [[key, _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(f"a {type(value).__name__} in the state cannot be saved: {value!r}")


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_unpack(item, tensors) for item in content)
    return {key: _unpack(item, tensors) for key, item in content}


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_into(model: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a state dict into a model whose parameters stay where they are."""
    model.load_state_dict(dict(state), assign=False)
