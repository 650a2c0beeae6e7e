"""The checkpoints of a run, in the subfolder ``checkpoints`` of its folder.

Each is a folder ``step-000000123`` with one ``rankN.safetensors`` of each rank, the metrics that
were logged so far, and ``manifest.json``, which is written last and has the size and digest of
every file and a digest of itself. A folder without a manifest is not a checkpoint. A checkpoint is
*intact* if all its files match the manifest; no other is used. The file ``latest`` names the last
one, for people; a resumed run takes the newest intact one, whatever ``latest`` says.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.disk import DISK, Disk, replace_file
from paceline.checkpoint.states import reason_of, strict_json
from paceline.errors import UsageError

VERSION = 2
FOLDER, MANIFEST, LATEST, METRICS = "checkpoints", "manifest.json", "latest", "metrics.json"
MAX_MANIFEST_BYTES = 4 << 20
UNUSABLE = ".unusable"
"""The suffix that a run adds to a checkpoint which it could not use."""
_NAME = re.compile(r"step-(\d{9,15})", re.ASCII)


@dataclass(frozen=True)
class Saved:
    """A rank's report on the file that it wrote; ``error`` says why it could not write it.

    ``ranks`` are all ranks whose files make up the checkpoint.
    """

    rank: int
    step: int
    time_s: float
    bytes: int = 0
    digest: str = ""
    error: str = ""
    ranks: Sequence[int] = ()


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint.

    Attributes:
        step: how many steps its first worker had made.
        ranks: those whose states it holds; the others had been lost.
        time_s: when it was made, on the run's clock.
        config: of the run.
    """

    path: Path
    step: int
    ranks: list[int]
    time_s: float
    config: dict[str, Any]

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """The metrics and events up to this checkpoint."""
        records: dict[str, list[dict[str, Any]]]
        records = json.loads((self.path / METRICS).read_text("utf-8"))
        return records

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuse to resume with another configuration; the error names the first difference."""
        saved = self.config
        for name in [*config, *(name for name in saved if name not in config)]:
            if saved.get(name) != plain(config.get(name)):
                raise UsageError(
                    f"{name} ({config.get(name)}) must be {saved.get(name)}, as in the checkpoint"
                    f" {self.path}: resume with the same command, or choose another folder"
                )


class Store:
    """The checkpoints in one folder; the newest ``keep`` of them are kept."""

    def __init__(self, path: Path, keep: int = 2, disk: Disk = DISK) -> None:
        self.path, self._keep, self._disk = path, keep, disk

    def folder(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.path / f"step-{step:09d}"

    # Writing -------------------------------------------------------------------------------------

    def save_rank(self, step: int, rank: int, time_s: float, content: bytes) -> Saved:
        """Write the state of a rank; returns the report on it."""
        folder = self.folder(step)
        try:
            self._disk.make_folder(folder)
            self._disk.flush(self.path)
            replace_file(folder / _rank_file(rank), content, "rank", self._disk)
        except OSError as error:
            return Saved(rank, step, time_s, error=error.strerror or str(error))
        return Saved(rank, step, time_s, len(content), _digest(content))

    def commit(
        self, saved: Sequence[Saved], config: Mapping[str, Any], records: Mapping[str, Any]
    ) -> None:
        """Write the manifest of a checkpoint whose files all ranks wrote, and update ``latest``."""
        step = saved[0].step
        folder, content = self.folder(step), json.dumps(records).encode()
        replace_file(folder / METRICS, content, "metrics", self._disk)
        files = {_rank_file(s.rank): {"bytes": s.bytes, "blake2b": s.digest} for s in saved}
        files[METRICS] = {"bytes": len(content), "blake2b": _digest(content)}
        manifest = {
            "version": VERSION,
            "step": step,
            "time_s": saved[0].time_s,
            "ranks": [one.rank for one in saved],
            "config": plain(config),
            "files": files,
        }
        text = json.dumps(seal(manifest), indent=2) + "\n"
        replace_file(folder / MANIFEST, text.encode(), "manifest", self._disk)
        replace_file(self.path / LATEST, f"{folder.name}\n".encode(), "latest", self._disk)
        self.remove_old(step)

    def abandon(self, step: int) -> None:
        """Remove the files of a checkpoint that could not be completed."""
        self._disk.remove(self.folder(step))

    def remove_old(self, step: int) -> None:
        """Remove what is older than the checkpoint of ``step``, except the newest ``keep``."""
        older = [number for number in self._steps() if number <= step]
        committed = [number for number in older if _has_manifest(self.folder(number))]
        for number in set(older) - set(committed[: self._keep]):
            self._disk.remove(self.folder(number))

    def prepare(self, after: Checkpoint | None) -> None:
        """Clear the way for a run: no checkpoint newer than ``after`` keeps its name.

        A folder that was never committed is removed. A former checkpoint is renamed.
        """
        self._disk.make_folder(self.path)
        self._disk.flush(self.path.parent)
        for step in self._steps():
            if after is None or step > after.step:
                self._move_aside(self.folder(step))
        for part in self.path.glob("**/.*.part"):
            self._disk.remove(part)

    def _move_aside(self, folder: Path) -> None:
        if not self._was_committed(folder):
            self._disk.remove(folder)
            return
        aside, number = folder.with_name(folder.name + UNUSABLE), 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}{UNUSABLE}-{number}")
        self._disk.rename(folder, aside)

    # Reading -------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint; warns about each newer one that is not intact.

        Raises:
            UsageError: there are checkpoints, but none is intact.
        """
        intact, unusable = self.scan()
        latest = self._latest()
        if intact is None and (unusable or latest is not None):
            reasons = unusable or [f"{LATEST} names {latest!r}, which does not exist"]
            raise UsageError(
                f"none of the checkpoints in {self.path} can be used (nothing was removed):"
                f" {'; '.join(reasons)}. Restore the files, or choose another folder"
            )
        for reason in unusable:
            outcome = f"trying an earlier one, and keeping this one as *{UNUSABLE}"
            warnings.warn(f"{reason}; {outcome}", stacklevel=2)
        if intact is not None and (latest is None or not self._exists(latest)):
            what = "is missing" if latest is None else f"names {latest!r}, which does not exist"
            warnings.warn(
                f"{self.path / LATEST} {what}; {intact.path.name} is the newest intact checkpoint",
                stacklevel=2,
            )
        return intact

    def scan(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, and why each newer one is not intact."""
        unusable: list[str] = []
        for step in self._steps():
            if self._was_committed(self.folder(step)):
                try:
                    return open_checkpoint(self.folder(step)), unusable
                except UsageError as error:
                    unusable.append(str(error))
        return None, unusable

    @property
    def has_any(self) -> bool:
        """Whether there is any checkpoint, intact or not."""
        return bool(self._steps()) or self._latest() is not None

    def _steps(self) -> list[int]:
        """The steps of all checkpoint folders, newest first."""
        if not self.path.is_dir():
            return []
        found = [_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir()]
        steps = sorted((int(match[1]) for match in found if match), reverse=True)
        return [step for step in steps if self.folder(step).is_dir()]

    def _was_committed(self, folder: Path) -> bool:
        """Whether a folder was once a checkpoint; others belong to runs that died while writing."""
        return _has_manifest(folder) or folder.name == self._latest()

    def _exists(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None and (self.path / name).is_dir()

    def _latest(self) -> str | None:
        """The content of the file ``latest``; None if there is no such file."""
        try:
            with (self.path / LATEST).open("rb") as file:
                return file.read(64).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError:
            return ""


def _has_manifest(folder: Path) -> bool:
    """Whether a folder has a manifest, readable or not."""
    try:
        (folder / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def first_rank(path: Path) -> int | None:
    """The first rank whose state is in a checkpoint's folder; None if it is not such a folder.

    A checkpoint of a run must be intact. What ``worker.save`` writes has no manifest to check.
    """
    if (path / MANIFEST).is_file():
        return open_checkpoint(path).ranks[0]
    return 0 if (path / _rank_file(0)).is_file() else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint after checking that all its files match the manifest."""
    try:
        manifest = _read_manifest(path)
        for name, entry in manifest["files"].items():
            _verify(path / name, entry)
        facts = {name: manifest[name] for name in ("step", "ranks", "config")}
        return Checkpoint(path, time_s=float(manifest["time_s"]), **facts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"checkpoint {path} cannot be used: {reason_of(error)}") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    with (path / MANIFEST).open("rb") as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} must have at most {MAX_MANIFEST_BYTES} bytes")
    manifest = strict_json(content.decode())
    if not isinstance(manifest, dict):
        raise ValueError(f"{MANIFEST} must be a dict")
    if (version := manifest["version"]) != VERSION:
        raise ValueError(
            f"{MANIFEST}: version ({version}) must be {VERSION}: another Paceline wrote it"
        )
    if manifest != seal(manifest):
        raise ValueError(f"{MANIFEST} has changed since it was written: its digest differs")
    ranks, step = manifest["ranks"], manifest["step"]
    integers = isinstance(ranks, list) and all(type(number) is int for number in [step, *ranks])
    if not integers or not ranks or ranks != sorted(set(ranks)) or ranks[0] < 0:
        raise ValueError(f"{MANIFEST}: ranks and step must be integers, ranks in order")
    expected = {METRICS, *map(_rank_file, ranks)}
    if path.name != (name := f"step-{step:09d}"):
        raise ValueError(f"{MANIFEST} belongs to {name}: the folder must have this name")
    if set(manifest["files"]) != expected:
        raise ValueError(f"{MANIFEST} must name the files of its ranks")
    if not isinstance(manifest["config"], dict):
        raise ValueError(f"{MANIFEST} must hold a configuration")
    return manifest


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with a digest of itself."""
    content = {name: value for name, value in manifest.items() if name != "blake2b"}
    return {**content, "blake2b": _digest(json.dumps(content, sort_keys=True).encode())}


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    """Refuse a file that differs from the one that was written."""
    if path.is_symlink() or not path.is_file():
        whose = ": the host of that rank wrote it" if path.name != METRICS else ""
        raise ValueError(f"{path.name} is missing{whose}")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(f"{path.name} has {size} bytes, but was written with {entry['bytes']}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
    if digest.hexdigest() != entry["blake2b"]:
        raise ValueError(f"{path.name} has changed since it was written: its digest differs")


def plain(value: Any) -> Any:
    """A value after it was converted to JSON and back."""
    return json.loads(json.dumps(value, default=str))


def _rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
