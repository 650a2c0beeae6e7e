"""Tables that fit the terminal: wide, compact, brief, or one list per row."""

from __future__ import annotations

import pytest
from rich.console import Console

from paceline.cli.screen import Screen

COLUMNS = ["method", "time to 0.8", "sent"]
ROWS = [["allreduce", "211.0 ms (210.6 ms to 211.4 ms)", "9.0 MB"]]
BRIEF = [["allreduce", "211.0 ms", "9.0 MB"]]


@pytest.fixture
def lines(monkeypatch, capsys):
    """The lines of a table in a terminal of some width."""

    def show(width, rows=ROWS, brief=None):
        console = Console(width=width, highlight=False)
        monkeypatch.setattr(Screen, "console", property(lambda screen: console))
        Screen(as_json=False).table(COLUMNS, rows, brief)
        return [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]

    return show


def test_a_table_that_fits_has_headings_of_one_line(lines):
    heading, rule, row = lines(80)
    assert heading.split("  ")[0] == "method" and "time to 0.8" in heading
    assert set(rule) == {"─"} and row.endswith("9.0 MB")


def test_a_table_that_is_too_wide_breaks_its_headings(lines):
    first, second, _, row = lines(27, BRIEF)
    assert first == "time to" and second.split() == ["method", "0.8", "sent"]
    assert row.split() == ["allreduce", "211.0", "ms", "9.0", "MB"]


def test_a_table_that_is_still_too_wide_shows_its_brief_rows(lines):
    assert not any("(" in line for line in lines(30, brief=BRIEF))
    assert lines(30, brief=BRIEF) == lines(30, BRIEF)


@pytest.mark.parametrize("brief", [None, BRIEF])
def test_a_table_that_never_fits_is_a_list_for_each_row(lines, brief):
    name, time, sent = lines(20, brief=brief)
    assert name == "allreduce"
    assert time.split(maxsplit=3)[3] == ROWS[0][1] and sent.split() == ["sent", "9.0", "MB"]


def test_a_table_without_rows_is_shown(lines):
    assert lines(80, [])[0].startswith("method")
