"""The rules: each can give each verdict, and intervals are those of Student's t."""

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
        ((0.0, 0.03, -0.03), OPEN),  # the mean is near 0, but the interval is wide
        ((0.011, 0.012, 0.009), OPEN),  # the bound on the mean lies in the interval
    ],
)
def test_a_difference_near_zero(values, verdict):
    assert near_zero("it", values, 0.01, 0.02).verdict == verdict


def test_always_needs_it_in_every_run():
    assert always("it", [True] * 3).verdict == HOLDS
    assert always("it", [True, True, False]).verdict == FAILS


def test_a_claim_holds_when_all_figures_do_and_fails_with_one():
    good, bad, unclear = (above("it", STEADY, bound) for bound in (0.0, 2.0, 1.0))
    information = shown("it", STEADY)
    assert combine([good, information, good]) == HOLDS
    assert combine([good, unclear, bad]) == FAILS
    assert combine([good, unclear]) == OPEN
    assert combine([information]) == OPEN
    assert combine([good, bad.second_column()]) == HOLDS  # the second column decides nothing


def test_a_figure_that_is_too_small_to_tell_decides_the_claim():
    good, bad = (above("it", STEADY, bound) for bound in (0.0, 2.0))
    small = good.unless_too_small("too few steps")
    assert (small.verdict, small.too_small) == (SMALL, "too few steps")
    assert (
        good.unless_too_small(None) == good
        and shown("it", STEADY).unless_too_small("few").verdict is None
    )
    assert combine([good, small]) == combine([small, bad]) == SMALL
    assert combine([good, small.second_column()]) == HOLDS


@pytest.mark.parametrize(
    "rule", [interval_90, lambda v: above("it", v, 0), lambda v: always("", v)]
)
def test_fewer_than_three_seeds_are_refused(rule):
    with pytest.raises(ValueError, match="2 values"):
        rule([1.0, 1.0])


@given(many, st.floats(-10, 10))
def test_an_interval_contains_its_mean_and_shifts_with_the_values(values, shift):
    low, high = interval_90(values)
    mean = sum(values) / len(values)
    assert low <= mean + 1e-9 and mean <= high + 1e-9
    moved = interval_90([value + shift for value in values])
    assert moved == pytest.approx((low + shift, high + shift), abs=1e-9)


@given(many)
def test_more_of_the_same_values_narrow_the_interval(values):
    low, high = interval_90(values)
    narrower = interval_90(values * 4)
    assert narrower[1] - narrower[0] <= high - low + 1e-12


def test_the_quantiles_are_those_of_student():
    values = [0.0, 0.0, 0.0, 0.0, 5.0]  # mean 1, standard error 1
    assert interval_90(values) == pytest.approx((1 - 2.132, 1 + 2.132), abs=1e-3)
    many_values = [-1.0, 1.0] * 500
    half = 1.761 / math.sqrt(999)  # by 14 degrees of freedom: never too narrow
    assert interval_90(many_values) == pytest.approx((-half, half), rel=1e-6)
