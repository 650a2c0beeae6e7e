"""``paceline strategies``: the methods' docstrings, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest

import paceline as pl
from paceline.cli import main
from paceline.cli.about import IN_JSON, SHOWN, parts_of
from paceline.report.methods import describe
from paceline.strategies import STRATEGIES, strategy_class
from paceline.strategies.about import About

KEYS = {"name", "summary", "paper", "options", "synchronous", "servers"}
TEXTS = {"idea", "equations", "faults", "bytes", "when_to_use", "reference"}
MARKUP = ("``", ".. math::", ":math:", "====", "Args:", "\x1b")


@pytest.fixture
def paceline(monkeypatch, capsys):
    """Run a command in a terminal of some width; returns its lines."""

    def run(*arguments, columns=80):
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        return capsys.readouterr().out.splitlines()

    return run


def headings(lines):
    """The headings after the summary, each up to its first comma."""
    begins = [i + 1 for i, line in enumerate(lines[:-1]) if not line]
    return [lines[i].partition(",")[0] for i in begins if not lines[i].startswith(" ")]


# Every method ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_docstring_has_every_part(name):
    facts, parts = describe(name), parts_of(name)
    assert re.fullmatch(r"[A-Z][\w -]+: .+\.", facts["summary"])
    wanted = {*IN_JSON, "Symbols", "Example", *(["Args"] if facts["options"] else [])}
    assert wanted <= set(parts) <= {"Summary", *SHOWN}
    assert "Notes" not in parts, "a paragraph belongs to no heading"
    assert strategy_class(name).about.reference


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_docstring_has_the_required_facts(name, paceline):
    (facts,) = json.loads(paceline("strategies", name, "--json")[-1])["strategies"]
    assert set(facts) == KEYS | TEXTS
    for key in TEXTS:
        assert facts[key] and not [mark for mark in MARKUP if mark in facts[key]], key
    assert r"\leftarrow" in facts["equations"] or "=" in facts["equations"]
    assert "slow worker" in facts["faults"] and re.search(r"\bdead\b", facts["faults"])
    assert re.search(r"size of|model|gradient", facts["bytes"])
    assert re.search(r"learning rate .*\(factor 1\b", facts["when_to_use"]), "the lr factor"


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_option_has_type_default_and_help(name):
    fields = {field.name: field for field in dataclasses.fields(strategy_class(name))}
    facts = {option["name"]: option for option in describe(name)["options"]}
    assert set(facts) == set(fields)
    for option, about in facts.items():
        assert about["default"] == fields[option].default
        assert about["type"] and about["help"].endswith((".", "..."))
        assert "``" not in about["help"]


# For people --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 44])
@pytest.mark.parametrize("name", STRATEGIES)
def test_an_explanation_fits_the_terminal(name, columns, paceline):
    lines = paceline("strategies", name, columns=columns)
    code = lines[lines.index("Example") + 1 : lines.index("Faults")]
    assert code[0].startswith("  >>> ") and (columns < 80 or max(map(len, code)) <= 80)
    text = [line for line in lines if line not in code]
    assert max(map(len, text)) <= columns
    assert not [mark for mark in MARKUP for line in text if mark in line]
    assert not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_explanation_has_its_parts_in_order(name, paceline):
    wanted = "Idea Symbols Equations Options Example Faults Bytes When to use Reference"
    assert " ".join(headings(paceline("strategies", name))) == wanted


def test_a_part_is_readable(paceline):
    lines = paceline("strategies", "sasgd")
    assert lines[0].startswith("SASGD: local steps") and "every interval steps." in lines[0]
    assert r"  x_i \leftarrow x_i - \gamma g_i \quad (T \text{ times}), \qquad" in lines
    assert "  T        interval" in lines
    assert "  interval (int, default 16)" in lines and "      steps between aggregations." in lines
    assert "  momentum (keep|reset|average, default keep)" in lines
    assert "  global_lr (float or none, default none)" in lines
    assert "the pseudo-gradient x' - x_i stands" in " ".join(map(str.strip, lines))
    assert "  [(0, 0.0), (1, -1.0), (0, -1.0), (1, -1.0)]" in lines
    assert lines[lines.index("Faults") + 1].startswith("  A slow worker slows all")


def test_a_method_without_options_says_so(paceline):
    lines = paceline("strategies", "allreduce")
    assert lines[lines.index("Options") + 1] == "  none"


def test_the_list_shows_names_summaries_and_options(paceline):
    lines = paceline("strategies", "--quiet")
    names = [line.split()[0] for line in lines[:-2] if not line.startswith(" ")]
    assert names == list(STRATEGIES)
    assert max(map(len, lines)) <= 80 and "``" not in "".join(lines)
    assert lines[-1] == "paceline strategies NAME explains one method."
    after = lines[lines.index(next(line for line in lines if line.startswith("hierarchical"))) :]
    together = " ".join(" ".join(after[:3]).split())
    assert together.startswith("hierarchical Hierarchical SASGD: groups average often, all workers")
    assert "options: group_size=4, group_interval=4, interval=16" in together


def test_the_list_fits_a_narrow_terminal(paceline):
    lines = paceline("strategies", columns=36)
    assert max(map(len, lines)) <= 36
    assert [line for line in lines[:-3] if line and line[0] != " "] == list(STRATEGIES)


# For programs ------------------------------------------------------------------------------------


def test_the_list_for_programs_has_every_method(paceline):
    (line,) = paceline("strategies", "--json")
    facts = json.loads(line)["strategies"]
    assert [about["name"] for about in facts] == list(STRATEGIES)
    assert all(set(about) == KEYS for about in facts)
    kinds = {about["name"]: (about["synchronous"], about["servers"]) for about in facts}
    assert kinds["allreduce"] == (True, 0) and kinds["downpour"] == (False, 1)
    option = {"name": "interval", "type": "int", "default": 16}
    assert facts[1]["options"][0] == {**option, "help": "steps between aggregations."}


# Docstrings that have less -----------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Bare(pl.Strategy):
    def step(self, x, g):
        self.local_update(g)


@dataclasses.dataclass(kw_only=True)
class Plain(Bare):
    """Plain: steps.

    .. math:: x = y

    As it was.

    Args:
        wide: how wide.

            Two paragraphs of it.

    Something about it all.

    - one
    - two
    """

    about = About(
        faults="""wide is not changed,
        see step."""
    )

    wide: dict[int, float] = dataclasses.field(default_factory=dict)


@pytest.fixture
def registered(monkeypatch):
    for cls in (Bare, Plain):
        path = f"{__name__}:{cls.__name__}"
        monkeypatch.setitem(STRATEGIES, cls.__name__.lower(), path)


def test_what_a_docstring_does_not_say_is_left_out(registered, paceline):
    (facts,) = json.loads(paceline("strategies", "plain", "--json")[-1])["strategies"]
    assert facts["equations"] == "x = y\n\nAs it was."
    assert facts["faults"] == "wide is not changed, see step."
    assert facts["idea"] == facts["bytes"] == facts["reference"] == ""
    assert facts["options"][0]["default"] == {}
    lines = paceline("strategies", "plain")
    assert headings(lines) == ["Equations", "Options", "Notes", "Faults"]
    assert lines[lines.index("Notes") + 1 :][:4] == [
        "  Something about it all.",
        "",
        "  - one",
        "  - two",
    ]


def test_a_method_without_a_docstring_is_listed(registered, paceline):
    lines = paceline("strategies", "bare")
    assert headings(lines) == ["Options"]
    assert any(line.startswith("bare") for line in paceline("strategies"))
