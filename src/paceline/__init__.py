"""Paceline: distributed training of PyTorch models when lockstep is the wrong answer.

.. code-block:: python

    import paceline as pl

    pl.launch(train, workers=4, strategy="sasgd")        # real processes
    pl.simulate(train, workers=64, strategy="sasgd")     # virtual time
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline._version import __version__ as __version__

if TYPE_CHECKING:
    from paceline.comm.comm import Comm as Comm
    from paceline.comm.limits import Limits as Limits
    from paceline.comm.ports import Lost as Lost
    from paceline.common.faults import cut as cut
    from paceline.common.faults import degrade as degrade
    from paceline.common.faults import freeze as freeze
    from paceline.common.faults import join as join
    from paceline.common.faults import kill as kill
    from paceline.common.faults import slow as slow
    from paceline.errors import CommTimeout as CommTimeout
    from paceline.errors import Deadlock as Deadlock
    from paceline.errors import PacelineError as PacelineError
    from paceline.errors import PeerLost as PeerLost
    from paceline.errors import UsageError as UsageError
    from paceline.errors import WorkerFailed as WorkerFailed
    from paceline.launcher.init import init as init
    from paceline.launcher.launch import launch as launch
    from paceline.launcher.paced import paced as paced
    from paceline.launcher.simulate import simulate as simulate
    from paceline.model.gradient import Gradient as Gradient
    from paceline.record.result import Result as Result
    from paceline.sim.cluster import Cluster as Cluster
    from paceline.strategies.base import Strategy as Strategy
    from paceline.training.worker import Worker as Worker

_MODULES = {
    "Cluster": "paceline.sim.cluster",
    "Comm": "paceline.comm.comm",
    "CommTimeout": "paceline.errors",
    "Deadlock": "paceline.errors",
    "Gradient": "paceline.model.gradient",
    "Limits": "paceline.comm.limits",
    "Lost": "paceline.comm.ports",
    "PacelineError": "paceline.errors",
    "PeerLost": "paceline.errors",
    "Result": "paceline.record.result",
    "Strategy": "paceline.strategies.base",
    "UsageError": "paceline.errors",
    "Worker": "paceline.training.worker",
    "WorkerFailed": "paceline.errors",
    "cut": "paceline.common.faults",
    "degrade": "paceline.common.faults",
    "freeze": "paceline.common.faults",
    "init": "paceline.launcher.init",
    "join": "paceline.common.faults",
    "kill": "paceline.common.faults",
    "launch": "paceline.launcher.launch",
    "paced": "paceline.launcher.paced",
    "simulate": "paceline.launcher.simulate",
    "slow": "paceline.common.faults",
}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import paceline`` loads no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
