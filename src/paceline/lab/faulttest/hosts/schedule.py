"""One run over many hosts: everything that decides it, drawn from a seed or parsed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, cast

from paceline.comm.limits import Limits
from paceline.common.options import above, at_least, build, one_of
from paceline.common.seeds import stream
from paceline.errors import UsageError

HOSTS = "hosts"
"""How the command, and the report of a campaign, name this world."""
SYNCHRONOUS = ("sum", "slices", "broadcast")
OWN = ("post", "shout", "publish", "peek", "shelve", "draw", "push", "rest")
ACTS = (*SYNCHRONOUS, *OWN, "meet", "flood")
"""What a worker may do. Who meets does nothing that needs all the others at once."""
KINDS = ("kill", "stop", "cut", "drop", "join")


@dataclass(frozen=True, kw_only=True)
class HostsFault:
    """A fault.

    Args:
        kind: ``kill`` ends a process, ``stop`` stops it, ``cut`` cuts its host off, ``drop`` breaks
            its connections, ``join`` starts a rank that comes late.
        rank: whose process it strikes; -1 is the registrar.
        peer: of a cut or a drop, the rank (-1: the registrar) on the other end; all, if there is
            none.
        at_s: when, after all have started.
        at_act: or rather when the process has sent so many frames since then.
        for_s: how long a stop or a cut lasts.
        again_s: after how long another process is started for the rank; never, if there is none.
    """

    kind: Literal["kill", "stop", "cut", "drop", "join"]
    rank: int
    peer: int | None = None
    at_s: float = 0.0
    at_act: int | None = None
    for_s: float = 0.5
    again_s: float | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        at_least("rank", self.rank, -1)
        if self.kind == "join" and self.at_act is not None:
            raise UsageError("join: at_act must not be given: there is no process yet")
        for name in ("at_s", "at_act", "for_s", "again_s"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class HostsSchedule:
    """One run.

    Args:
        world: names this kind of run.
        workers: the number of workers.
        server: whether there is a server beside them, the last rank.
        acts: what each worker does, in this order.
        seed: decides all that is random in the run.
        pause_s: how long a worker computes before each act, at most.
        latency_s: about how long a frame takes.
        room: how many frames a connection takes before it has no room.
        dead_s: see :class:`~paceline.comm.limits.Limits`.
        ranks_per_host: how many ranks share a host.
        apart: whether the registrar has a host of its own; else it shares that of rank 0.
        agents: whether other hosts tell the registrar how their processes are.
        faults: the faults to inject.
    """

    world: Literal["hosts"] = "hosts"
    workers: int = 3
    server: bool = False
    acts: tuple[str, ...] = ("sum", "draw", "post")
    seed: int = 0
    pause_s: float = 0.1
    latency_s: float = 1e-3
    room: int = 1000
    dead_s: float = 1.0
    ranks_per_host: int = 1
    apart: bool = False
    agents: bool = False
    faults: tuple[HostsFault, ...] = ()

    def __post_init__(self) -> None:
        one_of("world", self.world, (HOSTS,))
        at_least("workers", self.workers, 1)
        at_least("ranks_per_host", self.ranks_per_host, 1)
        at_least("room", self.room, 1)
        for name in ("pause_s", "latency_s", "dead_s"):
            above(name, getattr(self, name), 0)
        for act in self.acts:
            one_of("act", act, ACTS)
        if "meet" in self.acts and self.sums:
            raise UsageError("acts: who meets must not sum: one could wait for another for ever")
        if "push" in self.acts and not self.server:
            raise UsageError("acts: push needs a server")
        for fault in self.faults:
            for rank in (fault.rank, fault.peer):
                if rank is not None and not -1 <= rank < self.size:
                    raise UsageError(f"{fault.kind}: rank ({rank}) must be below {self.size}")

    # Text ----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        fields = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default or field.name == "world"
        }
        if self.faults:
            fields["faults"] = [
                {
                    field.name: value
                    for field in dataclasses.fields(fault)
                    if (value := getattr(fault, field.name)) != field.default
                }
                for fault in self.faults
            ]
        return json.dumps(fields)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> HostsSchedule:
        """The schedule that these fields describe."""
        return build(cls, fields, "schedule")

    def but(self, **changes: Any) -> HostsSchedule:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)

    # Derived values ------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """How reports name it."""
        return HOSTS

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.workers + self.server

    @property
    def sums(self) -> bool:
        """Whether workers sum; then one that is lost stays away."""
        return bool({*self.acts} & {*SYNCHRONOUS})

    @property
    def late(self) -> tuple[int, ...]:
        """The ranks that come after the beginning."""
        return tuple(sorted({fault.rank for fault in self.faults if fault.kind == "join"}))

    @property
    def limits(self) -> Limits:
        """The time limits of the ranks."""
        return Limits(dead_s=self.dead_s, progress_limit_s=60.0, notice_s=1e9)

    def host_of(self, rank: int) -> int:
        """The number of the host that a rank, or the registrar, is on."""
        if rank >= 0:
            return rank // self.ranks_per_host
        return self.host_of(self.size - 1) + 1 if self.apart else 0

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.host_of(self.size - 1) + 1 + self.apart


# Drawing a schedule ------------------------------------------------------------------------------


def draw_hosts(seed: int) -> HostsSchedule:
    """Draw the schedule for ``seed``."""
    random = Random(int(stream(seed, "fault test of hosts").integers(1 << 60)))
    workers, server = random.choice((2, 3, 3, 4, 5)), random.random() < 0.5
    kinds = [*OWN, "meet"] if random.random() < 0.4 else [*SYNCHRONOUS, *OWN]
    kinds = [kind for kind in kinds if kind != "push" or server]
    favorites = random.sample(kinds, 4)
    if server and random.random() < 0.8:
        favorites[0] = "push"
    schedule = HostsSchedule(
        workers=workers,
        server=server,
        acts=tuple(random.choice(favorites) for _ in range(random.randint(4, 14))),
        seed=random.randrange(1 << 30),
        pause_s=random.choice((0.02, 0.1, 0.3, 1.0)),
        latency_s=random.choice((1e-4, 1e-3, 0.01, 0.05)),
        room=random.choice((2, 8, 1000, 1000)),
        dead_s=random.choice((1.0, 1.5)),
        ranks_per_host=random.choice((1, 1, 2)),
        apart=random.random() < 0.5,
        agents=random.random() < 0.4,
    )
    if random.random() < 0.3:
        return _at_commit_point(schedule, random)
    schedule = _with_floods(schedule, Random(f"{seed} floods"))
    drawing = _Drawing(schedule, random)
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4))):
        drawing.add()
    return schedule.but(faults=tuple(drawing.faults))


def _with_floods(schedule: HostsSchedule, random: Random) -> HostsSchedule:
    """The same, where ranks share hosts with more large messages than fit into their memory."""
    acts = [*schedule.acts]
    for _ in range(random.choice((1, 2, 4)) if schedule.ranks_per_host > 1 else 0):
        acts.insert(random.randint(0, len(acts)), "flood")
    return schedule.but(acts=tuple(acts))


def _at_commit_point(schedule: HostsSchedule, random: Random) -> HostsSchedule:
    """The same schedule, with losses in the middle of sums that some have and others have not."""
    two = random.random() < 0.5
    schedule = schedule.but(
        workers=random.choice((3, 4, 4)),
        server=False,
        acts=tuple(random.choice(("sum", "sum", "slices")) for _ in range(random.randint(2, 6))),
        pause_s=random.choice((0.3, 1.0)) if two else random.choice((0.02, 0.1)),
        latency_s=random.choice((1e-3, 0.01, 0.03)),
        ranks_per_host=1,
        agents=True,
    )
    if held := not two and random.random() < 0.6:
        schedule = schedule.but(apart=True, pause_s=0.3)
    drawing = _Drawing(schedule, random)
    if held:
        last = drawing.kill_held_up()
    else:
        last = drawing.kill_two() if two else drawing.kill_behind_cut()
    return schedule.but(faults=(*drawing.faults, *filter(None, [last])))


class _Drawing:
    """Draws faults that leave one worker alone, which starts with the run."""

    def __init__(self, schedule: HostsSchedule, random: Random) -> None:
        self._schedule, self._random = schedule, random
        self._spared = random.randrange(schedule.workers)
        self._struck: set[int] = set()
        self._late: set[int] = set()
        self.faults: list[HostsFault] = []

    def add(self) -> None:
        """Draw one fault, if one of the drawn kind is possible."""
        kinds = (
            self._kill,
            self._kill,
            self._stop,
            self._stop,
            self._cut,
            self._cut,
            self._drop,
            self._drop,
            self._end_registrar,
            self._end_registrar,
            self._join,
            self.kill_behind_cut,
            self.kill_two,
        )
        fault = self._random.choice(kinds)()
        if fault is not None:
            self.faults.append(fault)

    def _when(self, rank: int) -> dict[str, Any]:
        if rank not in self._late and self._random.random() < 0.6:
            return {"at_act": int(self._random.choice((10, 40, 150)) * self._random.random())}
        return {"at_s": round(self._random.choice((0.5, 2.0)) * self._random.random(), 3)}

    def _victim(self) -> int | None:
        spared = {*self._struck, self._spared}
        ranks = [rank for rank in range(self._schedule.size) if rank not in spared]
        if not ranks:
            return None
        victim: int = self._random.choice(ranks)
        self._struck.add(victim)
        return victim

    def _again_s(self, rank: int) -> float | None:
        if rank < self._schedule.workers and (self._schedule.sums or self._random.random() < 0.5):
            return None  # a server is always followed
        return round(0.05 + 1.5 * self._random.random(), 3)

    def _long_s(self) -> float:
        return round(self._schedule.dead_s * (1.2 + 2 * self._random.random()), 3)

    def _short_s(self) -> float:
        return round(self._schedule.dead_s * (0.05 + 0.6 * self._random.random()), 3)

    def _kill(self) -> HostsFault | None:
        if (rank := self._victim()) is None:
            return None
        return HostsFault(kind="kill", rank=rank, again_s=self._again_s(rank), **self._when(rank))

    def kill_behind_cut(self) -> HostsFault | None:
        """Kill a rank while what it sends another, and what that hears of it, is held up."""
        if (fault := self._kill()) is None:
            return None
        at_s, peer = round(self._random.random(), 3), self._random.randrange(self._schedule.workers)
        for other in self._random.choice(((fault.rank,), (fault.rank, -1))):
            self.faults.append(
                HostsFault(kind="cut", rank=peer, peer=other, at_s=at_s, for_s=self._short_s())
            )
        return dataclasses.replace(fault, at_s=at_s, at_act=self._random.randrange(20))

    def kill_held_up(self) -> HostsFault | None:
        """Kill a rank while all it sends is held up; one gets that before it hears of the death."""
        if (fault := self._kill()) is None:
            return None
        others = [rank for rank in range(self._schedule.workers) if rank != fault.rank]
        at_s, dead_s = round(0.5 * self._random.random(), 3), self._schedule.dead_s
        unaware, held_s = self._random.choice(others), round(0.75 * dead_s, 3)
        cuts = [(fault.rank, rank, held_s + 0.2 * (rank != unaware)) for rank in others]
        for rank, peer, for_s in [*cuts, (unaware, -1, held_s + 0.2)]:
            self.faults.append(HostsFault(kind="cut", rank=rank, peer=peer, at_s=at_s, for_s=for_s))
        kill_s = round(at_s + dead_s * (0.3 + 0.2 * self._random.random()), 3)
        return dataclasses.replace(fault, at_s=kill_s, at_act=None)

    def kill_two(self) -> HostsFault | None:
        """Kill two ranks one soon after the other."""
        first, second = self._kill(), self._kill()
        if first is None or second is None:
            return first
        later_s = round(first.at_s + 0.8 * self._random.random(), 3)
        self.faults.append(first)
        return dataclasses.replace(second, at_s=later_s, at_act=None)

    def _stop(self) -> HostsFault | None:
        if self._random.random() < 0.4:
            rank = self._random.randrange(self._schedule.size)
            return HostsFault(kind="stop", rank=rank, for_s=self._short_s(), **self._when(rank))
        if (victim := self._victim()) is None:
            return None
        again_s = self._again_s(victim) if self._random.random() < 0.5 else None
        when = self._when(victim)
        return HostsFault(kind="stop", rank=victim, for_s=self._long_s(), again_s=again_s, **when)

    def _cut(self) -> HostsFault | None:
        """Cut one host off from another, or from all; the spared worker keeps the registrar."""
        schedule, random = self._schedule, self._random
        if random.random() < 0.5:
            rank, peer = random.randrange(-1, schedule.size), random.randrange(-1, schedule.size)
            near = schedule.host_of(-1) in (schedule.host_of(rank), schedule.host_of(peer))
            for_s = self._short_s() if near or random.random() < 0.5 else self._long_s()
            return HostsFault(kind="cut", rank=rank, peer=peer, for_s=for_s, **self._when(rank))
        if (victim := self._victim()) is None:
            return None
        host = schedule.host_of(victim)
        if host in (schedule.host_of(-1), schedule.host_of(self._spared)):
            return None
        again_s = self._again_s(victim) if random.random() < 0.3 else None
        whom = -1 if random.random() < 0.3 else None
        when = self._when(victim)
        return HostsFault(
            kind="cut", rank=victim, peer=whom, for_s=self._long_s(), again_s=again_s, **when
        )

    def _drop(self) -> HostsFault:
        rank = self._random.randrange(self._schedule.size)
        peer = self._random.choice((None, -1, self._random.randrange(self._schedule.size)))
        return HostsFault(kind="drop", rank=rank, peer=peer, **self._when(rank))

    def _end_registrar(self) -> HostsFault:
        kind = self._random.choice(("kill", "kill", "stop"))
        for_s = self._long_s() if self._random.random() < 0.5 else self._short_s()
        again_s = round(0.6 * self._random.random(), 3) if kind == "kill" else None
        return HostsFault(
            kind=cast(Any, kind), rank=-1, for_s=for_s, again_s=again_s, **self._when(-1)
        )

    def _join(self) -> HostsFault | None:
        named = {rank for fault in self.faults for rank in (fault.rank, fault.peer)}
        named |= self._struck | {self._spared}
        others = [rank for rank in range(self._schedule.workers) if rank not in named]
        if not others:
            return None
        rank = self._random.choice(others)
        self._late.add(rank)
        return HostsFault(kind="join", rank=rank, at_s=round(2 * self._random.random(), 3))
