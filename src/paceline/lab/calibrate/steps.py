"""How long a worker's step takes when nobody else is waited for, and what communication adds.

The script runs as it is, with a method that updates locally and then does one thing of what
methods do with a vector of the model's size: sum it, publish it, read a peer's, ask a server.
So these are timed where they happen, with the caches as a gradient leaves them. Steps are timed
after one that did nothing of it: loading, forward, backward, local update, and the Python around
them. By how much the others take longer is put down to what went before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.comm.base import Transport
from paceline.comm.metered import MeteredTransport
from paceline.comm.packet import Packet
from paceline.common.reference import Reference, find, refer_to
from paceline.common.seeds import seed_user_generators
from paceline.errors import PeerLost, ServingDone, UsageError
from paceline.lab.calibrate.clock import OwnTime
from paceline.launcher.rank_process import Channel, Message
from paceline.launcher.supervisor import run_ranks
from paceline.record.trace import Trace
from paceline.strategies.decentralised import average
from paceline.strategies.downpour import Downpour
from paceline.strategies.served import Request
from paceline.training.session import Session
from paceline.training.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


WARM_UP = 5
"""Steps that are not counted: torch prepares its kernels in them."""
TURNS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "reduce": ("gather", "reduce"),
    "look": ("publish", "peek"),
    "mail": ("post", "take"),
}
"""What comes after a step in turn, and the kinds of work in it."""
HANDLED = tuple(what for kinds in TURNS.values() for what in kinds)
"""Kinds of work of a worker's own core."""
NUMBERS = 6
"""Numbers that go with a vector in a message, as strategies send them."""
LEAST = 8
"""Steps that are counted in any case, however long they take."""


class Enough(BaseException):
    """Ends a script that has made as many steps as are needed."""


class Timed(NamedTuple):
    """One thing that was timed, and of how many samples it was."""

    samples: int
    seconds: float


class StepClock(Trace):
    """In place of a trace: the times of batches and steps, and the work of communication."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[tuple[str, Timed]] = []
        self.loading: list[Timed] = []
        self.work: dict[str, list[float]] = {}
        self._own, self._began = OwnTime(), (0.0, 0.0)
        self._epoch = -1
        self._batch_s: float | None = None
        self._step_s: float | None = None
        self._updated_s = 0.0
        self._turn = self._last_turn = "nothing"

    def record(
        self,
        time_s: float,
        rank: int,
        event: str,
        peer: int | None = None,
        nbytes: int = 0,
        **more: Any,
    ) -> None:
        """Hear of an event."""
        if event == "batch":
            self._batch(self._own.now(), more["epoch"], more["samples"])
        elif event == "step":
            self._step(self._own.now(), more["samples"])

    def _batch(self, now_s: float, epoch: int, samples: int) -> None:
        if self._step_s is not None and epoch == self._epoch:
            self.loading.append(Timed(samples, now_s - self._step_s))
        self._epoch, self._step_s = epoch, None
        self._batch_s = now_s if self._batch_s is None else self._batch_s

    def _step(self, now_s: float, samples: int) -> None:
        if self._batch_s is not None:
            taken = Timed(samples, self._updated_s - self._batch_s)
            self.gradients.append((self._last_turn, taken))
        self._step_s, self._batch_s = now_s, None
        if len(self.gradients) == WARM_UP:
            self._began = (now_s, time.perf_counter())

    def updated(self, turn: str) -> None:
        """Hear that the step is over, but for what comes in turn."""
        self._updated_s = self._own.now()
        self._last_turn, self._turn = self._turn, turn

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Within, the time of the processor counts as work of this kind."""
        began_s = time.process_time()
        yield
        self.work.setdefault(what, []).append(time.process_time() - began_s)

    def queued_share(self) -> float:
        """The share of the time after the warm-up in which this rank had no core."""
        own_s, wall_s = self._own.now() - self._began[0], time.perf_counter() - self._began[1]
        return max(0.0, 1 - own_s / wall_s)

    @property
    def counted(self) -> list[tuple[str, Timed]]:
        """The gradients after the warm-up, and what came in turn before each."""
        return self.gradients[WARM_UP:]


class Probe(Downpour):
    """The plain optimizer, and after each step one thing that methods do; ends the script."""

    synchronous: ClassVar[bool] = True

    def __init__(self, clock: StepClock, steps: int, limit_s: float) -> None:
        super().__init__()
        self._clock, self._steps_left = clock, WARM_UP + steps
        self._until_s = time.monotonic() + limit_s
        self._turns = cycle(["reduce", "nothing", "look", "nothing", "mail", "nothing"])
        self._served_s: float | None = None

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        if self.comm.rank < self.workers:
            self._among = self.comm.group(range(self.workers))
            self.comm.publish(Packet.of([0.0] * NUMBERS, x).buffer)
            self._among.barrier()

    @property
    def uses_gradient(self) -> bool:
        return False

    def step(self, x: Tensor, g: Tensor | None) -> None:
        self.local_update()
        turn = next(self._turns)
        self._clock.updated(turn)
        self._steps_left -= 1
        getattr(self, f"_{turn}")(x)

    def _nothing(self, x: Tensor) -> None:
        """End together, when one has made its steps, or has run out of time."""
        late = len(self._clock.counted) >= LEAST and time.monotonic() > self._until_s
        ends = x.new_tensor([float(late or self._steps_left <= 0)])
        self._among.all_reduce(ends)
        if ends.item():
            raise Enough

    def _reduce(self, x: Tensor) -> None:
        with self._clock.working("gather"):
            g = self.replica.flat.gather()
        with self._clock.working("reduce"):
            self._among.all_reduce(g)

    def _look(self, x: Tensor) -> None:
        with self._clock.working("publish"):
            self.comm.publish(Packet.of([0.0] * NUMBERS, x).buffer)
        with self._clock.working("peek"):
            peer = (self.comm.rank + 1) % self.workers
            seen = self.comm.peek(peer, Packet.empty(NUMBERS, x).buffer)
            assert seen is not None, "every worker has published, and ends with the others"
            average(x, [Packet(seen[1], NUMBERS, x.dtype).vector])

    def _mail(self, x: Tensor) -> None:
        with self._clock.working("post"):
            self.ask(0, self.replica.flat.g, Request(version=self.versions[0]))
        with self._clock.working("take"):
            self.hear(0, x)

    # The server's side ---------------------------------------------------------------------------

    def open(self, w: Tensor, part: slice) -> None:
        try:
            super().open(w, part)
        except UsageError:  # an optimizer that cannot be made again
            self.server_optimizer = "momentum"
            super().open(w, part)

    def act(self, src: int, request: Request, vector: Tensor, settings: list[float]) -> None:
        super().act(src, request, vector, settings)
        now_s = time.process_time()
        if self._served_s is not None:
            self._clock.work.setdefault("serve", []).append(now_s - self._served_s)
        self._served_s = now_s


def time_steps(transport: Transport, channel: Channel, argument: Message) -> Message:
    """On one rank: run the script for a while, or serve those that do; the times of it."""
    clock = StepClock()
    probe = Probe(clock, argument["steps"], argument["limit_s"])
    seed_user_generators(argument["seed"], transport.rank)
    metered, workers = MeteredTransport(transport, clock), transport.size - 1
    session = Session(metered, probe, workers=workers, seed=argument["seed"])
    with suppress(
        Enough, ServingDone, PeerLost
    ):  # whoever runs out of data is missed by the others
        find(argument["train"])(Worker(session), **argument["arguments"])
    told = {"work": {what: times[1:] or times for what, times in clock.work.items()}}
    if transport.rank == workers:
        return told
    if session.stepper is None or len(clock.counted) < LEAST:
        raise UsageError(
            f"the script must make at least {WARM_UP + LEAST} steps on each of {workers} workers,"
            " one a core, with batches from worker.setup_dataloaders; one of them made"
            f" {len(clock.gradients)}: give it more data, or fewer cores (taskset)"
        )
    return {
        **told,
        "gradients": [(turn, *timed) for turn, timed in clock.counted],
        "loading": clock.loading[WARM_UP:],
        "nbytes": session.stepper.replica.flat.x.nbytes,
        "queued": clock.queued_share(),
    }


@dataclass(frozen=True)
class StepTimes:
    """The times of one run, all ranks together.

    Attributes:
        gradients: from a batch to the end of its step, after a step without communication.
        loading: from a step to the next batch.
        work: what the processor of a rank did in each operation; the median. ``serve`` is all that
            a server does for a request.
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
) -> StepTimes:
    """Run the script with so many workers at once, and a server; the times of it."""
    argument: Message = {
        "train": train,
        "arguments": dict(arguments),
        "steps": steps,
        "limit_s": limit_s,
        "seed": seed,
    }
    told = run_ranks(refer_to(time_steps), [argument] * (workers + 1), transport=transport)
    ranks = told[:workers]
    gradients = [(turn, Timed(*timed)) for rank in ranks for turn, *timed in rank["gradients"]]
    after = aftermath(gradients)
    work = {
        what: _median(rank["work"][what] for rank in ranks) + after[turn] / len(kinds)
        for turn, kinds in TURNS.items()
        for what in kinds
    }
    return StepTimes(
        [timed for turn, timed in gradients if turn == "nothing"],
        [Timed(*timed) for rank in ranks for timed in rank["loading"]],
        {**work, "serve": _median([told[workers]["work"]["serve"]])},
        told[0]["nbytes"],
        statistics.mean(rank["queued"] for rank in ranks),
    )


def aftermath(gradients: Sequence[tuple[str, Timed]]) -> dict[str, float]:
    """By how much a whole gradient takes longer after each turn than after nothing; medians."""
    full = max(timed.samples for _, timed in gradients)
    times: dict[str, list[float]] = {turn: [] for turn in TURNS}
    for turn, timed in gradients:
        if timed.samples == full:
            times[turn].append(timed.seconds)
    medians = {turn: statistics.median(each) for turn, each in times.items() if each}
    alone = medians.get("nothing", 0.0)
    return {turn: max(0.0, medians.get(turn, alone) - alone) for turn in TURNS}


def _median(times: Iterable[list[float]]) -> float:
    return statistics.median(seconds for rank in times for seconds in rank)
