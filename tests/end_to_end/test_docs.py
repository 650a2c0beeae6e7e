"""The pages are right: their programs run, their files load, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import warm
from support.hermetic import outside

import paceline as pl
from paceline.comm import ports
from paceline.common.faults import KINDS, Fault
from paceline.lab.tasks.recipe import FOLDERS
from paceline.sim.cluster import (
    PRESETS,
    CollectiveCosts,
    Compute,
    Handling,
    Link,
    Loading,
    Serving,
    load_cluster,
)
from paceline.sim.models import MODELS, StandsFor

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 100
INSTALLED = ("paceline doctor", "paceline strategies")


class Block(NamedTuple):
    """A fenced block of a page: its language, the number of its first line, its lines."""

    page: Path
    language: str
    first: int
    lines: list[str]

    def __str__(self) -> str:
        return f"{self.page.name}:{self.first}"


def pages() -> list[Path]:
    """The pages whose blocks are run."""
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [page for page in named if page.exists()] + sorted((ROOT / "docs").glob("*.md"))


def all_pages() -> list[Path]:
    """Every Markdown file of the repository."""
    found = ROOT.rglob("*.md")
    outside = {"runs", "build", "dist", "node_modules"}
    return sorted(
        page
        for page in found
        if not any(p.startswith(".") or p in outside for p in page.relative_to(ROOT).parts)
    )


def blocks_of(page: Path) -> Iterator[Block]:
    block, fence = None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        opening = re.match(r"(`{3,}|~{3,})\s*(\w*)", line)
        if block is None and opening:
            fence, block = opening[1], Block(page, opening[2], number + 1, [])
        elif block is not None and line.rstrip() == fence:
            yield block
            block = None
        elif block is not None:
            block.lines.append(line)
    assert block is None, f"{page.name}:{block.first - 1}: a block that does not end"


def blocks(language: str) -> list[Block]:
    return [b for page in pages() for b in blocks_of(page) if b.language == language]


def commands() -> list[tuple[Block, str]]:
    """The commands of the shell blocks, each in one line."""
    found = []
    for block in blocks("sh"):
        text = "\n".join(block.lines).replace("\\\n", " ")
        found += [(block, line.strip()) for line in text.splitlines() if line.strip()]
    return found


def run(command: list[str], folder: Path) -> None:
    """Run a program that must succeed, with our programs first in the path.

    Some commands run by the programs that are installed, the others by those that start faster.
    """
    installed = any(text.startswith(INSTALLED) for text in command)
    first = Path(sys.executable).parent if installed else warm.programs()
    path = os.pathsep.join([str(first), os.environ.get("PATH", "")])
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


def test_there_are_pages_and_they_hold_programs():
    assert ROOT / "README.md" in pages()
    assert blocks("python") and blocks("toml") and commands()


@pytest.mark.parametrize(
    "page",
    sorted({block.page for block in blocks("python")}),
    ids=lambda page: page.name,
)
def test_the_programs_of_a_page_run(page, tmp_path):
    """All blocks of a page are one script, whose lines have the same numbers as on the page."""
    lines: list[str] = []
    for block in blocks("python"):
        if block.page == page:
            lines += [""] * (block.first - 1 - len(lines)) + block.lines
    script = tmp_path / f"{page.stem.replace('-', '_').lower()}.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run(["python", script.name], tmp_path)


CLUSTER_KEYS = {f.name for f in dataclasses.fields(pl.Cluster)} - {"name", "about"}


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_the_toml_of_a_page_loads(block, tmp_path):
    text = "\n".join(block.lines)
    if CLUSTER_KEYS & set(tomllib.loads(text)):
        path = tmp_path / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        load_cluster(path)


@pytest.fixture
def root(tmp_path):
    """A folder with links to the repository's files, where commands may write."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "runs":
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


RUNNABLE = sorted({line for _, line in commands() if line.startswith(("paceline ", "python "))})


@pytest.mark.parametrize("line", RUNNABLE)
def test_a_command_of_a_page_succeeds(line, root):
    run(["sh", "-c", line], root)


def test_the_architecture_names_files_and_functions_that_are_there():
    """Of ``file``, ``function`` and of paths alone, in the walk and in the table."""
    text, source = (ROOT / "docs" / "architecture.md").read_text(), ROOT / "src" / "paceline"
    paths = re.findall(r"`([a-z_/]+(?:\.py|/))`", text)
    hops = re.findall(r"`([a-z_/]+\.py)`, `(?:\w+\.)?(\w+)`", text)
    assert len(paths) > 20 and len(hops) > 6
    for path in paths:
        assert (source / path).exists() or (ROOT / path).exists(), path
    for path, name in hops:
        assert re.search(rf"^ *(def|class) {name}\b", (source / path).read_text(), re.MULTILINE)


def test_the_scripts_that_pages_call_are_there():
    for block, line in commands():
        word = line.split()[0]
        if word.startswith("scripts/"):
            script = ROOT / word
            assert script.is_file() and os.access(script, os.X_OK), f"{block}: {word}"


def prose_of(page: Path) -> str:
    """A page without its blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^(`{3,}|~{3,}).*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)


def links_of(page: Path) -> Iterator[str]:
    """The targets of a page's links within the repository; code is ignored."""
    text = re.sub(r"`[^`\n]*`", "", prose_of(page))
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    targets += re.findall(r"^\[[^\]]+\]:\s*<?([^\s>]+)", text, flags=re.MULTILINE)
    targets += re.findall(r"\b(?:href|src)=\"([^\"]+)\"", text)
    for target in targets:
        if not re.match(r"[a-z][a-z0-9+.-]*:|//|#", target, flags=re.IGNORECASE):
            yield target.partition("#")[0]


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_not_broken(page):
    for target in links_of(page):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def words_of(page: str) -> set[str]:
    """The names in a page's code, inline and in blocks."""
    path = ROOT / "docs" / page
    code = re.findall(r"`([^`]+)`", prose_of(path))
    code += [line for block in blocks_of(path) for line in block.lines]
    return set(re.findall(r"[\w-]+", " ".join(code)))


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


PORTS = (
    ports.Mail,
    ports.Collectives,
    ports.Members,
    ports.DataQueue,
    ports.Clock,
    ports.Rendezvous,
    ports.Ports,
)


def test_the_contracts_page_names_every_operation():
    fields = {f.name for f in dataclasses.fields(pl.Limits)}
    wanted = public(pl.Comm) | fields | set().union(*map(public, PORTS))
    assert wanted <= words_of("comm-contract.md")


def test_the_simulators_page_names_every_key_preset_and_fault():
    kinds = (
        pl.Cluster,
        Compute,
        Link,
        Loading,
        CollectiveCosts,
        Serving,
        Handling,
        StandsFor,
        Fault,
    )
    wanted = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    assert wanted | set(PRESETS) | set(KINDS) | set(MODELS) <= words_of("simulator.md")


def test_the_tutorial_names_every_method_and_class_attribute():
    wanted = public(pl.Strategy) - {"bind", "state_dict", "load_state_dict"}
    assert wanted <= words_of("writing-a-strategy.md")


@pytest.mark.parametrize("page", ["README.md", "docs/checkpoints.md", "docs/loops.md"])
def test_the_loops_of_the_pages_work_for_a_worker_without_batches(page):
    """One is restarted and one joins late; by then their first epochs are over."""
    source = next(b for b in blocks_of(ROOT / page) if "def train(worker" in "\n".join(b.lines))
    shown: dict[str, object] = {"__name__": page}
    exec("\n".join(source.lines), shown)
    begun = Counter()

    def train(worker: pl.Worker) -> None:
        def watched(*loaders, **how):
            class Loader:
                def __iter__(self):
                    members = worker.comm.members
                    begun[worker.rank, members.incarnation(worker.rank)] += 1
                    for number, batch in enumerate(paced):
                        begun[worker.rank, worker.comm.members.incarnation(worker.rank)] -= (
                            number == 0
                        )
                        yield batch

            paced = share(*loaders, **how)
            return Loader()

        share, worker.setup_dataloaders = worker.setup_dataloaders, watched
        shown["train"](worker)

    faults = [pl.kill(rank=1).at(step=6), pl.join(rank=2).at(seconds=1.0)]
    cluster = pl.Cluster(compute=Compute(step_s=0.1))
    how = {"strategy": "gossip", "faults": faults, "max_restarts": 1, "cluster": cluster}
    result = pl.simulate(train, workers=3, **how)
    assert result.joined_workers == 2
    assert begun[1, 2] > 0 and begun[2, 1] > 0, "each had an epoch without a batch"
