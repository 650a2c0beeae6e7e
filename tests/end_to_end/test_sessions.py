"""The pages that a reader types from top to bottom: what they show is what happens."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support import runs
from support.pages import SESSIONS, Block, blocks_of, name_of, run

ADDRESS = "127.0.0.1:7000"
"""The address that pages use for runs on many hosts of this machine."""
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


@pytest.mark.parametrize("page", SESSIONS, ids=name_of)
def test_a_session_works_from_its_first_line_to_its_last(page, tmp_path):
    address, printed, last = f"127.0.0.1:{runs.free_port()}", "", ""
    for block in blocks_of(page):
        if block.title and block.language == "python":
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "sh" and block.title != "install":
            printed = run(["sh", "-e", "-c", block.text.replace(ADDRESS, address)], tmp_path)
        elif block.language == "text" and last == "sh":
            assert_shown(block, printed)
        last = block.language


def test_a_session_whose_output_has_changed_is_noticed():
    page = SESSIONS[0]
    shown = next(block for block in blocks_of(page) if block.language == "text")
    printed = shown.text.replace("accuracy", "precision")
    assert_shown(shown, shown.text)
    with pytest.raises(AssertionError, match="shows"):
        assert_shown(shown, printed)
