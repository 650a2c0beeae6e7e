"""The place of a strategy in a run: what it is given there, and what it can ask for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import PeerLost
from paceline.strategies.toolbox.guard import Guard

if TYPE_CHECKING:
    from paceline.comm.comm import Comm
    from paceline.model.gradient import Gradient
    from paceline.model.replica import Replica

T = TypeVar("T")


@dataclass
class Staleness:
    """How old what was applied was: in updates of a server, or in steps of the reader."""

    count: int = 0
    total: int = 0
    maximum: int = 0
    ages: dict[int, int] = field(default_factory=dict, kw_only=True)

    def note(self, age: int) -> None:
        """Count one more."""
        self.count += 1
        self.total += age
        self.maximum = max(self.maximum, age)
        self.ages[age] = self.ages.get(age, 0) + 1


class RankListener:
    """Hears what a strategy has to tell of its rank; here, nobody does."""

    def tell(self, event: str, **facts: Any) -> None:
        """Hear of something that goes into the run's record."""

    def summoned(self, number: int, stop: bool) -> None:
        """Save this rank, which is no worker, together with all others."""


class Place:
    """What every method works with; none overrides it.

    Attributes:
        comm: the whole world; ranks below ``workers`` are the workers.
        replica: this rank's model and optimizer.
        workers: how many there are, or will be.
        seed: of the run, for what a method draws.
        stale: how old what this worker applied was.
        guard: judges updates before they are handed on, or taken in.
        listener: hears what goes into the run's record, and of calls to a checkpoint.
    """

    def bind(
        self,
        comm: Comm,
        replica: Replica,
        workers: int,
        seed: int = 0,
        listener: RankListener | None = None,
    ) -> None:
        """Tie the strategy to its place; the run calls it once, before ``setup``."""
        self.comm, self.replica, self.workers, self.seed = comm, replica, workers, seed
        self.stale = Staleness()
        self.listener = listener or RankListener()
        self.guard = Guard(comm.rank, self.listener.tell)
        self._missed: set[int] = set()

    def live_workers(self) -> Sequence[int]:
        """The workers that are here now, this one included, in order."""
        alive = self.comm.members.alive()
        return alive[: bisect_left(alive, self.workers)]

    def starters(self) -> Comm:
        """All ranks that are here from the beginning, among themselves."""
        return self.comm.group(self.comm.members.starters())

    def first_workers(self) -> list[int]:
        """The workers that are here from the beginning."""
        return [rank for rank in self.comm.members.starters() if rank < self.workers]

    def among_live(self, act: Callable[[Comm], T], measuring: bool = False) -> T:
        """Let all workers that are left ``act`` together; again, if one is lost on the way.

        The workers that are members when the first of them calls this act together. A worker that
        comes later, or again, acts alone: some of the others may have gone on without it, and the
        rest cannot know. What is only ``measuring`` counts nowhere, and takes no virtual time.
        """
        own, members = self.comm.rank, self.comm.members
        workers = [(rank, number) for rank, number in members.final_roster() if rank < self.workers]
        while True:  # only who is missed shrinks the group, so that all come to the same one
            here = [rank for rank, number in workers if members.incarnation(rank) == number]
            left = [rank for rank in here if rank not in self._missed]
            together = left if own in left else [own]
            try:
                return act(self.comm.group(together, strict=True, metered=not measuring))
            except PeerLost as error:
                self._missed.update(error.ranks)

    def local_update(self, g: Gradient) -> None:
        """Run the user's own optimizer on the parameters and their gradients, if usable."""
        self.replica.local_update(g)
