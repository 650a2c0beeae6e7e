"""The methods beside torch's own of the same kind, step by step in the same real processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.training import flat
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paceline.comm.metered import MeteredTransport
from paceline.processes import run_ranks
from paceline.reference import refer_to
from paceline.strategies import make_strategy
from paceline.tasks import fashion
from paceline.worker import Worker

WORKERS, STEPS, BATCH, INTERVAL, WARMUP = 4, 50, 8, 8, 5
TOLERANCE = 1e-6
MOMENTUM = {"lr": 0.01, "momentum": 0.9}
PLAIN = {"lr": 0.05}

Trained = tuple[nn.Module, Any]
Way = Callable[[Any], Trained]


def make_net() -> nn.Module:
    torch.manual_seed(7)
    return fashion.make_model("cnn")


def paced(strategy: str, **options: float) -> Way:
    def make(transport: Any) -> Trained:
        size = transport.size
        worker = Worker(
            MeteredTransport(transport), make_strategy(strategy), workers=size, seed=0
        )
        net = make_net()
        return worker.setup(net, SGD(net.parameters(), **options))

    return make


def data_parallel(**options: float) -> Way:
    def make(transport: Any) -> Trained:
        net = DistributedDataParallel(make_net())
        return net, SGD(net.parameters(), **options)

    return make


def post_local(start: int, **options: float) -> Way:
    """Torch averages gradients for ``start`` steps, then the models of steps start, start + 8, ..."""

    def make(transport: Any) -> Trained:
        from torch.distributed.optim import PostLocalSGDOptimizer  # warns of its own torch.jit

        net = DistributedDataParallel(make_net())
        state = PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
        net.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=INTERVAL, warmup_steps=start)
        return net, PostLocalSGDOptimizer(SGD(net.parameters(), **options), averager)

    return make


PAIRS: dict[str, tuple[Way, Way]] = {
    "allreduce": (paced("allreduce", **MOMENTUM), data_parallel(**MOMENTUM)),
    "sasgd": (
        paced(f"sasgd(interval={INTERVAL}, warmup=1)", **MOMENTUM),
        post_local(0, **MOMENTUM),
    ),
    "sasgd after a warm-up": (
        paced(f"sasgd(interval={INTERVAL}, warmup={WARMUP + 1})", **PLAIN),
        post_local(WARMUP, **PLAIN),
    ),
}


def train(way: Way, transport: Any) -> torch.Tensor:
    """The parameters of this rank after so many steps on batches that are its own."""
    net, optimizer = way(transport)
    images = fashion.load_images()
    for step in range(STEPS):
        first = (step * transport.size + transport.rank) * BATCH
        x, y = (part[first : first + BATCH] for part in (images.x_train, images.y_train))
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return flat(net)


def compare(transport: Any, channel: Any, argument: Any) -> Any:
    """For each pair: how far apart the two end, how far they came, and where rank 0 is."""
    mine = not dist.is_initialized()
    if mine:  # a file to meet at, and the loopback to talk over
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(argument["meet_at"], transport.size)
        dist.init_process_group("gloo", store=store, rank=transport.rank, world_size=transport.size)
    start = flat(make_net())
    told = {}
    for name, (ours, theirs) in PAIRS.items():
        one, other = train(ours, transport), train(theirs, transport)
        first = other.clone()
        dist.broadcast(first, 0)
        told[name] = [
            float((one - other).abs().max()),
            float((other - start).abs().max()),
            float((other - first).abs().max()),
        ]
    if mine:
        dist.destroy_process_group()
    return told


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(name, marks=pytest.mark.transport(name))
        for name in ("shared_memory", "distributed")
    ],
)
def test_the_methods_equal_torchs_own(world, tmp_path):
    argument = {"meet_at": str(tmp_path / "meeting")}
    told = run_ranks(refer_to(compare), [argument] * WORKERS, transport=world)
    for rank, by_name in enumerate(told):
        for name, (apart, moved, from_first) in by_name.items():
            print(rank, name, apart, moved, from_first)
