"""Loggers: what a run logs, in TensorBoard, Weights & Biases, MLflow, or CSV files.

The launcher feeds them with what it gets from all workers; workers know nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.common.options import one_of
from paceline.errors import UsageError
from paceline.record.loggers.base import About, Logger
from paceline.record.loggers.feed import Feed

NEEDS = {"csv": None, "mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb"}
"""Each logger, and the package that it needs: the extra has the same name."""
_IN_FOLDER = ("csv", "tensorboard")


def check_loggers(log: str | Sequence[str], out: object) -> list[str]:
    """The names of the loggers; refuses one that is unknown, missing, or has nowhere to write."""
    names = [log] if isinstance(log, str) else [*log]
    for name in names:
        one_of("log", name, NEEDS)
        package = NEEDS[name]
        if package is not None and find_spec(package) is None:
            raise UsageError(f'log ({name}) needs {package}: pip install "paceline[{name}]"')
        if name in _IN_FOLDER and out is None:
            raise UsageError(f"log ({name}) needs out, the folder that it writes to")
    return sorted(set(names))


def open_loggers(
    names: Sequence[str], config: Mapping[str, Any], folder: Path | None
) -> list[Feed]:
    """Start to feed the loggers of a run."""
    about = About(folder=folder, settings=settings_of(config))
    return [Feed(name, partial(_open, name, about)) for name in names]


def _open(name: str, about: About) -> Logger:
    module = import_module(f"paceline.record.loggers.to_{name}")
    logger: Logger = module.open_logger(about)
    return logger


def settings_of(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The settings of a run as hyper-parameters: plain values under plain names.

    >>> settings_of({"workers": 2, "device": None, "arguments": {"lr": 0.1}, "faults": []})
    {'workers': 2, 'arguments.lr': 0.1}
    """
    parts: dict[str, Mapping[str, Any]] = {"": {k: config.get(k) for k in _SETTINGS}}
    parts["strategy."] = config.get("method", {}).get("fields", {})
    parts["arguments."] = config.get("arguments", {})
    named = {prefix + name: v for prefix, part in parts.items() for name, v in part.items()}
    return {name: v for name, v in named.items() if isinstance(v, (bool, int, float, str))}


_SETTINGS = (
    "world",
    "spec",
    "workers",
    "seed",
    "global_batch",
    "batch",
    "device",
    "as_model",
    "on_loss",
    "max_restarts",
    "threads",
)
