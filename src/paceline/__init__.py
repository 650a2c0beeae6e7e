"""Paceline: distributed training of PyTorch models when lockstep is the wrong answer.

.. code-block:: python

    import paceline as pl

    pl.launch(train, workers=4, strategy="sasgd")        # real processes
    pl.simulate(train, workers=64, strategy="sasgd")     # virtual time
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline._version import __version__

if TYPE_CHECKING:
    from paceline.comm.base import Comm, Limits
    from paceline.errors import (
        CommTimeout,
        Deadlock,
        PacelineError,
        PeerLost,
        UsageError,
        WorkerFailed,
    )
    from paceline.results import Result
    from paceline.run import init, launch, simulate
    from paceline.sim.cluster import Cluster
    from paceline.sim.faults import cut, degrade, freeze, join, kill, slow
    from paceline.strategies.base import Strategy
    from paceline.worker import Worker

_HOMES = {
    "Cluster": "paceline.sim.cluster",
    "Comm": "paceline.comm.base",
    "CommTimeout": "paceline.errors",
    "Deadlock": "paceline.errors",
    "Limits": "paceline.comm.base",
    "PacelineError": "paceline.errors",
    "PeerLost": "paceline.errors",
    "Result": "paceline.results",
    "Strategy": "paceline.strategies.base",
    "UsageError": "paceline.errors",
    "Worker": "paceline.worker",
    "WorkerFailed": "paceline.errors",
    "cut": "paceline.sim.faults",
    "degrade": "paceline.sim.faults",
    "freeze": "paceline.sim.faults",
    "init": "paceline.run",
    "join": "paceline.sim.faults",
    "kill": "paceline.sim.faults",
    "launch": "paceline.run",
    "simulate": "paceline.run",
    "slow": "paceline.sim.faults",
}

__all__ = [
    "Cluster",
    "Comm",
    "CommTimeout",
    "Deadlock",
    "Limits",
    "PacelineError",
    "PeerLost",
    "Result",
    "Strategy",
    "UsageError",
    "Worker",
    "WorkerFailed",
    "__version__",
    "cut",
    "degrade",
    "freeze",
    "init",
    "join",
    "kill",
    "launch",
    "simulate",
    "slow",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import paceline`` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
