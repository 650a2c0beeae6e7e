"""A page that a reader types from top to bottom: what it shows is what happens.

The tutorial takes longer; ``tests/integrations`` runs it.
"""

from __future__ import annotations

import pytest
from support.pages import START, assert_shown, blocks_of, walk


def test_the_first_five_minutes_work_from_the_first_line_to_the_last(tmp_path):
    walk(START, tmp_path)


def test_output_that_is_no_longer_that_of_the_page_is_noticed():
    shown = next(block for block in blocks_of(START) if block.language == "text")
    assert_shown(shown, shown.text)
    with pytest.raises(AssertionError, match="shows"):
        assert_shown(shown, shown.text.replace("accuracy", "precision"))
