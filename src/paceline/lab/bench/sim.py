"""``paceline bench sim``: the cost of the simulator, on top of the gradients that it computes.

Kernel: events per second when ranks only compute, post and poll. Gradients: the built-in networks
under ``allreduce``, interleaved with a plain loop that makes the same steps (draw a batch, forward,
backward, update) with as many replicas and no simulator, and with that loop in as many threads that
take turns, as the simulator's do; in processor time, which other programs change less. Scale: the
cost of a worker's step with few workers and with a thousand.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from paceline.comm.comm import Comm
from paceline.comm.limits import Limits
from paceline.common.one_core import on_one_core
from paceline.lab.tasks.fashion import load_images, make_loader, make_model
from paceline.lab.tasks.recipe import LEAST_BATCH, MOMENTUM, batch_of
from paceline.launcher.simulate import simulate
from paceline.sim.cluster import load_cluster
from paceline.sim.world import SimulatedPorts, World
from paceline.training.worker import Worker

Clock = Callable[[], float]
Step = Callable[[], None]

CLUSTER = "ethernet-10g"
EVENTS_A_RANK = 600
WARM_UP = 3
"""The first steps do not count: torch prepares its kernels in each thread."""


SCALES = (8, 64, 1000)
SCALED = ("allreduce", "sasgd", "gossip", "easgd", "downpour")


def bench_scale(
    strategies: Sequence[str], scales: Sequence[int], repeats: int, steps: int
) -> list[dict[str, Any]]:
    """The processor time of a worker's step, by method and number of workers, interleaved.

    All runs use the same batch size and about the same total of steps: ``steps`` for each worker
    at the largest scale. The strategy None is the plain loop over as many replicas: caches slow it
    down with the number of workers as they do a simulation.
    """
    total, rows = steps * max(scales), []
    for strategy in (None, *strategies):
        costs: dict[int, list[float]] = {workers: [] for workers in scales}
        for _ in range(repeats):
            for workers in scales:
                steps_each = -(-total // workers)
                step_s = _cpu_s(strategy, workers, steps_each) / (workers * steps_each)
                costs[workers].append(1e6 * step_s)
        first = statistics.median(costs[scales[0]])
        for workers, micros in costs.items():
            cost = statistics.median(micros)
            rows.append(
                {
                    "strategy": strategy,
                    "workers": workers,
                    "cpu_us_per_step": cost,
                    "ratio_to_fewest": cost / first,
                }
            )
    return rows


def _cpu_s(strategy: str | None, workers: int, steps: int) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if strategy is None:
            return _plain_s(workers, "cnn", steps, LEAST_BATCH, time.process_time)
        clock = time.process_time
        return _simulated_s(workers, "cnn", steps, LEAST_BATCH, clock, strategy)
    finally:
        torch.set_num_threads(threads)


def bench_sim(workers: int, repeats: int, steps: int) -> list[dict[str, Any]]:
    """Time the kernel alone, then with the gradients of each network; one row for each."""
    events = statistics.median(_events_per_s(workers) for _ in range(repeats))
    rows = [_row(workers, None, events)]
    for model in ("cnn", "mlp"):
        rows.append(_with_gradients(workers, model, repeats, steps))
    return rows


def _row(
    workers: int,
    model: str | None,
    events: float,
    overhead: float | None = None,
    quartiles: list[float] | None = None,
    step_us: float | None = None,
    threads: float | None = None,
) -> dict[str, Any]:
    return {
        "workers": workers,
        "model": model,
        "events_per_s": events,
        "overhead_share": overhead,
        "overhead_quartiles": quartiles,
        "overhead_us_per_step": step_us,
        "of_threads_share": threads,
    }


def _events_per_s(workers: int) -> float:
    world = World(load_cluster(CLUSTER), workers, seed=0, limits=Limits(), faults=[])

    def body(ports: SimulatedPorts) -> None:
        comm, x = Comm(ports), torch.zeros(16)
        for _ in range(EVENTS_A_RANK // 2):
            comm.clock.charge(0.001 * (1 + comm.rank % 3))
            comm.board.post(x, (comm.rank + 1) % comm.size)
            comm.board.poll(x)

    start = time.perf_counter()
    world.run(body)
    return world.calendar.events / (time.perf_counter() - start)


def _with_gradients(workers: int, model: str, repeats: int, steps: int) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plain, threaded, simulated, clock = [], [], [], time.process_time
    for _ in range(repeats + 1):
        plain.append(_plain_s(workers, model, steps, None, clock))
        threaded.append(_threaded_s(workers, model, steps, clock))
        simulated.append(_simulated_s(workers, model, steps, None, clock))
    torch.set_num_threads(threads)
    ratios = sorted(sim / base for sim, base in zip(simulated[1:], plain[1:], strict=True))
    of_threads = [each / base for each, base in zip(threaded[1:], plain[1:], strict=True)]
    share = statistics.median(ratios) - 1
    quartiles = [ratios[repeats // 4] - 1, ratios[-1 - repeats // 4] - 1]
    step_us = 1e6 * statistics.median(plain[1:]) / (steps * workers)
    events = 2 * workers * steps / statistics.median(simulated[1:])
    threads_share = statistics.median(of_threads) - 1
    return _row(workers, model, events, share, quartiles, share * step_us, threads_share)


def _replicas(workers: int, model: str, batch_size: int | None) -> Iterator[Step]:
    """A step of each of as many replicas."""
    images = load_images()
    for _ in range(workers):
        net = make_model(model)
        sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=MOMENTUM)
        pairs = _Pairs(images.x_train, images.y_train)
        size = batch_size or batch_of(workers)
        loader = DataLoader(pairs, batch_size=size, shuffle=True, collate_fn=_as_is)
        yield partial(_next_step, net, sgd, chain.from_iterable(repeat(loader)))


def _plain_s(workers: int, model: str, steps: int, batch_size: int | None, clock: Clock) -> float:
    """The time of the same steps in a plain loop over as many replicas."""
    replicas = [*_replicas(workers, model, batch_size)]
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            start = clock()
        for step in replicas:
            step()
    return clock() - start


def _threaded_s(workers: int, model: str, steps: int, clock: Clock) -> float:
    """The time of that loop in as many threads, each of which hands on to the next."""
    turns = [threading.Lock() for _ in range(workers)]
    moments: list[float] = []

    def run(number: int, step: Step) -> None:
        for count in range(WARM_UP + steps):
            turns[number].acquire()
            if number == 0 and count == WARM_UP:
                moments.append(clock())
            step()
            turns[(number + 1) % workers].release()

    for turn in turns:
        turn.acquire()
    with on_one_core():
        replicas = enumerate(_replicas(workers, model, None))
        threads = [threading.Thread(target=run, args=replica) for replica in replicas]
        for thread in threads:
            thread.start()
        turns[0].release()
        for thread in threads:
            thread.join()
        return clock() - moments[0]


def _simulated_s(
    workers: int,
    model: str,
    steps: int,
    batch_size: int | None,
    clock: Clock,
    strategy: str = "allreduce",
) -> float:
    """The time of the same steps in the simulator, from the first to the last."""
    moments: list[float] = []

    def train(worker: Worker) -> None:
        net: torch.nn.Module = make_model(model)
        sgd: Any = torch.optim.SGD(net.parameters(), lr=0.01, momentum=MOMENTUM)
        net, sgd = worker.setup(net, sgd)
        size = batch_size or batch_of(worker.size)
        loader = worker.setup_dataloaders(make_loader(load_images(), size))
        batches = chain.from_iterable(repeat(loader))
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                worker.comm.barrier()
                moments.append(clock())
            _step(net, sgd, *next(batches))
        moments.append(clock())

    simulate(train, workers=workers, cluster=CLUSTER, strategy=strategy)
    return max(moments) - min(moments)


class _Pairs(Dataset[Any]):
    """Images with labels; fetches a whole batch at once, as is fastest with a DataLoader."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._y)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.tensor(indices)
        return self._x[chosen], self._y[chosen]


def _as_is(batch: Any) -> Any:
    return batch


def _next_step(net: torch.nn.Module, sgd: Any, batches: Iterator[Any]) -> None:
    _step(net, sgd, *next(batches))


def _step(net: torch.nn.Module, sgd: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    sgd.zero_grad()
    cross_entropy(net(x), y).backward()
    sgd.step()
