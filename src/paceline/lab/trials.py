"""Many simulated runs on all cores, each made once, for comparisons and experiments."""

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
from paceline.lab.pool import answers, cores, serve
from paceline.lab.tasks.recipe import BUILT_IN
from paceline.launcher.simulate import simulate
from paceline.record.folder import provenance
from paceline.record.result import Result
from paceline.sim.cluster import Cluster
from paceline.strategies.base import Strategy
from paceline.strategies.packing import pack_strategy, unpack_strategy


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulated run, told so that another process can make it.

    Args:
        train: where the training function is found; the built-in task's when not given.
        arguments: more keyword arguments for it; numbers, texts, lists and dicts.
    """

    strategy: Strategy
    workers: int
    cluster: Cluster
    seed: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    train: Reference = field(default_factory=lambda: BUILT_IN)

    def config(self) -> dict[str, Any]:
        """All that decides the outcome, beside the versions."""
        return {
            "train": self.train,
            "strategy": pack_strategy(self.strategy),
            "workers": self.workers,
            "cluster": _without_none(asdict(self.cluster)),
            "seed": self.seed,
            "arguments": plain_json("arguments", dict(self.arguments)),
            "faults": [_without_none(asdict(fault)) for fault in self.faults],
        }

    def key(self) -> str:
        """The same as text: what a :class:`Book` finds its outcome by."""
        return json.dumps(self.config(), sort_keys=True)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Trial:
        """The trial that :meth:`config` tells of."""
        return cls(
            **{
                **config,
                "strategy": unpack_strategy(config["strategy"]),
                "cluster": build(Cluster, config["cluster"], "cluster"),
                "faults": tuple(build(Fault, fault, "fault") for fault in config["faults"]),
            }
        )

    def run(self) -> Outcome:
        """Make the run, in this process."""
        try:
            result = simulate(
                self.train,
                workers=self.workers,
                strategy=self.strategy,
                cluster=self.cluster,
                seed=self.seed,
                faults=self.faults,
                arguments=self.arguments,
            )
        except PacelineError as error:
            return Outcome(error=str(error), exit_code=error.exit_code)
        return Outcome(result=result)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a trial: a result, or the error that ended it."""

    result: Result | None = None
    error: str | None = None
    exit_code: int = 0

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Outcome:
        """The outcome that ``asdict`` made this of."""
        result = told["result"]
        return cls(**{**told, "result": None if result is None else Result(**result)})


def run_trials(
    trials: Sequence[Trial],
    *,
    folder: Path | None = None,
    processes: int | None = None,
    on_done: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Make the runs, on all cores; the outcomes in the order of ``trials``.

    Args:
        trials: equal ones are run once.
        folder: keeps each outcome as soon as it is there; those that are in it already, of the same
            trial and versions, are not made again.
        processes: how many runs at a time; one a core when not given.
        on_done: called with the place of a trial and its outcome, in the order in which they come.
    """
    book = Book(folder)
    configs = [trial.key() for trial in trials]
    places: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        places.setdefault(config, []).append(place)
    found: dict[str, Outcome] = {}

    def take(config: str, outcome: Outcome) -> None:
        found[config] = outcome
        for place in places[config]:
            if on_done is not None:
                on_done(place, outcome)

    todo = []
    for config in places:
        known = book.find(config)
        if known is None:
            todo.append(config)
        else:
            take(config, known)
    for config, told in answers(todo, "paceline.lab.trials", _make, processes or cores()):
        outcome = Outcome.of(json.loads(told))
        book.keep(config, told)
        take(config, outcome)
    return [found[config] for config in configs]


def _make(config: str) -> str:
    """One trial, texts in and out."""
    return json.dumps(asdict(Trial.of(json.loads(config)).run()))


class Book:
    """Outcomes in a folder, by what decides them: the configuration, a script, the versions."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._made = folder, provenance()
        self._versions = json.dumps(self._made["versions"], sort_keys=True)
        if folder is not None:
            make_folder(folder)

    def find(self, config: str) -> Outcome | None:
        """The outcome of a configuration, if it is there, and whole."""
        path = self.path(config)
        try:
            return None if path is None else Outcome.of(read_object(path)["outcome"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, config: str, outcome: str) -> None:
        """Write an outcome down, with what it was made by."""
        path = self.path(config)
        if path is not None:
            made = json.dumps(self._made)
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
    """A nested dict without what was not given."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


if __name__ == "__main__":
    serve(_make)
