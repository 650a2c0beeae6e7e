"""The wheel and the source distribution: what is in them, and that what they install runs."""

from __future__ import annotations

import email
import json
import os
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from support import runs
from support.distribution import build, python
from support.worlds import on_shared_memory
from trove_classifiers import classifiers

import paceline as pl

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = (
    "py.typed",
    "lab/tasks/fashion_mnist.npz",
    "lab/tasks/learning_rates.json",
    "lab/papers/learning_rates.json",
    "lab/drill/cases/01-kill.toml",
    "report/page.html",
    "watch/static/page.css",
    "watch/static/page.html",
    "watch/static/page.js",
)
"""What is no module, and without which a command fails."""
MOST_BYTES = 4_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with what the wheel installs, and nothing else of this clone."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


# What is in them ---------------------------------------------------------------------------------


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    source = ROOT / "src"
    here = [path for path in (source / "paceline").rglob("*") if path.is_file()]
    modules = {str(path.relative_to(source)) for path in here if "__pycache__" not in path.parts}
    about = f"paceline-{pl.__version__}.dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt")
    names += tuple(f"licenses/{name}" for name in PROJECT["license-files"])
    with zipfile.ZipFile(wheel) as content:
        assert set(content.namelist()) == modules | {f"{about}/{name}" for name in names}
    assert wheel.name == f"paceline-{pl.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("name", NEEDED)
def test_the_wheel_has_the_files_that_are_no_modules(name, installed):
    there = installed / "paceline" / name
    assert there.read_bytes() == (ROOT / "src" / "paceline" / name).read_bytes()


def test_every_file_that_is_no_module_is_known_here():
    """A new kind of file needs a line above."""
    kinds = {(str(Path(name).parent), Path(name).suffix) for name in NEEDED}
    package = ROOT / "src" / "paceline"
    for path in package.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert (str(path.relative_to(package).parent), path.suffix) in kinds, path


def test_the_source_distribution_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as content:
        content.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    assert build(tree, tmp_path / "again", "wheel").read_bytes() == wheel.read_bytes()
    for name in ("README.md", "CHANGELOG.md", "tests/conftest.py", "docs/start.md"):
        assert (tree / name).is_file(), name
    assert os.access(tree / "scripts" / "test", os.X_OK)
    assert not list(tree.rglob("__pycache__")) and not (tree / "runs").exists()


# What they say of themselves ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def metadata(installed):
    (path,) = installed.glob("*.dist-info/METADATA")
    return email.message_from_string(path.read_text(encoding="utf-8"))


def test_the_metadata_is_what_an_index_wants(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("paceline", pl.__version__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", pl.__version__)
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert metadata.get_all("License-File") == PROJECT["license-files"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert len(metadata["Summary"]) < 100 and metadata["Keywords"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_the_classifiers_exist_and_name_the_supported_pythons(metadata):
    named = metadata.get_all("Classifier")
    assert set(named) <= classifiers
    found = {each.rpartition(" ")[2] for each in named if re.search(r":: 3\.\d+$", each)}
    assert found == set(re.findall(r"3\.1\d", (ROOT / "scripts" / "setup").read_text()))


def test_a_plain_installation_needs_what_is_imported_without_an_extra(metadata):
    plain = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert sorted(re.match(r"\w+", each)[0] for each in plain) == [
        "numpy",
        "rich",
        "safetensors",
        "torch",
        "typer",
    ]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])


def test_pages_name_extras_that_exist():
    named = set()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]:
        for extras in re.findall(r"paceline\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            named |= set(extras.split(","))
    assert {"hosts", "ray"} < named <= set(PROJECT["optional-dependencies"])


def test_the_changes_are_listed_for_a_version_to_come():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[0] == "Unreleased" or headings[0].startswith(f"{pl.__version__} - ")


# What they install -------------------------------------------------------------------------------


@on_shared_memory
def test_what_the_wheel_installs_runs_in_an_empty_folder(installed, tmp_path):
    """Its programs, its data, and the files of its report and its page."""
    path = os.pathsep.join([str(installed), runs.environment()["PYTHONPATH"]])

    def command(*arguments):
        return python(tmp_path, "-m", "paceline", *arguments, PYTHONPATH=path)

    where = "import paceline, paceline.watch; print(paceline.__file__)"
    assert Path(python(tmp_path, "-c", where, PYTHONPATH=path).strip()).is_relative_to(installed)
    line = ["-s", "gossip", "-w", 2, "--model", "mlp", "--epochs", 1, "--json"]
    for world in ("run", "sim"):
        result = json.loads(command(world, *line, "--out", world).splitlines()[-1])
        assert result["samples"] == 4000 and result["accuracy"] > 0.5
    assert "Report: " in command("report", "run", "sim")
    assert "paceline" in command("--version") and "allreduce" in command("strategies")
    command("watch", "run", "--json")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "sim"]
