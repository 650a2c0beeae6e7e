"""Write a function that was typed into a notebook, and all that it uses, as a module.

A notebook is no file that other processes could import, and nothing is pickled here. But each of
its cells is in ``linecache``, where tracebacks look for source. So the module has the source of the
function and of the functions and classes that it uses, imports for what comes from modules, and
plain constants as they are now. A function that uses anything else is refused.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import math
import os
import re
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from paceline.errors import UsageError

MOST_CHARACTERS = 100_000
"""The longest constant that is written into a module."""
_FROM_CELLS = "__main__"
_LITERALS = (type(None), bool, int, float, complex, str, bytes)
_FORMS: dict[type, str] = {list: "[{}]", tuple: "({})", set: "{{{}}}"}


def is_typed_in(thing: Callable[..., Any]) -> bool:
    """Whether a function was typed in: it is in no file that another process could import."""
    main = sys.modules[_FROM_CELLS]
    in_file = any(getattr(main, name, None) is not None for name in ("__file__", "__spec__"))
    return getattr(thing, "__module__", None) == _FROM_CELLS and not in_file


def module_of(function: Callable[..., Any]) -> str:
    """The source of a module that defines a function which was typed in."""
    cells = _Cells(vars(sys.modules[_FROM_CELLS]), function.__name__)
    cells.define(function.__name__, function)
    return cells.text()


@dataclass
class _Cells:
    """What is written into the module.

    Attributes:
        names: what is defined in the notebook.
        wanted: the function for which it is made.
        lines: imports and constants.
        definitions: the sources of functions and classes, and what each needs to be defined.
        future: whether annotations are not evaluated.
    """

    names: Mapping[str, Any]
    wanted: str
    lines: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    future: bool = False

    def define(self, name: str, thing: Any) -> None:
        """Add a function or a class that was typed in, and all that it uses."""
        source = _source_of(thing)
        if source is None:
            raise UsageError(
                f"{name} must be in a file, not typed in at a prompt: other processes import it."
                " Save it in a script, or use a notebook"
            )
        flags = getattr(getattr(thing, "__code__", None), "co_flags", 0)
        self.future |= bool(flags & __future__.annotations.compiler_flag)
        at_once, later = _names_in(source)
        self.definitions[name] = source, at_once
        for used in sorted(at_once | later):
            if used in self.names and used not in self.definitions:
                self._add(used, self.names[used], name)
        for module in _submodules(source, self.names):
            self.lines[module] = f"import {module}"

    def _add(self, name: str, thing: Any, user: str) -> None:
        """Add what a function or a class uses under a name."""
        if name in self.lines:
            return
        if isinstance(thing, types.ModuleType) and thing.__name__ != _FROM_CELLS:
            plain = thing.__name__ == name
            self.lines[name] = f"import {thing.__name__}" + ("" if plain else f" as {name}")
        elif (constant := _literal(thing)) is not None:
            if len(constant) > MOST_CHARACTERS:
                raise self._refused(name, f"{len(constant)} characters long", user)
            self.lines[name] = f"{name} = {constant}"
        elif getattr(thing, "__module__", None) == _FROM_CELLS and _is_definition(thing):
            self._define_as(name, thing)
        elif (origin := _origin(thing, name)) is not None:
            module, own = origin
            alias = "" if own == name else f" as {name}"
            self.lines[name] = f"from {module} import {own}{alias}"
        else:
            raise self._refused(name, type(thing).__name__, user)

    def _define_as(self, name: str, thing: Any) -> None:
        """Add a function or a class under a name that may be another than its own."""
        own = name if thing.__name__ == "<lambda>" else thing.__name__
        if own not in self.definitions:
            self.define(own, thing)
        if own != name:
            self.definitions[name] = f"{name} = {own}\n", {own}

    def _refused(self, name: str, what: str, user: str) -> UsageError:
        return UsageError(
            f"{user} uses {name} ({what}) of the notebook, which other processes do not have: make"
            f" it inside of {self.wanted}, or pass it by arguments={{...}} if it is plain data"
        )

    def text(self) -> str:
        """The module; what a definition needs comes before it."""
        parts = [f'"""What {self.wanted} uses of a notebook."""\n']
        if self.future:
            parts.append("from __future__ import annotations\n")
        parts.append("".join(f"{line}\n" for line in self.lines.values()))
        return "\n".join([*parts, *self._in_order()])

    def _in_order(self) -> Iterator[str]:
        done: set[str] = set()

        def visit(name: str) -> Iterator[str]:
            if name in done or name not in self.definitions:
                return
            done.add(name)
            source, at_once = self.definitions[name]
            for needed in sorted(at_once):
                yield from visit(needed)
            yield source

        for name in self.definitions:
            yield from visit(name)


# Sources -----------------------------------------------------------------------------------------


def _is_definition(thing: Any) -> bool:
    return isinstance(thing, type) or isinstance(inspect.unwrap(thing), types.FunctionType)


def _source_of(thing: Any) -> str | None:
    """The source of a function or a class, with its decorators; None if no cell has it."""
    if isinstance(thing, type):
        return _source_of_class(thing)
    code = inspect.unwrap(thing).__code__
    lines = linecache.getlines(code.co_filename)
    for node in _nodes(lines):
        if _first_line(node) == code.co_firstlineno and _defines(node, code.co_name):
            return _segment(node, lines)
    return None


def _source_of_class(thing: type) -> str | None:
    """The source of a class: from the cell of one of its methods, or the last that defines it."""
    codes = [getattr(value, "__code__", None) for value in vars(thing).values()]
    files = [code.co_filename for code in codes if code is not None]
    for file in [*files, *reversed(_cells_so_far())]:
        lines = linecache.getlines(file)
        for node in _nodes(lines):
            if isinstance(node, ast.ClassDef) and node.name == thing.__name__:
                return _segment(node, lines)
    return None


def _cells_so_far() -> list[str]:
    """The names of all cells, in the order in which they were first run."""
    return [name for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None]


def _nodes(lines: list[str]) -> Iterator[ast.stmt]:
    """The statements of a cell, those inside of others included."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        tree = compile("".join(lines), "<cell>", "exec", flags)
    except SyntaxError:
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def _defines(node: ast.stmt, name: str) -> bool:
    """Whether a statement defines a function of that name, or an anonymous one."""
    if name == "<lambda>":
        return isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda)
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _segment(node: ast.stmt, lines: list[str]) -> str:
    """The source of a statement, as if it stood at the top level."""
    text = "".join(lines[_first_line(node) - 1 : node.end_lineno])
    return textwrap.dedent(text).rstrip() + "\n"


# Names -------------------------------------------------------------------------------------------


def _names_in(source: str) -> tuple[set[str], set[str]]:
    """The global names that a definition uses when it is made, and those that it uses later."""
    top = symtable.symtable(source, "<cell>", "exec")
    at_once, later = _used(top), set[str]()
    pending = [(table, True) for table in top.get_children()]
    while pending:
        table, is_now = pending.pop()
        is_now = is_now and table.get_type() == "class"
        (at_once if is_now else later).update(_used(table))
        pending += [(child, is_now) for child in table.get_children()]
    return at_once, later


def _used(table: symtable.SymbolTable) -> set[str]:
    """The names of the module that a scope reads or assigns."""
    is_top = table.get_type() == "module"
    symbols = [s for s in table.get_symbols() if s.is_referenced() or s.is_declared_global()]
    return {s.get_name() for s in symbols if is_top or s.is_global()}


def _submodules(source: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Modules inside of others that are used by their whole name: ``xml.dom.minidom``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)) is not None:
            first, _, rest = dotted.partition(".")
            module = names.get(first)
            if isinstance(module, types.ModuleType):
                whole = f"{module.__name__}.{rest}"
                if whole in sys.modules:
                    yield whole


def _dotted(node: ast.expr) -> str | None:
    text = ast.unparse(node)
    return text if re.fullmatch(r"\w+(\.\w+)+", text) else None


# Values ------------------------------------------------------------------------------------------


def _literal(value: Any) -> str | None:
    """A plain constant as source; None for anything else.

    >>> _literal([1, ("a", None), {"b": {2.5}}]), _literal(float("inf")), _literal(object())
    ("[1, ('a', None), {'b': {2.5}}]", "float('inf')", None)
    """
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return f"float('{value}')"
    if kind in _LITERALS:
        return repr(value)
    if isinstance(value, PurePath):
        return f"__import__('pathlib').Path({os.fspath(value)!r})"
    if f"{kind.__module__}.{kind.__name__}" == "torch.device":
        return f"__import__('torch').device({str(value)!r})"
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _literal(value.item())
    if kind is dict:
        pairs = [(_literal(key), _literal(item)) for key, item in value.items()]
        parts = [None if None in pair else f"{pair[0]}: {pair[1]}" for pair in pairs]
        return _joined("{{{}}}", parts)
    if kind is set and not value:
        return "set()"
    if kind in _FORMS:
        form = "({},)" if kind is tuple and len(value) == 1 else _FORMS[kind]
        return _joined(form, [_literal(item) for item in value])
    return None


def _joined(form: str, parts: list[str | None]) -> str | None:
    known = [part for part in parts if part is not None]
    return form.format(", ".join(known)) if len(known) == len(parts) else None


def _origin(thing: Any, name: str) -> tuple[str, str] | None:
    """The module from which something was imported, and its name there."""
    own, shown = getattr(thing, "__name__", name), repr(thing)[:200]  # torch.float16
    first = [(getattr(thing, "__module__", None), getattr(thing, "__qualname__", None))]
    first.append((shown.rpartition(".")[0], shown.rpartition(".")[2]))
    loaded = sorted(sys.modules, key=lambda each: (each.count("."), len(each), each))
    rest = [(each, called) for each in loaded for called in (own, name) if each[0] != "_"]
    for module, called in [*first, *rest]:
        known = getattr(sys.modules.get(str(module)), "__dict__", {})
        if module != _FROM_CELLS and known.get(called, known) is thing:
            return str(module), str(called)
    return None
