"""The folder of a run: configuration, metrics, trace, and the model that it ended with."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

CONFIG, METRICS, TRACE, MODEL = "config.json", "metrics.jsonl", "trace.jsonl", "model.safetensors"


class RunFolder:
    """Where a run writes. What an earlier run left there is removed first; other files stay."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for stale in (CONFIG, METRICS, TRACE, MODEL, *self.path.glob("trace.*.jsonl")):
                (self.path / stale).unlink(missing_ok=True)
            self._metrics = (self.path / METRICS).open("w", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"out ({path}) must be a folder that can be written: {reason}") from None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write what the run was asked to do, and with which versions it does it."""
        text = json.dumps({**config, **provenance()}, indent=2, default=str)
        (self.path / CONFIG).write_text(text + "\n", encoding="utf-8")

    def metric(self, record: Mapping[str, Any]) -> None:
        """Add one line of metrics."""
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        """Close what is open."""
        self._metrics.close()

    @property
    def trace(self) -> Path:
        """The run's trace."""
        return self.path / TRACE

    def rank_trace(self, rank: int) -> Path:
        """The trace of one rank, until they are merged."""
        return self.path / f"trace.{rank}.jsonl"

    @property
    def model(self) -> Path:
        """The answer, under plain state-dict names."""
        return self.path / MODEL


def provenance() -> dict[str, Any]:
    """The versions behind a result."""
    versions = {name: version(name) for name in ("paceline", "torch", "numpy")}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "platform": platform.platform(),
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None
