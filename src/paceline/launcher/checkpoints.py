"""The launcher's side of checkpoints: choose the one to resume from, and commit new ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from paceline.checkpoint.disk import DISK, Disk
from paceline.checkpoint.store import FOLDER, Checkpoint, Saved, Store
from paceline.comm.membership import MembershipPolicy
from paceline.common.faults import Fault
from paceline.common.files import reason_of
from paceline.common.options import at_least, positive
from paceline.errors import UsageError
from paceline.record.folder import check_out
from paceline.record.result import RunRecorder
from paceline.strategies import strategy_name
from paceline.strategies.base import Strategy
from paceline.strategies.served import RoleStrategy
from paceline.training.checkpointing import Plan


class CheckpointCoordinator:
    """The checkpoints of one run.

    Args:
        out: the folder of the run; without one there are no checkpoints.
        steps: make one each time the first worker has made so many steps.
        minutes: make one every so many minutes.
        keep: how many of the newest are kept.
        resume: whether to resume from the newest intact checkpoint, if there is one.
        disk: the operations that write them.

    Attributes:
        start: the checkpoint that the run resumes from.
        error: why the last checkpoint that was due could not be made.
        last: the step of the last checkpoint that was made.
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
            positive("checkpoint_minutes", minutes)
        at_least("keep", keep, 1)
        self._out = None if out is None else Path(out)
        self.on = steps is not None or minutes is not None or resume
        if self.on and self._out is None:
            raise UsageError("out (None) must be a folder: checkpoints are written to it")
        self.folder = (self._out or Path()) / FOLDER
        self._steps, self._minutes, self._resume = steps, minutes, resume
        self._store = Store(self.folder, keep, disk)
        self._reports: dict[int, list[tuple[Saved, int]]] = {}
        self._warned = False
        self._ranks = 0
        self.start: Checkpoint | None = None
        self.error: str | None = None
        self.last: int | None = None

    def check_strategy(self, strategy: Strategy, ranks: int, workers: int) -> None:
        """Refuse a method whose servers or communicators cannot be called to a checkpoint."""
        if self.on and ranks > workers and not isinstance(strategy, RoleStrategy):
            raise UsageError(
                f"checkpoints must not be used with {strategy_name(strategy)}: it has roles beside"
                " workers, and is no RoleStrategy"
            )

    def prepare(self, config: Mapping[str, Any], ranks: int) -> None:
        """Choose the checkpoint to resume from; refuse one of another run, and to overwrite any."""
        if self._out is not None and self._store.has_any and not self._resume:
            raise UsageError(
                f"out ({self._out}) holds checkpoints of an earlier run: resume it with"
                " --resume (resume=True), or choose another folder"
            )
        if not self.on:
            return
        check_out(self.folder)
        self._config, self._ranks = config, ranks
        self.start = self._store.newest() if self._resume else None
        if self.start is not None:
            self.start.check_config(config)
        self._store.prepare(self.start)

    @property
    def plan(self) -> Plan | None:
        """What ranks need to know about checkpoints."""
        if not self.on:
            return None
        resume = None if self.start is None else str(self.start.path.absolute())
        folder = str(self.folder.absolute())
        return Plan(folder=folder, steps=self._steps, minutes=self._minutes, resume=resume)

    def late_joiners(self, policy: MembershipPolicy) -> list[Fault]:
        """Joins of the workers that the checkpoint lacks: they had been lost when it was made."""
        absent = self._absent if policy.accepts_joiners else []
        return [Fault(kind="join", rank=rank, at_s=self.start_s) for rank in absent]

    def away(self, policy: MembershipPolicy) -> list[int]:
        """The workers that the checkpoint lacks, where nobody can join: they stay lost."""
        return [] if policy.accepts_joiners else self._absent

    @property
    def _absent(self) -> list[int]:
        present = range(self._ranks) if self.start is None else self.start.ranks
        return [rank for rank in range(self._ranks) if rank not in present]

    @property
    def start_s(self) -> float:
        """The time on the run's clock at which this part of the run starts."""
        return 0.0 if self.start is None else self.start.time_s

    def follow(self, recorder: RunRecorder) -> None:
        """Restore the records of the checkpoint, and save this recorder's with each new one."""
        self._recorder = recorder
        if self.start is not None:
            records = self.start.records()
            recorder.restore(records["metrics"], records["events"])

    def add_report(self, saved: Saved) -> None:
        """Take a rank's report on its file; the last report of a checkpoint commits it."""
        reports = self._reports.setdefault(saved.step, [])
        reports.append((saved, len(self._recorder.metrics)))
        if len(reports) == len(saved.ranks):
            del self._reports[saved.step]
            self._commit(sorted(reports, key=lambda one: one[0].rank))

    def _commit(self, reports: list[tuple[Saved, int]]) -> None:
        saved, counts = [one for one, _ in reports], {one.rank: count for one, count in reports}
        step, self.error = saved[0].step, next((one.error for one in saved if one.error), None)
        if self.error is None:
            metrics = [
                record
                for number, record in enumerate(self._recorder.metrics)
                if number < counts.get(record["rank"], len(self._recorder.metrics))
            ]
            try:
                records = {"metrics": metrics, "events": [*self._recorder.events]}
                self._store.commit(saved, self._config, records)
                self.last = step
                return
            except OSError as error:
                self.error = reason_of(error)
        self._store.abandon(step)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the checkpoint of step {step} could not be saved in {self.folder}: {self.error};"
                " training continues, and the previous checkpoint is kept",
                stacklevel=2,
            )

    def facts(self) -> dict[str, Any]:
        """The entries on checkpoints in the run's result."""
        return {
            "checkpoint": self.last,
            "checkpoint_error": self.error,
            "resumed_at": None if self.start is None else self.start.step,
        }

    def how_to_resume(self) -> str:
        """How to resume a run that a signal ended."""
        if self.last is None:
            return f"its checkpoint could not be made: {self.error}"
        return (
            f"its checkpoint of step {self.last} is saved: resume with --out"
            f" {self.folder.parent} --resume (resume=True)"
        )
