"""The pages of the site as Markdown: those of ``docs/``, with what is generated filled in."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from documentation.commands import command_reference
from documentation.examples import EXAMPLES, example_anchor, example_sources
from documentation.methods import method_reference
from documentation.navigation import BESIDE_DOCS, ROOT, name_on_site

_MARKER = re.compile(r"^<!-- (\w+)(?:: (.*?))? -->$", re.MULTILINE)
_FENCE = re.compile(r"^(`{3,}|~{3,})")
_LINK = re.compile(r"(`+[^`]*`+)|(\]\(\s*)([^)\s]+)(\s*(?:\"[^\"]*\"\s*)?\))")


def stage(folder: Path) -> None:
    """Write all pages, and the files that they show, into ``folder``."""
    shutil.copytree(ROOT / "docs", folder)
    for page in [*folder.rglob("*.md")]:
        where = page.relative_to(folder)
        _write(ROOT / "docs" / where, folder, PurePosixPath(where.as_posix()))
        if page.name == "README.md":
            page.unlink()
    for name, page_name in BESIDE_DOCS.items():
        _write(ROOT / name, folder, PurePosixPath(page_name))


def _write(source: Path, folder: Path, where: PurePosixPath) -> None:
    """Write one page, filled in, with links that fit the site."""
    where = name_on_site(where)
    text = filled(source.read_text(encoding="utf-8"))
    text = with_links(text, lambda target: retargeted(target, source, where))
    (folder / where).write_text(text, encoding="utf-8")


def filled(text: str) -> str:
    """A page with the generated parts in place of the comments that ask for them."""
    makers: dict[str, Callable[[str], str]] = {
        "api": api_directive,
        "commands": lambda _: command_reference(),
        "method": method_reference,
        "sources": example_sources,
    }

    def fill(match: re.Match[str]) -> str:
        make = makers.get(match[1])
        return match[0] if make is None else make(match[2] or "")

    return _MARKER.sub(fill, text)


def api_directive(name: str) -> str:
    """What mkdocstrings reads: an object, below a heading with the name that users write."""
    short = name.removeprefix("paceline.")
    heading = short.rpartition(".")[2] if "." in short else f"pl.{short}"
    options = f"      heading: {heading}\n      toc_label: {heading}"
    return f"::: {name}\n    options:\n{options}"


def with_links(text: str, retarget: Callable[[str], str]) -> str:
    """A page whose links are ``retarget``ed; code is left as it is."""

    def replace(match: re.Match[str]) -> str:
        code, before, target, after = match.groups()
        return code or f"{before}{retarget(target)}{after}"

    lines, fence = [], ""
    for line in text.splitlines():
        opening = _FENCE.match(line)
        if opening and (not fence or line.rstrip() == fence):
            fence = "" if fence else opening[1]
        lines.append(line if fence or opening else _LINK.sub(replace, line))
    return "\n".join(lines) + "\n"


def retargeted(target: str, source: Path, where: PurePosixPath) -> str:
    """The target on the site of a link that the page ``source`` has; ``where`` is its new place."""
    if re.match(r"[a-z][a-z0-9+.-]*:|#", target):
        return target
    path, _, anchor = target.partition("#")
    absolute = Path(os.path.normpath(source.parent / path))
    page, own_anchor = place_of(absolute.relative_to(ROOT).as_posix())
    if page is None:
        raise SystemExit(f"{source.relative_to(ROOT)} links to {target}, which the site lacks")
    relative = os.path.relpath(page, where.parent)
    anchor = anchor or own_anchor
    return f"{relative}#{anchor}" if anchor else relative


def place_of(path: str) -> tuple[str | None, str]:
    """Where the site has a file of the repository: its page, and an anchor there."""
    if path in BESIDE_DOCS:
        return BESIDE_DOCS[path], ""
    if path == EXAMPLES or path.startswith(f"{EXAMPLES}/"):
        return "examples.md", example_anchor(path)
    if path in ("README.md", "docs", "docs/README.md"):
        return "index.md", ""
    if path.startswith("docs/") and (ROOT / path).is_file():
        return str(name_on_site(PurePosixPath(path.removeprefix("docs/")))), ""
    return None, ""
