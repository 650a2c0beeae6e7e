"""The folder of a run: configuration, metrics, events, trace, and the final model."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import runpy
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from paceline._version import __version__
from paceline.common.files import FILE_MODE, Lines, make_folder, reason_of, write_private
from paceline.common.reading import read_object
from paceline.errors import UsageError
from paceline.record.progress import ProgressLog
from paceline.record.trace import Trace, merge, warn_of_no_trace

if TYPE_CHECKING:
    from torch import nn

FILES = CONFIG, METRICS, EVENTS, PROGRESS, TRACE, MODEL, RESULT = (
    "config.json",
    "metrics.jsonl",
    "events.jsonl",
    "progress.jsonl",
    "trace.jsonl",
    "model.safetensors",
    "result.json",
)
LOCK = ".lock"
"""Locked by the process that writes the folder, until it ends."""
TABLES = ("metrics.csv", "events.csv", "settings.csv")
"""The files of the logger ``csv``."""
TENSORBOARD, TENSORBOARD_SUFFIX = "tensorboard", ".paceline"
"""The folder of the logger ``tensorboard``, and how the names of its files end."""
TIMELINE = "timeline.json"
"""The file that ``paceline timeline`` writes, unless another name is given."""


class RunFolder:
    """The folder that a run writes to. Files of an earlier run are removed; other files stay."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        try:
            make_folder(self.path)
            files = map(self.path.joinpath, (*FILES, *TABLES, TIMELINE))
            logs = self.path.glob(f"{TENSORBOARD}/**/*{TENSORBOARD_SUFFIX}")
            for stale in [*files, *self.path.glob("trace.*.jsonl"), *logs]:
                stale.unlink(missing_ok=True)
            self._metrics, self._events = self._lines(METRICS), self._lines(EVENTS)
            self.progress = ProgressLog(self._lines(PROGRESS))
        except OSError as error:
            raise _cannot_write(path, error) from None
        self._traced = True

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration of the run and the versions that it uses."""
        self.progress.synchronous = bool(config.get("synchronous"))
        try:
            write_private(self.path / CONFIG, _config_text(config))
        except OSError as error:
            self.close()
            raise _cannot_write(self.path, error) from None

    def metric(self, record: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        self._metrics.add(json.dumps(record) + "\n")

    def event(self, record: Mapping[str, Any]) -> None:
        """Append one event."""
        self._events.add(json.dumps(record) + "\n")

    def no_trace(self, reason: str | None = None) -> None:
        """Have no trace: none is wanted, or a rank's disk failed for ``reason`` (warns once)."""
        if self._traced and reason is not None:
            warn_of_no_trace(self.path, reason)
        self._traced = False

    def close(self) -> None:
        """Close the open files."""
        self.progress.close()
        self._events.close()
        self._metrics.close()

    def _lines(self, name: str) -> Lines:
        return Lines(self.path / name, partial(_warn_of, self.path / name))

    def merge_traces(self, ranks: int) -> None:
        """Merge the traces of all ranks into one; remove them all if one rank's trace failed."""
        parts = [rank_trace(self.path, rank) for rank in range(ranks)]
        if self._traced:
            try:
                merge(parts, self.path / TRACE)
            except OSError as error:
                self.no_trace(reason_of(error))
        if not self._traced:
            for path in [*parts, self.path / TRACE]:
                with suppress(OSError):
                    path.unlink()


class RankFiles:
    """What a rank's own process writes into the folder of a run, if there is one.

    With ``append``, it continues the files of the rank's earlier process. ``on_no_trace`` is
    called with the reason if the trace cannot be written.
    """

    def __init__(
        self,
        out: str | PathLike[str] | None,
        rank: int,
        *,
        append: bool = False,
        trace: bool = True,
        on_no_trace: Callable[[str], None] | None = None,
    ) -> None:
        self._path, self._rank = (None if out is None else Path(out)), rank
        self._metrics: Lines | None = None
        self._begun = False
        self.trace: Trace | None = None
        if self._path is not None:
            make_folder(self._path)
            path = rank_trace(self._path, rank)
            if trace:
                self.trace = Trace(path, append=append, on_failure=on_no_trace)
            else:
                path.unlink(missing_ok=True)

    def metric(self, record: Mapping[str, Any]) -> None:
        """Append one line to the metrics of this rank."""
        if self._path is not None:
            path = self._path / f"metrics.{self._rank}.jsonl"
            if self._metrics is None:
                self._metrics = Lines(path, partial(_warn_of, path), append=self._begun)
                self._begun = True
            self._metrics.add(json.dumps(record) + "\n")

    def save_answer(self, model: nn.Module | None) -> str | None:
        """Write the final model; returns the reason if it cannot be written."""
        return save_answer(model, self._path, self.trace)

    def close(self) -> None:
        """Write what is buffered and close the files; a later metric is still appended."""
        if self.trace is not None:
            self.trace.close()
        if self._metrics is not None:
            self._metrics.close()
        self._metrics = None


def save_answer(model: nn.Module | None, folder: Path | None, trace: Trace | None) -> str | None:
    """Write the final model, if there is a folder; returns the reason if it cannot be written.

    On a full disk the trace is removed to make room.
    """
    from paceline.checkpoint.states import save_tensors

    if folder is None or model is None:
        return None
    while True:
        try:
            save_tensors(model.state_dict(), folder / MODEL)
            return None
        except OSError as error:
            if trace is None or not trace.give_up(reason_of(error)):
                return reason_of(error)


_RECORDED: dict[str, type] = {
    "world": str,
    "workers": int,
    "seed": int,
    "threads": int,
    "strategy": str,
    "train": dict,
    "method": dict,
    "arguments": dict,
}
"""The entries of a run's configuration that a replay needs, and their types."""


_JOIN_EVENTS = {"joined", "rejoined", "restarted", "succeeded", "outlived"}


class RecordedRun:
    """The files of a real run, for a replay of it; ``trace`` is that of its events."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.trace = self.path / TRACE
        try:
            self.config = read_object(self.path / CONFIG)
        except (OSError, ValueError) as error:
            raise self.unfit(f"{CONFIG} cannot be read: {reason_of(error)}") from None
        if self.config.get("world") == "simulated":
            raise self.unfit("it was simulated; run the same command with the same seed instead")
        if "method" not in self.config or not self.trace.is_file():
            raise self.unfit(f"it has no {TRACE}, or an older version wrote it")
        for name, kind in _RECORDED.items():
            if type(value := self.config.get(name)) is not kind:
                rule = f"{name} ({value!r:.40}) must be of type {kind.__name__}"
                raise self.unfit(f"{CONFIG}: {rule}")

    def unfit(self, reason: str) -> UsageError:
        """The error for a folder that cannot be replayed."""
        return UsageError(
            f"replay ({self.path}) must be the folder that paceline run --out or pl.launch(out=...)"
            f" has written: {reason}"
        )

    @property
    def model(self) -> Path:
        """The file of the final model."""
        if not (self.path / MODEL).is_file():
            raise self.unfit(f"it has no {MODEL}, so the run did not finish")
        return self.path / MODEL

    def lost(self) -> frozenset[int]:
        """The workers that were lost; refuses a run in which a rank joined late or rejoined."""
        try:
            events = read_object(self.path / RESULT).get("events") or []
            happened = [(str(event["event"]), int(event["rank"])) for event in events]
        except (OSError, ValueError) as error:
            raise self.unfit(f"{RESULT} cannot be read: {reason_of(error)}") from None
        except (KeyError, TypeError):
            raise self.unfit(f"{RESULT}: events must be a list of events") from None
        joined = sorted({event for event, _ in happened} & _JOIN_EVENTS)
        lost = frozenset(rank for event, rank in happened if event == "lost")
        if joined or any(rank >= self.config["workers"] for rank in lost):
            raise self.unfit(
                "a rank joined late, rejoined or had a successor, and a replay can follow only the"
                " loss of workers"
            )
        return lost

    def check_model(self) -> None:
        """Refuse a final model that is no safetensors file."""
        from paceline.checkpoint.states import check_header

        try:
            check_header(self.model)
        except (OSError, ValueError, RecursionError) as error:
            raise self.unfit(f"{MODEL} cannot be read: {error}") from None

    def check(self, out: str | PathLike[str] | None, **given: Any) -> None:
        """Refuse settings that differ from the recorded ones, and to overwrite this run."""
        if out is not None and Path(out).resolve() == self.path.resolve():
            raise UsageError(f"out ({out}) must not be the folder of the run that is replayed")
        for name, value in given.items():
            recorded = self.config.get(name)
            if value != recorded:
                raise UsageError(
                    f"{name} ({value}) must be {recorded}, as in the run in {self.path}"
                )


def largest_difference(one: Path, other: Path) -> float | None:
    """The largest difference between two models' parameters; None if all bits are equal."""
    if one.read_bytes() == other.read_bytes():
        return None
    from safetensors.torch import load_file

    ours, theirs = load_file(one), load_file(other)
    if {name: t.shape for name, t in ours.items()} != {name: t.shape for name, t in theirs.items()}:
        return math.inf
    gaps = [(ours[name].double() - theirs[name].double()).abs() for name in ours]
    return max((float(gap.max()) for gap in gaps if gap.numel()), default=0.0)


def _config_text(config: Mapping[str, Any]) -> str:
    return json.dumps({**config, **provenance()}, indent=2, default=str) + "\n"


def write_result(
    folder: Path, result: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> None:
    """Write the result of a run, its complete metrics, and its configuration if given.

    If the disk fails, this only warns: the caller still has the result.
    """
    lines = [json.dumps(record) + "\n" for record in result["metrics"]]
    texts = {RESULT: json.dumps(result) + "\n", METRICS: "".join(lines)}
    if config is not None:
        texts = {CONFIG: _config_text(config), **texts}
    for name, text in texts.items():
        try:
            write_private(folder / name, text)
        except OSError as error:
            _warn_of(folder / name, reason_of(error))


def _warn_of(path: Path, reason: str) -> None:
    warnings.warn(f"{path} could not be written: {reason}", stacklevel=3)


@contextmanager
def claim(out: str | PathLike[str] | None) -> Iterator[None]:
    """Lock the folder of a run; refuses one that another run is still writing.

    The kernel releases the lock when the process that holds it ends, in whatever way.
    """
    if out is None:
        yield
        return
    check_out(out)
    path = Path(out) / LOCK
    try:
        lock = _lock(path, out)
    except OSError as error:
        raise _cannot_write(out, error) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _lock(path: Path, out: str | PathLike[str]) -> int:
    """Lock a file; returns the descriptor that holds the lock."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 200, 0).decode(errors="replace") or "another"
            os.close(lock)
            raise UsageError(
                f"out ({out}) must not be in use: process {owner} is still writing a run there;"
                " wait until it ends, or choose another folder"
            ) from None
        except OSError:  # a file system without locks
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                break
        os.close(lock)  # the former owner has just removed this file
    with suppress(OSError):  # a full disk
        os.pwrite(lock, f"{os.getpid()} on {gethostname()}".encode(), 0)
    return lock


def is_claimed(folder: Path) -> bool | None:
    """Whether a process is writing the folder; None if it would be one of another machine."""
    try:
        pid, _, machine = (folder / LOCK).read_text().partition(" on ")
    except (OSError, ValueError):
        return False
    return os.path.exists(f"/proc/{pid}") if machine == gethostname() else None


def check_out(path: str | PathLike[str]) -> None:
    """Refuse a folder that cannot be written, before the run starts."""
    try:
        make_folder(Path(path))
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: str | PathLike[str], error: OSError) -> UsageError:
    return UsageError(f"out ({path}) must be a writable folder: {reason_of(error)}")


def rank_trace(folder: Path, rank: int) -> Path:
    """The trace file of one rank, before the traces are merged."""
    return folder / f"trace.{rank}.jsonl"


def provenance() -> dict[str, Any]:
    """The versions that produced a result."""
    versions = {"paceline": __version__, "torch": _torch_version(), "numpy": version("numpy")}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "platform": platform.platform(),
        "git_revision": _git_revision(),
    }


def _torch_version() -> str:
    """torch's own version with its build (``+cu130``), read without importing torch."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "a package that we depend on"
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def _git_revision() -> str | None:
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None
