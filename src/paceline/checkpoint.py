"""Parameters and optimizer state as files that hold numbers and nothing else.

A rank's state is one file, ``NAME.safetensors``: its tensors, and all that is not one as JSON in
its header. No pickle, neither way. It is written under another name, flushed to the disk and then
renamed, so that a crash leaves the old one or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import UsageError


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, header: dict[str, str] | None = None
) -> None:
    """Write tensors by name; views and tied tensors are written as what they hold."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    _replace(path, lambda temporary: save_file(plain, temporary, header))


def save_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write a nested state of tensors, numbers, texts, lists and dicts."""
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / f"{name}.safetensors", {"state": json.dumps(tree)})


def load_state(folder: Path, name: str) -> dict[str, Any]:
    """Read what :func:`save_state` wrote."""
    path = folder / f"{name}.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            tree = json.loads((file.metadata() or {})["state"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UsageError(f"no saved state in {path}: {error}") from None
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
