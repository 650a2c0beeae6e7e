"""What a run does when it loses a rank."""

from __future__ import annotations

from collections import Counter

from paceline.common.options import at_least, one_of
from paceline.errors import UsageError

ON_LOSS = ("continue", "stop")
MOST_SUCCESSORS = 5
"""How often the run restarts one server or communicator; more deaths point to a bug in it."""


class MembershipPolicy:
    """Whether a run continues without a lost rank, and whether it restarts that rank.

    Args:
        synchronous: whether the method is synchronous.
        workers: how many there are; the ranks after them serve, and are always restarted.
        on_loss: ``continue`` or ``stop``; by default asynchronous methods continue.
        max_restarts: how many restarts of workers the run makes in total.
        takes_in: whether a worker can join the method in mid-run.
    """

    def __init__(
        self,
        synchronous: bool,
        workers: int,
        on_loss: str | None,
        max_restarts: int,
        takes_in: bool = True,
    ) -> None:
        if on_loss is not None:
            one_of("on_loss", on_loss, ON_LOSS)
        at_least("max_restarts", max_restarts, 0)
        if max_restarts and not takes_in:
            raise UsageError(
                f"max_restarts ({max_restarts}) must be 0: no worker can join this method during a"
                " run"
            )
        self.on_loss = on_loss or ("stop" if synchronous else "continue")
        if max_restarts and not self.goes_on:
            raise UsageError(
                f"max_restarts ({max_restarts}) must be 0 where a loss ends the run: add"
                ' on_loss="continue"'
            )
        self.workers, self.max_restarts = workers, max_restarts
        self._synchronous, self._takes_in = synchronous, takes_in
        self._restarted: Counter[int] = Counter()

    @property
    def goes_on(self) -> bool:
        """Whether the run continues after the loss of a rank."""
        return self.on_loss == "continue"

    @property
    def accepts_joiners(self) -> bool:
        """Whether a worker can join while the run is under way."""
        return self.goes_on and self._takes_in

    @property
    def ends_at_once(self) -> bool:
        """Whether a loss ends the run at once.

        A synchronous run ends when a rank waits for the lost one: its error can name the wait.
        """
        return not self.goes_on and not self._synchronous

    def may_rejoin(self, rank: int) -> bool:
        """Whether ``rank``, lost because it was stopped, may rejoin; the run kills it otherwise.

        A server has a successor by then. A worker of a synchronous method can come again only in a
        new process, which begins to train where the others are.
        """
        return rank < self.workers and not self._synchronous

    def can_restart(self, rank: int) -> bool:
        """Whether ``rank`` would be restarted if it died now."""
        if not self.goes_on:
            return False
        if rank < self.workers:
            used = sum(count for worker, count in self._restarted.items() if worker < self.workers)
            return used < self.max_restarts
        return self._restarted[rank] < MOST_SUCCESSORS

    def restarts(self, rank: int) -> bool:
        """Decide whether to restart ``rank``, which has died, and count the restart."""
        allowed = self.can_restart(rank)
        self._restarted[rank] += allowed
        return allowed
