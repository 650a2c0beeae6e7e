"""The checkpoints of a run, in the folder ``checkpoints`` of its own.

Each is a folder ``step-000000123`` with one ``rankN.safetensors`` of each rank, the metrics that
were logged until then, and at last ``manifest.json``, which has the size and a digest of every
file, and one of itself. A folder without a manifest is no checkpoint. None is used before all of
its files are what the manifest says. The file ``latest`` names the last one, for people; who goes
on takes the newest that is whole, whatever ``latest`` says.
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
"""What the name of a checkpoint ends in that a run has passed over."""
_NAME = re.compile(r"step-(\d{9,15})", re.ASCII)
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
        older = [number for number in self._steps() if number <= step]
        whole = [number for number in older if _has_manifest(self.folder(number))]
        for number in set(older) - set(whole[: self._keep]):
            self._disk.remove(self.folder(number))

    def begin(self, after: Checkpoint | None) -> None:
        """Make ready for a run: nothing that is later than what it goes on from is in its way.

        What never came to be a checkpoint is removed. What was one is kept, under another name.
        """
        self._disk.make_folder(self.path)
        self._disk.flush(self.path.parent)
        for step in self._steps():
            if after is None or step > after.step:
                self._clear_away(self.folder(step))
        for part in self.path.glob("**/.*.part"):
            self._disk.remove(part)

    def _clear_away(self, folder: Path) -> None:
        if not self._was_made(folder):
            self._disk.remove(folder)
            return
        aside, number = folder.with_name(folder.name + UNUSABLE), 1
        while aside.exists():
            number += 1
            aside = folder.with_name(f"{folder.name}{UNUSABLE}-{number}")
        self._disk.rename(folder, aside)

    # Reading -------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; says of each later one why it is not.

        Raises:
            UsageError: there are some, and none is whole.
        """
        whole, unusable = self.look()
        told = self._latest()
        if whole is None and (unusable or told is not None):
            reasons = unusable or [f"{LATEST} names {told!r}, and there is no such checkpoint"]
            raise UsageError(
                f"none of the checkpoints in {self.path} can be used, and nothing is removed:"
                f" {'; '.join(reasons)}. Put back what was there, or choose another folder"
            )
        for reason in unusable:
            rest = f"looking for an earlier one, and keeping this one as *{UNUSABLE}"
            warnings.warn(f"{reason}; {rest}", stacklevel=2)
        if whole is not None and (told is None or not self._is_one(told)):
            what = "is missing" if told is None else f"names {told!r}, which is not there"
            warnings.warn(
                f"{self.path / LATEST} {what}; {whole.path.name} is the newest that is whole",
                stacklevel=2,
            )
        return whole

    def look(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and why each later one is not."""
        unusable: list[str] = []
        for step in self._steps():
            if self._was_made(self.folder(step)):
                try:
                    return open_checkpoint(self.folder(step)), unusable
                except UsageError as error:
                    unusable.append(str(error))
        return None, unusable

    @property
    def holds_some(self) -> bool:
        """Whether there is anything in it."""
        return bool(self._steps()) or self._latest() is not None

    def _steps(self) -> list[int]:
        """The steps that there are folders of, newest first."""
        if not self.path.is_dir():
            return []
        found = [_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir()]
        steps = sorted((int(match[1]) for match in found if match), reverse=True)
        return [step for step in steps if self.folder(step).is_dir()]

    def _was_made(self, folder: Path) -> bool:
        """Whether a folder has been a checkpoint: the others are of runs that ended before."""
        return _has_manifest(folder) or folder.name == self._latest()

    def _is_one(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None and (self.path / name).is_dir()

    def _latest(self) -> str | None:
        """What the file says that names the last one; None when it is not there."""
        try:
            with (self.path / LATEST).open("rb") as file:
                return file.read(64).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError:
            return ""


def _has_manifest(folder: Path) -> bool:
    """Whether there is a manifest in a folder, one that cannot be read included."""
    try:
        (folder / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


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
        raise UsageError(f"checkpoint {path} cannot be used: {reason_of(error)}") from None
    return Checkpoint(path, manifest)


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
            f"{MANIFEST}: version ({version}) must be {VERSION}: another Paceline has written it"
        )
    if manifest != seal(manifest):
        raise ValueError(f"{MANIFEST} is not as it was written: its digest is another")
    ranks, step = manifest["ranks"], manifest["step"]
    whole = isinstance(ranks, list) and all(type(number) is int for number in [step, *ranks])
    if not whole or not ranks or ranks != sorted(set(ranks)) or ranks[0] < 0:
        raise ValueError(f"{MANIFEST}: ranks and step must be whole numbers, ranks in order")
    wanted = {METRICS, *map(_rank_file, ranks)}
    if path.name != (name := f"step-{step:09d}"):
        raise ValueError(f"{MANIFEST} is that of {name}: the folder must have this name")
    if set(manifest["files"]) != wanted:
        raise ValueError(f"{MANIFEST} must name the files of its ranks")
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
