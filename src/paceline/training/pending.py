"""The batches that a worker has drawn since its last step: to train on, or only to preview.

A loop over a loader that is left before its batches were used was a preview: people print the shape
of a batch, often on one rank only. A preview has no effect: its batches count for no step, and the
same epoch starts again with them. A loop that was left has used its batches if

- a step was made in it, or, without gradients, it asked for a second batch;
- it started in the body of another loop, as with ``next(iter(loader))`` for every step;
- a step follows it, before another loop draws a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.training.loader import PacedLoader, Position


class DrawnBatch(NamedTuple):
    """What a worker needs to know about a batch: its position, and its number of samples."""

    epoch: int
    number: int
    samples: int
    full: int
    epochs_done: float
    queue: int | None = None


class Pass:
    """One iteration over a loader.

    Attributes:
        loader: the loader.
        epoch: the epoch of the loader's data.
        began: the position at which it started; ``taken``, its batches of the epoch so far.
        open: whether the loop is running; ``left``, whether it was left before the data ended.
        used: whether its batches were used.
        in_body: whether it started in the body of another loop.
        trains: whether gradients were on for its last batch.
        held: its batches that were not used yet; ``samples``, those that count for the next step.
    """

    def __init__(self, loader: PacedLoader, epoch: int, began: Position) -> None:
        self.loader, self.epoch, self.began, self.taken = loader, epoch, began, began.taken
        self.open, self.left = True, False
        self.used = self.in_body = self.trains = False
        self.held: list[DrawnBatch] = []
        self.samples = 0

    @property
    def is_preview(self) -> bool:
        """Whether it was left, and its batches were not used so far."""
        return self.left and not self.used and not self.in_body

    def leave(self) -> None:
        """Note that the loop was left; does nothing if its data has ended."""
        self.left, self.open = self.left or self.open, False


class PendingBatches:
    """The batches that a worker has drawn and not used yet.

    Args:
        done_with: called with queue, epoch and number of a batch that no worker needs to take
            again.
        forget: called with the number of samples that count for no step after all.
    """

    def __init__(
        self, done_with: Callable[[int, int, int], None], forget: Callable[[int], None]
    ) -> None:
        self._done_with, self._forget = done_with, forget
        self._loops: list[Pass] = []
        """The loops that have drawn since the last step, the most recent last."""
        self.own_samples = 0
        """The samples that the script has drawn since the last step without a loader."""

    @property
    def samples(self) -> int:
        """The samples that count for the next step in any case."""
        last = self._loops[-1:]
        of_loops = sum(loop.samples for loop in self._loops if not loop.left or loop in last)
        return of_loops + self.own_samples

    def draw(self, loop: Pass, trains: bool) -> None:
        """Note that a loop draws a batch."""
        if not loop.held and not loop.used:
            loop.in_body = trains and any(other.open for other in self._loops if other is not loop)
        loop.trains = trains
        self._remove(loop)
        self._loops.append(loop)

    def body_done(self, loop: Pass) -> None:
        """Note that the body of a loop is done; without gradients, this uses the batch."""
        if not loop.trains:
            loop.used = True
            self._use(loop)
            self._remove(loop)

    def before_step(self) -> None:
        """Discard the batches of loops that were left before this step; use the others."""
        running = [i for i, loop in enumerate(self._loops) if loop.trains and not loop.left]
        last = running[-1] if running else 0
        for i, loop in enumerate([*self._loops]):
            if loop.left and (i < last or not loop.trains):
                self._discard(loop)
            loop.used = True

    def after_step(self) -> None:
        """Note that a step was made: no worker needs to take its batches again."""
        for loop in self._loops:
            self._use(loop)
            loop.samples = 0
        self._loops.clear()
        self.own_samples = 0

    def close(self, loop: Pass) -> None:
        """Close a loop, because its loader starts another one."""
        loop.leave()
        if loop.left:
            self._discard(loop)

    def close_all(self) -> None:
        """Discard the batches of all loops that were left, at the end of training."""
        for loop in [*self._loops]:
            if loop.left:
                self._discard(loop)

    def drop(self) -> None:
        """Forget all batches: after this rank was left behind, others have taken them."""
        for loop in self._loops:
            loop.held.clear()
            loop.samples = 0
        self._loops.clear()
        self.own_samples = 0

    def _discard(self, loop: Pass) -> None:
        """Discard the unused batches of a loop that was left."""
        if loop.in_body:
            return
        loop.left = False
        if not loop.used:
            loop.loader.repeat_epoch(loop)
        elif loop.loader.queue is not None:
            self._use(loop)
            for number in {*loop.loader.ahead(), *loop.began.tickets}:
                self._done_with(loop.loader.queue, loop.epoch, number)
        self._forget(loop.samples)
        loop.samples = 0
        loop.held.clear()
        self._remove(loop)

    def _use(self, loop: Pass) -> None:
        for batch in loop.held:
            if batch.queue is not None:
                self._done_with(batch.queue, batch.epoch, batch.number)
        loop.held.clear()

    def _remove(self, loop: Pass) -> None:
        self._loops = [other for other in self._loops if other is not loop]
