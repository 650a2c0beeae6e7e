"""What virtual workers read on their device is what they would read from the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.launcher import simulate
from paceline.sim import resident
from paceline.sim.resident import Resident
from paceline.sim.world import World

CPU = torch.device("cpu")


class Elsewhere(Resident):
    """Copies tensors as if the workers' device were another one."""

    def _copy_of(self, tensor):
        self._device = torch.device("meta")
        try:
            return super()._copy_of(tensor)
        finally:
            self._device = CPU


@pytest.fixture
def copies(monkeypatch):
    """Have a tensor's copy be one on the CPU, and count the copies."""
    made, to = [], torch.Tensor.to

    def copied(tensor, device, **options):
        if str(device) != "meta":
            return to(tensor, device, **options)
        made.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", copied)
    return made


def test_rows_are_those_of_the_tensor_and_it_is_copied_once(copies):
    x, there = torch.randn(20, 3), Elsewhere(CPU)
    order = np.random.default_rng(0).permutation(20)
    for indices in (order[3:7], order[7:9], np.array([5, 5]), order[::2], order[:0]):
        (rows,) = there.rows([x], indices)
        assert torch.equal(rows, x[indices.tolist()])
    (rows,) = there.rows([x.view(20, 3)], order)  # another worker's tensor of the same memory
    assert torch.equal(rows, x[order.tolist()]) and len(copies) == 1


def test_a_tensor_that_has_changed_is_copied_again(copies):
    x, there, indices = torch.zeros(4, 2), Elsewhere(CPU), np.array([1, 3])
    there.rows([x], indices)
    x[3] = 7
    assert there.rows([x], indices)[0].tolist() == [[0, 0], [7, 7]] and len(copies) == 2


def test_what_is_too_large_stays_with_the_host(copies, monkeypatch):
    monkeypatch.setattr(resident, "MOST_BYTES", 100)
    small, large, there = torch.zeros(10), torch.ones(100), Elsewhere(CPU)
    rows = there.rows([small, large], np.array([2]))
    assert [each.tolist() for each in rows] == [[0], [1]] and len(copies) == 1


def test_orders_that_are_no_longer_used_are_forgotten(monkeypatch):
    monkeypatch.setattr(resident, "ORDERS", 2)
    x, there = torch.arange(9), Resident(CPU)
    orders = [np.random.default_rng(seed).permutation(9) for seed in range(5)]
    for order in (*orders, *orders):
        assert there.rows([x], order[2:6])[0].tolist() == order[2:6].tolist()


def train(worker):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(90, 4, generator=generator), torch.arange(90) % 3
    for shuffle in (True, False):
        loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=shuffle)
        for x_now, y_now in worker.setup_dataloaders(loader):
            sgd.zero_grad()
            loss = nn.functional.cross_entropy(net(x_now), y_now)
            loss.backward()
            sgd.step()
            worker.log(loss=loss)


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_a_run_is_the_same(strategy, monkeypatch):
    class There(World):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.resident = Resident(CPU)

    one = pl.simulate(train, workers=3, strategy=strategy)
    monkeypatch.setattr(simulate, "World", There)
    other = pl.simulate(train, workers=3, strategy=strategy)
    assert other.trace_hash == one.trace_hash and other.metrics == one.metrics


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "needs a GPU that torch can see"), ("gpu", r"device \(gpu\) must be cpu, cuda")],
)
def test_a_device_that_is_not_there_is_refused(device, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(train, workers=2, device=device)
