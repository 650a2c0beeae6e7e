"""The task to train: the built-in task, or the user's script, checked before anything starts."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cli.options import ScriptOptions, TrainingOptions
from paceline.cli.script import UNREAD, option_of, read_script
from paceline.common.files import FOLDER_MODE
from paceline.common.options import above, at_least, finite
from paceline.common.reference import WHOLE
from paceline.common.seeds import check_seed
from paceline.errors import UsageError
from paceline.lab.tasks.recipe import (
    BUILT_IN,
    DEEP,
    DEEP_TASK,
    check_folder,
    check_model,
    find_folder,
)
from paceline.record.folder import check_out


@dataclass(frozen=True)
class Task:
    """A training function by name, and its arguments.

    Attributes:
        name: for people.
        reference: where ranks find it.
        arguments: of the function.
        asked: what a script that runs as a whole gives to ``pl.init``.
    """

    name: str
    reference: dict[str, Any]
    arguments: dict[str, Any]
    asked: Mapping[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """What the script gives to ``pl.init`` under a name; refuses what only its run tells."""
        if self.asked[name] is UNREAD:
            raise UsageError(
                f"{option_of(name)} is missing: {self.name} gives pl.init a {name} that is known"
                " only when it runs"
            )
        return self.asked[name]


def find_task(chosen: TrainingOptions) -> Task:
    """The task of a command; refuses a script or an argument that is wrong."""
    script, arguments = chosen.script, chosen.arguments()
    _check_numbers(arguments)
    check_seed(chosen.seed)
    if script is not None:
        if chosen.full:
            raise UsageError("--full must be used with the built-in task, not with a script")
        return _script_task(script, chosen, arguments)
    refuse_without_script(chosen)
    if (recipe := DEEP.get(arguments.get("model", ""))) is not None:
        if chosen.full:
            raise UsageError("--full is for Fashion-MNIST: name the folder with --data")
        recipe.check_data(Path(arguments["data"]) if "data" in arguments else None)
        return Task(arguments["model"], DEEP_TASK, arguments)
    if "model" in arguments:
        check_model(arguments["model"])
    if chosen.full:
        arguments.setdefault("data", find_folder())
    if "data" in arguments:
        check_folder(Path(arguments["data"]).expanduser())
    return Task("built-in task", BUILT_IN, arguments)


def _script_task(path: Path, chosen: TrainingOptions, arguments: dict[str, Any]) -> Task:
    script = read_script(path)
    name = script.entry(chosen.function, arguments)
    reference: dict[str, Any] = {"script": str(path.resolve()), "name": name}
    if chosen.script_arguments:
        reference["argv"] = [*chosen.script_arguments]
    asked = script.asked if name == WHOLE and script.asked is not None else {}
    return Task(path.name, reference, arguments, asked)


def refuse_without_script(chosen: ScriptOptions) -> None:
    """Refuse what is for a script, because there is none."""
    if chosen.function is not None:
        raise UsageError(f"--function ({chosen.function}) must be given with a script")
    if chosen.script_arguments:
        own = shlex.join(chosen.script_arguments)
        raise UsageError(f"-- must be given with a script: paceline run SCRIPT -- {own}")


def recorded_task(config: Mapping[str, Any]) -> Task:
    """The task of a real run, from its configuration; checked, but not imported."""
    from paceline.common.reference import check_reference

    reference, arguments = config["train"], config["arguments"]
    check_reference("train", reference)
    if "script" in reference:
        function = None if reference["name"] == WHOLE else reference["name"]
        read_script(Path(reference["script"])).entry(function, arguments)
    name = Path(reference.get("script") or reference.get("main") or reference["module"]).name
    return Task("built-in task" if reference == BUILT_IN else name, reference, arguments)


def choose_out(out: Path | None, what: str) -> Path:
    """The folder of a run: the given one, or a new one under ``runs``."""
    if out is not None:
        check_out(out)
        return out
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{what}"
    check_out(stem.parent)
    for number in itertools.count(1):
        chosen = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        with suppress(FileExistsError):  # of an earlier run, or one that started in the same second
            chosen.mkdir(FOLDER_MODE)
            break
    return chosen


def _check_numbers(arguments: Mapping[str, Any]) -> None:
    for name in ("epochs", "steps", "batch_size"):
        at_least(name, arguments.get(name, 1), 1)
    lr = arguments.get("lr", 1.0)
    above("lr", lr, 0)
    finite("lr", lr)
