"""The folder of a run: configuration, metrics, trace, and the model that it ended with."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TextIO

from paceline.errors import UsageError
from paceline.trace import Trace, merge

if TYPE_CHECKING:
    from torch import nn

FILES = CONFIG, METRICS, TRACE, MODEL = (
    "config.json",
    "metrics.jsonl",
    "trace.jsonl",
    "model.safetensors",
)


class RunFolder:
    """Where a run writes. What an earlier run left there is removed first; other files stay."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for stale in [*map(self.path.joinpath, FILES), *self.path.glob("trace.*.jsonl")]:
                stale.unlink(missing_ok=True)
            self._metrics = (self.path / METRICS).open("w", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(path, error) from None

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

    @property
    def model(self) -> Path:
        """The answer, under plain state-dict names."""
        return self.path / MODEL

    def merge_traces(self, ranks: int) -> None:
        """Make one trace of those that ranks have written."""
        merge([rank_trace(self.path, rank) for rank in range(ranks)], self.trace)


class RankFiles:
    """What a rank's own process writes into the folder of a run, if there is one."""

    def __init__(self, out: str | PathLike[str] | None, rank: int) -> None:
        self._path, self._rank = (None if out is None else Path(out)), rank
        self._metrics: TextIO | None = None
        if self._path is not None:
            self._path.mkdir(parents=True, exist_ok=True)
        self.trace = Trace(rank_trace(self._path, rank)) if self._path else None

    def metric(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics of this rank."""
        if self._path is not None:
            name = f"metrics.{self._rank}.jsonl"
            self._metrics = self._metrics or (self._path / name).open("w", encoding="utf-8")
            self._metrics.write(json.dumps(record) + "\n")
            self._metrics.flush()

    def save_answer(self, model: nn.Module | None) -> None:
        """Write the model that the run ends with; rank 0 does."""
        from paceline.checkpoint import save_tensors

        if self._path is not None and self._rank == 0 and model is not None:
            save_tensors(model.state_dict(), self._path / MODEL)

    def close(self) -> None:
        """Write the rest."""
        if self.trace is not None:
            self.trace.close()
        if self._metrics is not None:
            self._metrics.close()


def check_out(path: str | PathLike[str]) -> None:
    """Refuse a folder that cannot be written, before a run is made for it."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: str | PathLike[str], error: OSError) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(f"out ({path}) must be a folder that can be written: {reason}")


def rank_trace(folder: Path, rank: int) -> Path:
    """The trace of one rank, until they are merged."""
    return folder / f"trace.{rank}.jsonl"


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
