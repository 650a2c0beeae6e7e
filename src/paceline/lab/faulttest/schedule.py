"""One run of the fault tests: everything that decides it, drawn from a seed or parsed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from paceline.comm.limits import Limits
from paceline.comm.membership import MembershipPolicy
from paceline.common.faults import Fault, parse_fault
from paceline.common.options import above, at_least, build, one_of
from paceline.common.seeds import stream
from paceline.errors import UsageError
from paceline.sim.cluster import Cluster, Compute, Link, Loading, Serving
from paceline.strategies import STRATEGIES, make_strategy
from paceline.strategies.base import Strategy

Random = np.random.Generator
OBJECTIVES = ("quadratic", "network", "still")
OPTIMIZERS = ("sgd", "momentum", "decay", "adam")
DATA = ("steps", "auto", "static")
BAD = {"nan": math.nan, "inf": -math.inf, "huge": 1e30}
"""What a bad gradient is filled with, by its kind."""
_LATENCIES_S = (0.0, 1e-4, 3e-3, 0.05)
_BYTES_PER_S = (math.inf, 1e6, 1e4, 3e3)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One run.

    Args:
        strategy: the method, with its options.
        workers: the number of workers.
        steps: the steps of each worker; with a loader, about as many.
        uneven: worker i makes ``uneven * (i % 4)`` steps fewer.
        seed: the seed of the run itself.
        mirrored: whether the data and speeds are handed to the ranks in reverse order.
        objective: ``quadratic``, a tiny ``network``, or ``still`` (all gradients zero).
        optimizer: plain SGD, with ``momentum``, with weight ``decay``, or ``adam``.
        lr: the learning rate; ``falling`` halves it by the last step.
        data: ``steps`` (batches of the worker's own), or how a loader shares its data.
        latency_s: the latency of links.
        bytes_per_s: the bandwidth of links.
        serving_bytes_per_s: how fast servers work through requests.
        step_s: the time of a gradient; ``spread`` and ``factors`` are those of a cluster.
        load_s: the time to load a batch.
        ranks_per_node, registrar: as in a cluster.
        on_loss: whether the run continues without a lost rank; by default as the method has it.
        max_restarts: how many lost workers are restarted.
        dead_s: a rank that is stopped for longer is lost.
        checkpoint_steps: the steps between checkpoints; None for no checkpoints.
        bad_rank: the worker that has bad gradients, of ``bad_kind``, in its ``bad_steps``.
        faults: the faults, as sentences.
    """

    strategy: str
    workers: int = 2
    steps: int = 8
    uneven: int = 0
    seed: int = 0
    mirrored: bool = False
    objective: Literal["quadratic", "network", "still"] = "quadratic"
    optimizer: Literal["sgd", "momentum", "decay", "adam"] = "sgd"
    lr: float = 0.05
    falling: bool = False
    data: Literal["steps", "auto", "static"] = "steps"
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    serving_bytes_per_s: float = math.inf
    step_s: float = 0.1
    spread: float = 0.0
    factors: tuple[float, ...] = (1.0,)
    load_s: float = 0.0
    ranks_per_node: int = 1
    registrar: int | None = None
    on_loss: Literal["continue", "stop"] | None = None
    max_restarts: int = 0
    dead_s: float = 0.5
    checkpoint_steps: int | None = None
    bad_rank: int | None = None
    bad_steps: tuple[int, ...] = ()
    bad_kind: Literal["nan", "inf", "huge"] = "nan"
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("objective", self.objective, OBJECTIVES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("data", self.data, DATA)
        one_of("bad_kind", self.bad_kind, tuple(BAD))
        for name in ("workers", "steps"):
            at_least(name, getattr(self, name), 1)
        for name in ("uneven", "seed", "max_restarts"):
            at_least(name, getattr(self, name), 0)
        for name in ("lr", "step_s", "dead_s"):
            above(name, getattr(self, name), 0)
        if self.checkpoint_steps is not None:
            at_least("checkpoint_steps", self.checkpoint_steps, 1)

    # Text form -----------------------------------------------------------------------------------

    def __str__(self) -> str:
        """The line that :meth:`parse` reads; fields with their default value are left out."""
        fields = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return json.dumps(fields)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text form of a schedule."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise UsageError(f'schedule ({text}) must be like {{"strategy": "gossip"}}')
        schedule = build(cls, fields, "schedule")
        _ = schedule.script, schedule.method  # raise UsageError for an unknown fault or method
        return schedule

    def but(self, **changes: Any) -> Schedule:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    # Derived values ------------------------------------------------------------------------------

    @cached_property
    def method(self) -> Strategy:
        """The strategy as an object."""
        return make_strategy(self.strategy)

    @property
    def name(self) -> str:
        """The method's name."""
        return self.strategy.partition("(")[0]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.method.roles(self.workers)) if self.workers > 1 else 1

    @cached_property
    def script(self) -> tuple[Fault, ...]:
        """The faults as objects."""
        return tuple(parse_fault(sentence) for sentence in self.faults)

    @property
    def losses(self) -> MembershipPolicy:
        """What the run does about lost ranks."""
        return MembershipPolicy(
            self.method.synchronous,
            self.workers,
            self.on_loss,
            self.max_restarts,
            self.method.takes_workers_in,
        )

    @property
    def limits(self) -> Limits:
        """The time limits of the transport."""
        return Limits(dead_s=self.dead_s)

    @property
    def cluster(self) -> Cluster:
        """The simulated cluster."""
        link = Link(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s)
        inside = Link(latency_s=self.latency_s / 8, bytes_per_s=self.bytes_per_s * 8)
        return Cluster(
            name="faulttest",
            ranks_per_node=self.ranks_per_node,
            registrar=self.registrar,
            network=link,
            inside=inside,
            compute=Compute(step_s=self.step_s, spread=self.spread, factors=self.factors),
            loading=Loading(batch_s=self.load_s),
            serving=Serving(bytes_per_s=self.serving_bytes_per_s),
        )

    def data_index(self, rank: int) -> int:
        """Whose data a worker has: its own, unless the schedule is mirrored."""
        return self.workers - 1 - rank if self.mirrored else rank

    def steps_of(self, rank: int) -> int:
        """How many steps a worker makes in a run without a loader."""
        return max(0, self.steps - self.uneven * (self.data_index(rank) % 4))

    @property
    def seconds(self) -> float:
        """A rough estimate of how long the run lasts."""
        message_s = self.latency_s + 200 / self.bytes_per_s
        each_s = self.step_s * max(self.factors) + self.load_s + 2 * message_s
        return self.steps * each_s

    @property
    def setup_s(self) -> float:
        """The time after which every worker has surely started."""
        return 40 * (self.latency_s + self.workers * 100 / self.bytes_per_s)


# Drawing a schedule ------------------------------------------------------------------------------


def draw(method: str, seed: int) -> Schedule:
    """Draw the schedule of ``method`` for ``seed``."""
    random = stream(seed, "fault test", list(STRATEGIES).index(method))
    workers = int(random.choice([2, 2, 3, 3, 3, 4, 4, 5, 7]))
    optimizer: Any = str(random.choice(OPTIMIZERS, p=[0.45, 0.25, 0.2, 0.1]))
    objective: Any = str(random.choice(OBJECTIVES, p=[0.8, 0.1, 0.1]))
    options = _OPTIONS[method](random, workers, optimizer)
    inside = ", ".join(f"{name}={value}" for name, value in options.items())
    schedule = Schedule(
        strategy=f"{method}({inside})" if inside else method,
        workers=workers,
        steps=int(random.integers(3, 10)),
        uneven=int(random.integers(1, 4)) if random.random() < 0.3 else 0,
        seed=int(random.integers(1 << 30)),
        objective=objective,
        optimizer=optimizer,
        lr=float(random.choice([0.02, 0.05, 0.1])) / workers,
        falling=bool(random.random() < 0.3),
        data=cast(Any, str(random.choice(DATA, p=[0.5, 0.4, 0.1]))),
        latency_s=float(random.choice(_LATENCIES_S)),
        bytes_per_s=float(random.choice(_BYTES_PER_S, p=[0.4, 0.2, 0.3, 0.1])),
        serving_bytes_per_s=float(random.choice([math.inf, 3e3], p=[0.6, 0.4])),
        step_s=float(random.choice([0.05, 0.1, 0.2])),
        spread=float(random.choice([0.0, 0.3])),
        factors=tuple(random.choice([1.0, 1.0, 1.5, 3.0], size=workers).tolist()),
        load_s=float(random.choice([0.0, 0.05], p=[0.7, 0.3])),
        ranks_per_node=int(random.choice([1, 1, 2, 0])),
        dead_s=float(random.choice([0.3, 0.8])),
    )
    schedule = _with_registrar(_with_faults(schedule, random), seed)
    if random.random() < 0.3:
        schedule = schedule.but(checkpoint_steps=int(random.integers(1, 5)))
    return _with_bad_gradients(schedule, random) if random.random() < 0.2 else schedule


def _with_faults(schedule: Schedule, random: Random) -> Schedule:
    """The same schedule, in four of five cases with faults."""
    if random.random() < 0.2:
        return schedule
    method = schedule.method
    restarts = int(random.choice([0, 0, 1, 2])) if method.takes_workers_in else 0
    on_loss = None if random.random() < 0.2 else "continue"
    if method.synchronous and on_loss is None:
        restarts = 0  # the first loss ends the run
    schedule = schedule.but(on_loss=on_loss, max_restarts=restarts)
    faults = _Faults(schedule, random)
    for _ in range(int(random.choice([1, 1, 2, 2, 3, 4]))):
        faults.add()
    return schedule.but(faults=tuple(faults.sentences))


def _with_registrar(schedule: Schedule, seed: int) -> Schedule:
    """The same schedule, in one of five cases with faults over many hosts, one of which is cut off.

    It has a stream of its own: without it, a seed gives what it gave before there were registrars.
    """
    random = stream(seed, "registrar", list(STRATEGIES).index(schedule.name))
    if not schedule.faults or random.random() < 0.8:
        return schedule
    node = schedule.cluster.node(int(random.integers(schedule.size)))
    rank, start_s = int(random.integers(schedule.size)), schedule.seconds * random.random()
    for_s = schedule.dead_s * (0.5 + 2 * random.random())
    cut = f"cut(rank={rank}, for_s={for_s:.4g}).at(seconds={schedule.setup_s + start_s:.4g})"
    return schedule.but(registrar=node, faults=(*schedule.faults, cut))


def _with_bad_gradients(schedule: Schedule, random: Random) -> Schedule:
    """The same schedule with a few consecutive bad gradients of one worker."""
    first, count = int(random.integers(schedule.steps)), int(random.integers(1, 5))
    return schedule.but(
        bad_rank=int(random.integers(schedule.workers)),
        bad_steps=tuple(range(first, first + count)),
        bad_kind=cast(Any, str(random.choice(list(BAD)))),
    )


class _Faults:
    """Draws faults that never lose one worker, which starts with the run."""

    def __init__(self, schedule: Schedule, random: Random) -> None:
        self._schedule, self._random = schedule, random
        self._spared = int(random.integers(schedule.workers))
        self._late: set[int] = set()
        self._lost: set[int] = set()
        self.sentences: list[str] = []

    def add(self) -> None:
        """Draw one fault, if one of the drawn kind is possible."""
        kinds: list[Callable[[], str | None]] = [
            self._kill,
            self._kill,
            self._freeze,
            self._freeze,
            self._slow,
            self._link,
            self._join,
            self._end_server,
        ]
        sentence = kinds[int(self._random.integers(len(kinds)))]()
        if sentence is not None:
            self.sentences.append(sentence)

    def _victim(self) -> int | None:
        others = [r for r in range(self._schedule.workers) if r not in {self._spared, *self._lost}]
        if not others:
            return None
        victim = int(self._random.choice(others))
        self._lost.add(victim)
        return victim

    def _time(self) -> str:
        schedule, random = self._schedule, self._random
        span_s = float(random.choice([0.5, 1.2])) * schedule.seconds
        return f"at(seconds={schedule.setup_s + span_s * random.random():.4g})"

    def _moment(self, rank: int) -> str:
        if rank in self._late or self._random.random() < 0.7:
            return self._time()
        return f"at(step={int(self._random.integers(self._schedule.steps))})"

    def _kill(self) -> str | None:
        rank = self._victim()
        return None if rank is None else f"kill(rank={rank}).{self._moment(rank)}"

    def _freeze(self) -> str | None:
        dead_s, draw = self._schedule.dead_s, self._random.random()
        if draw < 0.4:
            any_rank = int(self._random.integers(self._schedule.size))
            for_s = dead_s * (0.1 + 0.8 * self._random.random())
            return f"freeze(rank={any_rank}, for_s={for_s:.4g}).{self._time()}"
        rank = self._victim()
        if rank is None:
            return None
        for_s = dead_s * (1.2 + 3 * self._random.random())
        duration = "" if draw > 0.92 else f", for_s={for_s:.4g}"
        return f"freeze(rank={rank}{duration}).{self._moment(rank)}"

    def _slow(self) -> str:
        rank = int(self._random.integers(self._schedule.workers))
        factor = float(self._random.choice([2.0, 5.0]))
        return f"slow(rank={rank}, factor={factor}, for_s=1.0).{self._time()}"

    def _link(self) -> str:
        size, random = self._schedule.size, self._random
        rank, hop = int(random.integers(size)), int(random.integers(1, size))
        peer = f", peer={(rank + hop) % size}" if random.random() < 0.6 else ""
        for_s = 0.1 + random.random()
        if random.random() < 0.5:
            return f"cut(rank={rank}{peer}, for_s={for_s:.4g}).{self._time()}"
        return f"degrade(rank={rank}{peer}, factor=0.1, for_s={for_s:.4g}).{self._time()}"

    def _join(self) -> str | None:
        if not self._schedule.losses.accepts_joiners:
            return None
        if self._schedule.method.synchronous and self._random.random() < 0.5:
            return self._kill_and_return()
        others = [
            r
            for r in range(self._schedule.workers)
            if r not in {self._spared, *self._lost, *self._late}
        ]
        if not others:
            return None
        rank = int(self._random.choice(others))
        self._late.add(rank)
        return f"join(rank={rank}).{self._time()}"

    def _kill_and_return(self) -> str | None:
        """Kill a worker, and have it come again."""
        schedule, random, rank = self._schedule, self._random, self._victim()
        if rank is None or rank in self._late:
            return None
        killed_s = schedule.setup_s + 0.7 * schedule.seconds * random.random()
        self.sentences.append(f"kill(rank={rank}).at(seconds={killed_s:.4g})")
        again_s = killed_s + 0.5 * schedule.seconds * random.random()
        return f"join(rank={rank}).at(seconds={again_s:.4g})"

    def _end_server(self) -> str | None:
        servers = range(self._schedule.workers, self._schedule.size)
        if not servers:
            return None
        rank = int(self._random.choice(list(servers)))
        if self._random.random() < 0.3:
            return self._kill_behind_cut(rank)
        if self._random.random() < 0.25:
            for_s = self._schedule.dead_s * (1.2 + self._random.random())
            return f"freeze(rank={rank}, for_s={for_s:.4g}).{self._time()}"
        return f"kill(rank={rank}).{self._time()}"

    def _kill_behind_cut(self, rank: int) -> str:
        """Cut a server off, and kill it before its last replies get through."""
        schedule, random = self._schedule, self._random
        start_s = schedule.setup_s + 0.8 * schedule.seconds * random.random()
        self.sentences.append(f"cut(rank={rank}, for_s=2.0).at(seconds={start_s:.4g})")
        return f"kill(rank={rank}).at(seconds={start_s + 0.5 * random.random():.4g})"


# The options of each method ----------------------------------------------------------------------

Options = dict[str, Any]


def _sasgd(random: Random, workers: int, optimizer: str) -> Options:
    momentum = str(random.choice(["keep", "reset", "average"]))
    form = str(random.choice(["auto", "pseudo"]))
    warmup = int(random.choice([0, 0, 2]))
    return {
        "interval": int(random.integers(1, 5)),
        "form": form,
        "momentum": momentum,
        "warmup": warmup,
    }


def _hierarchical(random: Random, workers: int, optimizer: str) -> Options:
    group_interval = int(random.integers(1, 3))
    interval = group_interval * int(random.integers(1, 4))
    size = int(random.integers(1, workers + 1))
    return {"group_size": size, "group_interval": group_interval, "interval": interval}


def _diloco(random: Random, workers: int, optimizer: str) -> Options:
    momentum = float(random.choice([0.0, 0.9]))
    return {"interval": int(random.integers(1, 5)), "outer_momentum": momentum}


def _served(random: Random, workers: int, optimizer: str) -> Options:
    kind = str(random.choice(["user", "user", "sgd", "momentum", "adagrad"]))
    return {"server_optimizer": kind, "shards": int(random.choice([1, 1, 2]))}


def _downpour(random: Random, workers: int, optimizer: str) -> Options:
    return {
        "push_interval": int(random.integers(1, 4)),
        "fetch_interval": int(random.integers(1, 4)),
        "phase": str(random.choice(["full", "paper"])),
        "local_move": str(random.choice(["none", "true", "false"])),
        **_served(random, workers, optimizer),
    }


def _ssp(random: Random, workers: int, optimizer: str) -> Options:
    return {"bound": int(random.integers(0, 4)), **_served(random, workers, optimizer)}


def _cyclic(random: Random, workers: int, optimizer: str) -> Options:
    options: Options = {
        "form": "gradient",
        "max_accumulated": int(random.integers(1, 5)),
        "scale": str(random.choice(["mean", "sum"])),
        "local_move": str(random.choice(["true", "false"])),
        **_served(random, workers, optimizer),
    }
    if random.random() < 0.5:
        return {name: options[name] for name in ("max_accumulated", "shards")}
    return options


def _easgd(random: Random, workers: int, optimizer: str) -> Options:
    has_momentum = optimizer in ("momentum", "adam")
    options: Options = {
        "interval": int(random.integers(1, 4)),
        "beta": float(random.choice([0.5, 0.9])),
        "momentum": 0.0 if has_momentum else float(random.choice([0.0, 0.0, 0.5])),
        "sync": str(random.choice(["true", "false", "false"])),
    }
    if options["sync"] == "false":
        options["shards"] = int(random.choice([1, 1, 2]))
    return options


def _layered(random: Random, workers: int, optimizer: str) -> Options:
    return {"group_size": int(random.integers(1, workers + 1))}


def _topology(random: Random) -> str:
    return str(random.choice(["complete", "ring", "exponential"]))


def _gossip(random: Random, workers: int, optimizer: str) -> Options:
    options: Options = {
        "mode": str(random.choice(["pull", "push"])),
        "sync": str(random.choice(["true", "false", "false"])),
        "order": str(random.choice(["mix_first", "parallel", "step_first"])),
        "topology": _topology(random),
    }
    if random.random() < 0.3:
        options["probability"] = 0.5
    else:
        options["interval"] = int(random.integers(1, 3))
    return options


def _adpsgd(random: Random, workers: int, optimizer: str) -> Options:
    return {"interval": int(random.integers(1, 3)), "topology": _topology(random)}


_OPTIONS: dict[str, Callable[[Random, int, str], Options]] = {
    "allreduce": lambda random, workers, optimizer: {},
    "sasgd": _sasgd,
    "hierarchical": _hierarchical,
    "diloco": _diloco,
    "downpour": _downpour,
    "easgd": _easgd,
    "cyclic": _cyclic,
    "layered": _layered,
    "gossip": _gossip,
    "ssp": _ssp,
    "adpsgd": _adpsgd,
}
