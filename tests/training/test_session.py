"""What a session does that no method does: the measurements at the end."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline as pl
from paceline.comm.comm import Comm
from paceline.comm.solo import solo_ports
from paceline.strategies.toolbox import guard
from paceline.training import session

NUMEL, PIECE = 1000, 64


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made, but for views of others."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        outcome = call(*args, **(kwargs or {}))
        memory = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if torch.is_tensor(x)}
        for x in tree_leaves(outcome):
            if torch.is_tensor(x) and x.untyped_storage().data_ptr() not in memory:
                self.bytes = max(self.bytes, x.nbytes)
        return outcome


@pytest.fixture
def pieces(monkeypatch):
    monkeypatch.setattr(session, "PIECE", PIECE)
    monkeypatch.setattr(guard, "PIECE", PIECE)


def train(worker):
    torch.manual_seed(worker.rank)
    model = torch.nn.Linear(10, NUMEL // 10, bias=False)
    model, optimizer = worker.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(4, 10)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("strategy", ["sasgd(interval=3)", "gossip", "easgd(interval=3)"])
def test_a_model_that_is_looked_at_in_pieces_is_as_far_away_as_in_one(strategy, request):
    whole = pl.simulate(train, workers=3, strategy=strategy).consensus_distance
    request.getfixturevalue("pieces")
    in_pieces = pl.simulate(train, workers=3, strategy=strategy).consensus_distance
    assert whole
    assert in_pieces == pytest.approx(whole, rel=1e-6)


def test_the_measurement_at_the_end_makes_no_second_copy(pieces):
    x = torch.randn(NUMEL)
    with Largest() as largest:
        norm, *_ = session._spread(x, 1, Comm(solo_ports()))
    assert norm == pytest.approx(float(x.norm()))
    assert largest.bytes <= 8 * PIECE  # of double precision


def test_the_distance_of_two_models_needs_no_third(pieces):
    one, other = torch.randn(NUMEL), torch.randn(NUMEL)
    with Largest() as largest:
        distance = guard.distance(one, other)
    assert distance == pytest.approx(float((one - other).norm()))
    assert largest.bytes <= 4 * PIECE
    other[7] = torch.nan
    assert math.isnan(guard.distance(one, other))


@pytest.mark.parametrize(
    "strategy", ["sasgd(interval=2)", "hierarchical(group_size=2,group_interval=1)"]
)
def test_workers_that_end_early_take_the_mean_of_the_others(strategy):
    ends = {}

    def train(worker):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        model, optimizer = worker.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(4 * worker.rank):  # worker 0 has no step at all
            optimizer.zero_grad()
            model(torch.ones(1)).backward()
            optimizer.step()
        worker.finish()
        ends[worker.rank] = model.weight.item()

    pl.simulate(train, workers=2, strategy=strategy)
    assert ends == {0: -4.0, 1: -4.0}
