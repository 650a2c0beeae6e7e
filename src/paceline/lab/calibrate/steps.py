"""Time the steps of a worker that waits for nobody, and what communication adds to them.

The user's script runs with a probe as its method. The probe updates locally, and then does one of
the things that methods do with a vector of the model's size: sum it, publish it and read a peer's,
or ask a server. So these are timed where they happen in training, with the caches as a gradient
leaves them. A step (loading, forward, backward, local update) is timed after a step without
communication. If a step takes longer after communication, the difference is added to the cost of
that communication.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from paceline.comm.metered import MeteredPorts
from paceline.comm.ports import Ports
from paceline.common.generators import seed_user_generators
from paceline.common.reference import Reference, find, refer_to
from paceline.errors import PeerLost, ServingDone, UsageError
from paceline.lab.bench.device import finish, shared
from paceline.lab.calibrate.clock import OwnTime, WorkTime
from paceline.launcher.rank_process import Channel, Message
from paceline.launcher.supervisor import run_ranks
from paceline.record.trace import Trace
from paceline.strategies.downpour import Downpour, DownpourServer
from paceline.strategies.pairs import average
from paceline.strategies.service import Request
from paceline.training.session import Session
from paceline.training.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.model.gradient import Gradient


WARM_UP = 5
"""The first steps do not count: torch prepares its kernels in them."""
EXCHANGES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "reduce": ("gather", "reduce"),
    "window": ("publish", "peek"),
    "mail": ("post", "take"),
}
"""The exchanges that follow steps in turn, and the kinds of work in each."""
WORK_KINDS = tuple(kind for kinds in EXCHANGES.values() for kind in kinds)
"""The kinds of work that a worker's own core does."""
HEADER_BYTES = 48
"""How large the header of a message is, about as strategies send them."""
LEAST_STEPS = 8
"""At least this many steps are timed, however long they take."""


class StepsDone(BaseException):
    """Ends a script that has made enough steps."""


class Timed(NamedTuple):
    """A measured time, and how many samples it was for."""

    samples: int
    seconds: float


class StepClock(Trace):
    """Used in place of a trace: times batches, steps and the work of communication."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.gradients: list[tuple[str, Timed]] = []
        self.loading: list[Timed] = []
        self.work: dict[str, list[float]] = {}
        self._own, self._work, self._began = OwnTime(), WorkTime(device), (0.0, 0.0)
        self._epoch = -1
        self._batch_s: float | None = None
        self._step_s: float | None = None
        self._updated_s = 0.0
        self._exchange = self._last_exchange = "nothing"

    def record(
        self,
        time_s: float,
        rank: int,
        event: str,
        peer: int | None = None,
        nbytes: int = 0,
        **more: Any,
    ) -> None:
        """Note the time of a batch or a step."""
        if event == "batch":
            self._batch(self._now(), more["epoch"], more["samples"])
        elif event == "step":
            self._step(self._now(), more["samples"])

    def _now(self) -> float:
        finish(self.device)
        return self._own.now()

    def _batch(self, now_s: float, epoch: int, samples: int) -> None:
        if self._step_s is not None and epoch == self._epoch:
            self.loading.append(Timed(samples, now_s - self._step_s))
        self._epoch, self._step_s = epoch, None
        self._batch_s = now_s if self._batch_s is None else self._batch_s

    def _step(self, now_s: float, samples: int) -> None:
        if self._batch_s is not None:
            timed = Timed(samples, self._updated_s - self._batch_s)
            self.gradients.append((self._last_exchange, timed))
        self._step_s, self._batch_s = now_s, None
        if len(self.gradients) == WARM_UP:
            self._began = (now_s, time.perf_counter())

    def updated(self, exchange: str) -> None:
        """Note the end of the local update; ``exchange`` follows."""
        self._updated_s = self._now()
        self._last_exchange, self._exchange = self._exchange, exchange

    @contextmanager
    def working(self, kind: str) -> Iterator[None]:
        """Count the time of this context as work of ``kind``."""
        began_s = self.work_s()
        yield
        self.work.setdefault(kind, []).append(self.work_s() - began_s)

    def work_s(self) -> float:
        """The clock of work."""
        return self._work.now()

    def queued_share(self) -> float:
        """The share of the time after the warm-up in which this rank waited for a core."""
        own_s, wall_s = self._own.now() - self._began[0], time.perf_counter() - self._began[1]
        return max(0.0, 1 - own_s / wall_s)

    @property
    def counted(self) -> list[tuple[str, Timed]]:
        """The gradients after the warm-up, and the exchange before each."""
        return self.gradients[WARM_UP:]


class Probe(Downpour):
    """The plain optimizer, with one exchange after each step; ends the script when it is done."""

    synchronous: ClassVar[bool] = True
    uses_gradient: ClassVar[bool] = False

    def __init__(self, clock: StepClock, steps: int, limit_s: float) -> None:
        super().__init__()
        self._clock, self._steps_left = clock, WARM_UP + steps
        self._until_s = time.monotonic() + limit_s
        self._exchanges = cycle(["reduce", "nothing", "window", "nothing", "mail", "nothing"])

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        if self.comm.rank < self.workers:
            self._worker_group = self.comm.group(range(self.workers))
            self.comm.board.publish(x, bytes(HEADER_BYTES))
            self._worker_group.barrier()

    def step(self, x: Tensor, g: Gradient) -> None:
        self.local_update(g)
        exchange = next(self._exchanges)
        self._clock.updated(exchange)
        self._steps_left -= 1
        getattr(self, f"_{exchange}")(x)

    def _nothing(self, x: Tensor) -> None:
        """End on all workers together when one has made its steps, or has run out of time."""
        late = len(self._clock.counted) >= LEAST_STEPS and time.monotonic() > self._until_s
        ends = x.new_tensor([float(late or self._steps_left <= 0)])
        self._worker_group.all_reduce(ends)
        if ends.item():
            raise StepsDone

    def _reduce(self, x: Tensor) -> None:
        with self._clock.working("gather"):
            g = self.replica.flat.gather()
        with self._clock.working("reduce"):
            self._worker_group.all_reduce(g)

    def _window(self, x: Tensor) -> None:
        with self._clock.working("publish"):
            self.comm.board.publish(x, bytes(HEADER_BYTES))
        with self._clock.working("peek"):
            peer = (self.comm.rank + 1) % self.workers
            read = self.comm.board.peek(peer, x)
            assert read is not None, "every worker has published, and ends with the others"
            average(x, [read.x])

    def _mail(self, x: Tensor) -> None:
        with self._clock.working("post"):
            self.send_request(0, self.replica.flat.g, Request(version=self.versions[0]))
        with self._clock.working("take"):
            self.await_reply(0, x)

    def make_server(self) -> ProbeServer:
        try:
            return ProbeServer(self, self._clock)
        except UsageError:  # the server cannot make the user's optimizer
            self.server_optimizer = "momentum"
            return ProbeServer(self, self._clock)


class ProbeServer(DownpourServer):
    """A parameter server that times its updates."""

    def __init__(self, method: Probe, clock: StepClock) -> None:
        super().__init__(method)
        self._clock = clock
        self._served_s: float | None = None

    def on_request(self, worker: int, request: Request, vector: Tensor) -> None:
        super().on_request(worker, request, vector)
        now_s = self._clock.work_s()
        if self._served_s is not None:
            self._clock.work.setdefault("serve", []).append(now_s - self._served_s)
        self._served_s = now_s


def time_steps(ports: Ports, channel: Channel, argument: Message) -> Message:
    """Run the script for a while on one rank, or serve the workers; return the times."""
    clock = StepClock(torch.device(argument["device"]))
    probe = Probe(clock, argument["steps"], argument["limit_s"])
    seed_user_generators(argument["seed"], ports.rank)
    metered, workers = MeteredPorts(ports, clock), ports.size - 1
    session = Session(
        metered, probe, workers=workers, seed=argument["seed"], device=argument["device"]
    )
    # A worker that runs out of data ends first: the others take it for lost.
    with suppress(StepsDone, ServingDone, PeerLost):
        find(argument["train"])(Worker(session), **argument["arguments"])
    times = {"work": {kind: times[1:] or times for kind, times in clock.work.items()}}
    if ports.rank == workers:
        return times
    if session.stepper is None or len(clock.counted) < LEAST_STEPS:
        raise UsageError(
            f"the script must make at least {WARM_UP + LEAST_STEPS} steps on each of {workers}"
            " workers, one a core, with batches from worker.setup_dataloaders; one of them made"
            f" {len(clock.gradients)}: give it more data, or fewer cores (taskset)"
        )
    return {
        **times,
        "gradients": [(exchange, *timed) for exchange, timed in clock.counted],
        "loading": clock.loading[WARM_UP:],
        "nbytes": session.stepper.replica.flat.x.nbytes,
        "queued": clock.queued_share(),
    }


@dataclass(frozen=True)
class StepTimes:
    """The times of one run, all ranks together.

    Attributes:
        gradients: from a batch to the end of its step, after a step without an exchange.
        loading: from a step to the next batch.
        work: the median processor time of each kind of work; ``serve`` is that of a server for one
            request.
        nbytes: the size of the model.
        queued: the share of the time in which other work had the cores.
    """

    gradients: list[Timed]
    loading: list[Timed]
    work: dict[str, float]
    nbytes: int
    queued: float


def run_steps(
    train: Reference,
    arguments: Mapping[str, Any],
    *,
    workers: int,
    transport: str,
    steps: int,
    limit_s: float,
    seed: int,
    device: str = "cpu",
) -> StepTimes:
    """Run the script with this many workers and a server; return the times."""
    argument: Message = {
        "train": train,
        "arguments": dict(arguments),
        "steps": steps,
        "limit_s": limit_s,
        "seed": seed,
        "device": device,
    }
    ranks = [argument] * (workers + 1)
    reports = run_ranks(refer_to(time_steps), ranks, transport=transport, device=shared(device))
    ranks = reports[:workers]
    gradients = [
        (exchange, Timed(*timed)) for rank in ranks for exchange, *timed in rank["gradients"]
    ]
    slowdowns = slowdown_after(gradients)
    work = {
        kind: _median(rank["work"][kind] for rank in ranks) + slowdowns[exchange] / len(kinds)
        for exchange, kinds in EXCHANGES.items()
        for kind in kinds
    }
    return StepTimes(
        [timed for exchange, timed in gradients if exchange == "nothing"],
        [Timed(*timed) for rank in ranks for timed in rank["loading"]],
        {**work, "serve": _median([reports[workers]["work"]["serve"]])},
        reports[0]["nbytes"],
        statistics.mean(rank["queued"] for rank in ranks),
    )


def slowdown_after(gradients: Sequence[tuple[str, Timed]]) -> dict[str, float]:
    """How much longer a step on a full batch takes after each exchange than after none."""
    full = max(timed.samples for _, timed in gradients)
    times: dict[str, list[float]] = {exchange: [] for exchange in EXCHANGES}
    for exchange, timed in gradients:
        if timed.samples == full:
            times[exchange].append(timed.seconds)
    medians = {exchange: statistics.median(each) for exchange, each in times.items() if each}
    undisturbed_s = medians.get("nothing", 0.0)
    return {
        exchange: max(0.0, medians.get(exchange, undisturbed_s) - undisturbed_s)
        for exchange in EXCHANGES
    }


def _median(times: Iterable[list[float]]) -> float:
    return statistics.median(seconds for rank in times for seconds in rank)
