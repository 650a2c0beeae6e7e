"""worker.setup refuses a rank with another model, method, seed or version, in every world."""

from __future__ import annotations

import pytest
import torch
from support import runs
from support.worlds import on_distributed
from torch import nn
from torch.optim import SGD, Adam

import paceline as pl
from paceline.common.reference import refer_to
from paceline.errors import UsageError
from paceline.launcher.supervisor import run_ranks

CASES = {
    "shape": "parameter 1.weight of float32 (2, 4), strides (4, 1) on rank 0, parameter 1.weight of"
    " float32 (3, 4), strides (4, 1) on rank 2",
    "dtype": "parameter 0.weight of float32 (4, 3), strides (3, 1) on rank 0, parameter 0.weight of"
    " float64 (4, 3), strides (3, 1) on rank 2",
    "name": "parameter 1.weight of float32 (2, 4), strides (4, 1) on rank 0, parameter last.weight"
    " of float32 (2, 4), strides (4, 1) on rank 2",
    "more": "nothing more on rank 0, parameter 2.weight of float32 (2, 2), strides (2, 1)",
    "fewer": "1.weight of float32 (2, 4), strides (4, 1) on rank 0, nothing more on rank 2",
    "strides": "strides (3, 1) on rank 0, parameter 0.weight of float32 (4, 3), strides (1, 4)",
    "frozen": "parameter 0.bias of float32 (4,), strides (1,) on rank 0, parameter 1.weight",
    "buffer": "nothing more on rank 0, fixed seen of int64 (), strides () on rank 2",
    "optimizer": "optimizer SGD with 1 parameter groups on rank 0, optimizer Adam with 1",
}


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if kind == "shape":
        net[1] = nn.Linear(4, 3)
    elif kind == "dtype":
        net.double()
    elif kind == "name":
        net = nn.Sequential()
        net.add_module("0", nn.Linear(3, 4))
        net.add_module("last", nn.Linear(4, 2))
    elif kind == "more":
        net.append(nn.Linear(2, 2))
    elif kind == "fewer":
        del net[1]
    elif kind == "strides":
        net[0].weight = nn.Parameter(torch.zeros(3, 4).t())
    elif kind == "frozen":
        net[0].bias.requires_grad_(False)
    elif kind == "buffer":
        net.register_buffer("seen", torch.tensor(0))
    return net, (Adam if kind == "optimizer" else SGD)(net.parameters(), lr=0.1)


def set_up_one_differently(worker: pl.Worker, kind: str) -> None:
    worker.setup(*build(kind if worker.rank == 2 else "same"))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_another_model_on_one_rank_is_refused_by_name(kind, strategy):
    with pytest.raises(UsageError) as refused:
        pl.simulate(set_up_one_differently, workers=4, strategy=strategy, arguments={"kind": kind})
    assert CASES[kind] in str(refused.value)


def test_another_model_on_one_rank_is_refused_in_every_world(transport):
    how = {"workers": 3, "strategy": "gossip", "arguments": {"kind": "shape"}}
    with pytest.raises(UsageError) as refused:
        if transport == "simulated":
            pl.simulate(set_up_one_differently, **how)
        else:
            pl.launch(set_up_one_differently, transport=transport, **how)
    assert CASES["shape"] in str(refused.value)


def test_of_two_that_differ_the_first_is_named():
    def train(worker):
        worker.setup(*build(["same", "same", "more", "dtype"][worker.rank]))

    with pytest.raises(UsageError, match=r"more on rank 0, parameter 2\.weight .* on rank 2"):
        pl.simulate(train, workers=4)


def test_the_same_model_costs_no_bytes_and_no_time():
    def train(worker):
        worker.setup(*build("same"))
        assert worker._session.recorder.meter.bytes_sent == sum(
            p.nbytes for p in build("same")[0].parameters()
        )

    assert pl.simulate(train, workers=2, cluster="ideal").virtual_seconds == 0.0


@on_distributed
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 8}, "seed 7 on rank 0, seed 8 on rank 1"),
        ({"version": "9.9"}, "paceline 1.0 on rank 0, paceline 9.9 on rank 1"),
    ],
)
def test_another_seed_or_version_under_a_launcher_is_refused(other, message):
    argument = {"port": runs.free_port(), "seed": 7, "version": "1.0"}
    with pytest.raises(UsageError) as refused:
        run_ranks(refer_to(runs.differ_by_environment), [argument, {**argument, **other}])
    assert message in str(refused.value)
