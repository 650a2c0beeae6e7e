"""The material of a report: runs, read from a comparison's folder or from their own folders."""

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
_PROVENANCE = ("versions", "platform", "git_revision")


class Setting(NamedTuple):
    """The system that runs used (a cluster, or real processes), and the number of workers."""

    system: str
    workers: int

    def __str__(self) -> str:
        return f"{self.workers} worker{'s' if self.workers != 1 else ''} on {self.system}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: its configuration, the versions that made it, and its result or error."""

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
    """Runs to compare, and what they have in common."""

    task: str
    target: float | None
    runs: Sequence[Run]
    command: str | None = None
    made_at: str | None = None

    @property
    def settings(self) -> list[Setting]:
        """The settings, ordered by system and number of workers."""
        systems = [*dict.fromkeys(run.setting.system for run in self.runs)]
        found = {run.setting for run in self.runs}
        return sorted(found, key=lambda s: (systems.index(s.system), s.workers))

    @property
    def methods(self) -> list[str]:
        """The methods, in the order of the runs."""
        return [*dict.fromkeys(run.strategy for run in self.runs)]

    @property
    def seeds(self) -> list[int]:
        """All seeds, sorted."""
        return sorted({run.seed for run in self.runs})

    def of(self, setting: Setting, method: str) -> list[Run]:
        """The runs of a method in a setting."""
        return [run for run in self.runs if (run.setting, run.strategy) == (setting, method)]

    def results(self, setting: Setting, method: str) -> list[Result]:
        """The results of those runs that did not fail."""
        return [run.result for run in self.of(setting, method) if run.result is not None]


def read_material(folders: Sequence[Path], target: float | None = None) -> Material:
    """The runs of a comparison's folder, or of the folders of single runs."""
    with refuse_malformed(rule(folders)):
        return _material(folders, target)


def _material(folders: Sequence[Path], target: float | None) -> Material:
    if len(folders) == 1 and (folders[0] / COMPARISON).is_file():
        return _comparison(folders[0], target)
    runs = _numbered([_run(folder) for folder in folders])
    tasks = [*dict.fromkeys(_task(run.config) for run in runs)]
    built_in = all(run.config.get("train") == BUILT_IN for run in runs)
    return Material(
        task=", ".join(tasks),
        target=0.8 if target is None and built_in else target,
        runs=runs,
    )


def _comparison(folder: Path, target: float | None) -> Material:
    plan = _read(folder, COMPARISON)
    runs = [_trial(folder, entry) for entry in plan["runs"]]
    return Material(
        task=plan["task"],
        target=plan["target"] if target is None else target,
        runs=_numbered(runs),
        command=plan["command"],
        made_at=plan["made_at"],
    )


def _trial(folder: Path, entry: Mapping[str, Any]) -> Run:
    """A run of a comparison, from the file that holds its outcome."""
    trial = _read(folder, entry["file"])
    return Run(
        strategy=entry["strategy"],
        setting=Setting(_system(trial["config"]), entry["workers"]),
        seed=entry["seed"],
        config=trial["config"],
        made=trial["made"],
        result=_result(trial["outcome"]["result"]),
        error=trial["outcome"]["error"],
    )


def _run(folder: Path) -> Run:
    """A run from its own folder."""
    config, result = _read(folder, CONFIG), _read(folder, RESULT)
    return Run(
        strategy=config["spec"],
        setting=Setting(_system(config), result["workers"]),
        seed=result["seed"],
        config={key: value for key, value in config.items() if key not in _PROVENANCE},
        made={key: config[key] for key in _PROVENANCE},
        result=_result(result),
    )


def _result(fields: dict[str, Any] | None) -> Result | None:
    from paceline.record.result import Result

    return None if fields is None else Result(**fields)


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(folder / name)
    except (OSError, ValueError) as error:
        raise UsageError(f"{rule([folder])}: {name} cannot be read: {reason_of(error)}") from None


def rule(folders: Sequence[Path]) -> str:
    """The beginning of each error message about the content of folders."""
    names = ", ".join(map(str, folders))
    return f"folder ({names}) must be one that paceline compare, run or sim has completed"


def _system(config: Mapping[str, Any]) -> str:
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


def _numbered(runs: Iterable[Run]) -> list[Run]:
    """Number the systems that have the same name but differ."""
    known: dict[str, list[Any]] = {}
    numbered = []
    for run in runs:
        system, workers = run.setting
        same = known.setdefault(system, [])
        if (cluster := run.config.get("cluster")) not in same:
            same.append(cluster)
        number = same.index(cluster)
        name = f"{system} #{number + 1}" if number else system
        numbered.append(Run(**{**vars(run), "setting": Setting(name, workers)}))
    return numbered
