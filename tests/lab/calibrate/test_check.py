"""The errors, spreads and rankings of predictions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab.calibrate.check import Row, Setup, predict, rank_methods
from paceline.lab.calibrate.machine import Subject

SUBJECT = Subject(name="mlp", train={})
RATES = st.floats(1, 1e6)


def row(strategy, predicted, *measured, workers=2):
    return Row(predicted, list(measured), setup=Setup(SUBJECT, workers, strategy))


def test_the_error_is_a_signed_share_of_the_measured_value():
    data = row("gossip", 120.0, 90.0, 100.0, 110.0).to_json()
    assert data["what"] == "mlp, gossip, 2 workers"
    assert (data["predicted"], data["measured"]) == (120.0, 100.0)
    assert data["error"] == pytest.approx(0.2)
    assert data["spread"] == pytest.approx(0.1)
    assert data["within"], "0.2 is twice the spread"
    assert row("gossip", 85.0, 100.0).to_json()["error"] == pytest.approx(-0.15)


@given(RATES, st.lists(RATES, min_size=1, max_size=5))
def test_within_is_15_percent_or_twice_the_spread(predicted, measured):
    checked = row("a", predicted, *measured)
    allowed = max(0.15, 2 * checked.spread) * checked.median
    assert checked.within == (abs(predicted - checked.median) <= allowed)
    assert checked.error > -1 and checked.spread >= 0


def test_a_ranking_is_right_if_no_pair_is_reversed():
    rows = [row("a", 30.0, 29.0), row("b", 20.0, 25.0), row("c", 10.0, 12.0)]
    (ranking,) = rank_methods(rows)
    assert ranking == {
        "where": "mlp, 2 workers",
        "predicted": ["a", "b", "c"],
        "measured": ["a", "b", "c"],
        "right": True,
    }
    rows[0].predicted = 15.0
    (ranking,) = rank_methods(rows)
    assert ranking["predicted"] == ["b", "a", "c"] and not ranking["right"]


def test_methods_closer_than_their_spread_are_not_ranked():
    close = [row("a", 11.0, 9.0, 10.0, 12.0), row("b", 10.0, 9.5, 10.5, 11.5)]
    other = [row("a", 1.0, 9.0, workers=4), row("b", 2.0, 8.0, workers=4)]
    first, second = rank_methods([*close, *other])
    assert first["predicted"] != first["measured"] and first["right"]
    assert second["where"] == "mlp, 4 workers" and not second["right"]


def test_no_set_up_gives_no_prediction():
    assert predict([], {}) == []
