"""The guard of gradients that stay on a GPU; here the device is the CPU, which is never late."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.strategies.toolbox.device_guard import DeviceGuard
from paceline.strategies.toolbox.guard import DROP, KNOWN, Guard


@pytest.fixture
def told():
    return []


@pytest.fixture
def guard(told):
    return Guard(1, lambda event, **facts: told.append((event, facts.get("reason"))))


GRADIENT = torch.zeros(2)


def judged(device_guard, *numbers, max_norm=None):
    GRADIENT.copy_(torch.tensor(numbers))
    device_guard.pass_through(GRADIENT, max_norm)
    return GRADIENT.tolist()


def test_a_good_gradient_stays_as_it_is(guard, told):
    device_guard = DeviceGuard(guard, lambda: True)
    assert judged(device_guard, 3.0, -4.0) == [3.0, -4.0]
    device_guard.settle()
    assert (told, guard.dropped) == ([], {})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_bad_gradient_becomes_zero_and_is_counted_later(guard, told, bad):
    device_guard = DeviceGuard(guard, lambda: True)
    assert judged(device_guard, 1.0, bad) == [0.0, 0.0]
    assert guard.dropped == {}
    device_guard.settle()
    assert guard.dropped == {1: 1} and told[0][0] == "dropped"


def test_an_exploding_gradient_becomes_zero_unless_it_is_clipped(guard, told):
    device_guard = DeviceGuard(guard, lambda: True)
    for _ in range(KNOWN):
        assert judged(device_guard, 1.0, 0.0) == [1.0, 0.0]
    device_guard.settle()
    assert judged(device_guard, 2 * DROP, 0.0) == [0.0, 0.0]
    assert judged(device_guard, 2 * DROP, 0.0, max_norm=1.0) == [2 * DROP, 0.0]
    assert judged(device_guard, math.nan, 0.0, max_norm=1.0) == [0.0, 0.0]
    device_guard.settle()
    assert [reason for _, reason in told][1:] == ["not finite"]
    assert told[0][1].startswith("exploding")


def test_a_worker_that_is_not_to_blame_is_not_set_aside(guard):
    for blamed, aside in ((False, set()), (True, {1})):
        device_guard = DeviceGuard(guard, lambda blamed=blamed: blamed)
        for _ in range(4):
            judged(device_guard, math.nan, 0.0)
        device_guard.settle()
        assert guard.aside == aside


def test_half_precision_does_not_overflow(guard):
    gradient = torch.full((1000,), 60000.0, dtype=torch.float16)
    DeviceGuard(guard, lambda: True).pass_through(gradient, None)
    assert (gradient == 60000.0).all()


def test_norms_are_counted_in_their_order(guard):
    device_guard = DeviceGuard(guard, lambda: True)
    for number in range(1, 41):
        judged(device_guard, float(number), 0.0)
    device_guard.settle()
    assert guard.state()["usual"]["gradient"] == [float(number) for number in range(1, 41)]
