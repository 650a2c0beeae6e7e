"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from paceline.cli.app import app

_ON_EACH = "--help"


def command_reference() -> str:
    """All commands: what each does, its arguments and its options."""
    return "\n".join(_lines(typer.main.get_command(app), "paceline", None))


def _lines(command: Any, name: str, parent: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name.split()[-1], parent=parent)
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    if parent is not None:
        yield from (f"## {name}", "", _text(command.help), "")
        yield from ("```text", command.get_usage(context).removeprefix("Usage: "), "```", "")
    if not names:
        yield from _options(command.get_params(context), context)
    for each in names:
        yield from _lines(command.get_command(context, each), f"{name} {each}", context)


def _options(parameters: list[Any], context: Any) -> Iterator[str]:
    records = [parameter.get_help_record(context) for parameter in parameters]
    shown = [record for record in records if record and _ON_EACH not in record[0]]
    for name, text in shown:
        yield f"- `{name}`: {_text(text)}" if text else f"- `{name}`"
    yield ""


def _text(text: str | None) -> str:
    """A text in one line, without what Markdown would take for markup."""
    line = " ".join((text or "").split())
    for mark in "<>[]*_":
        line = line.replace(mark, f"\\{mark}")
    return line
