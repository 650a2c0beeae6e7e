"""Gradients that are gathered while backward makes them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD

import paceline as pl
from paceline.model.flat import Flat

LARGE, SMALL = 512, 8
"""The widths of a layer whose weight has 1 MiB, and of one that is small."""


class Setting:
    """A large and a small layer, whose gradients are gathered early while they are wanted."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(SMALL, LARGE), nn.Linear(LARGE, LARGE))
        self.large, self.small = self.model[1].weight, self.model[0].weight
        optimizer = SGD(self.model.parameters(), lr=0.1)
        self.flat = Flat(self.model, optimizer, lambda numel, like: like.new_zeros(numel))
        self.wanted = True
        self.hooks = self.flat.gather_early(lambda: self.wanted)

    def backward(self, seed=0):
        """Returns what the gradient of the large weight is, by this alone."""
        x = torch.randn(4, SMALL, generator=torch.Generator().manual_seed(seed))
        (grad,) = torch.autograd.grad(self.model(x).square().sum(), self.large)
        self.model(x).square().sum().backward()
        return grad

    def lies_in_g(self, parameter):
        memory = parameter.grad.untyped_storage().data_ptr()
        return memory == self.flat.g.untyped_storage().data_ptr()


def test_a_large_gradient_is_gathered_by_backward_and_a_small_one_by_the_step():
    here = Setting()
    grad = here.backward()
    assert here.lies_in_g(here.large)
    assert not here.lies_in_g(here.small)
    assert torch.equal(here.large.grad, grad)
    here.flat.gather()
    assert here.flat.is_gathered()
    assert torch.equal(here.large.grad, grad)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_add_up_and_are_cleared(set_to_none):
    here = Setting()
    first, second = here.backward(1), here.backward(2)
    assert torch.equal(here.large.grad, first + second)
    here.flat.gather()
    here.model.zero_grad(set_to_none=set_to_none)
    third = here.backward(3)
    assert here.lies_in_g(here.large)
    assert torch.equal(here.large.grad, third)


@pytest.mark.parametrize(
    "hold",
    [lambda p: p.grad, lambda p: p.grad.detach(), lambda p: p.grad.flatten(), lambda p: p.grad[:1]],
    ids=["itself", "detached", "flattened", "a row"],
)
def test_a_gradient_that_the_loop_still_holds_is_not_overwritten_by_the_next_backward(hold):
    here = Setting()
    here.backward(1)
    held = hold(here.large)
    before = held.clone()
    here.model.zero_grad()
    second = here.backward(2)
    assert torch.equal(held, before)
    assert torch.equal(here.large.grad, second)
    del held
    here.model.zero_grad()
    here.backward(3)
    assert here.lies_in_g(here.large)


def test_a_part_of_g_that_the_library_keeps_is_no_reason_to_wait():
    here = Setting()
    kept = here.flat.kept_g(slice(0, SMALL))
    here.backward()
    assert here.lies_in_g(here.large)
    here.model.zero_grad()
    held = here.flat.g[:SMALL]
    here.backward()
    assert not here.lies_in_g(here.large)
    assert kept.shape == held.shape


def test_gradients_that_are_not_wanted_or_have_a_graph_are_left_alone():
    here = Setting()
    here.wanted = False
    here.backward()
    assert not here.lies_in_g(here.large)
    here.wanted = True
    here.model.zero_grad()
    loss = here.model(torch.randn(4, SMALL)).square().sum()
    with pytest.warns(UserWarning, match="create_graph"):
        loss.backward(create_graph=True)
    assert here.large.grad.requires_grad
    here.model.zero_grad()  # breaks the cycle of the parameter and the graph


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deep", "pickle"],
)
def test_copies_of_the_model_and_the_model_after_the_run_gather_nothing(copied):
    here = Setting()
    here.backward()
    twin = copied(here.model)
    here.flat.g.fill_(7)
    twin(torch.randn(4, SMALL)).sum().backward()
    assert twin[1].weight.grad.untyped_storage().data_ptr() != here.flat.g.data_ptr()
    assert (here.flat.g == 7).all()
    for hook in here.hooks:
        hook.remove()
    here.model.zero_grad()
    here.backward()
    assert not here.lies_in_g(here.large)


def train_on_large(worker, bare=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SMALL, LARGE), nn.Linear(LARGE, LARGE))
    optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.9)
    large = model[1].weight
    if not bare:
        model, optimizer = worker.setup(model, optimizer)
    held = before = None
    for step in range(4):
        optimizer.zero_grad()
        own = torch.zeros_like(large)
        for part in range(2):
            x = torch.randn(4, SMALL, generator=torch.Generator().manual_seed(10 * step + part))
            loss = model(x).square().sum()
            own += torch.autograd.grad(loss, large, retain_graph=True)[0]
            loss.backward()
        assert torch.allclose(large.grad, own)
        if held is not None:
            assert torch.equal(held, before)
        held = large.grad
        optimizer.step()
        before = held.clone()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "cyclic", "sasgd(interval=2)"])
def test_a_loop_with_a_large_model_sees_its_gradients_under_every_method(strategy):
    trained = []

    def train(worker):
        trained.append(train_on_large(worker))

    pl.simulate(train, workers=2, strategy=strategy, batched="off")
    if strategy == "allreduce":
        plain = train_on_large(None, bare=True)
        for parameter, expected in zip(trained[0], plain, strict=True):
            torch.testing.assert_close(parameter, expected)
