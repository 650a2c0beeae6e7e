"""``llms.txt`` and ``llms-full.txt``: the site for language models, after llmstxt.org."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

from documentation.docstrings import Docstrings

_HEAD = """# Paceline

> {about}

Each link leads to a page in Markdown; the page for people has the ending .html in place of .md.
All pages in one file: [llms-full.txt](llms-full.txt)
"""
_DIRECTIVE = re.compile(r"^::: ([\w.]+)\n(?: {4}.*\n)*", re.MULTILINE)


def write_llms(docs: Path, site: Path, navigation: list[Any]) -> None:
    """Write both files, and beside each page of HTML its text in Markdown."""
    package = griffe.load("paceline", extensions=griffe.Extensions(Docstrings()))
    texts = {}
    for page in sorted(docs.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        text = _DIRECTIVE.sub(lambda found: described(package, found[1]), text)
        texts[page.relative_to(docs).as_posix()] = text
        (site / page.relative_to(docs)).write_text(text, encoding="utf-8")
    lines = [*_entries(texts, navigation)]
    head = _HEAD.format(about=sentence_of(texts["index.md"]))
    (site / "llms.txt").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    names = re.findall(r"\]\((\S+\.md)\)", "\n".join(lines))
    whole = "\n\n".join(f"<!-- {name} -->\n\n{texts[name]}" for name in names)
    (site / "llms-full.txt").write_text(whole, encoding="utf-8")


def described(package: Any, name: str) -> str:
    """The signature and the docstring of an object, and of its public members."""
    thing = package[name.removeprefix("paceline.")]
    thing = thing.final_target if thing.is_alias else thing
    parts = [_entry("## ", thing)]
    if thing.is_class:
        own = [member for member in thing.members.values() if not member.is_alias]
        public = [member for member in own if member.is_public and member.docstring]
        parts += [_entry("### ", member) for member in public]
    return "\n".join(parts)


def _entry(marks: str, thing: Any) -> str:
    parameters = [each for each in getattr(thing, "parameters", []) if each.name != "self"]
    takes = [each.name if each.required else f"{each.name}={each.default}" for each in parameters]
    call = f"({', '.join(takes)})" if thing.is_function else ""
    text = thing.docstring.value if thing.docstring else ""
    return f"{marks}`{thing.name}{call}`\n\n{text}\n"


def _entries(texts: dict[str, str], navigation: list[Any]) -> Iterator[str]:
    """The lines of a navigation: a heading for each group, a line for each page."""
    for part in navigation:
        ((name, below),) = part.items()
        yield f"\n## {name}\n"
        yield from _lines(texts, below)


def _lines(texts: dict[str, str], part: Any) -> Iterator[str]:
    if isinstance(part, str):
        title = texts[part].partition("\n")[0].removeprefix("# ")
        yield f"- [{title}]({part}): {sentence_of(texts[part])}"
        return
    for below in part.values() if isinstance(part, dict) else part:
        yield from _lines(texts, below)


def sentence_of(text: str) -> str:
    """The first sentence below a page's title, without links and markup."""
    for paragraph in re.split(r"\n\s*\n", text)[1:]:
        if re.match(r"\w|\[|`(?!``)", paragraph):
            line = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.?!]) +(?=[A-Z`])", line)[0]
    return ""
