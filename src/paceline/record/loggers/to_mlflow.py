"""MLflow: one run, with the metrics of all workers over their steps.

Its own settings apply: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlflow
from mlflow.entities import Metric

from paceline.record.loggers.base import About, Logger, numbers_of, sentence_of


def open_logger(about: About) -> Logger:
    """Begin a run, with the settings as its parameters."""
    run = mlflow.start_run(run_name=about.name)
    mlflow.log_params(dict(about.settings))
    return MlflowLogger(run.info.run_id, about.began_s)


class MlflowLogger(Logger):
    """Metrics by worker; events as running counts, and as sentences in tags."""

    def __init__(self, run_id: str, began_s: float) -> None:
        self._client, self._run_id, self._began_s = mlflow.MlflowClient(), run_id, began_s
        self._happened = Counter[str]()

    def metric(self, record: Mapping[str, Any]) -> None:
        worker, when = f"worker-{record['rank']}", self._milliseconds(record)
        metrics = [
            Metric(f"{name}/{worker}", value, when, record["step"])
            for name, value in numbers_of(record).items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def event(self, record: Mapping[str, Any]) -> None:
        name = record["event"]
        self._happened[name] += 1
        count, total = self._happened[name], self._happened.total()
        self._client.log_metric(
            self._run_id, f"events/{name}", count, self._milliseconds(record), total
        )
        self._client.set_tag(self._run_id, f"event.{total:04}", sentence_of(record))

    def close(self) -> None:
        mlflow.end_run()

    def _milliseconds(self, record: Mapping[str, Any]) -> int:
        return round((self._began_s + float(record["t"])) * 1000)
