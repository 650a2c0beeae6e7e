"""``llms.txt`` and ``llms-full.txt``: the site for language models, after llmstxt.org."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEAD = """# Paceline

> {about}

Each link leads to a page in Markdown; the page for people has the ending .html in place of .md.
"""


def write_llms(docs: Path, site: Path, navigation: list[Any]) -> None:
    """Write both files, and beside each page of HTML the Markdown that it was made from."""
    pages = [*_entries(docs, navigation)]
    for page in docs.rglob("*.md"):
        shutil.copy(page, site / page.relative_to(docs))
    about = paragraph_of((docs / "index.md").read_text(encoding="utf-8"))
    (site / "llms.txt").write_text(_HEAD.format(about=about) + "\n".join(pages) + "\n")
    names = re.findall(r"\]\((\S+\.md)\)", "\n".join(pages))
    texts = [f"<!-- {name} -->\n\n{(docs / name).read_text(encoding='utf-8')}" for name in names]
    (site / "llms-full.txt").write_text("\n\n".join(texts))


def _entries(docs: Path, navigation: list[Any]) -> Iterator[str]:
    """The lines of a navigation: a heading for each group, a line for each page."""
    for part in navigation:
        ((name, below),) = part.items()
        yield f"\n## {name}\n"
        yield from _lines(docs, [below] if isinstance(below, str) else below)


def _lines(docs: Path, parts: list[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, dict):
            ((_, part),) = part.items()
        if isinstance(part, list):
            yield from _lines(docs, part)
            continue
        text = (docs / part).read_text(encoding="utf-8")
        yield f"- [{title_of(text)}]({part}): {paragraph_of(text)}"


def title_of(text: str) -> str:
    """The title of a page."""
    return text.partition("\n")[0].removeprefix("# ")


def paragraph_of(text: str) -> str:
    """The first sentence below a page's title, without links and markup."""
    for paragraph in re.split(r"\n\s*\n", text)[1:]:
        if re.match(r"\w|\[|`", paragraph) and not paragraph.startswith("```"):
            line = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", line.replace("`", ""))[0]
    return ""
