"""Checkpoints as who starts a run sees them: which to go on from, and those that are made."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.disk import DISK, Disk
from paceline.checkpoint.store import FOLDER, Checkpoint, Saved, Store
from paceline.common.faults import Fault
from paceline.common.options import above, at_least, finite
from paceline.errors import UsageError
from paceline.record.folder import check_out
from paceline.strategies import strategy_name
from paceline.strategies.base import Strategy
from paceline.training.checkpointing import Plan

if TYPE_CHECKING:
    from paceline.record.result import RunRecorder


class CheckpointCoordinator:
    """The checkpoints of one run.

    Args:
        out: the folder of the run; without one there are none.
        steps: make one after so many steps of the first worker.
        minutes: make one after so many minutes.
        keep: how many are kept.
        resume: whether to go on from the newest that is whole, or begin where there is none.
        disk: what they are written to.

    Attributes:
        start: the one that the run goes on from.
        error: why the last one could not be made.
        last: the step of the last one that was.
    """

    def __init__(
        self,
        out: str | PathLike[str] | None,
        *,
        steps: int | None,
        minutes: float | None,
        keep: int,
        resume: bool,
        disk: Disk = DISK,
    ) -> None:
        if steps is not None:
            at_least("checkpoint_steps", steps, 1)
        if minutes is not None:
            above("checkpoint_minutes", minutes, 0)
            finite("checkpoint_minutes", minutes)
        at_least("keep", keep, 1)
        self._out = None if out is None else Path(out)
        self.on = steps is not None or minutes is not None or resume
        if self.on and self._out is None:
            raise UsageError("out (None) must be a folder, for checkpoints to be in it")
        self.folder = (self._out or Path()) / FOLDER
        self._steps, self._minutes, self._resume = steps, minutes, resume
        self._store = Store(self.folder, keep, disk)
        self._heard: dict[int, list[tuple[Saved, int]]] = {}
        self._warned = False
        self._ranks = 0
        self.start: Checkpoint | None = None
        self.error: str | None = None
        self.last: int | None = None

    def check_strategy(self, strategy: Strategy, ranks: int, workers: int) -> None:
        """Refuse a method whose other ranks do not come when they are called."""
        if self.on and ranks > workers and type(strategy).summon is Strategy.summon:
            raise UsageError(
                f"checkpoints must not be used with {strategy_name(strategy)}: it has roles beside"
                " workers, but no summon()"
            )

    def prepare(self, config: Mapping[str, Any], ranks: int) -> None:
        """Find what the run goes on from, and refuse what it must not go on from or overwrite."""
        if not self.on:
            if self._out is not None and self._store.has_any:
                raise self._in_the_way()
            return
        check_out(self.folder)
        self._config, self._ranks = config, ranks
        if self._store.has_any and not self._resume:
            raise self._in_the_way()
        self.start = self._store.newest() if self._resume else None
        if self.start is not None:
            self.start.check_config(config)
        self._store.prepare(self.start)

    def _in_the_way(self) -> UsageError:
        return UsageError(
            f"out ({self.folder.parent}) holds checkpoints of an earlier run: go on from them with"
            " --resume (resume=True), or choose another folder"
        )

    @property
    def plan(self) -> Plan | None:
        """What ranks have to know."""
        if not self.on:
            return None
        resume = None if self.start is None else str(self.start.path.absolute())
        folder = str(self.folder.absolute())
        return Plan(folder=folder, steps=self._steps, minutes=self._minutes, resume=resume)

    @property
    def latecomers(self) -> list[Fault]:
        """The workers that had been lost when the checkpoint was made: they join the run."""
        there = range(self._ranks) if self.start is None else self.start.ranks
        absent = [rank for rank in range(self._ranks) if rank not in there]
        return [Fault(kind="join", rank=rank, at_s=self.start_s) for rank in absent]

    @property
    def start_s(self) -> float:
        """The time on the run's clock that it begins at."""
        return 0.0 if self.start is None else self.start.time_s

    def follow(self, book: RunRecorder) -> None:
        """Take up what was logged before, and put down with each checkpoint what has been."""
        self._book = book
        if self.start is not None:
            records = self.start.records()
            book.restore(records["metrics"], records["events"])

    def hear(self, saved: Saved) -> None:
        """Hear of a rank's file; with the last one of a checkpoint, make it one."""
        heard = self._heard.setdefault(saved.step, [])
        heard.append((saved, len(self._book.metrics)))
        if len(heard) == len(saved.ranks):
            del self._heard[saved.step]
            self._make(sorted(heard, key=lambda one: one[0].rank))

    def _make(self, heard: list[tuple[Saved, int]]) -> None:
        saved, counts = [one for one, _ in heard], {one.rank: count for one, count in heard}
        step, self.error = saved[0].step, next((one.error for one in saved if one.error), None)
        if self.error is None:
            metrics = [
                record
                for number, record in enumerate(self._book.metrics)
                if number < counts.get(record["rank"], len(self._book.metrics))
            ]
            try:
                records = {"metrics": metrics, "events": [*self._book.events]}
                self._store.commit(saved, self._config, records)
                self.last = step
                return
            except OSError as error:
                self.error = error.strerror or str(error)
        self._store.abandon(step)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the checkpoint of step {step} could not be saved in {self.folder}: {self.error};"
                " training goes on, and the one before is still there",
                stacklevel=2,
            )

    def facts(self) -> dict[str, Any]:
        """What the result of the run tells of them."""
        resumed_at = None if self.start is None else self.start.step
        return {
            "checkpoint": self.last,
            "checkpoint_error": self.error,
            "resumed_at": resumed_at,
        }

    def told_of_last(self) -> str:
        """Where a run that was told to end can be taken up."""
        if self.last is None:
            return f"no checkpoint could be made: {self.error}"
        return (
            f"its checkpoint of step {self.last} is saved: go on from it with --out"
            f" {self.folder.parent} --resume (resume=True)"
        )
