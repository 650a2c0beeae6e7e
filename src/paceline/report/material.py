"""What a report is made of: runs, read from the folder of a comparison or from their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.common.files import reason_of
from paceline.common.reading import read_object, refuse_malformed
from paceline.errors import UsageError
from paceline.lab.tasks.recipe import BUILT_IN
from paceline.record.folder import CONFIG, RESULT

if TYPE_CHECKING:
    from paceline.record.result import Result

COMPARISON = "comparison.json"
_MADE = ("versions", "platform", "git_revision")


class Setting(NamedTuple):
    """Where runs were made: a cluster or real processes, and how many workers there were."""

    place: str
    workers: int

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' if self.workers != 1 else ''} on {self.place}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: what was asked for, what it was made by, and what came of it."""

    strategy: str
    setting: Setting
    seed: int
    config: Mapping[str, Any]
    made: Mapping[str, Any]
    result: Result | None
    error: str | None = None

    @property
    def virtual(self) -> bool:
        """Whether its time was simulated."""
        return "cluster" in self.config


@dataclass(frozen=True, kw_only=True)
class Material:
    """Runs to put side by side, and what they have in common."""

    task: str
    target: float | None
    runs: Sequence[Run]
    command: str | None = None
    made_at: str | None = None

    @property
    def settings(self) -> list[Setting]:
        """The settings, by place and number of workers."""
        places = [*dict.fromkeys(run.setting.place for run in self.runs)]
        found = {run.setting for run in self.runs}
        return sorted(found, key=lambda s: (places.index(s.place), s.workers))

    @property
    def methods(self) -> list[str]:
        """The methods, in the order in which they were asked for."""
        return [*dict.fromkeys(run.strategy for run in self.runs)]

    @property
    def seeds(self) -> list[int]:
        """The seeds that were used."""
        return sorted({run.seed for run in self.runs})

    def of(self, setting: Setting, method: str) -> list[Run]:
        """The runs of a method, one a seed."""
        return [run for run in self.runs if (run.setting, run.strategy) == (setting, method)]

    def results(self, setting: Setting, method: str) -> list[Result]:
        """What those came to that came to their end."""
        return [run.result for run in self.of(setting, method) if run.result is not None]


def read_material(folders: Sequence[Path], target: float | None = None) -> Material:
    """The runs of a comparison's folder, or of the folders of single runs."""
    with refuse_malformed(rule(folders)):
        return _material(folders, target)


def _material(folders: Sequence[Path], target: float | None) -> Material:
    if len(folders) == 1 and (folders[0] / COMPARISON).is_file():
        return _comparison(folders[0], target)
    runs = _named_apart([_run(folder) for folder in folders])
    tasks = [*dict.fromkeys(_task(run.config) for run in runs)]
    built_in = all(run.config.get("train") == BUILT_IN for run in runs)
    return Material(
        task=", ".join(tasks),
        target=0.8 if target is None and built_in else target,
        runs=runs,
    )


def _comparison(folder: Path, target: float | None) -> Material:
    told = _read(folder, COMPARISON)
    runs = [_trial(folder, entry) for entry in told["runs"]]
    return Material(
        task=told["task"],
        target=told["target"] if target is None else target,
        runs=_named_apart(runs),
        command=told["command"],
        made_at=told["made_at"],
    )


def _trial(folder: Path, entry: Mapping[str, Any]) -> Run:
    """A run of a comparison, from the file that holds its outcome."""
    told = _read(folder, entry["file"])
    return Run(
        strategy=entry["strategy"],
        setting=Setting(_place(told["config"]), entry["workers"]),
        seed=entry["seed"],
        config=told["config"],
        made=told["made"],
        result=_result(told["outcome"]["result"]),
        error=told["outcome"]["error"],
    )


def _run(folder: Path) -> Run:
    """A run from its own folder."""
    config, told = _read(folder, CONFIG), _read(folder, RESULT)
    return Run(
        strategy=config["spec"],
        setting=Setting(_place(config), told["workers"]),
        seed=told["seed"],
        config={key: value for key, value in config.items() if key not in _MADE},
        made={key: config[key] for key in _MADE},
        result=_result(told),
    )


def _result(told: dict[str, Any] | None) -> Result | None:
    from paceline.record.result import Result

    return None if told is None else Result(**told)


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(folder / name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{rule([folder])}: {name} cannot be read: {reason_of(error)}") from None


def rule(folders: Sequence[Path]) -> str:
    """The beginning of a complaint about what folders hold."""
    names = ", ".join(map(str, folders))
    return f"folder ({names}) must be one that paceline compare, run or sim has written to its end"


def _place(config: Mapping[str, Any]) -> str:
    if "cluster" in config:
        return str(config["cluster"]["name"])
    return f"real processes ({config['world']})"


def _task(config: Mapping[str, Any]) -> str:
    train = config.get("train")
    if train == BUILT_IN:
        return "the built-in task"
    if isinstance(train, Mapping):
        return Path(str(train.get("script") or train.get("main") or train["module"])).name
    return str(train or "a script")


def _named_apart(runs: Iterable[Run]) -> list[Run]:
    """Number the places that have one name and are not the same."""
    known: dict[str, list[Any]] = {}
    apart = []
    for run in runs:
        place, workers = run.setting
        same = known.setdefault(place, [])
        if (cluster := run.config.get("cluster")) not in same:
            same.append(cluster)
        number = same.index(cluster)
        name = f"{place} #{number + 1}" if number else place
        apart.append(Run(**{**vars(run), "setting": Setting(name, workers)}))
    return apart
