"""Checkpoints on a disk that may lose its power at any moment, and what is there afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from os.path import dirname
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.checkpoint.disk import Disk
from paceline.checkpoint.states import load_state
from paceline.checkpoint.store import Checkpoint, Store
from paceline.common.seeds import stream
from paceline.errors import UsageError
from paceline.lab.faulttest.schedule import Schedule
from paceline.lab.faulttest.watched import Violation
from paceline.launcher.checkpoints import CheckpointCoordinator
from paceline.record.result import RunBook
from paceline.training.checkpointing import CheckpointParticipant

Image = Mapping[str, bytes]
MOMENTS = 3
"""At so many moments of a run its disk is looked at as if the power had failed there."""


class FragileDisk(Disk):
    """Remembers what would be there after a loss of power, at each moment.

    What was not flushed is half there, if it has its name; and names that were not flushed are
    there or not.

    Args:
        root: the folder that it is.

    Attributes:
        images: what would be there, at each moment; files by their names.
        on_image: called with each moment.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images: list[Image] = []
        self.on_image: Callable[[], None] = lambda: None
        self._nodes: dict[str, list[bytes]] = {}
        self._names: dict[str, list[bytes]] = {}
        for path in root.rglob("*"):
            if path.is_file():
                name = self._name(path)
                self._nodes[name] = self._names[name] = [path.read_bytes()] * 2
        self._note()

    def write(self, path: Path, content: bytes, on_half: Callable[[], None]) -> None:
        super().write(path, content, on_half)
        self._nodes[self._name(path)] = [content, content[: len(content) // 2]]
        self._note()

    def flush(self, path: Path) -> None:
        name = self._name(path)
        if name in self._nodes:
            self._nodes[name][1] = self._nodes[name][0]
        else:
            for gone in [n for n in self._names if dirname(n) == name and n not in self._nodes]:
                del self._names[gone]
            self._names |= {n: node for n, node in self._nodes.items() if dirname(n) == name}
        self._note()

    def rename(self, path: Path, target: Path) -> None:
        super().rename(path, target)
        name = self._name(path)
        for moved in [n for n in self._nodes if n == name or n.startswith(f"{name}/")]:
            self._nodes[self._name(target) + moved[len(name) :]] = self._nodes.pop(moved)
        self._note()

    def remove(self, path: Path) -> None:
        super().remove(path)
        name = self._name(path)
        for gone in [n for n in self._nodes if n == name or n.startswith(f"{name}/")]:
            del self._nodes[gone]
        self._note()

    def _name(self, path: Path) -> str:
        """Of a path below the root: its name from there."""
        return str(path)[len(str(self.root)) + 1 :]

    def _note(self) -> None:
        for names in (self._names, self._nodes):
            self.images.append({name: node[1] for name, node in names.items()})
            self.on_image()


class Shelf:
    """Where a run of the fault tests has its checkpoints.

    Args:
        schedule: the run.
        image: what is there already; the run goes on from it.

    Attributes:
        made: for each image of the disk, the step of the last checkpoint that was complete by then.
    """

    def __init__(self, schedule: Schedule, image: Image | None = None) -> None:
        self._schedule = schedule
        self._folder = TemporaryDirectory(prefix="paceline-faulttest-")
        root = Path(self._folder.name)
        lay_out(image or {}, root)
        self.disk = FragileDisk(root)
        steps = schedule.checkpoint_steps
        self.saving = CheckpointCoordinator(
            root, steps=steps, minutes=None, keep=1, resume=True, disk=self.disk
        )
        with warnings.catch_warnings(action="ignore"):  # of a pointer that is not there yet
            self.saving.prepare({"schedule": str(schedule.but(faults=()))}, schedule.size)
        self.saving.follow(RunBook(None, None))
        self.made: list[int | None] = [None] * len(self.disk.images)
        self.disk.on_image = lambda: self.made.append(self.saving.last)

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()

    def checkpointing(self) -> CheckpointParticipant:
        """What one rank makes its part of them with."""
        assert self.saving.plan is not None
        return CheckpointParticipant(self.saving.plan, self.saving.hear, self.disk)

    def after_loss_of_power(self) -> list[tuple[Image, int | None]]:
        """What is there after a loss of power, at some moments, and what had been made by then."""
        random = stream(self._schedule.seed, "power")
        moments = random.integers(len(self.disk.images), size=MOMENTS)
        return [(self.disk.images[moment], self.made[moment]) for moment in moments]

    def check(self) -> int:
        """Whether a loss of power would have spoiled a checkpoint; how many were looked at."""
        found = [look_at(image, made) for image, made in self.after_loss_of_power()]
        return sum(one is not None for one in found)


def lay_out(image: Image, root: Path) -> None:
    """Make the files of an image."""
    for name, content in image.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def look_at(image: Image, made: int | None) -> Checkpoint | None:
    """The checkpoint that is there: whole, and no older than the one that had been ``made``."""
    with TemporaryDirectory(prefix="paceline-faulttest-") as folder:
        lay_out(image, Path(folder))
        found, unusable = Store(Path(folder) / "checkpoints").look()
        try:
            for rank in found.ranks if found else ():
                assert found is not None
                load_state(found.path, f"rank{rank}")
        except UsageError as error:
            unusable.append(str(error))
        if unusable:
            raise Violation("a loss of power spoils nothing", unusable[0])
    if made is not None and (found is None or found.step < made):
        step = None if found is None else found.step
        raise Violation(
            "a checkpoint that was made stays", f"that of step {made} is gone; there is {step}"
        )
    return found
