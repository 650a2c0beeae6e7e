"""The navigation of the site, as zensical.toml has it: each page must be in it, once."""

from __future__ import annotations

import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "zensical.toml"
BESIDE_DOCS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""The pages outside of ``docs/`` that the site has as well, with their names there."""


def navigation() -> list[Any]:
    """Pages, and groups of them: each a name, and what it stands for."""
    nav: list[Any] = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]["nav"]
    return nav


def pages_in(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [page for part in below for page in pages_in(part)]


def name_on_site(page: PurePosixPath) -> PurePosixPath:
    """What the site calls a page of ``docs/``."""
    return page.with_name("index.md") if page.name == "README.md" else page


def pages_of_docs() -> set[str]:
    """The pages that the site must have, by the names that it gives to them."""
    docs = ROOT / "docs"
    found = [PurePosixPath(page.relative_to(docs).as_posix()) for page in docs.rglob("*.md")]
    return {str(name_on_site(page)) for page in found} | {*BESIDE_DOCS.values()}


def navigation_problems(there: set[str], named: list[str]) -> list[str]:
    """What is wrong with a navigation that names these pages, where those are there."""
    problems = [f"{page} is not in the navigation" for page in sorted(there - {*named})]
    problems += [f"the navigation names {page}, which is not there" for page in {*named} - there]
    problems += [f"the navigation names {page} twice" for page in {*named} if named.count(page) > 1]
    return problems
