"""``paceline bench step``: what a method adds to a training step, compared with torch's own.

Two processes hold one model for each way of training. Every repeat takes the ways in a random order
and runs an interval of steps with each, between two intervals without communication. Each time is
compared with these two neighbors, so that a slow moment of the machine affects both.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paceline.comm.comm import Comm
from paceline.comm.metered import MeteredPorts
from paceline.comm.ports import Ports
from paceline.common.reference import refer_to
from paceline.lab.bench.gloo import free_port, join_gloo
from paceline.launcher.rank_process import Channel
from paceline.launcher.supervisor import run_ranks
from paceline.strategies import make_strategy
from paceline.training.session import Session
from paceline.training.worker import Worker

INTERVAL, BATCH = 16, 32
STEPS, WARM_UP = INTERVAL, 2
PLAIN = "no communication"
Step = Callable[[], None]
Interval = tuple[float, float]


def bench_step(workers: int, repeats: int) -> list[dict[str, Any]]:
    """Time a step of each way of training; one row for each."""
    argument = {"repeats": repeats, "port": free_port()}
    seconds_by_rank = run_ranks(refer_to(time_steps), [argument] * workers)
    rows, plain = [], []
    for way in seconds_by_rank[0]:
        repeats_of_ranks = zip(*(seconds[way] for seconds in seconds_by_rank), strict=True)
        slowest = [[max(times) for times in zip(*ranks, strict=True)] for ranks in repeats_of_ranks]
        plain += [(before + after) / 2 for before, _, after in slowest]
        rows.append(_row(way, workers, slowest))
    baseline = [[time, time, time] for time in plain]
    return [_row(PLAIN, workers, baseline), *rows]


def _row(way: str, workers: int, repeats: list[list[float]]) -> dict[str, Any]:
    """The row of a way of training; a repeat is its time between two of the plain steps."""
    ratios = sorted(2 * time / (before + after) for before, time, after in repeats)
    low, high = _interval_of_median(ratios)
    return {
        "what": way,
        "workers": workers,
        "ms": statistics.median(time for _, time, _ in repeats) * 1e3,
        "ratio_to_no_comm": statistics.median(ratios),
        "interval_90": [low, high],
        "repeats": len(repeats),
    }


def _interval_of_median(ordered: list[float]) -> Interval:
    """The 90 % interval of the median, from order statistics (binomial, normal approximation)."""
    count = len(ordered)
    reach = 1.645 * (count**0.5) / 2
    low, high = int(count / 2 - reach), int(count / 2 + reach)
    return ordered[max(0, low)], ordered[min(count - 1, high)]


def time_steps(ports: Ports, channel: Channel, argument: dict[str, Any]) -> Any:
    """Time the ways of training on one rank: the seconds of a step in each repeat, by way."""
    comm = Comm(ports)
    join_gloo(comm, argument["port"])
    ways = _ways(ports)
    seconds: dict[str, list[list[float]]] = {way: [] for way in ways if way != PLAIN}
    order = random.Random(0)
    for repeat in range(argument["repeats"] + 1):
        for way in order.sample(list(seconds), len(seconds)):
            times = [_time(comm, ways[each]) for each in (PLAIN, way, PLAIN)]
            if repeat:
                seconds[way].append(times)
    return seconds


def _time(comm: Comm, step: Step) -> float:
    """The mean time of a step over an interval, after a few steps to warm the caches."""
    for _ in range(WARM_UP):
        step()
    comm.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - start) / STEPS


def make_net() -> nn.Module:
    """An MLP of 1.86 million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def _ways(ports: Ports) -> dict[str, Step]:
    return {
        PLAIN: _plain(),
        "allreduce": _paced(ports, "allreduce"),
        "torch DDP": _ddp(),
        "sasgd(interval=16)": _paced(ports, f"sasgd(interval={INTERVAL})"),
        "torch PostLocalSGD, every 16": _post_local(),
        "torch PeriodicModelAverager, every 16": _periodic(),
    }


def _stepper(net: nn.Module, optimizer: Any, after: Step | None = None) -> Step:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 784, generator=generator)
    y = torch.randint(0, 10, (BATCH,), generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
        if after is not None:
            after()

    return step


def _optimizer(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.001, momentum=0.9)


def _plain() -> Step:
    net = make_net()
    return _stepper(net, _optimizer(net))


def _paced(ports: Ports, strategy: str) -> Step:
    session = Session(MeteredPorts(ports), make_strategy(strategy), workers=ports.size, seed=0)
    net = make_net()
    return _stepper(*Worker(session).setup(net, _optimizer(net)))


def _ddp() -> Step:
    net = DistributedDataParallel(make_net())
    return _stepper(net, _optimizer(net))


def _post_local() -> Step:
    net = make_net()
    return _stepper(*post_local(net, _optimizer(net), INTERVAL))


def post_local(
    net: nn.Module, optimizer: SGD, interval: int
) -> tuple[DistributedDataParallel, PostLocalSGDOptimizer]:
    """A model and its optimizer under torch's PostLocalSGD, with local steps from the first.

    The warm-up makes it average after each whole interval; without, after 1, 17, 33, ... steps.
    """
    wrapped = DistributedDataParallel(net)
    state = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=interval, warmup_steps=interval - 1)
    return wrapped, PostLocalSGDOptimizer(optimizer, averager)


def _periodic() -> Step:
    net = make_net()
    averager = PeriodicModelAverager(period=INTERVAL, warmup_steps=0)
    return _stepper(net, _optimizer(net), lambda: averager.average_parameters(net.parameters()))
