"""Fits recover the costs from which times were made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.lab.calibrate.fit import fit_costs, fit_line, fit_variation

COSTS = st.floats(1e-7, 1e-2)
SIZES = st.lists(st.integers(1, 10**8), min_size=2, max_size=6, unique=True)


@given(COSTS, st.floats(1e-11, 1e-8), SIZES)
def test_a_line_is_recovered(start, slope, sizes):
    seconds = [start + slope * nbytes for nbytes in sizes]
    line = fit_line(sizes, seconds)
    assert [line.seconds(nbytes) for nbytes in sizes] == pytest.approx(seconds, rel=1e-5)
    assert line.error < 1e-5
    if max(sizes) > 100 * min(sizes) and 0.01 < slope * min(sizes) / start < 100:
        assert (line.start, line.slope) == (pytest.approx(start, 1e-4), pytest.approx(slope, 1e-4))


@given(COSTS, SIZES, st.randoms(use_true_random=False))
def test_no_cost_is_negative_and_the_error_is_the_noise(start, sizes, random):
    seconds = [start * (1 + random.uniform(-0.3, 0.3)) for _ in sizes]
    line = fit_line(sizes, seconds)
    assert line.start >= 0 and line.slope >= 0
    assert 0 <= line.error <= 0.5


def test_small_times_count_as_much_as_large_times():
    line = fit_line([1e3, 1e6, 1e8], [1e-5, 1e-4, 1e-2])
    assert line.error < 0.2
    assert line.seconds(1e3) == pytest.approx(1e-5, rel=0.2)


def test_one_size_gives_a_constant():
    assert fit_line([8, 8, 8], [1.0, 2.0, 3.0])[:2] == (2.0, 0.0)


@given(st.lists(st.floats(0.001, 10), min_size=3, max_size=3), st.integers(0, 1000))
def test_several_costs_are_recovered(costs, seed):
    features = np.random.default_rng(seed).uniform(1, 100, (12, 3))
    fitted = fit_costs(features.tolist(), (features @ costs).tolist())
    assert fitted == pytest.approx(costs, rel=1e-3, abs=1e-4)


def draws(kind, value, count=4000):
    random = np.random.default_rng(0)
    if kind == "spread":
        return 1 + value * random.uniform(-1, 1, count)
    return random.lognormal(-value * value / 2, value, count)


@pytest.mark.parametrize(
    ("kind", "value"), [("spread", 0.1), ("spread", 0.5), ("lognormal", 0.2), ("lognormal", 0.6)]
)
def test_a_distribution_is_recognized_by_its_draws(kind, value):
    fitted = fit_variation(draws(kind, value).tolist())
    assert fitted.kind == kind
    assert fitted.value == pytest.approx(value, rel=0.1)
    assert fitted.error < 0.02


def test_times_that_fit_no_distribution_become_a_trace():
    factors = [0.7, 0.7, 0.7, 1.9] * 100
    fitted = fit_variation(factors)
    assert fitted.kind == "trace"
    assert fitted.trace == pytest.approx(factors[: len(fitted.trace)])
    assert np.mean(fitted.trace) == pytest.approx(1)


def test_times_that_do_not_vary_have_no_distribution():
    assert fit_variation([1.0, 1.001, 0.999] * 10).kind == "none"
