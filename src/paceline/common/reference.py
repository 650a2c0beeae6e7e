"""Refer to functions and classes by name, so that a rank's process finds them without pickle."""

from __future__ import annotations

import importlib
import importlib.util
import json
import runpy
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

_MAIN = "__paceline_main__"
WHOLE = "__main__"
"""The name in the reference of a script that runs as a whole, from its first line."""
_JSON = "numbers, strings, lists and dicts only"
Reference = dict[str, Any]


def refer_to(thing: Callable[..., Any] | type) -> Reference:
    """The module or script of a function or class, and its name, for another process."""
    module, name = thing.__module__, check_name(thing)
    if module not in ("__main__", _MAIN):
        return {"module": module, "name": name}
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return {"module": spec.name, "name": name}
    if (path := getattr(main, "__file__", None)) is None:
        raise UsageError(f"{name} must be in a file, not typed in: other processes import it")
    return {"main": str(Path(path).resolve()), "name": name}


def check_name(thing: Callable[..., Any] | type) -> str:
    """The name of a function or class; refuses what is not at the top level of a module."""
    name: str = getattr(thing, "__qualname__", "")
    if not name or "<" in name or getattr(thing, "__self__", None) is not None:
        raise UsageError(
            f"{name or repr(thing)} must be defined at the top level of a module or script, where"
            " other processes find it by name. Move it out of the function, class or object that"
            " it is in; pass what it needs from there with arguments={...}"
        )
    return name


def refer_or_name(thing: Callable[..., Any] | Reference) -> Reference | str:
    """The reference of a function, for the record; only its name if no process could import it."""
    if isinstance(thing, dict):
        return thing
    try:
        return refer_to(thing)
    except UsageError:
        return getattr(thing, "__qualname__", repr(thing))


def find(reference: Reference) -> Any:
    """What :func:`refer_to` referred to."""
    if "main" in reference:
        module = _run_main(reference["main"])
    elif "script" in reference:
        path = Path(reference["script"])
        sys.argv = [str(path), *reference.get("argv", ())]
        if reference["name"] == WHOLE:
            return WholeScript(path)
        module = load_script(path)
    else:
        module = importlib.import_module(reference["module"])
    thing: Any = module
    for part in reference["name"].split("."):
        thing = getattr(thing, part)
    return thing


def check_reference(what: str, reference: Any) -> None:
    """Refuse a reference that :func:`refer_to` would not write: its file may be forged.

    A script needs its absolute path. A module must not be in Python's standard library: no
    training function is there, but functions that do harm when called are.
    """
    kinds = [kind for kind in ("main", "script", "module") if kind in reference]
    argv = {"argv"} & set(reference) if "script" in reference else set()
    if len(kinds) != 1 or set(reference) != {*kinds, "name", *argv}:
        raise UsageError(f"{what} ({reference}) must have a name, and one of main, script, module")
    (kind,) = kinds
    location, name, typed = reference[kind], reference["name"], reference.get("argv", [])
    named = isinstance(name, str) and (_is_dotted(name) or (kind, name) == ("script", WHOLE))
    texts = isinstance(typed, list) and all(isinstance(text, str) for text in typed)
    if not isinstance(location, str) or not named or not texts:
        raise UsageError(f"{what} ({reference}) must consist of names")
    if kind != "module":
        if not Path(location).is_absolute() or not Path(location).is_file():
            raise UsageError(f"{what} ({location}) must be the absolute path of a script")
    elif not _is_dotted(location) or location.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(f"{what} ({location}) must not be in Python's library")


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() and not part.startswith("__") for part in name.split("."))


in_whole_script: ContextVar[bool] = ContextVar("in_whole_script", default=False)
"""Whether this thread runs a script as a whole, which finds its worker by ``pl.init``."""


class WholeScript:
    """Calls a script on a worker, from its first line to its end, as Python runs it.

    Each call has its own ``__main__`` module: the workers of a simulation are in one process.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._former = path, sys.modules["__main__"]
        sys.path.insert(0, str(path.parent))
        self._code = compile(path.read_bytes(), str(path), "exec")

    def __call__(self, worker: Any) -> None:
        """Run the script."""
        module = types.ModuleType("__main__")
        module.__file__ = str(self._path)
        token = in_whole_script.set(True)
        sys.modules["__main__"] = module
        try:
            exec(self._code, vars(module))
        except SystemExit as end:
            if end.code == 2:  # what it was given is wrong, and it has said so
                raise UsageError(f"{self._path} has ended by sys.exit(2)") from None
            if end.code not in (None, 0):
                raise RuntimeError(f"the script has ended by sys.exit({end.code!r})") from end
        finally:
            in_whole_script.reset(token)
            sys.modules["__main__"] = self._former
        if not worker.began:
            raise UsageError(
                f"{self._path} has ended without worker = pl.init() and worker.setup: it has not"
                " trained on this worker"
            )


def load_script(path: Path) -> types.ModuleType:
    """Import a script under its own name, as if its folder were the current one."""
    sys.path.insert(0, str(path.parent))
    loader = _ScriptLoader(path.stem, str(path))  # accepts any file extension
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class _ScriptLoader(SourceFileLoader):
    """Loads a script from its source, as Python does: no file of bytecode is read or written."""

    def path_stats(self, path: str) -> Any:
        raise OSError("bytecode is not wanted")


def plain_json(name: str, value: Any) -> Any:
    """``value``, if JSON can represent it without a change."""
    copy = as_json(name, value)
    if repr(copy) != repr(value):
        raise UsageError(f"{name} must hold {_JSON}: {value} would become {copy}")
    return copy


def as_json(name: str, value: Any) -> Any:
    """``value`` converted to JSON and back."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must hold {_JSON}: {error}") from None


def _run_main(path: str) -> types.ModuleType:
    """Run the launching script again, without its ``if __name__ == "__main__"`` part."""
    if _MAIN not in sys.modules:
        module = types.ModuleType(_MAIN)
        sys.path.insert(0, str(Path(path).parent))
        module.__dict__.update(runpy.run_path(path, run_name=_MAIN))
        sys.modules[_MAIN] = sys.modules["__main__"] = module
    return sys.modules[_MAIN]
