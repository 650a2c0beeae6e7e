"""The task to train: the built-in task, or the user's script, checked before anything starts."""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.options import TrainingOptions
from paceline.common.files import FOLDER_MODE, reason_of
from paceline.common.options import above, at_least, finite
from paceline.common.reading import read_bytes
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
    """A training function by name, and its arguments."""

    name: str
    reference: dict[str, Any]
    arguments: dict[str, Any]


def find_task(chosen: TrainingOptions) -> Task:
    """The task of a command; refuses a script or an argument that is wrong."""
    script, arguments = chosen.script, chosen.arguments()
    _check_numbers(arguments)
    check_seed(chosen.seed)
    if script is not None:
        if chosen.full:
            raise UsageError("--full must be used with the built-in task, not with a script")
        _check_script(script, arguments)
        return Task(script.name, {"script": str(script.resolve()), "name": "train"}, arguments)
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


def recorded_task(config: Mapping[str, Any]) -> Task:
    """The task of a real run, from its configuration; checked, but not imported."""
    from paceline.common.reference import check_reference

    reference, arguments = config["train"], config["arguments"]
    check_reference("train", reference)
    if "script" in reference:
        _check_script(Path(reference["script"]), arguments)
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


def _check_script(script: Path, arguments: Mapping[str, Any]) -> None:
    """Refuse a script without a ``train`` that takes the arguments; does not run the script."""
    try:
        tree = ast.parse(read_bytes(script), str(script))
    except OSError as error:
        raise UsageError(f"script ({script}) cannot be read: {reason_of(error)}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        reason = error.args[0] if error.args else "it is nested too deeply"
        raise UsageError(f"script ({script}) is not Python: {line}{reason}") from None
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    if "train" in functions:
        _check_parameters(script, functions["train"], arguments)
    elif "train" not in _other_names(tree):
        has = ", ".join(functions) or "none"
        raise UsageError(f"script ({script}) must define train(worker); its functions: {has}")


def _check_parameters(script: Path, train: ast.FunctionDef, arguments: Mapping[str, Any]) -> None:
    names = [a.arg for a in (*train.args.posonlyargs, *train.args.args, *train.args.kwonlyargs)]
    if not names and train.args.vararg is None:
        raise UsageError(f"script ({script}): train() must take the worker: def train(worker)")
    for name in arguments:
        if name not in names[1:] and train.args.kwarg is None:
            taken = ", ".join(names[1:]) or "only the worker"
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} ({arguments[name]}) cannot be passed: train in {script} has no"
                f" parameter {name}; it takes {taken}"
            )


def _other_names(tree: ast.Module) -> set[str]:
    """The names that a script imports or assigns at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
