"""A nested state of tensors, numbers, strings, lists and dicts as one safetensors file.

Tensors are stored as tensors of the file, everything else as JSON in its header. Pickle is never
used. Before any tensor is read, the header is checked: its size, that it names nothing twice, and
that the file contains what the header describes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from paceline.checkpoint.disk import replace_file
from paceline.common.files import make_folder
from paceline.errors import UsageError

MAX_HEADER_BYTES = 8 << 20
_UNFIT = (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name; views and tied tensors are written as copies."""
    replace_file(path, _pack_tensors(tensors, None), "rank")


def _pack_tensors(tensors: Mapping[str, Tensor], header: dict[str, str] | None) -> bytes:
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return save(plain, header)


def save_state(folder: Path, name: str, state: Mapping[str, Any]) -> None:
    """Write a nested state of tensors, numbers, strings, lists and dicts."""
    content = pack_state(state)
    make_folder(folder)
    replace_file(folder / f"{name}.safetensors", content, "rank")


def pack_state(state: Mapping[str, Any]) -> bytes:
    """The content of the file that :func:`save_state` writes; a copy of the state."""
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors)
    return _pack_tensors(tensors, {"state": json.dumps(tree)})


def load_state(folder: Path, name: str) -> dict[str, Any]:
    """Read what :func:`save_state` wrote."""
    path = folder / f"{name}.safetensors"
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            tree = strict_json((file.metadata() or {})["state"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
        unpacked: dict[str, Any] = _unpack(tree, tensors)
        if not isinstance(unpacked, dict):
            raise ValueError("it is not a dict")
    except _UNFIT as error:
        raise UsageError(f"no saved state in {path}: {reason_of(error)}") from None
    return unpacked


def unpack_state(content: bytes) -> dict[str, Any]:
    """The state that :func:`pack_state` was given."""
    (length,) = struct.unpack_from("<Q", content)
    header = strict_json(content[8 : 8 + length].decode())
    state: dict[str, Any] = _unpack(strict_json(header["__metadata__"]["state"]), load(content))
    return state


def check_header(path: Path) -> None:
    """Refuse a file whose header is too large, is not JSON, or names something twice."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError("it is too short")
        (length,) = struct.unpack("<Q", start)
        size = path.stat().st_size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"its header ({length} bytes) must have at most {MAX_HEADER_BYTES} bytes, and fit"
                f" into the file ({size} bytes)"
            )
        strict_json(file.read(length).decode())


def strict_json(text: str) -> Any:
    """Parse a JSON text; refuses an object that has the same name twice."""
    return json.loads(text, object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {duplicate!r} appears twice")
    return result


def reason_of(error: BaseException) -> str:
    """Why a file cannot be used."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) or type(error).__name__


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON; moves its tensors to ``tensors``. Dict keys keep their type."""
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
    if not isinstance(content, list):
        raise ValueError(f"a {kind!r} must be a list")
    if kind == "tuple":
        return tuple(_unpack(item, tensors) for item in content)
    if kind != "dict":
        raise ValueError(f"{kind!r} is not a known kind of value")
    return {key: _unpack(item, tensors) for key, item in content}
