"""The checkpoints of a run, in the folder ``checkpoints`` of its own.

Each is a folder ``step-000000123`` with one ``rankN.safetensors`` of each rank, the metrics that
were logged until then, and at last ``manifest.json``, which has the size and a digest of every
file, and one of itself. A folder without a manifest is no checkpoint. The file ``latest`` names the
last one. None is used before all of its files are what the manifest says.
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
from paceline.checkpoint.states import strict_json
from paceline.errors import UsageError

VERSION = 2
FOLDER, MANIFEST, LATEST, METRICS = "checkpoints", "manifest.json", "latest", "metrics.json"
MAX_MANIFEST_BYTES = 4 << 20
_NAME = re.compile(r"step-\d{9,15}")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Saved:
    """What a rank tells of the file that it has written; without a digest, why it could not.

    ``ranks`` are those whose files are one checkpoint.
    """

    rank: int
    step: int
    time_s: float
    bytes: int = 0
    digest: str = ""
    error: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """The steps that its first worker had made."""
        return int(self.manifest["step"])

    @property
    def ranks(self) -> list[int]:
        """The ranks that it has the state of; the others were lost by then."""
        return list(self.manifest["ranks"])

    @property
    def time_s(self) -> float:
        """When it was made, on the run's clock."""
        return float(self.manifest["time_s"])

    def records(self) -> dict[str, list[dict[str, Any]]]:
        """The metrics and events until then."""
        told: dict[str, list[dict[str, Any]]] = json.loads((self.path / METRICS).read_text("utf-8"))
        return told

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuse to go on with another configuration, and name the first difference."""
        before = self.manifest["config"]
        for name in [*config, *(name for name in before if name not in config)]:
            if before.get(name) != plain(config.get(name)):
                raise UsageError(
                    f"{name} ({config.get(name)}) must be {before.get(name)}, as in the checkpoint"
                    f" {self.path}: resume with the same command, or choose another folder"
                )


class Store:
    """The checkpoints in one folder; the last ``keep`` of them are kept."""

    def __init__(self, path: Path, keep: int = 2, disk: Disk = DISK) -> None:
        self.path, self._keep, self._disk = path, keep, disk

    def folder(self, step: int) -> Path:
        """The folder of a checkpoint."""
        return self.path / f"step-{step:09d}"

    # Writing -------------------------------------------------------------------------------------

    def save_rank(self, step: int, rank: int, time_s: float, content: bytes) -> Saved:
        """Write the state of a rank; what comes of it."""
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
        """Make a checkpoint of what all ranks have written, and the latest one."""
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
        self.tidy(step)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that does not come to be."""
        self._disk.remove(self.folder(step))

    def tidy(self, step: int) -> None:
        """Remove what is older than the checkpoint of ``step``, but for those that are kept."""
        latest = self.folder(step).name
        older = [name for name in self._names() if name <= latest]
        whole = [name for name in older if (self.path / name / MANIFEST).is_file()]
        for name in set(older) - set(whole[: self._keep]):
            self._disk.remove(self.path / name)

    def begin(self, after: Checkpoint | None) -> None:
        """Make ready for a run: remove all that is later than what it goes on from."""
        self._disk.make_folder(self.path)
        self._disk.flush(self.path.parent)
        for name in self._names():
            if after is None or name > after.path.name:
                self._disk.remove(self.path / name)
        for part in self.path.glob("**/.*.part"):
            self._disk.remove(part)

    # Reading -------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The latest checkpoint that is whole; says of each later one why it is not."""
        named = self._latest()
        names = [name for name in self._names() if not named or name <= named]
        for name in names:
            if name != named and not (self.path / name / MANIFEST).is_file():
                continue  # it has never come to be one
            try:
                return open_checkpoint(self.path / name)
            except UsageError as error:
                warnings.warn(f"{error}; looking for an earlier one", stacklevel=2)
        return None

    @property
    def holds_some(self) -> bool:
        """Whether there is anything in it."""
        return bool(self._names())

    def _names(self) -> list[str]:
        """The folders of checkpoints, newest first."""
        if not self.path.is_dir():
            return []
        names = (entry.name for entry in self.path.iterdir() if entry.is_dir())
        return sorted((name for name in names if _NAME.fullmatch(name)), reverse=True)

    def _latest(self) -> str:
        try:
            with (self.path / LATEST).open("rb") as file:
                name = file.read(64).decode().strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return name if _NAME.fullmatch(name) else ""


def first_rank(path: Path) -> int | None:
    """The first rank whose state is in the folder of a checkpoint; None when it is no such folder.

    A checkpoint of a run is read only when it is whole; what ``worker.save`` writes has no manifest
    that would tell.
    """
    if (path / MANIFEST).is_file():
        return open_checkpoint(path).ranks[0]
    return 0 if (path / _rank_file(0)).is_file() else None


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, once all of its files are what the manifest says."""
    try:
        manifest = _read_manifest(path)
        for name, told in manifest["files"].items():
            _verify(path / name, told)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"checkpoint {path} is not whole: {error or type(error)}") from None
    return Checkpoint(path, manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    with (path / MANIFEST).open("rb") as file:
        content = file.read(MAX_MANIFEST_BYTES + 1)
    if len(content) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{MANIFEST} must have at most {MAX_MANIFEST_BYTES} bytes")
    manifest = strict_json(content.decode())
    if not isinstance(manifest, dict) or manifest["version"] != VERSION:
        raise ValueError(f"{MANIFEST} must be of version {VERSION}")
    if manifest != seal(manifest):
        raise ValueError(f"{MANIFEST} is not as it was written: its digest is another")
    ranks, step = manifest["ranks"], manifest["step"]
    whole = isinstance(ranks, list) and all(type(number) is int for number in [step, *ranks])
    if not whole or not ranks or ranks != sorted(set(ranks)) or ranks[0] < 0:
        raise ValueError(f"{MANIFEST}: ranks and step must be whole numbers, ranks in order")
    wanted = {METRICS, *map(_rank_file, ranks)}
    if path.name != f"step-{step:09d}" or set(manifest["files"]) != wanted:
        raise ValueError(f"{MANIFEST} must name its own folder, and the files of its ranks")
    float(manifest["time_s"])
    if not isinstance(manifest["config"], dict):
        raise ValueError(f"{MANIFEST} must hold a configuration")
    return manifest


def seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with a digest of itself."""
    told = {name: value for name, value in manifest.items() if name != "blake2b"}
    return {**told, "blake2b": _digest(json.dumps(told, sort_keys=True).encode())}


def _verify(path: Path, told: Mapping[str, Any]) -> None:
    """Refuse a file that is not the one that was written."""
    if path.is_symlink() or not path.is_file():
        raise ValueError(f"{path.name} is missing")
    size = path.stat().st_size
    if size != told["bytes"]:
        raise ValueError(f"{path.name} has {size} bytes, and was written with {told['bytes']}")
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != told["blake2b"]:
        raise ValueError(f"{path.name} is not as it was written: its digest is another")


def plain(value: Any) -> Any:
    """A value as it comes back from JSON."""
    return json.loads(json.dumps(value, default=str))


def _rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()
