"""A step of all parameters as one vector is the step of each; here on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.model import joint_step
from paceline.model.flat import Flat
from paceline.model.joint_step import ELEMENTWISE, JointStep

OPTIONS = {
    torch.optim.SGD: [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
    ],
    torch.optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}],
}
CASES = [(kind, options) for kind in ELEMENTWISE for options in OPTIONS.get(kind, [{}])]


class Net(nn.Module):
    """Parameters of several shapes, one of them a single number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 2).double().float()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.second(torch.tanh(self.first(x)))


class Pair:
    """The same model twice: stepped parameter by parameter, and jointly."""

    def __init__(
        self, kind=torch.optim.SGD, groups=lambda net: net.parameters(), fuses=False, **options
    ):
        self.nets, self.optimizers = [Net(), Net()], []
        for net in self.nets:
            self.optimizers.append(kind(groups(net), **{"lr": 0.05, **options}))
        self.flat = Flat(self.nets[1], self.optimizers[1], lambda n, like: like.new_zeros(n))
        self.optimizers[1].register_step_pre_hook(lambda *_: None)  # in place of the replica's
        self.joint, self.calls, self.joint_calls = JointStep(self.flat, self.optimizers[1]), 0, 0
        step, self.joint._step, self.joint._fuses = self.joint._step, self._count, fuses
        self._joint_step = step

    def _count(self, optimizer):
        self.joint_calls += 1
        self._joint_step(optimizer)

    def step(self, without=()):
        self.calls += 1
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(self.calls))
        for net in self.nets:
            net.zero_grad()
            net(x).square().sum().backward()
            for name, parameter in net.named_parameters():
                if name in without:
                    parameter.grad = None
        self.optimizers[0].step()
        self.flat.gather()
        self.joint.step()
        return self

    def check(self, joint_calls):
        one, other = (net.state_dict() for net in self.nets)
        torch.testing.assert_close(other, one)
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.testing.assert_close(states[1]["state"], states[0]["state"])
        assert states[1]["param_groups"] == states[0]["param_groups"]
        assert self.joint_calls == joint_calls


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_it_is_the_step_of_each_parameter(kind, options):
    pair = Pair(kind, **options)
    for _ in range(5):
        pair.step()
    pair.check(joint_calls=5)


FUSED = [(kind, options) for kind in joint_step.FUSED for options in OPTIONS.get(kind, [{}])]


@pytest.mark.parametrize(("kind", "options"), FUSED)
def test_a_fused_step_is_the_step_of_each_parameter(kind, options):
    pair = Pair(kind, fuses=True, **options)
    pair.step().step()
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.step().step().check(joint_calls=4)


def test_a_form_that_the_user_has_chosen_stays():
    parameters = Net().parameters
    assert joint_step.may_fuse(torch.optim.SGD(parameters(), lr=0.1))
    assert not joint_step.may_fuse(torch.optim.SGD(parameters(), lr=0.1, foreach=False))
    assert not joint_step.may_fuse(torch.optim.Adagrad(parameters(), lr=0.1))


def test_each_group_has_options_of_its_own():
    def groups(net):
        second = {"params": [*net.second.parameters(), net.scale], "lr": 0.2, "betas": (0.5, 0.9)}
        return [{"params": net.first.parameters()}, second, {"params": []}]

    pair = Pair(torch.optim.AdamW, groups)
    for _ in range(3):
        pair.step()
    for optimizer in pair.optimizers:
        optimizer.param_groups[1]["lr"] = 0.01
    pair.step().check(joint_calls=4)


def test_a_parameter_that_misses_a_step_is_stepped_by_itself():
    pair = Pair(torch.optim.Adam)
    pair.step().step(without=["first.bias"]).check(joint_calls=1)
    pair.step().check(joint_calls=1)  # it has made one step less than the others


def test_momentum_does_not_count_steps_so_a_missing_gradient_passes():
    pair = Pair(momentum=0.9)
    pair.step().step(without=["scale"]).step().step().check(joint_calls=3)


def test_what_the_user_does_to_the_state_counts():
    pair = Pair(torch.optim.Adam)
    pair.step()
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    pair.step()
    for optimizer, state in zip(pair.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    pair.step().check(joint_calls=3)
    for optimizer in pair.optimizers:
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
            state["step"].fill_(0)
    pair.step().check(joint_calls=4)
    for optimizer in pair.optimizers:
        optimizer.state.clear()
    pair.step().check(joint_calls=5)


def test_options_that_begin_to_need_a_state_get_one():
    pair = Pair()
    pair.step()
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["momentum"] = 0.9
    pair.step().step().check(joint_calls=3)


def test_a_group_of_single_numbers_is_stepped_one_by_one():
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.a * x + self.b

    pair = Pair(torch.optim.Adam)
    pair.step()
    numbers = Numbers()
    optimizer = torch.optim.Adam(numbers.parameters())
    flat = Flat(numbers, optimizer, lambda n, like: like.new_zeros(n))
    optimizer.register_step_pre_hook(lambda *_: None)
    joint = JointStep(flat, optimizer)
    for _ in range(3):
        numbers.zero_grad()
        numbers(torch.ones(3)).sum().backward()
        flat.gather()
        joint.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [3, 3]
    assert all(state["exp_avg"].dim() == 0 for state in optimizer.state.values())


def test_an_optimizer_with_hooks_of_the_user_steps_as_the_user_wrote_it():
    pair = Pair(momentum=0.9)
    seen = []
    for optimizer in pair.optimizers:
        optimizer.register_step_post_hook(
            lambda it, *_: seen.append(len(it.param_groups[0]["params"]))
        )
    pair.step().check(joint_calls=0)
    assert seen == [5, 5]


def test_a_step_that_fails_leaves_the_groups_as_they_were():
    pair = Pair(torch.optim.SGD, momentum=0.9)
    pair.step()
    optimizer = pair.optimizers[1]
    groups = [[*group["params"]] for group in optimizer.param_groups]
    optimizer.param_groups[0]["momentum"] = "much"
    with pytest.raises(TypeError):
        pair.joint.step()
    assert [group["params"] for group in optimizer.param_groups] == groups
    assert len(optimizer.state) == len(groups[0])
