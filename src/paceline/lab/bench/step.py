"""``paceline bench step``: what a method adds to a training step, compared with torch's own.

Two processes hold one model for each way of training. Every repeat takes the ways in a random order
and runs an interval of steps with each, between two intervals without communication. Each time is
compared with these two neighbors, so that a slow moment of the machine affects both. A method that
leaves its model for others has processes of its own, and is compared with steps without
communication there.
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
from paceline.errors import ServingDone
from paceline.lab.bench.device import finish, shared
from paceline.lab.bench.gloo import free_port, join_gloo
from paceline.launcher.rank_process import Channel
from paceline.launcher.spec import ranks_for
from paceline.launcher.supervisor import run_ranks
from paceline.strategies import make_strategy
from paceline.training.session import Session
from paceline.training.worker import Worker

INTERVAL, BATCH = 16, {"cpu": 32, "cuda": 128}
STEPS, WARM_UP = INTERVAL, 2
PLAIN = "no communication"
APART = ("gossip", "easgd", "downpour")
Step = Callable[[], None]
Interval = tuple[float, float]


def bench_step(workers: int, repeats: int, device: str, hidden: int) -> list[dict[str, Any]]:
    """Time a step of each way of training; one row for each.

    The device is ``cpu``, or one GPU that all workers share; ``hidden`` is the width of the model.
    """
    argument = {"repeats": repeats, "port": free_port(), "device": device, "hidden": hidden}
    argument |= {"workers": workers, "method": None}
    kept = shared(device)
    seconds_by_rank = run_ranks(refer_to(time_steps), [argument] * workers, device=kept)
    for method in APART:
        size = ranks_for(make_strategy(method), workers)
        of_ranks = run_ranks(
            refer_to(time_steps), [argument | {"method": method}] * size, device=kept
        )
        for seconds, more in zip(seconds_by_rank, of_ranks, strict=False):
            seconds |= more
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
    bench = Bench(ports, argument["workers"], argument["device"], argument["hidden"])
    if argument["method"]:
        return bench.time_apart(argument["method"], argument["repeats"])
    join_gloo(bench.workers, argument["port"])
    return bench.time(bench.ways(), argument["repeats"])


class Bench:
    """One rank's part in the timing.

    Args:
        ports: this rank's place.
        workers: the number of workers; ranks behind them are servers.
        device: of the model.
        hidden: the width of the model.
    """

    def __init__(self, ports: Ports, workers: int, device: str, hidden: int) -> None:
        self._ports, self._device, self._hidden = ports, torch.device(device), hidden
        comm, self._size = Comm(ports), workers
        self.workers = comm.group(range(workers)) if ports.rank < workers else comm

    def time(self, ways: dict[str, Step], repeats: int) -> dict[str, list[list[float]]]:
        """The seconds of a step in each repeat, by way."""
        seconds: dict[str, list[list[float]]] = {way: [] for way in ways if way != PLAIN}
        order = random.Random(0)
        for repeat in range(repeats + 1):
            for way in order.sample(list(seconds), len(seconds)):
                times = [self._time(ways[each]) for each in (PLAIN, way, PLAIN)]
                if repeat:
                    seconds[way].append(times)
        return seconds

    def time_apart(self, method: str, repeats: int) -> dict[str, list[list[float]]]:
        """The same of one method, which may have servers; a server has nothing to time."""
        session = self._session(method)
        try:
            ways = {PLAIN: self._plain(), method: self._step_of(session)}
        except ServingDone:
            return {}
        seconds = self.time(ways, repeats)
        session.finish()
        return seconds

    def _time(self, step: Step) -> float:
        """The mean time of a step over an interval, after a few steps to warm the caches."""
        for _ in range(WARM_UP):
            step()
        finish(self._device)
        self.workers.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        finish(self._device)
        return (time.perf_counter() - start) / STEPS

    def ways(self) -> dict[str, Step]:
        """The ways of training that can take turns in the same processes."""
        sasgd = f"sasgd(interval={INTERVAL})"
        return {
            PLAIN: self._plain(),
            "allreduce": self._step_of(self._session("allreduce")),
            "torch DDP": self._ddp(),
            sasgd: self._step_of(self._session(sasgd)),
            "torch PostLocalSGD, every 16": self._post_local(),
            "torch PeriodicModelAverager, every 16": self._periodic(),
        }

    def _session(self, strategy: str) -> Session:
        return Session(
            MeteredPorts(self._ports),
            make_strategy(strategy),
            workers=self._size,
            seed=0,
            device=str(self._device),
        )

    def _step_of(self, session: Session) -> Step:
        net = self._net()
        return self._stepper(*Worker(session).setup(net, _optimizer(net)))

    def _net(self) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(784, self._hidden),
            nn.ReLU(),
            nn.Linear(self._hidden, self._hidden),
            nn.ReLU(),
            nn.Linear(self._hidden, 10),
        )
        return layers.to(self._device)

    def _stepper(self, net: nn.Module, optimizer: Any, after: Step | None = None) -> Step:
        generator, batch = torch.Generator().manual_seed(1), BATCH[self._device.type]
        x = torch.randn(batch, 784, generator=generator).to(self._device)
        y = torch.randint(0, 10, (batch,), generator=generator).to(self._device)

        def step() -> None:
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
            if after is not None:
                after()

        return step

    def _plain(self) -> Step:
        net = self._net()
        return self._stepper(net, _optimizer(net))

    def _ddp(self) -> Step:
        net = DistributedDataParallel(self._net())
        return self._stepper(net, _optimizer(net))

    def _post_local(self) -> Step:
        net = self._net()
        return self._stepper(*post_local(net, _optimizer(net), INTERVAL))

    def _periodic(self) -> Step:
        net = self._net()
        average = PeriodicModelAverager(period=INTERVAL, warmup_steps=0).average_parameters
        return self._stepper(net, _optimizer(net), lambda: average(net.parameters()))


def _optimizer(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=0.001, momentum=0.9)


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
