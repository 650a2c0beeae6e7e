"""Docstrings as Markdown: an extension of griffe, which reads them for the API reference."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

from documentation.navigation import ROOT

_ROLE = re.compile(r":(?:py:)?(meth|class|func|mod|attr|data|exc|math):`(~?)([^`]+)`")
_PAGE = re.compile(r"`*\bdocs/([\w/-]+)\.md\b`*")
_CALLED = {"meth", "func"}


def as_markdown(text: str) -> str:
    """A text of a docstring without the roles of reStructuredText.

    >>> as_markdown(":meth:`setup` of :class:`~paceline.Worker`, by ``interval``")
    '`setup()` of `Worker`, by ``interval``'
    """
    return _ROLE.sub(_code, text)


def _code(match: re.Match[str]) -> str:
    role, tilde, name = match.groups()
    if role == "math":
        return convert(name)
    name = name.rpartition(".")[2] if tilde else name
    return f"`{name}()`" if role in _CALLED else f"`{name}`"


def _link(match: re.Match[str]) -> str:
    """A link to a page, from the folder of the API reference."""
    title = (ROOT / "docs" / f"{match[1]}.md").read_text(encoding="utf-8").partition("\n")[0]
    return f"[{title.removeprefix('# ')}](../../{match[1]}.md)"


class Docstrings(griffe.Extension):
    """Reads docstrings as the package's own readers do.

    Roles become code, and names of pages become links. A function that takes the fields of a spec
    (the decorator ``takes``) gets the signature and docstring that it has when it is imported.
    """

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Convert the docstring of each object that was read."""
        if isinstance(obj, griffe.Function) and any(
            str(decorator.value).startswith("takes(") for decorator in obj.decorators
        ):
            _as_imported(obj)
        if obj.docstring is not None:
            text = as_markdown(obj.docstring.value)
            obj.docstring.value = _PAGE.sub(_link, text)


def _as_imported(function: griffe.Function) -> None:
    """Give a function the parameters and the docstring that it has at run time."""
    found = getattr(importlib.import_module(function.module.path), function.name)
    function.docstring = griffe.Docstring(inspect.getdoc(found) or "", parent=function)
    function.decorators = []
    function.parameters = griffe.Parameters(
        *(_parameter(parameter) for parameter in inspect.signature(found).parameters.values())
    )


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    kind = griffe.ParameterKind[parameter.kind.name.lower()]
    has_default = parameter.default is not inspect.Parameter.empty
    default = repr(parameter.default) if has_default else None
    return griffe.Parameter(
        parameter.name, annotation=str(parameter.annotation), kind=kind, default=default
    )
