"""What users read of a method, in tables and pages: from its class and its docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from paceline.common.options import default_of, field_types, type_name
from paceline.strategies import strategy_class
from paceline.strategies.base import Strategy


def describe(name: str) -> dict[str, Any]:
    """What ``paceline strategies`` tells of a method."""
    cls = strategy_class(name)
    doc = inspect.getdoc(cls) or ""
    return {
        "name": name,
        "summary": without_markup(doc.partition("\n")[0]),
        "paper": cls.paper,
        "options": _options(cls, _argument_helps(doc)),
        "synchronous": cls().synchronous,
        "servers": len(cls().roles(2)) - 2,
    }


def without_markup(text: str) -> str:
    """A text of a docstring without the marks of reStructuredText.

    >>> print(without_markup(r"``interval`` of :class:`~paceline.Strategy`, :math:`x_i'`"))
    interval of Strategy, x_i'
    """
    text = re.sub(r":[\w:]+:`~(?:[^`]*\.)?([^`]+)`", r"\1", text)
    return re.sub(r":[\w:]+:`([^`]+)`", r"\1", text).replace("``", "")


def _options(cls: type[Strategy], helps: dict[str, str]) -> list[dict[str, Any]]:
    """The fields of a method that a user may set; those that ``helps`` tells of in its order."""
    types, order = field_types(cls), [*helps]
    options = [
        {
            "name": field.name,
            "type": type_name(types[field.name]),
            "default": default_of(field),
            "help": helps.get(field.name, ""),
        }
        for field in dataclasses.fields(cls)
        if field.init
    ]
    return sorted(
        options, key=lambda o: order.index(o["name"]) if o["name"] in order else len(order)
    )


def _argument_helps(doc: str) -> dict[str, str]:
    """The help of each argument, from the ``Args:`` part of a docstring."""
    match = re.search(r"^Args:\n((?: {4}.*\n|\n)+)", doc + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): ((?:.*\n(?: {8}.*\n)*))", match[1] if match else "", re.M)
    return {name: without_markup(" ".join(text.split())) for name, text in entries}
