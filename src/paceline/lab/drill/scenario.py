"""A scenario: what is trained, what goes wrong, and what has to come of it; a small TOML file.

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

The same file runs in real processes and in the simulator, unless its ``kind`` is one that only real
processes know.
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
]


@dataclass(frozen=True, kw_only=True)
class Expect:
    """What has to come of a scenario; what is None is not looked at.

    Args:
        lost: how many workers the run says it has lost.
        joined: how many have come late or again.
        succeeded: how many ranks that are no workers were followed by another.
        notice_s: within which time the others have noticed.
        gap_s: for how long no survivor is without a step.
        lockstep_gap_s: the same for synchronous methods.
        token_gap_s: the same for ``cyclic``, whose token may be with the rank that is stopped.
        dropped: how many updates are dropped, at least.
        throughput: samples/s of the run after the fault, at least, over those before.
        exit_code: of the run.
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
        """For how long no survivor of a run with this method is without a step."""
        other_s = self.token_gap_s if isinstance(method, Cyclic) else None
        if method.synchronous:
            other_s = self.lockstep_gap_s
        return self.gap_s if other_s is None else other_s


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One case of the drill.

    Args:
        about: the case in words.
        ids: the cases of the list of faults that it stands for.
        kind: how it is made to happen.
        methods: the methods that it is tried with, unless all are asked for.
        only: whether it makes sense for these methods alone.
        long: whether it takes so long that it is left out, unless it is named or all are asked for.
        workers: how many.
        epochs: of the built-in task.
        dead_s: after which time a stopped rank is lost.
        max_restarts: how many workers are started again.
        faults: what goes wrong.
        poisoned: a worker whose gradients are not finite, from its step 100 on.
        lives: which life each of these ranks has to begin before the run may end.
        expect: what has to come of it.
        unreached: why a method does not reach a figure, by ``METHOD throughput`` or ``accuracy``.
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
    poisoned: int | None = None
    lives: dict[int, int] = field(default_factory=dict)
    expect: Expect = field(default_factory=Expect)
    unreached: dict[str, str] = field(default_factory=dict)

    @property
    def virtual(self) -> bool:
        """Whether the simulator can run it."""
        return self.kind in ("faults", "exception")


def load_scenarios() -> dict[str, Scenario]:
    """All scenarios by name, in the order of their files."""
    folder = resources.files("paceline.lab.drill") / "cases"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {
        file.name[3:-5]: build(Scenario, tomllib.loads(file.read_text("utf-8")), file.name)
        for file in files
    }


def find_scenario(name: str) -> Scenario:
    """The scenario of a name."""
    scenarios = load_scenarios()
    if name not in scenarios:
        raise unknown("case", name, scenarios)
    return scenarios[name]
