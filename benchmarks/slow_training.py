"""Training over links that are really slow, with any method of Paceline or of torch, in one loop.

Each rank runs in a namespace of a :class:`namespaces.SlowNetwork` and joins the run by the standard
environment variables, as it would on a machine of its own. Loop, data, seeds and the steps at which
the answer is evaluated are the same for all.
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

from paceline.comm.ports import Ports
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
STAND_INS = {DDP: "allreduce", POST_LOCAL: "sasgd", PLAIN: "allreduce"}
"""The ways that are not methods of Paceline, each with the most similar method: it provides the
learning rate and the order of data."""
EVERY = 16
"""The steps of rank 0 between two evaluations of the answer."""
PROBES, PROBE_REPEATS = 4, 60
_PORT = 29500
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the built-in task.

    Args:
        way: a method, with options or without, one of :data:`TORCH`, or :data:`PLAIN`.
        model: a network of the task.
        workers: the number of workers; servers and communicators have further ranks.
        seed: the seed of weights, data and random choices.
        epochs: passes over the data.
        steps: end after this many steps of each worker, if that comes first.
        evaluates: whether rank 0 evaluates the answer during the run.
    """

    way: str
    model: str = "mlp"
    workers: int = 4
    seed: int = 0
    epochs: int = EPOCHS
    steps: int | None = None
    evaluates: bool = True

    @property
    def strategy(self) -> Strategy:
        """The method, or the most similar method to another way of training."""
        return make_strategy(STAND_INS.get(self.way, self.way))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return ranks_for(self.strategy, self.workers)


class Evaluation(NamedTuple):
    """The answer's loss and accuracy on the test set, some seconds after the first step."""

    seconds: float
    loss: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        seconds: from the first step to the last, of the slowest worker.
        steps: the steps of all workers.
        samples: the samples of all workers.
        bytes_sent: the payload that the method sent; None for torch's ways, which do not count it.
        wire_bytes: what all ranks sent over their links, with headers; in virtual time, without.
        evaluations: the answer during the run, and at the end.
    """

    seconds: float
    steps: int
    samples: int
    bytes_sent: int | None
    wire_bytes: int
    evaluations: list[Evaluation] = field(default_factory=list)

    def seconds_to(self, accuracy: float) -> float | None:
        """The time from the first step to the first evaluation with at least this accuracy."""
        return next((e.seconds for e in self.evaluations if e.accuracy >= accuracy), None)

    @property
    def samples_per_s(self) -> float:
        """The throughput of all workers together."""
        return self.samples / self.seconds


# The launcher's side -----------------------------------------------------------------------------


def run_job(network: SlowNetwork, job: Job) -> Outcome:
    """Run a job on the first ranks of a slow network."""
    before = sum(network.bytes_sent())
    reports = run_in(network, job.ranks, train_rank, asdict(job))
    return _outcome(job, reports, sum(network.bytes_sent()) - before)


def simulate_job(cluster: Cluster, job: Job) -> Outcome:
    """Run the same loop on a simulated cluster, in virtual time."""
    reports: dict[int, Message] = {}

    def train(worker: Worker) -> None:
        counter = Counter(worker)
        try:
            fit(worker, job, counter)
        finally:
            reports[worker.rank] = counter.report(job)

    result = simulate(
        train, workers=job.workers, strategy=job.strategy, cluster=cluster, seed=job.seed
    )
    return _outcome(job, [reports[rank] for rank in sorted(reports)], result.wire_bytes or 0)


def _outcome(job: Job, reports: Sequence[Message], wire_bytes: int) -> Outcome:
    workers = reports[: job.workers]
    return Outcome(
        seconds=max(report["seconds"] for report in workers),
        steps=sum(report["steps"] for report in workers),
        samples=sum(report["samples"] for report in workers),
        bytes_sent=None
        if job.way in STAND_INS
        else sum(report["bytes_sent"] for report in reports),
        wire_bytes=wire_bytes,
        evaluations=[Evaluation(*each) for each in reports[0]["evaluations"]],
    )


def measure(network: SlowNetwork) -> Latencies:
    """Measure the latency of a small message and of a small all-reduce among four ranks."""
    latencies = run_in(network, PROBES, probe_rank, {})
    return Latencies(*(statistics.median(times) for times in zip(*latencies, strict=True)))


def run_in(network: SlowNetwork, size: int, program: Callable[..., Any], job: Message) -> list[Any]:
    """Run ``program`` in a process for each of ``size`` ranks, each in its own namespace."""
    common = {"master": network.address(0), "port": _PORT, "job": job}
    arguments = [{**common, "namespace": network.path(rank)} for rank in range(size)]
    return run_ranks(refer_to(program), arguments)


# A rank's side -----------------------------------------------------------------------------------


@contextmanager
def joined(
    ports: Ports, argument: Message, strategy: str | Strategy, seed: int = 0
) -> Iterator[Worker]:
    """Move this rank into its namespace, and join the run there."""
    enter(argument["namespace"])
    os.environ.update(
        RANK=str(ports.rank),
        WORLD_SIZE=str(ports.size),
        MASTER_ADDR=argument["master"],
        MASTER_PORT=str(argument["port"]),
    )
    with init(strategy=strategy, seed=seed) as worker:
        yield worker


def train_rank(ports: Ports, channel: Channel, argument: Message) -> Message:
    """The program of a rank: train, then report."""
    job = Job(**argument["job"])
    counter: Counter | None = None
    with (
        suppress(SystemExit),  # a rank that is not a worker ends so
        joined(ports, argument, job.strategy, job.seed) as worker,
    ):
        counter = Counter(worker)
        fit(worker, job, counter)
    assert counter is not None
    return counter.report(job)


def fit(worker: Worker, job: Job, counter: Counter) -> None:
    """The training loop."""
    images = load_images()
    torch.manual_seed(job.seed)
    plain = make_model(job.model)
    rate = learning_rate(job.strategy, job.model, job.workers)
    sgd = SGD(plain.parameters(), lr=rate, momentum=MOMENTUM)
    net, optimizer, answer = set_up(worker, job.way, plain, sgd)
    loader = make_loader(images, batch_of(job.workers))
    batches = worker.setup_dataloaders(loader, epochs=job.epochs)
    for _ in range(job.epochs):
        for x, y in batches:
            counter.begin()
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
            counter.stepped(len(y))
            if job.evaluates and counter.steps % EVERY == 0:
                counter.save_answer(plain, answer)
            if counter.steps == job.steps:
                break
        if counter.steps == job.steps:
            break
    worker.finish()
    counter.save_answer(plain, nullcontext)


Answer = Callable[[], AbstractContextManager[None]]


def set_up(worker: Worker, way: str, net: nn.Module, sgd: SGD) -> tuple[nn.Module, Any, Answer]:
    """The model and optimizer of a way of training, and the context that gives its answer."""
    if way == PLAIN:
        return net, sgd, nullcontext
    if way == DDP:
        return DistributedDataParallel(net), sgd, nullcontext
    if way == POST_LOCAL:
        from paceline.lab.bench.step import post_local  # imports that take seconds

        return (*post_local(net, sgd, SASGD().interval), nullcontext)
    return (*worker.setup(net, sgd), worker.answer)


class Counter:
    """Counts the steps, samples and time of a rank; on rank 0, keeps the answers to evaluate."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._now = worker, worker.comm.clock.now
        self.steps = self.samples = 0
        self._first_s = self._last_s = 0.0
        self._answers: list[tuple[float, list[Tensor]]] = []

    def begin(self) -> None:
        """Note that a step begins."""
        if not self.steps:
            self._first_s = self._now()

    def stepped(self, samples: int) -> None:
        """Note the end of a step."""
        self._last_s = self._now()
        self.steps += 1
        self.samples += samples

    def save_answer(self, net: nn.Module, answer: Answer) -> None:
        """On rank 0, keep a copy of the current answer; it is evaluated after the run."""
        if self._worker.rank == 0:
            now_s = self._now() - self._first_s
            with answer():
                self._answers.append((now_s, [p.detach().clone() for p in net.parameters()]))

    def report(self, job: Job) -> Message:
        """All counts, and the evaluation of each answer."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self._last_s - self._first_s,
            "bytes_sent": self._worker._session.recorder.meter.bytes_sent,
            "evaluations": [
                Evaluation(at_s, *_evaluate(job.model, x)) for at_s, x in self._answers
            ],
        }


def _evaluate(model: str, parameters: list[Tensor]) -> tuple[float, float]:
    net = make_model(model)
    for parameter, value in zip(net.parameters(), parameters, strict=True):
        parameter.data = value
    return evaluate(net, load_images(), torch.device("cpu"))


class Latencies(NamedTuple):
    """The seconds of a small message, one way, and of a small all-reduce."""

    message_s: float
    all_reduce_s: float


def probe_rank(ports: Ports, channel: Channel, argument: Message) -> Latencies:
    """Time small round trips between pairs of ranks, then small all-reduces, on one rank."""
    small = torch.zeros(1)
    with joined(ports, argument, "allreduce") as worker:
        comm = worker.comm
        peer, first = comm.rank ^ 1, comm.rank % 2 == 0

        def round_trip() -> None:
            for sending in (first, not first):
                if sending:
                    comm.send(small, peer, 1)
                else:
                    comm.receive(small, peer, 1)

        comm.barrier()
        message_s = _median_s(round_trip) / 2
        comm.barrier()
        return Latencies(message_s, _median_s(lambda: comm.all_reduce(small)))


def _median_s(action: Callable[[], Any]) -> float:
    times = []
    for _ in range(PROBE_REPEATS):
        start_s = time.monotonic()
        action()
        times.append(time.monotonic() - start_s)
    return statistics.median(times)
