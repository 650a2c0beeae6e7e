"""What a run does when it loses a rank."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from paceline.common.options import at_least, one_of
from paceline.errors import UsageError

OnLoss = Literal["continue", "stop"]
ON_LOSS = ("continue", "stop")
MOST_SUCCESSORS = 5
"""How often one rank that is no worker is started again: more looks like a fault of its own."""


class MembershipPolicy:
    """Whether a run goes on without a lost rank, and whether that is started again.

    Args:
        synchronous: of the method; asynchronous ones go on, unless they are told otherwise.
        workers: how many there are; ranks from there on serve, and are always started again.
        on_loss: ``continue`` or ``stop``.
        max_restarts: how many workers are started again, all together.
    """

    def __init__(
        self, synchronous: bool, workers: int, on_loss: str | None, max_restarts: int
    ) -> None:
        if on_loss is not None:
            one_of("on_loss", on_loss, ON_LOSS)
        at_least("max_restarts", max_restarts, 0)
        if max_restarts and synchronous:
            raise UsageError(
                f"max_restarts ({max_restarts}) must be 0: a synchronous method takes no worker in"
                " mid-run"
            )
        self.on_loss = on_loss or ("stop" if synchronous else "continue")
        if max_restarts and not self.goes_on:
            raise UsageError(f"max_restarts ({max_restarts}) must be 0 where a loss ends the run")
        self.workers, self.max_restarts = workers, max_restarts
        self._synchronous = synchronous
        self._restarted: Counter[int] = Counter()

    @property
    def goes_on(self) -> bool:
        """Whether the run outlives the loss of a rank."""
        return self.on_loss == "continue"

    @property
    def takes_in(self) -> bool:
        """Whether a worker can come in the middle."""
        return self.goes_on and not self._synchronous

    @property
    def ends_at_once(self) -> bool:
        """Whether a loss ends the run at once, before another rank misses the lost one."""
        return not self.goes_on and not self._synchronous

    def comes_back(self, rank: int) -> bool:
        """Whether ``rank``, stopped for too long, goes on by itself; others are ended instead.

        A server has a successor then, and lockstep goes on without the worker.
        """
        return rank < self.workers and not self._synchronous

    def restarts(self, rank: int) -> bool:
        """Decide whether ``rank``, which has died, is started again; it counts as if it is."""
        if not self.goes_on:
            return False
        if rank < self.workers and not self.takes_in:
            allowed = False
        elif rank < self.workers:
            used = sum(count for worker, count in self._restarted.items() if worker < self.workers)
            allowed = used < self.max_restarts
        else:
            allowed = self._restarted[rank] < MOST_SUCCESSORS
        self._restarted[rank] += allowed
        return allowed
