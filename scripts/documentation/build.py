"""From the repository to a folder of HTML: stage the pages, build them, check what was built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from documentation.check import problems_of
from documentation.llms import write_llms
from documentation.navigation import (
    CONFIG,
    ROOT,
    navigation,
    navigation_problems,
    pages_in,
    pages_of_docs,
)
from documentation.stage import stage

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What Zensical has pages load for the search without a server; ours is part of the site."""
OWN_SHIM = "assets/search-from-files.js"


def build(out: Path) -> list[str]:
    """Build the site into ``out``; returns what is wrong with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(CONFIG, folder)
        stage(folder / "docs")
        problems = navigation_problems(pages_of_docs(), pages_in(navigation()))
        problems += run_zensical(folder)
        if not problems:
            finish(folder)
            problems = problems_of(folder / "site")
        if not problems:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(folder / "site", out)
    return problems


def run_zensical(folder: Path) -> list[str]:
    """Build what is staged; returns the output, if that failed."""
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout)  # it colors each letter, in pipes as well
    return [f"zensical failed:\n{said}"] if ended.returncode else []


def finish(folder: Path) -> None:
    """Have pages load nothing from elsewhere, and add the files for language models."""
    site = folder / "site"
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(text.replace(SHIM, up + OWN_SHIM), encoding="utf-8")
    write_llms(folder / "docs", site, navigation())
