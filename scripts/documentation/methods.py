"""The reference of the methods, from their docstrings, options and ``about``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from latex2mathml.converter import convert

from documentation.docstrings import as_markdown
from paceline.cli.about import ABOUT, parts_of, rows_of
from paceline.report.methods import describe
from paceline.strategies import strategy_class

_MATH = ".. math::"
_NEXT_EQUATION = re.compile(r",?\s*\\qquad|,\s*\\quad")


def method_reference(name: str) -> str:
    """What the docstring of a method says, in Markdown."""
    about, parts = describe(name), parts_of(name)
    texts = {title: " ".join(parts[title][0].split()) for title in ABOUT if title in parts}
    return "\n".join(
        [
            f"{as_markdown(about['summary'])}\n",
            *(f"{as_markdown(paragraph)}\n" for paragraph in parts.get("Idea", [])),
            *_symbols(parts.get("Symbols", [])),
            *_equations(parts.get("Equations", [])),
            *_options(name, about["options"]),
            *(f"{as_markdown(paragraph)}\n" for paragraph in parts.get("Notes", [])),
            *_example(name),
            *(f"**{title}.** {as_markdown(text)}\n" for title, text in texts.items()),
        ]
    )


def _symbols(tables: Sequence[str]) -> Iterator[str]:
    for table in tables:
        yield from ("| symbol | here |", "|---|---|")
        yield from (f"| {symbol} | {meaning} |" for symbol, meaning in rows_of(table))
        yield ""


def _equations(paragraphs: Sequence[str]) -> Iterator[str]:
    """The equations, each in a line, and the prose between them."""
    for paragraph in paragraphs:
        if not paragraph.startswith(_MATH):
            yield f"{as_markdown(paragraph)}\n"
            continue
        for equation in _NEXT_EQUATION.split(paragraph.removeprefix(_MATH)):
            formula = convert(textwrap.dedent(equation).strip(), display="block")
            yield f'<div class="equation">{formula}</div>\n'


def _options(name: str, options: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not options:
        yield "It has no options.\n"
        return
    yield f"Options, as `{name}(name=value)` or `--set name=value`:\n"
    for option in options:
        values = option["type"].replace("|", ", ")
        default = "none" if option["default"] is None else str(option["default"]).lower()
        yield f"- `{option['name']}` ({values}; default {default}): {option['help']}"
    yield ""


def _example(name: str) -> Iterator[str]:
    doc = inspect.getdoc(strategy_class(name)) or ""
    _, found, code = doc.partition("Example:\n")
    if found:
        yield f"```pycon\n{textwrap.dedent(code).strip()}\n```\n"
