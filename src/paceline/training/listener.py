"""Who hears what happens on a rank: each protocol is given to whoever calls it, at its making."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.record.result import Metric


class Listener:
    """Hears what a rank tells the run; here, nobody does."""

    def metric(self, record: Metric) -> None:
        """Hear of a record of ``worker.log``."""

    def progress(self, record: Metric) -> None:
        """Hear how far a worker is, a few times a second."""

    def event(self, record: Metric) -> None:
        """Hear of something that happened to a rank."""

    def ready(self) -> None:
        """Hear that this rank has its state, and begins."""


class StepListener(Protocol):
    """Hears of the steps of a worker, and takes part in them."""

    @property
    def may_return(self) -> bool:
        """Whether the worker may rejoin after it was left behind."""

    def step_asked(self) -> None:
        """Hear that ``optimizer.step()`` was called."""

    def step_skipped(self) -> None:
        """Hear that the step lies before the checkpoint that the run goes on from."""

    def before_step(self) -> None:
        """Hear that a step is made; may refuse it."""

    def after_step(self) -> None:
        """Hear that a step was made."""

    def rejoin(self, x: Tensor) -> None:
        """Take the state of the others, after the worker was left behind."""

    def has_returned(self) -> None:
        """Hear that the worker was left behind, and is a member again."""
