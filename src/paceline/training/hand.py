"""What a worker has drawn since its last step: batches to train with, and mere looks at some.

A loop over a loader that is left before any use was made of its batches was a look: people look at
a batch to print its shape, on one rank only. It is as if it had not been. Its batches count for no
step and come again, as the same epoch does. Of a loop that was left, use was made

- when a step was made in it, or, without gradients, when it had asked for a second batch;
- when it was begun in the body of another, as by ``next(iter(loader))`` for every step;
- when a step comes after it, before another loop draws a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.training.loader import PacedLoader, Place


class DrawnBatch(NamedTuple):
    """What a worker has to know of a batch: where it stands, and how many samples it has."""

    epoch: int
    number: int
    samples: int
    full: int
    epochs_done: float
    queue: int | None = None


class Pass:
    """One iteration over a loader.

    Attributes:
        loader: that it goes over.
        epoch: of the loader's data.
        began: the place where it began; ``taken``, how many batches of the epoch it is at by now.
        open: whether the loop goes on; ``left``, whether it ended before its data did.
        used: whether use was made of it.
        in_body: whether it was begun in the body of another loop.
        trains: whether gradients were on for its last batch.
        held: its batches that no use was made of; ``samples``, of those that count for a step.
    """

    def __init__(self, loader: PacedLoader, epoch: int, began: Place) -> None:
        self.loader, self.epoch, self.began, self.taken = loader, epoch, began, began.taken
        self.open, self.left = True, False
        self.used = self.in_body = self.trains = False
        self.held: list[DrawnBatch] = []
        self.samples = 0

    @property
    def is_look(self) -> bool:
        """Whether it was left, and no use was made of it so far."""
        return self.left and not self.used and not self.in_body

    def leave(self) -> None:
        """Hear that the loop has ended before its data, if it has not ended."""
        self.left, self.open = self.left or self.open, False

    def end(self) -> None:
        """Hear that the data has ended."""
        self.open = False


class Hand:
    """The batches of one worker that it has not made use of.

    Args:
        done_with: called with queue, epoch and number of a batch that nobody has to take again.
        forget: called with the samples that count for no step after all.
    """

    def __init__(
        self, done_with: Callable[[int, int, int], None], forget: Callable[[int], None]
    ) -> None:
        self._done_with, self._forget = done_with, forget
        self._loops: list[Pass] = []
        """Those that have drawn since the last step; who drew last stands last."""

    def draw(self, loop: Pass, trains: bool) -> None:
        """Hear that a loop draws a batch."""
        if not loop.held and not loop.used:
            loop.in_body = trains and any(o.open for o in self._loops if o is not loop)
        loop.trains = trains
        self._remove(loop)
        self._loops.append(loop)

    def came_round(self, loop: Pass) -> None:
        """Hear that the body of a loop is through: without gradients, that was its use."""
        if not loop.trains:
            loop.used = True
            self._use_up(loop)
            self._remove(loop)

    def before_step(self) -> None:
        """Tell what a step is made of from what was left before it came to one."""
        going_on = [i for i, loop in enumerate(self._loops) if loop.trains and not loop.left]
        last = going_on[-1] if going_on else 0
        for i, loop in enumerate([*self._loops]):
            if loop.left and (i < last or not loop.trains):
                self._give_up(loop)
            loop.used = True

    def after_step(self) -> None:
        """Hear that a step was made: nobody has to take those batches again."""
        for loop in self._loops:
            self._use_up(loop)
            loop.samples = 0
        self._loops.clear()

    def close(self, loop: Pass) -> None:
        """Have done with a loop, as its loader begins another."""
        loop.leave()
        if loop.left:
            self._give_up(loop)

    def close_all(self) -> None:
        """Have done with all loops that were left, at the end of training."""
        for loop in [*self._loops]:
            if loop.left:
                self._give_up(loop)

    def drop(self) -> None:
        """Forget all: in another life, others have these batches."""
        for loop in self._loops:
            loop.held.clear()
            loop.samples = 0
        self._loops.clear()

    def _give_up(self, loop: Pass) -> None:
        """Have the batches count for nothing that were left in a loop without a use."""
        if loop.in_body:
            return
        loop.left = False
        if not loop.used:
            loop.loader.looked_at(loop)
        elif loop.loader.queue is not None:
            self._use_up(loop)
            for number in {*loop.loader.ahead(), *loop.began.tickets}:
                self._done_with(loop.loader.queue, loop.epoch, number)
        self._forget(loop.samples)
        loop.samples = 0
        loop.held.clear()
        self._remove(loop)

    def _use_up(self, loop: Pass) -> None:
        for batch in loop.held:
            if batch.queue is not None:
                self._done_with(batch.queue, batch.epoch, batch.number)
        loop.held.clear()

    def _remove(self, loop: Pass) -> None:
        self._loops = [other for other in self._loops if other is not loop]
