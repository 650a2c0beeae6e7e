"""Training over links that are really slow: any method, torch's own as well, in one loop.

Each rank runs in a namespace of a :class:`namespaces.SlowNetwork` and joins the run by the standard
environment variables, as it would on a machine of its own. Loop, data, seeds and the moments of
evaluation are the same for all.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from namespaces import SlowNetwork, enter
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paceline.comm.base import Transport
from paceline.common.reference import refer_to
from paceline.lab.tasks.fashion import evaluate, load_images, make_loader, make_model
from paceline.lab.tasks.recipe import EPOCHS, MOMENTUM, batch_of, learning_rate
from paceline.launcher.init import init
from paceline.launcher.rank_process import Channel
from paceline.launcher.simulate import simulate
from paceline.launcher.spec import ranks_for
from paceline.launcher.supervisor import run_ranks
from paceline.sim.cluster import Cluster
from paceline.strategies import make_strategy
from paceline.strategies.base import Strategy
from paceline.strategies.sasgd import SASGD
from paceline.training.worker import Worker

DDP, POST_LOCAL, PLAIN = "torch DDP", "torch PostLocalSGD", "no communication"
TORCH = (DDP, POST_LOCAL)
LENDERS = {DDP: "allreduce", POST_LOCAL: "sasgd", PLAIN: "allreduce"}
"""The ways that are no methods of Paceline, each with the one next to it, whose learning rate and
order of data it takes."""
EVERY = 16
"""Steps of rank 0 between two looks at the answer."""
PROBES, PROBE_REPEATS = 4, 60
_PORT = 29500
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the built-in task.

    Args:
        way: a method, with options or without, one of :data:`TORCH`, or :data:`PLAIN`.
        model: a network of the task.
        workers: how many; servers and communicators come on top, each with a link of its own.
        seed: of weights, data and draws.
        epochs: passes over the data.
        steps: end after so many steps of each worker, if that comes first.
        looks: whether rank 0 looks at the answer on the way.
    """

    way: str
    model: str = "mlp"
    workers: int = 4
    seed: int = 0
    epochs: int = EPOCHS
    steps: int | None = None
    looks: bool = True

    @property
    def strategy(self) -> Strategy:
        """The method, or that which stands in for another way of training."""
        return make_strategy(LENDERS.get(self.way, self.way))

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return ranks_for(self.strategy, self.workers)


class Look(NamedTuple):
    """The answer at a moment: seconds since the first step, and how good it is on the test set."""

    seconds: float
    loss: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a job.

    Attributes:
        seconds: from the first step to the last, of the worker that took longest.
        samples: taken by all workers in that time; ``steps`` likewise.
        bytes_sent: payload that the method handed in; None for torch's ways, which do not say.
        wire_bytes: what the ranks put on their links, from first to last, headers and all; in
            virtual time, payload alone.
        looks: the answer on the way, and at the end.
    """

    seconds: float
    steps: int
    samples: int
    bytes_sent: int | None
    wire_bytes: int
    looks: list[Look] = field(default_factory=list)

    def seconds_to(self, accuracy: float) -> float | None:
        """From the first step to the first look at such an accuracy."""
        return next((look.seconds for look in self.looks if look.accuracy >= accuracy), None)

    @property
    def samples_per_s(self) -> float:
        """Of all workers together."""
        return self.samples / self.seconds


# The launcher's side -----------------------------------------------------------------------------


def run_job(network: SlowNetwork, job: Job) -> Outcome:
    """Run a job on the first ranks of a slow network."""
    before = sum(network.bytes_sent())
    told = run_in(network, job.ranks, train_rank, asdict(job))
    return _outcome(job, told, sum(network.bytes_sent()) - before)


def simulate_job(cluster: Cluster, job: Job) -> Outcome:
    """Run the same loop on a simulated cluster, in virtual time."""
    told: dict[int, Message] = {}

    def train(worker: Worker) -> None:
        counter = Counter(worker)
        try:
            fit(worker, job, counter)
        finally:
            told[worker.rank] = counter.tell(job)

    result = simulate(
        train, workers=job.workers, strategy=job.strategy, cluster=cluster, seed=job.seed
    )
    return _outcome(job, [told[rank] for rank in sorted(told)], result.wire_bytes or 0)


def _outcome(job: Job, told: Sequence[Message], wire_bytes: int) -> Outcome:
    workers = told[: job.workers]
    return Outcome(
        seconds=max(one["seconds"] for one in workers),
        steps=sum(one["steps"] for one in workers),
        samples=sum(one["samples"] for one in workers),
        bytes_sent=None if job.way in LENDERS else sum(one["bytes_sent"] for one in told),
        wire_bytes=wire_bytes,
        looks=[Look(*look) for look in told[0]["looks"]],
    )


def measure(network: SlowNetwork) -> Latencies:
    """Measure what a small message costs, and a small all-reduce, among four ranks at once."""
    told = run_in(network, PROBES, probe_rank, {})
    return Latencies(*(statistics.median(times) for times in zip(*told, strict=True)))


def run_in(network: SlowNetwork, size: int, program: Callable[..., Any], job: Message) -> list[Any]:
    """Run ``program`` in a process for each of ``size`` ranks, each in its own namespace."""
    common = {"master": network.address(0), "port": _PORT, "job": job}
    arguments = [{**common, "namespace": network.path(rank)} for rank in range(size)]
    return run_ranks(refer_to(program), arguments)


# A rank's side -----------------------------------------------------------------------------------


@contextmanager
def placed(
    transport: Transport, argument: Message, strategy: str | Strategy, seed: int = 0
) -> Iterator[Worker]:
    """The worker of this rank, which lives in its namespace from here on."""
    enter(argument["namespace"])
    os.environ.update(
        RANK=str(transport.rank),
        WORLD_SIZE=str(transport.size),
        MASTER_ADDR=argument["master"],
        MASTER_PORT=str(argument["port"]),
    )
    with init(strategy=strategy, seed=seed) as worker:
        yield worker


def train_rank(transport: Transport, channel: Channel, argument: Message) -> Message:
    """The program of a rank: train, then tell."""
    job = Job(**argument["job"])
    counter: Counter | None = None
    with (
        suppress(SystemExit),  # that is how a rank ends which is no worker
        placed(transport, argument, job.strategy, job.seed) as worker,
    ):
        counter = Counter(worker)
        fit(worker, job, counter)
    assert counter is not None
    return counter.tell(job)


def fit(worker: Worker, job: Job, counter: Counter) -> None:
    """The loop."""
    images = load_images()
    torch.manual_seed(job.seed)
    plain = make_model(job.model)
    rate = learning_rate(job.strategy, job.model, job.workers)
    sgd = SGD(plain.parameters(), lr=rate, momentum=MOMENTUM)
    net, optimizer, answer = tie(worker, job.way, plain, sgd)
    loader = make_loader(images, batch_of(job.workers))
    batches = worker.setup_dataloaders(loader, epochs=job.epochs)
    for _ in range(job.epochs):
        for x, y in batches:
            counter.begin()
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
            counter.stepped(len(y))
            if job.looks and counter.steps % EVERY == 0:
                counter.look(plain, answer)
            if counter.steps == job.steps:
                break
        if counter.steps == job.steps:
            break
    worker.finish()
    counter.look(plain, nullcontext)


Answer = Callable[[], AbstractContextManager[None]]


def tie(worker: Worker, way: str, net: nn.Module, sgd: SGD) -> tuple[nn.Module, Any, Answer]:
    """Model and optimizer under a way of training, and what puts its answer into the model."""
    if way == PLAIN:
        return net, sgd, nullcontext
    if way == DDP:
        return DistributedDataParallel(net), sgd, nullcontext
    if way == POST_LOCAL:
        from paceline.lab.bench.step import post_local  # what it imports takes seconds

        return (*post_local(net, sgd, SASGD().interval), nullcontext)
    return (*worker.setup(net, sgd), worker.answer)


class Counter:
    """What a rank counts, on the clock of its run, and the answers that rank 0 has seen."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._now = worker, worker.comm.now
        self.steps = self.samples = 0
        self._first_s = self._last_s = 0.0
        self._seen: list[tuple[float, list[Tensor]]] = []

    def begin(self) -> None:
        """Hear that a step begins."""
        if not self.steps:
            self._first_s = self._now()

    def stepped(self, samples: int) -> None:
        """Hear that a step is over."""
        self._last_s = self._now()
        self.steps += 1
        self.samples += samples

    def look(self, net: nn.Module, answer: Answer) -> None:
        """On rank 0, keep a copy of the present answer; it is tried after the run."""
        if self._worker.rank == 0:
            now_s = self._now() - self._first_s
            with answer():
                self._seen.append((now_s, [p.detach().clone() for p in net.parameters()]))

    def tell(self, job: Job) -> Message:
        """All of it, and how good each answer was."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self._last_s - self._first_s,
            "bytes_sent": self._worker._session.meter.bytes_sent,
            "looks": [Look(at_s, *_try(job.model, seen)) for at_s, seen in self._seen],
        }


def _try(model: str, parameters: list[Tensor]) -> tuple[float, float]:
    net = make_model(model)
    for own, seen in zip(net.parameters(), parameters, strict=True):
        own.data = seen
    return evaluate(net, load_images(), torch.device("cpu"))


class Latencies(NamedTuple):
    """The seconds of a small message, one way, and of a small all-reduce."""

    message_s: float
    all_reduce_s: float


def probe_rank(transport: Transport, channel: Channel, argument: Message) -> Latencies:
    """On one rank: small messages to and fro between two and two, then small all-reduces."""
    small = torch.zeros(1)
    with placed(transport, argument, "allreduce") as worker:
        comm = worker.comm
        peer, first = comm.rank ^ 1, comm.rank % 2 == 0

        def there_and_back() -> None:
            for sending in (first, not first):
                if sending:
                    comm.send(small, peer, 1)
                else:
                    comm.recv(small, peer, 1)

        comm.barrier()
        message_s = _median_s(there_and_back) / 2
        comm.barrier()
        return Latencies(message_s, _median_s(lambda: comm.all_reduce(small)))


def _median_s(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(PROBE_REPEATS):
        start_s = time.monotonic()
        action()
        times.append(time.monotonic() - start_s)
    return statistics.median(times)
