"""A step without torch's wrapping is the same step, and whoever hooks into steps is called."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline.model.bare_step import BareStep


class Own(optim.SGD):
    """An optimizer of the user's."""


def steps(kind, stepper, hook=None, **options):
    """The parameters after three steps, made by ``stepper`` of the optimizer."""
    torch.manual_seed(0)
    net = nn.Linear(7, 5)
    optimizer = kind(net.parameters(), lr=0.1, **options)
    if hook is not None:
        hook(optimizer)
    step = stepper(optimizer)
    for _ in range(3):
        net.zero_grad()
        net(torch.ones(1, 7)).square().sum().backward()
        step.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Rprop])
def test_a_bare_step_has_the_same_bits(kind, options):
    if kind is optim.Rprop:
        options = {}
    assert torch.equal(steps(kind, BareStep, **options), steps(kind, lambda o: o, **options))


def test_hooks_of_one_optimizer_and_of_all_are_called():
    called = []
    own = [lambda o: o.register_step_post_hook(lambda *_: called.append("own"))]
    own += [lambda o: o.register_step_pre_hook(lambda *_: None)]  # in place of the replica's
    steps(optim.SGD, BareStep, lambda o: [hook(o) for hook in own])
    handle = register_optimizer_step_post_hook(lambda *_: called.append("all"))
    try:
        steps(optim.SGD, BareStep, own[1])
    finally:
        handle.remove()
    assert called == ["own"] * 3 + ["all"] * 3


def test_a_scheduler_of_the_inner_optimizer_sees_its_steps():
    def schedule(optimizer):
        schedules.append(optim.lr_scheduler.StepLR(optimizer, 1))

    schedules: list[optim.lr_scheduler.LRScheduler] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(optim.SGD, BareStep, schedule)
        schedules[0].step()  # it warns if it has seen no step


def test_only_torch_s_own_optimizers_are_stepped_bare():
    parameters = nn.Linear(2, 2).parameters
    assert BareStep.suits(optim.SGD(parameters(), lr=0.1))
    assert not BareStep.suits(Own(parameters(), lr=0.1))
    assert not BareStep.suits(optim.SGD(parameters(), lr=0.1, differentiable=True))
