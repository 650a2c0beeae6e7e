"""Training over links that are really slow, with any method of Paceline or of others, in one loop.

Each worker runs on a host of its own, made of namespaces (:class:`paceline.lab.network.hosts`),
unless the job says otherwise. Ranks join the run by the standard environment variables, as under
any launcher: those of Paceline's methods over ``hosts``, with encryption, and all others over gloo.
Loop, data, seeds and the steps at which the answer is evaluated are the same for all.

    python benchmarks/slow_training.py PROGRAM ARGUMENT

is one rank; :func:`run_on` starts it.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paceline.common.reference import find, refer_to
from paceline.errors import PacelineError
from paceline.lab.network.hosts import HostNetwork
from paceline.lab.tasks.fashion import evaluate, load_images, make_loader, make_model
from paceline.lab.tasks.recipe import EPOCHS, MOMENTUM, batch_of, learning_rate
from paceline.launcher.init import init
from paceline.launcher.many_hosts import TOKEN_BYTES, TOKEN_VARIABLE, split
from paceline.launcher.simulate import simulate
from paceline.launcher.spec import ranks_for
from paceline.sim.cluster import Cluster
from paceline.strategies import make_strategy
from paceline.strategies.base import Strategy, homes_of
from paceline.strategies.sasgd import SASGD
from paceline.training.worker import Worker

DDP, POST_LOCAL, PLAIN = "torch DDP", "torch PostLocalSGD", "no communication"
TORCHFT, HIVEMIND = "torchft LocalSGD", "hivemind"
OTHERS = {DDP: "torch", POST_LOCAL: "torch", TORCHFT: "torchft", HIVEMIND: "hivemind"}
"""The ways of training that are not methods of Paceline, each with the package that it needs."""
STAND_INS = {
    DDP: "allreduce",
    POST_LOCAL: "sasgd",
    TORCHFT: "sasgd",
    HIVEMIND: "sasgd",
    PLAIN: "allreduce",
}
"""The same, each with the most similar method: it provides the learning rate and the order of
data."""
EVERY = 16
"""The steps of rank 0 between two evaluations of the answer."""
PROBES, PROBE_REPEATS = 4, 60
_PORTS = itertools.count(29500, 2)
"""For rank 0 of each run, and for what it starts beside it."""
_POLL_S = 0.05
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the built-in task.

    Args:
        way: a method, with options or without, one of :data:`OTHERS`, or :data:`PLAIN`.
        model: a network of the task.
        workers: the number of workers; servers and communicators have further ranks.
        hosts: the number of hosts; by default, one for each worker.
        seed: the seed of weights, data and random choices.
        epochs: passes over the data.
        steps: end after this many steps of each worker, if that comes first.
        evaluates: whether rank 0 evaluates the answer during the run.
    """

    way: str
    model: str = "mlp"
    workers: int = 4
    hosts: int | None = None
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

    @property
    def host_of_ranks(self) -> list[int]:
        """The host of each rank, as ``paceline run --hosts`` places them."""
        homes = homes_of(self.strategy, self.workers)[: self.ranks]
        hosts = split(homes, self.workers, self.hosts or self.workers)
        return [host for host in hosts if host is not None]

    @property
    def transport(self) -> str:
        """What the ranks join over."""
        return "distributed" if self.way in OTHERS else "hosts"


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
        bytes_sent: the payload that the method sent; None for others, which do not count it.
        wire_bytes: what all hosts sent over their links, with headers; in virtual time, without.
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


def run_job(network: HostNetwork, job: Job) -> Outcome:
    """Run a job on the first hosts of a network."""
    before = bytes_on_wire(network)
    reports = run_on(network, job.host_of_ranks, train_rank, asdict(job))
    return _outcome(job, reports, bytes_on_wire(network) - before)


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


def measure(network: HostNetwork) -> Latencies:
    """Measure the latency of a small message and of a small all-reduce among four ranks."""
    latencies = run_on(network, range(PROBES), probe_rank, {"transport": "hosts"})
    return Latencies(*(statistics.median(times) for times in zip(*latencies, strict=True)))


def run_on(
    network: HostNetwork,
    hosts: Sequence[int],
    program: Callable[[Message], Any],
    argument: Message,
) -> list[Any]:
    """Run ``program(argument)`` in a process for each rank, on these hosts; return its values."""
    line = [sys.executable, __file__, json.dumps(refer_to(program)), json.dumps(argument)]
    common = {
        **os.environ,
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": network.address(hosts[0]),
        "MASTER_PORT": str(next(_PORTS)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        TOKEN_VARIABLE: secrets.token_hex(TOKEN_BYTES),
    }
    processes = [
        network.popen(
            host,
            line,
            env={
                **common,
                "RANK": str(rank),
                "LOCAL_RANK": str(hosts[:rank].count(host)),
                "LOCAL_WORLD_SIZE": str(max(map(hosts.count, hosts))),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(_POLL_S)
    finally:
        for process in processes:
            process.kill()
        printed = [process.communicate()[0] for process in processes]
    if any(codes):
        raise PacelineError(f"a rank of {argument} failed: exit codes {codes}")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def bytes_on_wire(network: HostNetwork) -> int:
    """The bytes that all hosts have sent over their links so far, with all headers."""
    command = ("tc", "-s", "-j", "qdisc", "show", "dev", "eth0")
    return sum(json.loads(network.run(host, *command))[0]["bytes"] for host in network.alive)


# A rank's side -----------------------------------------------------------------------------------


@contextmanager
def joined(transport: str, strategy: str | Strategy, seed: int = 0) -> Iterator[Worker]:
    """Join the run; the process of a rank that is not a worker goes on behind this block."""
    try:
        with init(strategy=strategy, transport=transport, seed=seed) as worker:
            yield worker
    except SystemExit as end:
        if end.code:
            raise


def train_rank(argument: Message) -> Message:
    """The program of a rank: train, then report."""
    job, counter = Job(**argument), None
    with joined(job.transport, job.strategy, job.seed) as worker:
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
    loader = make_loader(images, batch_of(job.workers))
    with set_up(worker, job.way, plain, sgd) as (net, optimizer, answer):
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
Ready = tuple[nn.Module, Any, Answer]
"""The model and optimizer of a way of training, and the context that gives its answer."""


@contextmanager
def set_up(worker: Worker, way: str, net: nn.Module, sgd: SGD) -> Iterator[Ready]:
    """Prepare model and optimizer for a way of training, and end what it has started."""
    if way == PLAIN:
        yield net, sgd, nullcontext
    elif way == DDP:
        yield DistributedDataParallel(net), sgd, nullcontext
    elif way == POST_LOCAL:
        from paceline.lab.bench.step import post_local  # imports that take seconds

        yield (*post_local(net, sgd, SASGD().interval), nullcontext)
    elif way in OTHERS:
        import slow_peers

        begin = {TORCHFT: slow_peers.torchft_local_sgd, HIVEMIND: slow_peers.hivemind_local_sgd}
        with begin[way](worker, net, sgd, SASGD().interval) as optimizer:
            yield net, optimizer, nullcontext
    else:
        yield (*worker.setup(net, sgd), worker.answer)


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


def probe_rank(argument: Message) -> Latencies:
    """Time small round trips between pairs of ranks, then small all-reduces, on one rank."""
    small = torch.zeros(1)
    with joined(argument["transport"], "allreduce") as worker:
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


def main() -> None:
    """Be one rank, and print what its program returns."""
    sys.path.insert(0, str(Path(__file__).parent))
    program, argument = map(json.loads, sys.argv[1:])
    print(json.dumps(find(program)(argument)), flush=True)
    os._exit(0)  # on a slow link, gloo's threads may abort the interpreter's own end


if __name__ == "__main__":
    main()
