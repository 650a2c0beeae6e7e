"""The pages of the documentation: their blocks, and how their programs and commands are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.lab.tasks.recipe import FOLDERS
from support import runs, warm
from support.hermetic import outside

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
START, TUTORIAL = DOCS / "start.md", DOCS / "tutorial.md"
ARGUMENTS = DOCS / "how-to" / "arguments.md"
SESSIONS = (START, TUTORIAL, ARGUMENTS)
"""The pages whose files and commands belong together, from the top of the page to its end."""
ADDRESS = "127.0.0.1:7000"
"""The address that they use for runs on many hosts of this machine."""
RUN_LIMIT_S = 100
INSTALLED = ("paceline doctor", "paceline strategies")


class Block(NamedTuple):
    """A fenced block: its page, language and title, the number of its first line, its lines."""

    page: Path
    language: str
    title: str
    first: int
    lines: list[str]

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.first}"

    @property
    def text(self) -> str:
        """The lines, as a file would hold them."""
        return "\n".join(self.lines) + "\n"


def name_of(page: Path) -> str:
    """A page as a test's name has it."""
    return page.relative_to(ROOT).as_posix()


def pages() -> list[Path]:
    """The pages whose blocks are run."""
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [page for page in named if page.exists()] + sorted(DOCS.rglob("*.md"))


def all_pages() -> list[Path]:
    """Every Markdown file of the repository."""
    found = ROOT.rglob("*.md")
    elsewhere = {"runs", "build", "dist", "node_modules", "site"}
    return sorted(
        page
        for page in found
        if not any(p.startswith(".") or p in elsewhere for p in page.relative_to(ROOT).parts)
    )


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    block, fence = None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        opening = re.match(r"(`{3,}|~{3,})\s*(\w*)(?:.*?\btitle=\"([^\"]*)\")?", line)
        if block is None and opening:
            fence = opening[1]
            block = Block(page, opening[2], opening[3] or "", number + 1, [])
        elif block is not None and line.rstrip() == fence:
            yield block
            block = None
        elif block is not None:
            block.lines.append(line)
    assert block is None, f"{page.name}:{block.first - 1}: a block that does not end"


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^(`{3,}|~{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)


def run(command: list[str], folder: Path) -> str:
    """Run a program that must succeed, with our programs first in the path; returns its output.

    Some commands run by the programs that are installed, the others by those that start faster.
    """
    installed = any(text.startswith(INSTALLED) for text in command)
    first = Path(sys.executable).parent if installed else warm.programs()
    path = os.pathsep.join([str(first), str(Path(sys.executable).parent), os.environ["PATH"]])
    roots = os.environ[outside.ROOTS]
    if "paceline doctor" in command:  # it looks for data
        roots = os.pathsep.join([roots, FOLDERS[0]])
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, outside.ROOTS: roots},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"exit code {ended.returncode}\n{ended.stdout}"
    return ended.stdout


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?: (?:us|ms|s|B|KB|MB|GB)\b)?")


def without_numbers(line: str) -> str:
    """A line of output without what differs from run to run, on one machine and on others."""
    return " ".join(NUMBER.sub("#", line).split())


def assert_shown(expected: Block, printed: str) -> None:
    """The lines that the page shows must be in the output, in this order, but for their numbers."""
    lines: Iterator[str] = iter([without_numbers(line) for line in printed.splitlines()])
    for line in expected.lines:
        wanted = without_numbers(line)
        assert wanted in lines, f"{expected} shows {line!r}, and this was printed:\n{printed}"


def walk(page: Path, folder: Path) -> None:
    """Do what a reader of a session does in ``folder``; what is shown must be what is printed."""
    address, printed, last = f"127.0.0.1:{runs.free_port()}", "", ""
    for block in blocks_of(page):
        if block.title and block.language == "python":
            (folder / block.title).write_text(block.text)
        elif block.language == "sh" and block.title != "install":
            printed = run(["sh", "-e", "-c", block.text.replace(ADDRESS, address)], folder)
        elif block.language == "text" and last == "sh":
            assert_shown(block, printed)
        last = block.language
