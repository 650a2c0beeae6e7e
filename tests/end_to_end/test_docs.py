"""The pages are right: their programs run, their files load, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from documentation.navigation import (
    navigation,
    navigation_problems,
    pages_in,
    pages_of_docs,
)
from support.pages import (
    DOCS,
    ROOT,
    SESSIONS,
    Block,
    all_pages,
    blocks_of,
    name_of,
    pages,
    prose_of,
    run,
)

import paceline as pl
from paceline.cli.app import app
from paceline.comm import ports
from paceline.common.faults import KINDS, Fault
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
from paceline.strategies import STRATEGIES


def blocks(language: str) -> list[Block]:
    """The blocks of all pages but the sessions, which test_sessions.py runs."""
    found = [b for page in pages() if page not in SESSIONS for b in blocks_of(page)]
    return [block for block in found if block.language == language]


def commands() -> list[tuple[Block, str]]:
    """The commands of the shell blocks, each in one line; not those that install Paceline."""
    found = []
    for block in blocks("sh"):
        text = "\n".join(block.lines).replace("\\\n", " ")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        found += [(block, line) for line in lines if block.title != "install"]
    return found


def test_there_are_pages_and_they_hold_programs():
    assert ROOT / "README.md" in pages()
    assert blocks("python") and blocks("toml") and commands()


@pytest.mark.parametrize(
    "page",
    sorted({block.page for block in blocks("python")}),
    ids=name_of,
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
    text, source = (DOCS / "architecture.md").read_text(), ROOT / "src" / "paceline"
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


def links_in(text: str) -> Iterator[str]:
    """The targets of a text's links within the repository, without anchors; code is ignored."""
    yield from (target.partition("#")[0] for target in targets_in(text) if target[0] != "#")


def targets_in(text: str) -> Iterator[str]:
    """The targets of a text's links within the repository."""
    text = re.sub(r"`[^`\n]*`", "", text)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text)
    targets += re.findall(r"^\[[^\]]+\]:\s*<?([^\s>]+)", text, flags=re.MULTILINE)
    targets += re.findall(r"\b(?:href|src)=\"([^\"]+)\"", text)
    yield from (t for t in targets if not re.match(r"[a-z][a-z0-9+.-]*:|//", t, re.IGNORECASE))


def anchors_of(page: Path) -> set[str]:
    """The anchors that a code host gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.+)$", prose_of(page), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower()).replace(
            " ", "-"
        )
        for text in headings
    }


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_links_are_not_broken(page):
    for target in targets_in(prose_of(page)):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor and there.suffix == ".md":
            made = "examples.md" in path or anchor.startswith("paceline.")  # on the site alone
            assert made or anchor in anchors_of(there), f"{page.name} links to {target}"


def test_every_page_is_in_the_navigation_of_the_site():
    named = pages_in(navigation())
    assert navigation_problems(pages_of_docs(), named) == []
    assert navigation_problems(pages_of_docs() | {"stray.md"}, named) == [
        "stray.md is not in the navigation"
    ]
    assert navigation_problems(pages_of_docs() - {"gpu.md"}, [*named, "faults.md"]) == [
        "the navigation names gpu.md, which is not there",
        "the navigation names faults.md twice",
    ]


def words_of(page: str) -> set[str]:
    """The names in a page's code, inline and in blocks."""
    path = DOCS / page
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


@pytest.mark.parametrize(
    "page", ["README.md", "docs/how-to/resume.md", "docs/how-to/evaluation.md"]
)
def test_the_loops_of_the_pages_work_for_a_worker_without_batches(page):
    """One is restarted and one joins late; by then their first epochs are over."""
    programs = (b for b in blocks_of(ROOT / page) if b.language == "python")
    source = next(b for b in programs if "def train(worker" in b.text)
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


# Choosing a method -------------------------------------------------------------------------------

FIGURE = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def paragraphs_with_figures() -> Iterator[tuple[str, set[Path]]]:
    """Those of the decision page and of the pages on other libraries, with their sources."""
    for page in [DOCS / "choose.md", *sorted((DOCS / "coming-from").glob("*.md"))]:
        for paragraph in re.split(r"\n\s*\n|\n(?=- )", prose_of(page)):
            if paragraph.startswith("**Figures.**") or "slow-network.md" in paragraph:
                yield paragraph, {page.parent / target for target in links_in(paragraph)}


def test_every_figure_is_on_a_page_that_is_named_as_its_source():
    """As words: a number that is a part of another one does not count."""
    found = [*paragraphs_with_figures()]
    assert len(found) >= 11
    for paragraph, sources in found:
        numbers = {*FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", paragraph))}
        words = {*FIGURE.findall("\n".join(source.read_text() for source in sources))}
        assert sources and numbers <= words, f"{ {*numbers - words} } of: {paragraph}"


def shown_commands() -> list[tuple[Block, str]]:
    """The commands in blocks that are not run here; what follows two spaces explains them."""
    found = [*blocks("text"), *(b for page in SESSIONS for b in blocks_of(page))]
    return [
        (block, re.split(r" {2,}| &$| \|\| ", line.strip())[0])
        for block in found
        for line in block.lines
        if line.strip().startswith("paceline ")
    ]


def test_commands_that_are_only_shown_have_the_options_that_they_use():
    whole = typer.main.get_command(app)
    assert len(shown_commands()) > 20
    for block, line in shown_commands():
        name, *arguments = shlex.split(line.partition(" -- ")[0])[1:]
        command = whole.get_command(None, name)
        assert command is not None, f"{block}: {line}"
        try:
            command.make_context(name, arguments)
        except Exception as error:  # typer's own, which come from no public module
            raise AssertionError(f"{block}: {line}: {error}") from None


def test_the_reference_has_every_method_command_and_public_name():
    methods = (DOCS / "reference" / "methods.md").read_text()
    assert {*re.findall(r"<!-- method: (\S+) -->", methods)} == {*STRATEGIES}
    commands = (DOCS / "reference" / "command-line.md").read_text()
    listed = typer.main.get_command(app).list_commands(None)
    assert {*re.findall(r"^\| `([a-z]+)` \|", commands, re.M)} == {*listed}
    api = "".join(page.read_text() for page in (DOCS / "reference" / "api").glob("*.md"))
    named = {*re.findall(r"<!-- api: paceline\.(\w+) -->", api)}
    assert named == {*pl.__all__} - {"__version__"}
    table = (DOCS / "reference" / "api" / "README.md").read_text()
    assert named <= {*re.findall(r"`pl\.(\w+)`", table)}
