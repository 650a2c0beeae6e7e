"""The exact equalities of the methods, in float64, over random networks and seeds.

E1 to E4, E17 and E24 are the numbers of the specification's table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training import Problem, flat, gradient_at
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR

problems = st.builds(
    Problem,
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple),
    batch=st.integers(1, 5),
    steps=st.integers(1, 9),
)
ragged = problems.map(lambda problem: replace(problem, batch=1 + 2 * problem.batch, ragged=True))
rates = st.floats(1e-4, 0.5)


def sgd(lr, **more):
    return lambda parameters: SGD(parameters, lr=lr, **more)


def assert_close(actual, expected, tolerance=1e-12):
    scale = max(1.0, float(expected.abs().max()))
    assert float((actual - expected).abs().max()) <= tolerance * scale


def assert_replicas_equal(ends):
    for end in ends[1:]:
        assert torch.equal(end, ends[0])


@settings(max_examples=25)
@given(problem=problems, workers=st.sampled_from([2, 4, 8]), lr=rates)
def test_e1_sasgd_of_interval_1_is_synchronous_sgd_bit_for_bit(problem, workers, lr):
    problem.optimizer = sgd(lr)
    expected, _ = problem.run("allreduce", workers)
    actual, _ = problem.run("sasgd(interval=1)", workers)
    assert_replicas_equal(actual + expected)


@settings(max_examples=15)
@given(problem=problems, workers=st.sampled_from([3, 5, 6, 7]), lr=rates)
def test_e1_holds_to_rounding_for_other_numbers_of_workers(problem, workers, lr):
    problem.optimizer = sgd(lr)
    expected, _ = problem.run("allreduce", workers)
    actual, _ = problem.run("sasgd(interval=1)", workers)
    assert_replicas_equal(actual)
    assert_close(actual[0], expected[0])


@settings(max_examples=15)
@given(problem=problems, workers=st.integers(2, 6), first=rates, second=rates, global_lr=rates)
def test_e2_with_interval_1_the_local_rate_does_not_matter(
    problem, workers, first, second, global_lr
):
    strategy = f"sasgd(interval=1, global_lr={global_lr!r})"
    problem.optimizer = sgd(first)
    one, _ = problem.run(strategy, workers)
    problem.optimizer = sgd(second)
    other, _ = problem.run(strategy, workers)
    assert_replicas_equal(one + other)


def local_sgd(problem, workers, interval, lr):
    """Plain local SGD with averages by samples, and a last partial interval."""
    xs, taken = [flat(problem.model())] * workers, [0] * workers
    for step in range(problem.steps):
        xs = [x - lr * gradient_at(problem, x, rank, step) for rank, x in enumerate(xs)]
        taken = [n + problem.samples(rank, step) for rank, n in enumerate(taken)]
        if (step + 1) % interval == 0 or step == problem.steps - 1:
            xs, taken = [problem.mean(xs, taken)] * workers, [0] * workers
    return xs[0]


@settings(max_examples=12)
@given(problem=ragged, workers=st.integers(2, 6), lr=rates, given=st.booleans())
def test_e1_holds_with_ragged_batches(problem, workers, lr, given):
    """Whether the learning rate of the aggregation is given or not."""
    problem.optimizer = sgd(lr)
    expected, _ = problem.run("allreduce", workers)
    options = f", global_lr={lr / workers!r}" if given else ""
    actual, _ = problem.run(f"sasgd(interval=1{options})", workers)
    assert_close(actual[0], expected[0])


@settings(max_examples=20)
@given(problem=problems | ragged, workers=st.integers(2, 6), interval=st.integers(1, 5), lr=rates)
@pytest.mark.parametrize("form", ["gradient", "pseudo"])
def test_e3_sasgd_is_local_sgd_with_averaging(form, problem, workers, interval, lr):
    problem.optimizer = sgd(lr)
    actual, _ = problem.run(f"sasgd(interval={interval}, form={form})", workers)
    assert_replicas_equal(actual)
    assert_close(actual[0], local_sgd(problem, workers, interval, lr))


@settings(max_examples=20)
@given(problem=problems, workers=st.integers(2, 6), interval=st.integers(1, 5), global_lr=rates)
def test_e4_with_local_rate_0_sasgd_accumulates(problem, workers, interval, global_lr):
    problem.optimizer = sgd(0.0)
    strategy = f"sasgd(interval={interval}, global_lr={global_lr!r})"
    actual, _ = problem.run(strategy, workers)
    x, total = flat(problem.model()), 0.0
    for step in range(problem.steps):
        total = total + sum(gradient_at(problem, x, rank, step) for rank in range(workers))
        if (step + 1) % interval == 0 or step == problem.steps - 1:
            x, total = x - global_lr * total, 0.0
    assert_replicas_equal(actual)
    assert_close(actual[0], x)


@settings(max_examples=20)
@given(
    problem=problems,
    workers=st.integers(2, 6),
    lr=rates,
    momentum=st.floats(0, 0.95),
    decay=st.floats(0, 0.1),
)
def test_e17_interval_1_is_synchronous_for_linear_optimizers(problem, workers, lr, momentum, decay):
    problem.optimizer = sgd(lr, momentum=momentum, weight_decay=decay)
    problem.schedule = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))
    expected, _ = problem.run("allreduce", workers)
    actual, _ = problem.run("sasgd(interval=1)", workers)
    assert_close(actual[0], expected[0])


@settings(max_examples=20)
@given(
    problem=problems,
    workers=st.integers(2, 5),
    interval=st.integers(1, 5),
    lr=rates,
    ratio=st.floats(0.2, 3),
    decay=st.sampled_from([0.0, 0.05]),
)
def test_the_two_forms_are_equal_on_plain_sgd(problem, workers, interval, lr, ratio, decay):
    problem.optimizer = sgd(lr, weight_decay=decay)
    options = f"interval={interval}, global_lr={lr * ratio / workers!r}"
    one, _ = problem.run(f"sasgd({options}, form=gradient)", workers)
    other, _ = problem.run(f"sasgd({options}, form=pseudo)", workers)
    assert_close(one[0], other[0], 1e-11)


@settings(max_examples=10)
@given(problem=problems, workers=st.integers(2, 4), interval=st.integers(2, 5), lr=rates)
def test_a_rate_that_changes_inside_an_interval_gives_up_the_gradient_form(
    problem, workers, interval, lr
):
    problem.steps = 2 * interval + 1
    problem.optimizer = sgd(lr)
    problem.schedule = lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5)
    auto, _ = problem.run(f"sasgd(interval={interval})", workers)
    pseudo, _ = problem.run(f"sasgd(interval={interval}, form=pseudo)", workers)
    assert_replicas_equal(auto + pseudo)


@pytest.mark.parametrize("method", ["allreduce", "layered(group_size=2)"])
@settings(max_examples=15)
@given(problem=problems | ragged, workers=st.integers(2, 6), lr=rates)
def test_synchronous_sgd_is_one_worker_on_the_batches_of_all(method, problem, workers, lr):
    problem.optimizer = sgd(lr, momentum=0.9)
    actual, _ = problem.run(method, workers)
    x, velocity = flat(problem.model()), None
    for step in range(problem.steps):
        gradients = [gradient_at(problem, x, rank, step) for rank in range(workers)]
        mean = problem.mean(gradients, [problem.samples(rank, step) for rank in range(workers)])
        velocity = mean if velocity is None else 0.9 * velocity + mean
        x = x - lr * velocity
    assert_replicas_equal(actual)
    assert_close(actual[0], x)


OPTIMIZERS = {
    "sgd": sgd(0.05),
    "momentum": sgd(0.05, momentum=0.9),
    "nesterov": sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": sgd(0.05, momentum=0.9, dampening=0.1),
    "adam": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    "groups": lambda parameters: _two_groups(list(parameters)),
}
SCHEDULES = {
    "none": None,
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 5),
    "one-cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=30),
}


def _two_groups(parameters):
    groups = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}]
    return SGD(groups, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=3)"])
@settings(max_examples=4)
@given(problem=problems)
def test_e24_a_world_of_one_is_the_plain_optimizer(strategy, optimizer, schedule, problem):
    problem.optimizer, problem.schedule = OPTIMIZERS[optimizer], SCHEDULES[schedule]
    (actual,), result = problem.run(strategy, 1)
    assert torch.equal(actual, problem.run_alone())
    assert result.bytes_sent == 0
