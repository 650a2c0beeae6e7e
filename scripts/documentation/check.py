"""What is wrong with a built site: links that lead nowhere, and what it would load from others."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

_ELSEWHERE = re.compile(r"(?:https?:)?//")
_LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "use": "href"}
"""The attributes by which an element loads a file."""
_LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload"}
_IN_STYLE = re.compile(r"(?:url\(|@import\s+)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


@dataclass
class Page(HTMLParser):
    """What a page links to, what it loads, and where others can link to in it."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if (target := values.get(_LOADED.get(tag, ""))) is not None:
            self.loads.append(target)
        if tag == "link" and _LOADED_LINKS & {*values.get("rel", "").split()}:
            self.loads.append(values.get("href", ""))

    @classmethod
    def of(cls, path: Path) -> Page:
        """A page from its file."""
        page = cls()
        page.feed(path.read_text(encoding="utf-8"))
        return page


def problems_of(site: Path) -> list[str]:
    """All that is wrong with a site, each as a sentence."""
    pages = {path: Page.of(path) for path in sorted(site.rglob("*.html")) if is_page(path)}
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for target in [*page.links, *page.loads]:
            if problem := _problem(target, path, pages):
                problems.append(f"{name}: {problem}")
        problems += [f"{name} loads {target}" for target in page.loads if _ELSEWHERE.match(target)]
    for style in sorted(site.rglob("*.css")):
        found = _IN_STYLE.findall(style.read_text(encoding="utf-8"))
        problems += [f"{style.relative_to(site)} loads {target}" for target in found]
    return problems


def is_page(path: Path) -> bool:
    """Whether a file is a page of the site, and not a report that is shown as it is."""
    return path.parent.name != "timelines" and path.name != "404.html"


def _problem(target: str, path: Path, pages: dict[Path, Page]) -> str | None:
    """What is wrong with a target within the site, if anything."""
    if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
        return None
    file, _, anchor = unquote(target).partition("#")
    file = file.partition("?")[0]
    there = (path.parent / file).resolve() if file else path.resolve()
    there = there / "index.html" if there.is_dir() else there
    if not there.exists():
        return f"links to {target}, which is not there"
    page = pages.get(there)
    if anchor and page is not None and anchor not in page.anchors:
        return f"links to {target}, which has no such anchor"
    return None
