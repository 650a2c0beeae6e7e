"""The page of habits: what it names is there, and what is refused has a reason."""

from __future__ import annotations

import ast
import re

import pytest
from support.pages import DOCS, ROOT

PAGE = DOCS / "habits.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| habit ")
]


def names_of(path):
    """The functions of a file; of the loops that a test is parametrized with, those it has."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    used = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return {name for name in functions if name.startswith("test_") or name in used}


def problem_of(reference):
    path, _, name = reference.partition("::")
    file = ROOT / (path if path.startswith("examples/") else f"tests/{path}")
    if not file.is_file():
        return f"{path} is not there"
    if path.startswith("examples/"):
        return None
    return None if name in names_of(file) else f"{path} has no test {name}"


def test_there_are_rows_of_each_kind():
    assert len(ROWS) > 60
    assert all(len(row) == 4 and all(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_a_row_names_is_there(row):
    references = re.findall(r"`([^`]+)`", row[3])
    assert references
    assert [problem for problem in map(problem_of, references) if problem] == []


def test_a_reference_to_nothing_is_found():
    assert problem_of("training/test_habits.py::closures") is None
    assert problem_of("training/test_habits.py::no_such_loop") is not None
    assert problem_of("training/test_nothing.py::test_it") is not None
    assert problem_of("examples/nothing.py") is not None


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "refused" in row[1]], ids=lambda row: row[0]
)
def test_what_is_refused_has_a_reason(row):
    assert re.search(r"refused[^:;.]*: \w+( \S+){2}", row[1])
