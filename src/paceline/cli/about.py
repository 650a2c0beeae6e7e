"""``paceline strategies``: explain the methods, from their docstrings, fields and ``about``.

A docstring is reStructuredText in paragraphs: a summary, the idea, a table of symbols, equations,
then ``Args:`` and ``Example:``. They are shown without markup.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.cli.screen import Screen
from paceline.report.methods import describe, without_markup
from paceline.strategies import strategy_class, strategy_names

NAMED = ("Args", "Example")
"""The headings that appear in docstrings."""
ABOUT = ("Faults", "Bytes", "When to use", "Reference")
"""The headings of the texts in ``about``."""
SHOWN = ("Idea", "Symbols", "Equations", "Args", "Example", "Notes", *ABOUT)
"""All headings, in the order in which they are shown."""
IN_JSON = ("Idea", "Equations", *ABOUT)
"""The headings in the output of ``--json``, each as a text."""

Parts = dict[str, list[str]]

_NEXT = {
    "": "Summary",
    "Summary": "Idea",
    "Symbols": "Equations",
    "Args": "Notes",
    "Example": "Notes",
}
_TABLE = re.compile(r"=+( +=+)+\n")
_HEADING = re.compile(rf"\A(\.\. math::|({'|'.join(NAMED)}):(?=\s))")
_PREFORMATTED = (" ", "- ", "* ", ".. math::", "Example:")
_MIN_WIDTH, _NARROW_WIDTH, _MAX_WIDTH = 24, 60, 100
_INDENT = "  "


def show_strategies(screen: Screen) -> None:
    """List every method with its summary and options."""
    known = [describe(name) for name in strategy_names()]
    column, width = 2 + max(len(about["name"]) for about in known), _width()
    for about in known:
        screen.show("\n".join(_entry(about, column, width)))
    screen.show()
    screen.show("\n".join(_wrap("paceline strategies NAME explains one method.", width, "")))
    screen.emit({"strategies": known})


def show_strategy(screen: Screen, name: str) -> None:
    """Explain one method: its docstring part by part, and its options."""
    about, parts, width = describe(name), parts_of(name), _width()
    screen.show("\n".join(_wrap(about["summary"], width, "")))
    for heading in SHOWN:
        if heading == "Args":
            _show_part(screen, _options_title(about), _options(about["options"], width), width)
        elif heading in parts:
            _show_part(screen, heading, _part(heading, parts[heading], width), width)
    screen.emit({"strategies": [about | _texts(parts)]})


def _show_part(screen: Screen, title: str, lines: Iterator[str], width: int) -> None:
    screen.show()
    screen.show("\n".join([*_wrap(title, width, ""), *lines]))


# Reading docstrings ------------------------------------------------------------------------------


def parts_of(name: str) -> Parts:
    """The paragraphs of a method's docstring, and its other texts, by heading."""
    cls = strategy_class(name)
    parts: Parts = {}
    heading = ""
    for paragraph in re.split(r"\n\s*\n", (inspect.getdoc(cls) or "").strip()):
        heading = _heading(paragraph, heading)
        parts.setdefault(heading, []).append(paragraph)
    about = cls.about
    texts = (about.faults, about.bytes, about.when_to_use, about.reference or cls.paper)
    return parts | {name: [text] for name, text in zip(ABOUT, texts, strict=True) if text}


def _heading(paragraph: str, previous: str) -> str:
    """The heading of a paragraph that follows one under the heading ``previous``."""
    if paragraph.startswith(" "):
        return previous
    if (match := _HEADING.match(paragraph)) is not None:
        return match[2] or "Equations"
    return "Symbols" if _TABLE.match(paragraph) else _NEXT.get(previous, previous)


def _lines(paragraph: str) -> list[str]:
    """A paragraph as one line; if it is preformatted, as its own lines."""
    body = _HEADING.sub("", paragraph)
    if paragraph.startswith(_PREFORMATTED):
        return textwrap.dedent(body.strip("\n")).splitlines()
    return [without_markup(" ".join(body.split()))]


def rows_of(table: str) -> list[tuple[str, str]]:
    """The rows of a table below its header: all columns but the last, and the last."""
    rule, _, _, *lines = table.splitlines()
    last = rule.rindex(" ") + 1
    cells = [(line[:last], line[last:]) for line in lines if not line.startswith("=")]
    return [(without_markup(left).strip(), without_markup(right)) for left, right in cells]


def _texts(parts: Parts) -> dict[str, str]:
    """The parts for ``--json``; a missing part is empty."""
    return {
        heading.lower().replace(" ", "_"): "\n\n".join(
            "\n".join(_lines(paragraph)) for paragraph in parts.get(heading, [])
        )
        for heading in IN_JSON
    }


# Lines that fit ----------------------------------------------------------------------------------


def _width() -> int:
    """The width of the terminal, within limits; 80 if there is none."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, _MIN_WIDTH), _MAX_WIDTH)


def _wrap(text: str, width: int, indent: str = _INDENT, hang: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _entry(about: dict[str, Any], column: int, width: int) -> list[str]:
    """A method in the list: its name, and beside or below it the summary and options."""
    options = ", ".join(f"{o['name']}={_value(o['default'])}" for o in about["options"])
    indent = _INDENT if width < _NARROW_WIDTH else " " * column
    lines = _wrap(about["summary"], width, indent)
    lines += _wrap(f"options: {options or 'none'}", width, indent, len("options: "))
    if width < _NARROW_WIDTH:
        return [about["name"], *lines]
    return [f"{about['name']:<{column}}{lines[0].strip()}", *lines[1:]]


def _part(heading: str, paragraphs: Sequence[str], width: int) -> Iterator[str]:
    """The lines below a heading."""
    for number, paragraph in enumerate(paragraphs):
        if number:
            yield ""
        if _TABLE.match(paragraph):
            yield from _symbols(paragraph, width)
        elif heading == "Example":  # code keeps its lines
            yield from (_INDENT + line for line in _lines(paragraph))
        else:
            hang = 4 if paragraph.startswith(_PREFORMATTED) else 0
            for line in _lines(paragraph):
                deep = len(line) - len(line.lstrip())
                yield from _wrap(line, width, hang=hang + deep)


def _symbols(table: str, width: int) -> Iterator[str]:
    rows = rows_of(table)
    column = 2 + max(len(symbol) for symbol, _ in rows)
    for symbol, meaning in rows:
        yield from _wrap(f"{symbol:<{column}}{meaning}", width, hang=column)


def _options_title(about: dict[str, Any]) -> str:
    how = f", as {about['name']}(name=value) or --set name=value"
    return "Options" + how * bool(about["options"])


def _options(options: Sequence[dict[str, Any]], width: int) -> Iterator[str]:
    for option in options:
        kind = f"{option['type']}, default {_value(option['default'])}"
        yield from _wrap(f"{option['name']} ({kind})", width, hang=4)
        yield from _wrap(option["help"], width, 3 * _INDENT)
    if not options:
        yield f"{_INDENT}none"


def _value(value: Any) -> str:
    """A value as the user types it after ``name=``.

    >>> _value(None), _value(True), _value(0.5), _value("keep")
    ('none', 'true', '0.5', 'keep')
    """
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
