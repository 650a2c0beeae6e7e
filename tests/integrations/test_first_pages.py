"""The first pages, as a reader does what they say: install, five minutes, the tutorial."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.hermetic import outside
from support.pages import DOCS, ROOT, TUTORIAL, assert_shown, blocks_of, walk

pytestmark = pytest.mark.timeout(600)
MAKE = "python -m venv .venv"


@pytest.fixture
def clone(tmp_path):
    """The files of the repository, in a folder of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def environment() -> dict[str, str]:
    """That of a terminal: Python is that of the system, and pip may read what its settings name."""
    path = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), os.environ["PATH"]])
    everywhere = os.pathsep.join(map(str, Path("/").iterdir()))
    return {**os.environ, "PATH": path, outside.ROOTS: everywhere}


def with_dependencies(commands: str) -> str:
    """The commands; the new environment finds torch and all else where this one has it."""
    assert MAKE in commands
    there = sysconfig.get_paths()["purelib"]
    link = f"for lib in .venv/lib/python3.*; do echo {there} > $lib/site-packages/there.pth; done"
    return commands.replace(MAKE, f"{MAKE}\n{link}")


@pytest.mark.parametrize("page", ["install.md", "start.md"])
def test_a_page_works_from_nothing(page, clone):
    blocks = [*blocks_of(DOCS / page)]
    for block in blocks:
        if block.language == "python":
            (clone / block.title).write_text(block.text)
    commands = "".join(block.text for block in blocks if block.language == "sh")
    ended = subprocess.run(
        ["sh", "-e", "-c", with_dependencies(commands)],
        cwd=clone,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    for block in blocks:
        if block.language == "text":
            assert_shown(block, ended.stdout)


def test_the_tutorial_works_from_its_first_line_to_its_last(tmp_path):
    walk(TUTORIAL, tmp_path)
