"""Checkpoints on a disk whose power may fail at any moment, and what it holds afterwards."""

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
from paceline.record.result import RunRecorder
from paceline.training.checkpointing import CheckpointParticipant

Image = Mapping[str, bytes]
"""The files on a disk: their contents by name."""
MOMENTS = 3
"""The disk is checked after a power failure at this many random moments of a run."""


class FragileDisk(Disk):
    """Records what it would hold after a power failure, at each moment.

    Of a file that was not flushed, half the content survives. A name that was not flushed may
    survive or not: both images are recorded.

    Args:
        root: the folder that stands for the disk.

    Attributes:
        images: the possible contents after each operation.
        on_image: called after each image is added.
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
        self._record()

    def write(self, path: Path, content: bytes, on_half: Callable[[], None]) -> None:
        super().write(path, content, on_half)
        self._nodes[self._name(path)] = [content, content[: len(content) // 2]]
        self._record()

    def flush(self, path: Path) -> None:
        name = self._name(path)
        if name in self._nodes:
            self._nodes[name][1] = self._nodes[name][0]
        else:
            for removed in [n for n in self._names if dirname(n) == name and n not in self._nodes]:
                del self._names[removed]
            self._names |= {n: node for n, node in self._nodes.items() if dirname(n) == name}
        self._record()

    def rename(self, path: Path, target: Path) -> None:
        super().rename(path, target)
        name = self._name(path)
        for moved in [n for n in self._nodes if n == name or n.startswith(f"{name}/")]:
            self._nodes[self._name(target) + moved[len(name) :]] = self._nodes.pop(moved)
        self._record()

    def remove(self, path: Path) -> None:
        super().remove(path)
        name = self._name(path)
        for removed in [n for n in self._nodes if n == name or n.startswith(f"{name}/")]:
            del self._nodes[removed]
        self._record()

    def _name(self, path: Path) -> str:
        """The name of ``path`` relative to the root."""
        return str(path)[len(str(self.root)) + 1 :]

    def _record(self) -> None:
        for names in (self._names, self._nodes):
            self.images.append({name: node[1] for name, node in names.items()})
            self.on_image()


class CheckpointFolder:
    """The folder on a fragile disk into which a run of the fault tests writes its checkpoints.

    Args:
        schedule: the run.
        image: what the disk holds already; the run resumes from it.

    Attributes:
        completed: for each image of the disk, the step of the last checkpoint completed by then.
    """

    def __init__(self, schedule: Schedule, image: Image | None = None) -> None:
        self._schedule = schedule
        self._folder = TemporaryDirectory(prefix="paceline-faulttest-")
        root = Path(self._folder.name)
        write_image(image or {}, root)
        self.disk = FragileDisk(root)
        steps = schedule.checkpoint_steps
        self.coordinator = CheckpointCoordinator(
            root, steps=steps, minutes=None, keep=1, resume=True, disk=self.disk
        )
        with warnings.catch_warnings(action="ignore"):  # there is no checkpoint yet
            self.coordinator.prepare({"schedule": str(schedule.but(faults=()))}, schedule.size)
        self.coordinator.follow(RunRecorder(None, None))
        self.completed: list[int | None] = [None] * len(self.disk.images)
        self.disk.on_image = lambda: self.completed.append(self.coordinator.last)

    def __enter__(self) -> CheckpointFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()

    def checkpointing(self) -> CheckpointParticipant:
        """The participant of one rank."""
        assert self.coordinator.plan is not None
        return CheckpointParticipant(self.coordinator.plan, self.coordinator.add_report, self.disk)

    def after_power_failures(self) -> list[tuple[Image, int | None]]:
        """Images after a power failure at random moments, with the last checkpoint completed."""
        random = stream(self._schedule.seed, "power")
        moments = random.integers(len(self.disk.images), size=MOMENTS)
        return [(self.disk.images[moment], self.completed[moment]) for moment in moments]

    def check_images(self) -> int:
        """Check that no power failure would have spoiled a checkpoint; how many were found."""
        pairs = self.after_power_failures()
        return sum(check_image(image, completed) is not None for image, completed in pairs)


def write_image(image: Image, root: Path) -> None:
    """Write the files of ``image`` into ``root``."""
    for name, content in image.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def check_image(image: Image, completed: int | None) -> Checkpoint | None:
    """The newest checkpoint in ``image``; it must be complete, and no older than ``completed``."""
    with TemporaryDirectory(prefix="paceline-faulttest-") as folder:
        write_image(image, Path(folder))
        checkpoint, unusable = Store(Path(folder) / "checkpoints").scan()
        try:
            for rank in checkpoint.ranks if checkpoint else ():
                assert checkpoint is not None
                load_state(checkpoint.path, f"rank{rank}")
        except UsageError as error:
            unusable.append(str(error))
        if unusable:
            raise Violation("a power failure damages nothing", unusable[0])
    if completed is not None and (checkpoint is None or checkpoint.step < completed):
        step = None if checkpoint is None else checkpoint.step
        raise Violation(
            "a completed checkpoint stays",
            f"that of step {completed} is gone; there is {step}",
        )
    return checkpoint
