"""The learning rates of the claims' runs: one file, made by ``paceline papers --sweep``."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.common.files import reason_of
from paceline.common.reading import read_bytes
from paceline.errors import UsageError
from paceline.strategies import make_strategy
from paceline.strategies.base import Strategy
from paceline.strategies.elastic import Elastic

RATES = Path(__file__).with_name("learning_rates.json")
HELD_AT = 8
"""The number of workers at which the rates of the first column are chosen."""

METHODS = {
    "sgd": "allreduce",
    "allreduce": "allreduce",
    "sasgd": "sasgd(interval=4)",
    "downpour": "downpour(push_interval=4, fetch_interval=4)",
    "eamsgd": "easgd(interval=4, momentum=0.9)",
    "cyclic": "cyclic(form=gradient, max_accumulated=4, scale=mean)",
    "cyclic-sum": "cyclic(form=gradient, max_accumulated=4, scale=sum)",
    "cyclic-fixed": "cyclic(form=gradient, max_accumulated=1)",
    "gossip": "gossip",
    "easgd": "easgd(interval=4)",
}
"""The methods of the claims; ``sgd`` is one worker: there every method is the plain optimizer."""

OWN_COUNTS = {
    "sgd": (1,),
    "sasgd": (4, 16),
    "downpour": (4, 16),
    "eamsgd": (4, 16),
    "allreduce": (32, 100),
    "gossip": (32, 100),
    "easgd": (32, 100),
}
"""The numbers of workers, beside 8, at which the rates of the second column are swept."""


def method(name: str) -> Strategy:
    """The strategy of a method of the claims."""
    return make_strategy(METHODS[name])


def momentum(name: str) -> float:
    """The momentum of a method; the workers' SGD is plain."""
    strategy = method(name)
    return strategy.momentum if isinstance(strategy, Elastic) else 0.0


@dataclass(frozen=True)
class LearningRates:
    """The recorded learning rates.

    Args:
        record: the file's content.
        sha256: the hash of the file; every verdict carries it.
    """

    record: dict[str, Any]
    sha256: str

    @classmethod
    def read(cls, path: Path) -> LearningRates:
        """Read a file made by a sweep."""
        try:
            content = read_bytes(path)
            record = json.loads(content)
        except OSError as error:
            raise UsageError(f"rates ({path}) cannot be read: {reason_of(error)}") from None
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not {"held", "own"} <= record.keys():
            raise UsageError(f"rates ({path}) must be a file made by papers --sweep")
        return cls(record, hashlib.sha256(content).hexdigest())

    def held(self, task: str, name: str) -> float:
        """The rate chosen at 8 workers, used for any number of workers."""
        return self._look_up("held", task, name)

    def own(self, task: str, name: str, workers: int) -> float:
        """The rate chosen at exactly this number of workers."""
        if workers == HELD_AT:
            return self.held(task, name)
        return self._look_up("own", task, "sgd" if workers == 1 else name, str(workers))

    def _look_up(self, *keys: str) -> float:
        value: Any = self.record
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, (int, float)):
            entry = ", ".join(keys)
            raise UsageError(f"the file of rates has none for {entry}: make it by papers --sweep")
        return float(value)
