"""Run a program on every rank of any world, and return its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.comm.limits import Limits
from paceline.comm.membership import MembershipPolicy
from paceline.common.faults import Fault
from paceline.common.reference import refer_to
from paceline.launcher.supervisor import run_ranks
from paceline.sim.cluster import load_cluster
from paceline.sim.world import SimulatedPorts, World
from support import programs

TRANSPORTS = ("simulated", "shared_memory", "distributed", "hosts")
WORLDS = (*TRANSPORTS, "keeper")
"""The worlds of the contract. In ``keeper``, vectors lie in memory that a keeper holds: of the host
in place of a device, or of the GPU that PACELINE_TEST_DEVICE names."""
KEPT = programs.KEPT
on_shared_memory = pytest.mark.transport("shared_memory")
on_distributed = pytest.mark.transport("distributed")
on_hosts = pytest.mark.transport("hosts")
on_both = pytest.mark.parametrize(
    "world",
    [
        pytest.param("shared_memory", marks=on_shared_memory),
        pytest.param("distributed", marks=on_distributed),
    ],
)


@dataclass
class ProgramOutcome:
    """What ranks returned, the messages they sent, and the error that ended the run."""

    returned: list[Any] = field(default_factory=list)
    messages: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def values(self) -> list[Any]:
        """What each rank returned; raises the error that ended the run, if any."""
        if self.error is not None:
            raise self.error
        return self.returned


@dataclass
class _Channel:
    rank: int
    messages: list[tuple[int, dict[str, Any]]]

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append((self.rank, message))


def run_program(
    transport: str,
    program: Callable[..., Any],
    size: int,
    *,
    limits: Limits | None = None,
    faults: Sequence[Fault] = (),
    cluster: str = "ethernet-1g",
    policy: MembershipPolicy | None = None,
    **argument: Any,
) -> ProgramOutcome:
    """Run ``program(transport, channel, argument)`` on ``size`` ranks of a world.

    ``policy`` tells the launcher of a real world what it does when a rank is lost.
    """
    outcome = ProgramOutcome()
    try:
        if transport == "simulated":
            _simulate(outcome, program, size, limits, faults, cluster, argument)
        else:
            kept = transport == "keeper"
            outcome.returned = run_ranks(
                refer_to(programs.run_on_device) if kept else refer_to(program),
                [argument | {"program": refer_to(program)} if kept else argument] * size,
                transport="shared_memory" if kept else transport,
                device=KEPT if kept else None,
                limits=limits,
                policy=policy,
                on_message=lambda rank, message: outcome.messages.append((rank, message)),
            )
    except Exception as error:
        outcome.error = error
    return outcome


def _simulate(
    outcome: ProgramOutcome,
    program: Callable[..., Any],
    size: int,
    limits: Limits | None,
    faults: Sequence[Fault],
    cluster: str,
    argument: dict[str, Any],
) -> None:
    values: dict[int, Any] = {}
    world = World(load_cluster(cluster), size, seed=0, limits=limits or Limits(), faults=faults)

    def body(transport: SimulatedPorts) -> None:
        channel = _Channel(transport.rank, outcome.messages)
        values[transport.rank] = program(transport, channel, argument)

    world.run(body)
    outcome.returned = [values.get(rank) for rank in range(size)]
