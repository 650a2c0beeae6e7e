"""``paceline demo``: what a user sees who has just installed the package."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from support.worlds import on_shared_memory

from paceline.cli import demo

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def short(monkeypatch, warm_pool):
    """The demonstration with shorter runs of a smaller network."""
    parts = [dataclasses.replace(part, epochs=1) for part in demo.PARTS]
    monkeypatch.setattr(demo, "PARTS", parts)
    comparison = demo.Part.comparison

    def smaller(part, out):
        made = comparison(part, out)
        made.task.arguments["model"] = "mlp"
        return made

    monkeypatch.setattr(demo.Part, "comparison", smaller)


@on_shared_memory
@pytest.mark.parametrize("terminal", [True, False])
def test_it_compares_methods_in_80_columns_and_twice_at_once(
    terminal, short, paceline, monkeypatch, tmp_path
):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")
    lines = [re.sub(r"\x1b\[[\d;?]*\w", "", line) for line in paceline("demo").out.splitlines()]
    if terminal:
        assert max(map(len, lines)) <= 80
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    methods = [line.split()[0] for line in lines if re.match(r" *\w+ +[28] ", line)]
    assert methods == ["allreduce", "sasgd", "gossip", "allreduce", "sasgd", "gossip", "easgd"]
    for report in ("real", "wan"):
        assert f"Report: runs/demo/{report}/report.html" in lines
    assert "\n".join(lines).endswith(demo.NEXT)
    again = json.loads(paceline("demo", "--json").out.splitlines()[-1])
    assert [len(again[part]["rows"]) for part in ("real", "wan")] == [3, 4]


def test_it_makes_the_runs_that_the_front_page_shows():
    page = README.read_text()
    assert demo.NEXT.strip() in page
    shown = re.findall(r"^ +(\w+) +8 +\d\.\d+ ", page, re.MULTILINE)
    assert ",".join(shown) == demo.PARTS[1].strategies
