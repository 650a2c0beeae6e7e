"""The methods beside torch's own of the same kind, in the same real processes.

Two workers add in float32 what torch adds, to the bit. With three, the order of a sum matters, and
one activation that rounding pushes over the kink of a ReLU is seen fifty steps later: these train
in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import flat
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paceline.comm.metered import MeteredPorts
from paceline.common.reference import refer_to
from paceline.lab.tasks import fashion
from paceline.launcher.supervisor import run_ranks
from paceline.strategies import make_strategy
from paceline.training.session import Session
from paceline.training.worker import Worker

STEPS, BATCH, INTERVAL, WARMUP = 50, 4, 8, 5
TOLERANCE = 1e-6

Training = tuple[nn.Module, Any]
Way = Callable[[nn.Module, Any], Training]


def momentum(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.01, momentum=0.9)


def plain(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.05)


def paced(strategy: str, optimizer: Callable[[nn.Module], SGD]) -> Way:
    def set_up(net: nn.Module, transport: Any) -> Training:
        method = make_strategy(strategy)
        session = Session(MeteredPorts(transport), method, workers=transport.size, seed=0)
        return Worker(session).setup(net, optimizer(net))

    return set_up


def data_parallel(optimizer: Callable[[nn.Module], SGD]) -> Way:
    def set_up(net: nn.Module, transport: Any) -> Training:
        return DistributedDataParallel(net), optimizer(net)

    return set_up


def post_local(start: int, optimizer: Callable[[nn.Module], SGD]) -> Way:
    """Averages gradients before step ``start``, and models in it and every 8 steps from there."""

    def set_up(net: nn.Module, transport: Any) -> Training:
        from torch.distributed.optim import PostLocalSGDOptimizer  # this import warns of torch.jit

        parallel = DistributedDataParallel(net)
        state = PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
        parallel.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=INTERVAL, warmup_steps=start)
        return parallel, PostLocalSGDOptimizer(optimizer(net), averager)

    return set_up


PAIRS: dict[str, tuple[Way, Way]] = {
    "allreduce": (paced("allreduce", momentum), data_parallel(momentum)),
    "sasgd": (
        paced(f"sasgd(interval={INTERVAL}, warmup=1)", momentum),
        post_local(0, momentum),
    ),
    "warmed-up sasgd": (
        paced(f"sasgd(interval={INTERVAL}, warmup={WARMUP + 1})", plain),
        post_local(WARMUP, plain),
    ),
}


def new_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return fashion.make_model("cnn").to(dtype)


def train(way: Way, transport: Any, dtype: torch.dtype) -> torch.Tensor:
    """This rank's parameters after 50 steps on batches that no other rank sees."""
    images = fashion.load_images()
    net, optimizer = way(new_net(dtype), transport)
    for step in range(STEPS):
        first = (step * transport.size + transport.rank) * BATCH
        x, y = (part[first : first + BATCH] for part in (images.x_train, images.y_train))
        optimizer.zero_grad()
        cross_entropy(net(x.to(dtype)), y).backward()
        optimizer.step()
    return flat(net)


def compare(transport: Any, channel: Any, argument: Any) -> Any:
    """For each pair: how much the two differ, how far they moved, and the distance to rank 0."""
    meets = not dist.is_initialized()
    if meets:  # at a file, and talks over the loopback alone
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(argument["file"], transport.size)
        dist.init_process_group("gloo", store=store, rank=transport.rank, world_size=transport.size)
    dtype = getattr(torch, argument["dtype"])
    results = {}
    for name in argument["names"]:
        ours, theirs = (train(way, transport, dtype) for way in PAIRS[name])
        first = theirs.clone()
        dist.broadcast(first, 0)
        ways = (ours, flat(new_net(dtype)), first)
        results[name] = [float((theirs - other).abs().max()) for other in ways]
    if meets:
        dist.destroy_process_group()
    return results


@pytest.mark.parametrize(
    ("world", "workers", "dtype", "names"),
    [
        pytest.param(world, workers, dtype, names, marks=pytest.mark.transport(world))
        for world, workers, dtype, names in [
            ("shared_memory", 2, "float32", ["allreduce", "sasgd"]),
            ("distributed", 2, "float32", ["allreduce", "sasgd"]),
            ("hosts", 2, "float32", ["allreduce", "sasgd"]),
            ("shared_memory", 3, "float64", list(PAIRS)),
        ]
    ],
)
def test_each_method_ends_where_torchs_own_does(world, workers, dtype, names, tmp_path):
    argument = {"file": str(tmp_path / "meet"), "dtype": dtype, "names": names}
    results = run_ranks(refer_to(compare), [argument] * workers, transport=world)
    for rank, by_name in enumerate(results):
        for name, (apart, moved, from_rank_0) in by_name.items():
            assert apart <= TOLERANCE, name
            assert moved > 0.01, name
            together = rank == 0 or name == "allreduce"
            assert from_rank_0 == 0 if together else from_rank_0 > 0.001, name
