"""The folder of a run: configuration, metrics, trace, and the model that it ended with."""

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
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from paceline._version import __version__
from paceline.common.files import FILE_MODE, Lines, make_folder, reason_of, write_private
from paceline.common.reading import read_object, why
from paceline.errors import UsageError
from paceline.record.trace import Trace, merge, warn_of_no_trace

if TYPE_CHECKING:
    from torch import nn

FILES = CONFIG, METRICS, TRACE, MODEL, RESULT = (
    "config.json",
    "metrics.jsonl",
    "trace.jsonl",
    "model.safetensors",
    "result.json",
)
LOCK = ".lock"
"""Held by the process that writes the folder, as long as it does."""
TIMELINE = "timeline.json"
"""What ``paceline timeline`` makes of a trace, where no other name is given."""


class RunFolder:
    """Where a run writes. What an earlier run left there is removed first; other files stay."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        try:
            make_folder(self.path)
            files = map(self.path.joinpath, (*FILES, TIMELINE))
            for stale in [*files, *self.path.glob("trace.*.jsonl")]:
                stale.unlink(missing_ok=True)
            self._metrics = Lines(self.path / METRICS, partial(_warn_of, self.path / METRICS))
        except OSError as error:
            raise _cannot_write(path, error) from None
        self._traced = True

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write what the run was asked to do, and with which versions it does it."""
        try:
            write_private(self.path / CONFIG, _config_text(config))
        except OSError as error:
            self.close()
            raise _cannot_write(self.path, error) from None

    def metric(self, record: Mapping[str, Any]) -> None:
        """Add one line of metrics."""
        self._metrics.add(json.dumps(record) + "\n")

    def no_trace(self, reason: str | None = None) -> None:
        """Hear that a rank has given its trace up, and say it once; or that there is to be none."""
        if self._traced and reason is not None:
            warn_of_no_trace(self.path, reason)
        self._traced = False

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
        """Make one trace of those that ranks have written; none, where one of them is missing."""
        parts = [rank_trace(self.path, rank) for rank in range(ranks)]
        if self._traced:
            try:
                merge(parts, self.trace)
            except OSError as error:
                self.no_trace(reason_of(error))
        if not self._traced:
            for path in [*parts, self.trace]:
                with suppress(OSError):
                    path.unlink()


class RankFiles:
    """What a rank's own process writes into the folder of a run, if there is one.

    With ``goes_on``, after what an earlier process of the rank has written. Without ``trace``,
    there is none; ``on_no_trace`` is told why the disk did not take it.
    """

    def __init__(
        self,
        out: str | PathLike[str] | None,
        rank: int,
        *,
        goes_on: bool = False,
        trace: bool = True,
        on_no_trace: Callable[[str], None] | None = None,
    ) -> None:
        self._path, self._rank = (None if out is None else Path(out)), rank
        self._metrics: Lines | None = None
        self.trace: Trace | None = None
        if self._path is not None:
            make_folder(self._path)
            path = rank_trace(self._path, rank)
            if trace:
                self.trace = Trace(path, goes_on=goes_on, on_failure=on_no_trace)
            else:
                path.unlink(missing_ok=True)

    def metric(self, record: Mapping[str, Any]) -> None:
        """Add one line to the metrics of this rank."""
        if self._path is not None:
            path = self._path / f"metrics.{self._rank}.jsonl"
            self._metrics = self._metrics or Lines(path, partial(_warn_of, path))
            self._metrics.add(json.dumps(record) + "\n")

    def save_answer(self, model: nn.Module | None) -> str | None:
        """Write the model that the run ends with; returns why it could not be."""
        return save_answer(model, self._path, self.trace)

    def close(self) -> None:
        """Write the rest."""
        if self.trace is not None:
            self.trace.close()
        if self._metrics is not None:
            self._metrics.close()


def save_answer(model: nn.Module | None, folder: Path | None, trace: Trace | None) -> str | None:
    """Write the model that a run ends with, if there is a folder; returns why it could not be.

    On a full disk the trace makes room for it.
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
"""What a replay needs to know of a run, and of which type it is in the configuration."""


_CAME = {"joined", "rejoined", "restarted", "succeeded", "outlived"}


class RecordedRun:
    """What a real run has left in its folder, for a replay of it."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.config = read_object(self.path / CONFIG)
        except (OSError, ValueError) as error:
            raise self.unfit(f"{CONFIG} cannot be read: {why(error)}") from None
        if self.config.get("world") == "simulated":
            raise self.unfit("it was simulated; the same command and seed repeat it anyway")
        if "method" not in self.config or not self.trace.is_file():
            raise self.unfit(f"it has no {TRACE}, or is of an older version")
        for name, kind in _RECORDED.items():
            if type(value := self.config.get(name)) is not kind:
                told = f"{name} ({value!r:.40}) must be of type {kind.__name__}"
                raise self.unfit(f"{CONFIG}: {told}")

    def unfit(self, reason: str) -> UsageError:
        """The error that says why this folder cannot be replayed."""
        return UsageError(
            f"replay ({self.path}) must be the folder that paceline run --out or pl.launch(out=...)"
            f" has written: {reason}"
        )

    @property
    def trace(self) -> Path:
        """The recorded order."""
        return self.path / TRACE

    @property
    def model(self) -> Path:
        """The parameters that the run ended with."""
        if not (self.path / MODEL).is_file():
            raise self.unfit(f"it has no {MODEL}, so the run has not come to its end")
        return self.path / MODEL

    def lost(self) -> frozenset[int]:
        """The workers that were lost; refuses a run in which any rank came late, or came again."""
        try:
            events = read_object(self.path / RESULT).get("events") or []
            told = [(str(event["event"]), int(event["rank"])) for event in events]
        except (OSError, ValueError) as error:
            raise self.unfit(f"{RESULT} cannot be read: {why(error)}") from None
        except (KeyError, TypeError):
            raise self.unfit(f"{RESULT}: events must be a list of events") from None
        came = sorted({event for event, _ in told} & _CAME)
        lost = frozenset(rank for event, rank in told if event == "lost")
        if came or any(rank >= self.config["workers"] for rank in lost):
            raise self.unfit(
                "a rank came late, came again or had a successor, and a replay can follow the loss"
                " of workers only"
            )
        return lost

    def check_model(self) -> None:
        """Refuse a model that is not what it must be."""
        from paceline.checkpoint.states import check_header

        try:
            check_header(self.model)
        except (OSError, ValueError, RecursionError) as error:
            raise self.unfit(f"{MODEL} cannot be read: {error}") from None

    def check(self, out: str | PathLike[str] | None, **given: Any) -> None:
        """Refuse what would be another run, and to overwrite this one."""
        if out is not None and Path(out).resolve() == self.path.resolve():
            raise UsageError(f"out ({out}) must not be the folder of the run that is replayed")
        for name, value in given.items():
            if value != self.config[name]:
                told = self.config[name]
                raise UsageError(f"{name} ({value}) must be {told}, as in the run in {self.path}")


def largest_difference(one: Path, other: Path) -> float | None:
    """By how much the numbers of two models differ at most; None when they are the same bits."""
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
    """Write what a run has come to, and its metrics with what is known of them only then.

    Also what it was asked to do, if that was not written before. Where the disk does not take it,
    that is said: who has started the run has it all the same.
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
    """Have the folder of a run for oneself; refuses one that another run still writes.

    The lock is the kernel's: it ends with the process that holds it, however that ends.
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
    """Lock a file; the descriptor that holds the lock."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 20, 0).decode(errors="replace") or "another"
            os.close(lock)
            raise UsageError(
                f"out ({out}) must not be in use: process {owner} still writes a run there; wait"
                " for its end, or choose another folder"
            ) from None
        except OSError:  # there are file systems without locks
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                break
        os.close(lock)  # who had it before has removed it
    with suppress(OSError):  # a full disk
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def check_out(path: str | PathLike[str]) -> None:
    """Refuse a folder that cannot be written, before a run is made for it."""
    try:
        make_folder(Path(path))
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: str | PathLike[str], error: OSError) -> UsageError:
    return UsageError(f"out ({path}) must be a folder that can be written: {reason_of(error)}")


def rank_trace(folder: Path, rank: int) -> Path:
    """The trace of one rank, until they are merged."""
    return folder / f"trace.{rank}.jsonl"


def provenance() -> dict[str, Any]:
    """The versions behind a result."""
    versions = {"paceline": __version__, "torch": _torch_version(), "numpy": version("numpy")}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "platform": platform.platform(),
        "git_revision": _git_revision(),
    }


def _torch_version() -> str:
    """As torch tells it, with its build (``+cu130``), which its package may lack; loads nothing."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "a package that we depend on"
    return str(runpy.run_path(str(Path(spec.origin).with_name("version.py")))["__version__"])


def _git_revision() -> str | None:
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None
