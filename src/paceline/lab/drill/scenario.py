"""A scenario of the drill, as a small TOML file: the training, its faults, and expectations.

.. code-block:: toml

    about = "kill -9 of one of four workers"
    ids = ["F01", "F02"]
    methods = ["allreduce", "gossip", "cyclic", "downpour"]
    epochs = 12

    [[faults]]
    kind = "kill"
    rank = 1
    at_step = 40

    [expect]
    lost = 1
    gap_s = 3.0

The same file runs in real processes and in the simulator, unless its ``kind`` needs real processes.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from importlib import resources
from typing import Literal

from paceline.common.faults import Fault
from paceline.common.options import build
from paceline.errors import unknown
from paceline.strategies.base import Strategy
from paceline.strategies.cyclic import Cyclic

Kind = Literal[
    "faults",
    "exception",
    "interrupt",
    "launcher",
    "two_runs",
    "kill_while_saving",
    "kill_all",
    "spoil",
    "fill_disk",
    "end_by_signal",
    "hosts",
    "resume_hosts",
]
What = Literal[
    "kill_worker",
    "kill_server",
    "kill_registrar",
    "kill_processes",
    "power_off",
    "stop",
    "cut",
    "deafen",
    "join",
]


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What a scenario must lead to; None means any value.

    Args:
        lost: how many workers the run reports as lost.
        joined: how many workers join late or rejoin.
        succeeded: how many servers or communicators get a successor.
        notice_s: the time within which the others must notice.
        gap_s: the longest time that a survivor may be without a step.
        lockstep_gap_s: the same for synchronous methods.
        token_gap_s: the same for ``cyclic``: the stopped rank may hold the token.
        dropped: the least number of dropped updates.
        throughput: the least samples/s after the fault, over those before.
        exit_code: the exit code of the run.
    """

    lost: int | None = 0
    joined: int | None = 0
    succeeded: int | None = 0
    notice_s: float | None = None
    gap_s: float | None = None
    lockstep_gap_s: float | None = None
    token_gap_s: float | None = None
    dropped: int = 0
    throughput: float | None = None
    exit_code: int = 0

    def longest_gap_s(self, method: Strategy) -> float | None:
        """The longest time that a survivor may be without a step, with this method."""
        other_s = self.token_gap_s if isinstance(method, Cyclic) else None
        if method.synchronous:
            other_s = self.lockstep_gap_s
        return self.gap_s if other_s is None else other_s


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What the drill does to a run over many hosts, from outside.

    Args:
        what: kill the ``worker``, the ``server`` or the ``registrar``, or all ``processes`` of the
            host; ``power_off`` the host; ``stop`` the worker; ``cut`` the host off; ``deafen`` it:
            what others send to it is lost; let it ``join``.
        host: which one, from 0; from the end if it is negative. The worker and the server are its
            first ones.
        after_s: when, counted from the first step.
        for_s: how long it lasts; None: for good.
    """

    what: What
    host: int = -1
    after_s: float = 2.0
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One case of the drill.

    Args:
        about: the case in words.
        ids: the numbers of the faults that it covers, in the list of faults.
        kind: what is done to the run.
        methods: the methods to run, unless ``--full`` asks for all.
        only: whether it makes sense for these methods only.
        long: whether it takes so long that it runs only if named, or with ``--full``.
        workers: the number of workers; over many hosts, two on each.
        epochs: the epochs of the built-in task.
        dead_s: a rank that is stopped for longer is lost.
        max_restarts: how many lost workers are restarted.
        faults: the faults to inject.
        strikes: what is done to a run over many hosts.
        rate_mbit, delay_ms: the links between the hosts; None for no limit.
        poisoned: a worker whose gradients are not finite from its step 100 on.
        incarnations: the incarnation that each of these ranks must reach before the run may end.
        expect: what the scenario must lead to.
        unreached: why a method misses a figure, by ``METHOD throughput`` or ``METHOD accuracy``.
    """

    about: str
    ids: tuple[str, ...]
    kind: Kind = "faults"
    methods: tuple[str, ...] = ("allreduce", "gossip", "cyclic")
    only: bool = False
    long: bool = False
    workers: int = 4
    epochs: int = 12
    dead_s: float = 5.0
    max_restarts: int = 0
    faults: tuple[Fault, ...] = ()
    strikes: tuple[Strike, ...] = ()
    rate_mbit: float | None = None
    delay_ms: float = 0.0
    poisoned: int | None = None
    incarnations: dict[int, int] = field(default_factory=dict)
    expect: Expect = field(default_factory=Expect)
    unreached: dict[str, str] = field(default_factory=dict)

    @property
    def virtual(self) -> bool:
        """Whether the simulator can run it."""
        return self.kind in ("faults", "exception")

    @property
    def on_hosts(self) -> bool:
        """Whether it needs many hosts."""
        return self.kind in ("hosts", "resume_hosts")


def load_scenarios() -> dict[str, Scenario]:
    """All scenarios by name, in the order of their files."""
    folder = resources.files("paceline.lab.drill") / "cases"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {
        file.name[3:-5]: build(Scenario, tomllib.loads(file.read_text("utf-8")), file.name)
        for file in files
    }


def find_scenario(name: str) -> Scenario:
    """The scenario with this name."""
    scenarios = load_scenarios()
    if name not in scenarios:
        raise unknown("case", name, scenarios)
    return scenarios[name]
