"""From the repository to a folder of HTML: stage the pages, build them, check what was built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from documentation.check import problems_of
from documentation.llms import write_llms
from documentation.stage import ROOT, stage

CONFIG = ROOT / "zensical.toml"
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What Zensical has pages load for the search without a server; ours is part of the site."""
OWN_SHIM = "assets/search-from-files.js"


def build(out: Path) -> list[str]:
    """Build the site into ``out``; returns what is wrong with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(CONFIG, folder)
        stage(folder / "docs")
        problems = navigation_problems(folder / "docs")
        problems += run_zensical(folder)
        if not problems:
            finish(folder)
            problems = problems_of(folder / "site")
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(folder / "site", out)
    return problems


def run_zensical(folder: Path) -> list[str]:
    """Build what is staged; returns the output, if that failed."""
    ended = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return [f"zensical failed:\n{ended.stdout}"] if ended.returncode else []


def finish(folder: Path) -> None:
    """Have pages load nothing from elsewhere, and add the files for language models."""
    site = folder / "site"
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(text.replace(SHIM, up + OWN_SHIM), encoding="utf-8")
    write_llms(folder / "docs", site, navigation())


def navigation(config: Path = CONFIG) -> list[Any]:
    """The navigation: pages and groups of them, each a name and what it stands for."""
    nav: list[Any] = tomllib.loads(config.read_text(encoding="utf-8"))["project"]["nav"]
    return nav


def pages_in(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [page for part in below for page in pages_in(part)]


def navigation_problems(docs: Path) -> list[str]:
    """What is wrong with the navigation: each page must be in it, once."""
    named = pages_in(navigation())
    there = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    problems = [f"{page} is not in the navigation" for page in sorted(there - {*named})]
    problems += [f"the navigation names {page}, which is not there" for page in {*named} - there]
    problems += [f"the navigation names {page} twice" for page in {*named} if named.count(page) > 1]
    return problems
