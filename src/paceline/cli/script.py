"""What commands know of a script before it runs: its source is read, and nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.files import reason_of
from paceline.common.reading import read_bytes
from paceline.common.reference import WHOLE
from paceline.errors import UsageError, unknown

STARTS = ("init", "paced")
"""What a flat script calls to get its worker."""
UNREAD = object()
"""An argument that is known only when the script runs."""
Function = ast.FunctionDef


@dataclass(frozen=True)
class Script:
    """A script as it was read.

    Attributes:
        path: of the script.
        functions: those at its top level.
        others: further names that it imports or assigns there.
        asked: the arguments of its call of ``pl.init`` or ``pl.paced``; None if it calls neither.
    """

    path: Path
    functions: Mapping[str, Function]
    others: frozenset[str]
    asked: Mapping[str, Any] | None

    def entry(self, function: str | None, arguments: Mapping[str, Any]) -> str:
        """The function that runs on each worker, or ``WHOLE``: the script, from its first line.

        Refuses a script without that function, and arguments that it does not take.
        """
        name = function or "train"
        if function is None and self.asked is not None and not self._trains_a_worker:
            self._refuse_for_whole(arguments)
            return WHOLE
        if name in self.functions:
            self._check_parameters(self.functions[name], arguments)
        elif name not in self.others:
            raise self._lacks(function)
        return name

    @property
    def _trains_a_worker(self) -> bool:
        """Whether ``train`` says of its first parameter that this is the worker."""
        train = self.functions.get("train")
        first = _parameters(train)[:1] if train is not None else []
        return any(p.arg == "worker" or _is_worker(p.annotation) for p in first)

    def _lacks(self, function: str | None) -> UsageError:
        if function is not None:
            return unknown(f"function of {self.path}", function, self.functions)
        has = ", ".join(self.functions) or "none"
        return UsageError(
            f"script ({self.path}) must define train(worker); its functions: {has}. Name another"
            " one with --function, or call pl.init() for a script that runs as a whole"
        )

    def _refuse_for_whole(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            option = option_of(name)
            raise UsageError(
                f"{option} ({value}) cannot be passed: {self.path} runs as a whole, from its first"
                f" line; arguments of its own come after -- (... {self.path} -- {option} {value})"
            )

    def _check_parameters(self, function: Function, arguments: Mapping[str, Any]) -> None:
        names = [parameter.arg for parameter in _parameters(function)]
        called, own = function.name, function.args
        if not names and own.vararg is None:
            rule = f"{called}() must take the worker: def {called}(worker)"
            raise UsageError(f"script ({self.path}): {rule}")
        for name in arguments:
            if name not in names[1:] and own.kwarg is None:
                taken = ", ".join(names[1:]) or "only the worker"
                raise UsageError(
                    f"{option_of(name)} ({arguments[name]}) cannot be passed: {called} in"
                    f" {self.path} has no parameter {name}; it takes {taken}"
                )


def read_script(path: Path) -> Script:
    """Read a script; refuses what is not Python."""
    try:
        tree = ast.parse(read_bytes(path), str(path))
    except OSError as error:
        raise UsageError(f"script ({path}) cannot be read: {reason_of(error)}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        reason = error.args[0] if error.args else "it is nested too deeply"
        raise UsageError(f"script ({path}) is not Python: {line}{reason}") from None
    functions = {n.name: n for n in tree.body if isinstance(n, Function)}
    return Script(path, functions, frozenset(_other_names(tree)), _asked(tree))


def _other_names(tree: ast.Module) -> set[str]:
    """The names that a script imports or assigns at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _asked(tree: ast.Module) -> dict[str, Any] | None:
    """The arguments of the first call that gives the script its worker, as far as they are read."""
    modules, functions = {"paceline"}, set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name for each in node.names if each.name == "paceline"}
        elif isinstance(node, ast.ImportFrom) and node.module == "paceline":
            functions |= {each.asname or each.name for each in node.names if each.name in STARTS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_start(node.func, modules, functions):
            return {each.arg: _constant(each.value) for each in node.keywords if each.arg}
    return None


def _is_start(called: ast.expr, modules: set[str], functions: set[str]) -> bool:
    if isinstance(called, ast.Name):
        return called.id in functions
    if not isinstance(called, ast.Attribute) or called.attr not in STARTS:
        return False
    return isinstance(called.value, ast.Name) and called.value.id in modules


def _constant(value: ast.expr) -> Any:
    return value.value if isinstance(value, ast.Constant) else UNREAD


def _parameters(function: Function) -> list[ast.arg]:
    own = function.args
    return [*own.posonlyargs, *own.args, *own.kwonlyargs]


def _is_worker(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation).strip("'\"").endswith("Worker")


def option_of(name: str) -> str:
    """The option of a command that has a name in Python.

    >>> option_of("batch_size")
    '--batch-size'
    """
    return f"--{name.replace('_', '-')}"
