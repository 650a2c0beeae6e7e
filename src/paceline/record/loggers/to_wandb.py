"""Weights & Biases: one run, with the metrics of all workers over the run's time.

Its own settings apply: ``wandb login``, ``WANDB_PROJECT``, ``WANDB_MODE=offline``, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import wandb

from paceline.record.loggers.base import About, Logger, sentence_of, values_of


def open_logger(about: About) -> Logger:
    """Begin a run, with the settings as its configuration."""
    run = wandb.init(
        name=about.name,
        dir=None if about.folder is None else str(about.folder),
        config=dict(about.settings),
        settings=wandb.Settings(silent=True, console="off"),
    )
    run.define_metric("*", step_metric="t")
    return WandbLogger(run)


class WandbLogger(Logger):
    """Metrics by worker; events as running counts, and as sentences in the summary."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._happened = Counter[str]()
        self._sentences: list[str] = []

    def metric(self, record: Mapping[str, Any]) -> None:
        worker = f"worker-{record['rank']}"
        named = {f"{name}/{worker}": value for name, value in values_of(record).items()}
        self._run.log({"t": record["t"], f"step/{worker}": record["step"], **named})

    def event(self, record: Mapping[str, Any]) -> None:
        name = record["event"]
        self._happened[name] += 1
        self._sentences.append(sentence_of(record))
        self._run.log({"t": record["t"], f"events/{name}": self._happened[name]})
        self._run.summary["events"] = "\n".join(self._sentences)

    def close(self) -> None:
        self._run.finish()
