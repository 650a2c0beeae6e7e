"""Listeners for events on a rank; each is passed to the constructor of the object that calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.record.result import Metric


class Listener:
    """Receives what a rank reports to its run; this base class ignores it."""

    def metric(self, record: Metric) -> None:
        """A record of ``worker.log``."""

    def progress(self, record: Metric) -> None:
        """The progress of a worker, a few times a second."""

    def event(self, record: Metric) -> None:
        """Something happened to a rank."""

    def ready(self) -> None:
        """This rank has completed its setup."""


class StepListener(Protocol):
    """Is called around the steps of a worker, and takes part in them."""

    @property
    def may_return(self) -> bool:
        """Whether the worker may rejoin after it was left behind."""

    def step_asked(self) -> None:
        """``optimizer.step()`` was called."""

    def step_skipped(self) -> None:
        """The step was skipped: it is before the checkpoint that the run resumes from."""

    def before_step(self) -> None:
        """A step is about to be made; may refuse it."""

    def after_step(self) -> None:
        """A step was made."""

    def rejoin(self, x: Tensor) -> None:
        """Take over the state of the others, after the worker was left behind."""

    def has_returned(self) -> None:
        """The worker was left behind, and is a member again."""
