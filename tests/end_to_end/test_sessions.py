"""A page that a reader types from top to bottom: what it shows is what happens.

The tutorial takes longer; ``tests/integrations`` runs it.
"""

from __future__ import annotations

import pytest
from support.pages import ARGUMENTS, START, assert_shown, blocks_of, walk


@pytest.mark.parametrize("page", [START, ARGUMENTS], ids=lambda page: page.stem)
def test_a_page_works_from_its_first_line_to_its_last(page, tmp_path):
    walk(page, tmp_path)


def test_output_that_is_no_longer_that_of_the_page_is_noticed():
    shown = next(block for block in blocks_of(START) if block.language == "text")
    assert_shown(shown, shown.text)
    with pytest.raises(AssertionError, match="shows"):
        assert_shown(shown, shown.text.replace("accuracy", "precision"))
