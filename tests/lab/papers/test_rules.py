"""The rules: each gives each of the verdicts, and an interval is what it should be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab.papers.verdict import (
    FAILS,
    HOLDS,
    OPEN,
    SMALL,
    above,
    always,
    below,
    combine,
    interval_90,
    near_zero,
    shown,
)

STEADY, WILD = (1.0, 1.1, 0.9), (1.0, 9.0, -7.0)
many = st.lists(st.floats(-100, 100), min_size=3, max_size=20)


@pytest.mark.parametrize(
    ("values", "bound", "verdict"),
    [(STEADY, 0.5, HOLDS), (STEADY, 1.5, FAILS), (STEADY, 1.05, OPEN), (WILD, 0.5, OPEN)],
)
def test_above_and_below_mirror_each_other(values, bound, verdict):
    assert above("it", values, bound).verdict == verdict
    assert below("it", [-value for value in values], -bound).verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.001, -0.002, 0.004), HOLDS),
        ((0.009, 0.010, 0.008), HOLDS),
        ((0.02, 0.021, 0.022), FAILS),
        ((-0.02, -0.021, -0.022), FAILS),
        ((0.0, 0.03, -0.03), OPEN),  # near in the mean, but nobody knows
        ((0.011, 0.012, 0.009), OPEN),  # the bound on the mean lies in the interval
    ],
)
def test_a_difference_near_zero(values, verdict):
    assert near_zero("it", values, 0.01, 0.02).verdict == verdict


def test_what_must_happen_in_every_run():
    assert always("it", [True] * 3).verdict == HOLDS
    assert always("it", [True, True, False]).verdict == FAILS


def test_a_claim_holds_when_all_figures_do_and_fails_with_one():
    good, bad, unclear = (above("it", STEADY, bound) for bound in (0.0, 2.0, 1.0))
    told = shown("it", STEADY)
    assert combine([good, told, good]) == HOLDS
    assert combine([good, unclear, bad]) == FAILS
    assert combine([good, unclear]) == OPEN
    assert combine([told]) == OPEN
    assert combine([good, bad.beside()]) == HOLDS  # second columns are shown, and decide nothing


def test_a_set_up_that_cannot_decide_a_figure_decides_no_claim_by_it():
    good, bad = (above("it", STEADY, bound) for bound in (0.0, 2.0))
    small = good.unless("too few steps")
    assert (small.verdict, small.too_small) == (SMALL, "too few steps")
    assert good.unless(None) == good and shown("it", STEADY).unless("few").verdict is None
    assert combine([good, small]) == combine([small, bad]) == SMALL
    assert combine([good, small.beside()]) == HOLDS


@pytest.mark.parametrize(
    "rule", [interval_90, lambda v: above("it", v, 0), lambda v: always("", v)]
)
def test_fewer_than_three_seeds_are_refused(rule):
    with pytest.raises(ValueError, match="2 values"):
        rule([1.0, 1.0])


@given(many, st.floats(-10, 10))
def test_an_interval_holds_its_mean_and_moves_with_the_values(values, shift):
    low, high = interval_90(values)
    mean = sum(values) / len(values)
    assert low <= mean + 1e-9 and mean <= high + 1e-9
    moved = interval_90([value + shift for value in values])
    assert moved == pytest.approx((low + shift, high + shift), abs=1e-9)


@given(many)
def test_the_same_values_seen_more_often_narrow_it(values):
    low, high = interval_90(values)
    closer = interval_90(values * 4)
    assert closer[1] - closer[0] <= high - low + 1e-12


def test_the_quantiles_are_those_of_student():
    values = [0.0, 0.0, 0.0, 0.0, 5.0]  # mean 1, standard error 1
    assert interval_90(values) == pytest.approx((1 - 2.132, 1 + 2.132), abs=1e-3)
    many_values = [-1.0, 1.0] * 500
    half = 1.761 / math.sqrt(999)  # that of 14 degrees of freedom: never too narrow
    assert interval_90(many_values) == pytest.approx((-half, half), rel=1e-6)
