"""Parameters as views of one vector, whatever they look like."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

import paceline as pl
from paceline.errors import UsageError
from paceline.model.flat import Flat


def allocate(numel, like):
    return like.new_zeros(numel)


def flatten(model, optimizer=None):
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    return Flat(model, optimizer, allocate)


def test_parameters_become_views_and_keep_their_values():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = flatten(model)
    assert flat.x.numel() == 11
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    flat.x.zero_()
    assert all(not parameter.any() for parameter in model.parameters())


def test_x_is_laid_out_by_group():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    groups = [{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 1.0}]
    flat = flatten(model, SGD(groups, lr=0.1))
    assert flat.places == [[slice(0, 3)], [slice(3, 11)]]
    assert torch.equal(flat.x[:2], model[1].weight.detach().view(-1))


def test_channels_last_keeps_its_memory_format():
    model = nn.Conv2d(4, 3, 2).to(memory_format=torch.channels_last)
    strides, values = model.weight.stride(), model.weight.detach().clone()
    flat = flatten(model)
    assert model.weight.stride() == strides
    assert torch.equal(model.weight, values)
    model(torch.randn(1, 4, 5, 5)).sum().backward()
    gradient = model.weight.grad.clone()
    flat.gather()
    assert torch.equal(model.weight.grad, gradient)
    assert model.weight.grad.stride() == strides


def test_tied_weights_are_one_parameter():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    flat = flatten(model)
    assert flat.x.numel() == 9
    flat.x.fill_(2)
    assert bool((model["b"].weight == 2).all())


def test_frozen_parameters_stay_out_and_must_stay_frozen():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    flat = flatten(model)
    assert flat.x.numel() == 3
    flat.check()
    model[0].requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"parameter 0\.weight was frozen at worker\.setup"):
        flat.check()


def test_a_missing_gradient_is_zero_in_g_and_stays_missing():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    flat = flatten(model)
    model(torch.ones(1, 2)).sum().backward()
    flat.gather()
    model[0].weight.grad = None
    g = flat.gather()
    assert flat.present() == (False, True)
    assert not g[:4].any() and g[4:].any()
    assert model[0].weight.grad is None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_survive_zero_grad_of_model_and_optimizer(set_to_none):
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    flat = flatten(model, optimizer)
    for zero in (model.zero_grad, optimizer.zero_grad):
        zero(set_to_none=set_to_none)
        model(torch.ones(1, 2)).sum().backward()
        assert flat.gather().tolist() == [1.0, 1.0, 1.0]
    model(torch.ones(1, 2)).sum().backward()  # no zero_grad: accumulates onto what is there
    assert flat.gather().tolist() == [2.0, 2.0, 2.0]


def test_a_deep_copy_and_a_saved_model_stand_alone(tmp_path):
    import copy

    model = nn.Linear(2, 1)
    flat = flatten(model)
    twin = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    flat.x.zero_()
    assert twin.weight.any()
    assert torch.load(tmp_path / "model.pt", weights_only=True)["weight"].any()


def moved_by_to(model):
    model.to(torch.float64)


def moved_by_assign(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def moved_by_vector(model):
    parameters = list(model.parameters())
    vector = nn.utils.parameters_to_vector(parameters)
    nn.utils.vector_to_parameters(vector.clone(), parameters)


@pytest.mark.parametrize("move", [moved_by_to, moved_by_assign, moved_by_vector])
def test_parameters_that_leave_the_vector_are_noticed(move):
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    flat = flatten(model, optimizer)
    move(model)
    if move is moved_by_assign:  # the module has new parameters, the optimizer the old ones
        flat = flatten(model)
        moved_by_to(model)
    with pytest.raises(UsageError, match="parameter weight is no longer a view"):
        flat.check()


class _Shared(nn.Module):
    def __init__(self):
        super().__init__()
        memory = torch.zeros(4)
        self.a = nn.Parameter(memory[:3])
        self.b = nn.Parameter(memory[1:])


class _Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1).expand(3))


class _Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_Shared(), "parameters a and b share memory"),
        (_Expanded(), "parameter a has gaps or overlaps"),
        (_Complex(), r"parameter a \(torch.complex64\) must be of a real floating dtype"),
        (nn.LazyLinear(3), "parameter weight has no shape yet"),
        (nn.Linear(2, 2, device="meta"), "parameter weight is on the meta device"),
    ],
)
def test_what_cannot_be_flat_is_refused(model, message):
    with pytest.raises(UsageError, match=message):
        flatten(model)


def test_a_model_without_trained_parameters_is_refused():
    model = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        flatten(model)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 2, sparse=True)
    flat = flatten(model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="the gradient of weight is sparse"):
        flat.gather()


def test_a_worker_that_is_alone_has_its_parameters_where_torch_would_have_them():
    """On some processors the last bit of a product depends on it, and alone is bit for bit."""

    def train(worker):
        net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        net, _ = worker.setup(net, SGD(net.parameters(), lr=0.1))
        assert all(parameter.data_ptr() % 64 == 0 for parameter in net.parameters())

    pl.simulate(train, workers=1)
