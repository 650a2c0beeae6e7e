"""Run many simulations on all cores, each once, for comparisons and experiments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.common.faults import Fault
from paceline.common.files import make_folder, write_private
from paceline.common.options import build
from paceline.common.reading import read_object
from paceline.common.reference import Reference, plain_json
from paceline.errors import PacelineError
from paceline.lab.pool import cores, run_jobs, serve_jobs
from paceline.lab.tasks.recipe import BUILT_IN
from paceline.launcher.simulate import simulate
from paceline.record.folder import provenance
from paceline.record.result import Result
from paceline.sim.cluster import Cluster
from paceline.strategies.base import Strategy
from paceline.strategies.packing import pack_strategy, unpack_strategy

PROGRAM = "paceline.lab.trials"
"""What the processes of a pool run: this module."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The description of a simulated run that another process can run.

    Args:
        strategy: the method.
        workers: the number of workers.
        cluster: the simulated cluster.
        seed: the seed of the run.
        arguments: keyword arguments of the training function; JSON data.
        faults: the faults to inject.
        on_loss, max_restarts: what the run does about losses.
        train: where to find the training function; by default that of the built-in task.
        device, batched: where and how the gradients are computed.
    """

    strategy: Strategy
    workers: int
    cluster: Cluster
    seed: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    on_loss: str | None = None
    max_restarts: int = 0
    train: Reference = field(default_factory=lambda: BUILT_IN)
    device: str = "cpu"
    batched: str = "off"

    def config(self) -> dict[str, Any]:
        """Everything that decides the outcome, except the versions of the software."""
        policy = {"on_loss": self.on_loss, "max_restarts": self.max_restarts}
        where = {"device": (self.device, "cpu"), "batched": (self.batched, "off")}
        return {
            **{name: value for name, value in policy.items() if value},
            **{name: value for name, (value, usual) in where.items() if value != usual},
            "train": self.train,
            "strategy": pack_strategy(self.strategy),
            "workers": self.workers,
            "cluster": _without_none(asdict(self.cluster)),
            "seed": self.seed,
            "arguments": plain_json("arguments", dict(self.arguments)),
            "faults": [_without_none(asdict(fault)) for fault in self.faults],
        }

    def key(self) -> str:
        """The configuration as text: the key of its outcome in an :class:`OutcomeCache`."""
        return json.dumps(self.config(), sort_keys=True)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Trial:
        """The trial that :meth:`config` describes."""
        return cls(
            **{
                **config,
                "strategy": unpack_strategy(config["strategy"]),
                "cluster": build(Cluster, config["cluster"], "cluster"),
                "faults": tuple(build(Fault, fault, "fault") for fault in config["faults"]),
            }
        )

    def run(self) -> TrialOutcome:
        """Run the simulation in this process."""
        try:
            result = simulate(
                self.train,
                workers=self.workers,
                strategy=self.strategy,
                cluster=self.cluster,
                seed=self.seed,
                faults=self.faults,
                on_loss=self.on_loss,
                max_restarts=self.max_restarts,
                arguments=self.arguments,
                device=self.device,
                batched=self.batched,
            )
        except PacelineError as error:
            return TrialOutcome(error=str(error), exit_code=error.exit_code)
        return TrialOutcome(result=result)


@dataclass(frozen=True, kw_only=True)
class TrialOutcome:
    """The outcome of a trial: a result, or the error that ended it."""

    result: Result | None = None
    error: str | None = None
    exit_code: int = 0

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrialOutcome:
        """The outcome from which ``asdict`` made ``fields``."""
        result = fields["result"]
        return cls(**{**fields, "result": None if result is None else Result(**result)})


def run_trials(
    trials: Sequence[Trial],
    *,
    folder: Path | None = None,
    processes: int | None = None,
    on_done: Callable[[int, TrialOutcome], None] | None = None,
) -> list[TrialOutcome]:
    """Run the trials on all cores; return the outcomes in the order of ``trials``.

    Args:
        trials: equal ones are run once.
        folder: caches each outcome as soon as it is known; a trial whose outcome is there, from
            the same versions of the software, is not run again.
        processes: how many runs at a time; by default one per core.
        on_done: called with the index of a trial and its outcome, in the order in which they end.
    """
    cache = OutcomeCache(folder)
    configs = [trial.key() for trial in trials]
    indices: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        indices.setdefault(config, []).append(index)
    outcomes: dict[str, TrialOutcome] = {}

    def note(config: str, outcome: TrialOutcome) -> None:
        outcomes[config] = outcome
        for index in indices[config]:
            if on_done is not None:
                on_done(index, outcome)

    todo = []
    for config in indices:
        cached = cache.find(config)
        if cached is None:
            todo.append(config)
        else:
            note(config, cached)
    for config, result in run_jobs(todo, PROGRAM, run_trial, processes or cores()):
        outcome = TrialOutcome.from_dict(json.loads(result))
        cache.add(config, result)
        note(config, outcome)
    return [outcomes[config] for config in configs]


def run_trial(config: str) -> str:
    """Run one trial; its configuration and its outcome are JSON."""
    return json.dumps(asdict(Trial.from_config(json.loads(config)).run()))


class OutcomeCache:
    """Outcomes in a folder; the file name is a hash of configuration, script and versions."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._provenance = folder, provenance()
        self._versions = json.dumps(self._provenance["versions"], sort_keys=True)
        if folder is not None:
            make_folder(folder)

    def find(self, config: str) -> TrialOutcome | None:
        """The outcome of a configuration, if its file exists and is complete."""
        path = self.path(config)
        try:
            return None if path is None else TrialOutcome.from_dict(read_object(path)["outcome"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def add(self, config: str, outcome: str) -> None:
        """Write an outcome to its file, with the versions and the platform that made it."""
        path = self.path(config)
        if path is not None:
            made = json.dumps(self._provenance)
            text = f'{{"config": {config}, "made": {made}, "outcome": {outcome}}}\n'
            write_private(path, text)

    def path(self, config: str) -> Path | None:
        """The file of a configuration."""
        if self._folder is None:
            return None
        script = json.loads(config)["train"].get("script")
        source = Path(script).read_bytes() if script and Path(script).is_file() else b""
        key = hashlib.sha256(f"{self._versions} {config}".encode() + source).hexdigest()[:20]
        return self._folder / f"{key}.json"


def _without_none(value: Any) -> Any:
    """``value`` without the entries of nested dicts that are None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


if __name__ == "__main__":
    serve_jobs(run_trial)
