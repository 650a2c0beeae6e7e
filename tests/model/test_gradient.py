"""The gradient of a step, as a value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from paceline.errors import UsageError
from paceline.model.gradient import Gradient

WHOLE = Gradient(gathered=torch.ones(3), present=(True, True), samples=4)


@pytest.mark.parametrize(
    ("g", "usable", "weight", "ordinary"),
    [
        (WHOLE, True, 4, True),
        (replace(WHOLE, overflow=True), False, 4, False),
        (replace(WHOLE, dropped=True), False, 0, False),
        (replace(WHOLE, present=(True, False)), True, 4, False),
        (Gradient.nothing(torch.ones(3), 2), True, 0, True),
        (Gradient(), True, 1, True),
    ],
    ids=["whole", "overflow", "dropped", "incomplete", "nothing", "not gathered"],
)
def test_what_a_gradient_counts_for(g, usable, weight, ordinary):
    assert (g.usable, g.weight, g.ordinary) == (usable, weight, ordinary)


def test_nobody_changes_a_gradient():
    with pytest.raises(FrozenInstanceError):
        WHOLE.dropped = True


def test_a_vector_that_was_not_gathered_cannot_be_read():
    with pytest.raises(UsageError, match=r"g\.vector must not be read where uses_gradient is Fal"):
        _ = Gradient().vector
