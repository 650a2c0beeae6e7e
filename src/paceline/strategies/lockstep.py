"""What methods share whose workers meet in one all-reduce after another.

Workers need not have equally many batches. One that runs out goes on meeting the others with
weight 0, and so never leaves them waiting; a meeting to which nobody contributes is the last one.
Whoever fell behind then takes the parameters of the worker that made the most steps.

Nor need batches be equally large. Every mean over workers is ``sum n_i v_i / sum n_i``, where n_i
is the number of samples that worker i has taken since the last exchange.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PeerLost
from paceline.strategies.base import Strategy
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.base import Comm

# The weight of an all-reduce carries three counts: samples below ODD, then flags. There is room for
# 1 << 29 samples of each of 1 << 11 workers.
ODD = 1 << 40
BEHIND = 1 << 52


@dataclass(kw_only=True)
class Lockstep(Strategy):
    """A bulk-synchronous method: subclasses say what happens when workers :meth:`meet`."""

    def __post_init__(self) -> None:
        self.steps = self.unit = 0
        self._behind = self._someone_behind = False

    @abstractmethod
    def meet(self, x: Tensor, weight: int) -> bool:
        """Exchange with all workers and move on; return whether anybody had something to give.

        The weight is the number of samples in it. With weight 0 this worker has nothing to give and
        must follow every all-reduce all the same. When the guard has dropped all that was brought,
        the answer is true: others go on.
        """

    def judge(self, v: Tensor, weight: int) -> tuple[int, bool]:
        """The weight that ``v`` may be handed in with, and whether it is dropped.

        Then it counts for nothing, and the optimizer forgets what led to it.
        """
        if not weight or self.guard.admits(norm(v), self.comm.rank, "contribution"):
            return weight, False
        self.replica.forget_moments()
        return 0, True

    def weigh(
        self, v: Tensor, weight: int, odd: bool = False, mean: bool = True
    ) -> tuple[float, bool]:
        """Sum ``v`` over the workers by their samples, in place, or take the mean of it.

        Returns the sum of the weights, in units of a whole contribution, so that it is the number
        of workers where all are whole; and whether any rank is ``odd``.
        """
        if not self.unit:
            self.unit = agree_on_unit(self.comm, v, weight)
        unit = self.unit or 1
        if weight not in (0, unit):
            v.mul_(weight / unit)
        total, anyone_odd = self.reduce(v, weight, odd, unit if mean else None)
        return total / unit, anyone_odd

    def reduce(
        self, v: Tensor, weight: int, odd: bool = False, unit: int | None = None
    ) -> tuple[int, bool]:
        """Sum ``v`` over the workers: the sum of the weights, and whether any rank is ``odd``.

        With ``unit``, the weight of a whole contribution, ``v`` becomes the mean instead. Who is
        odd and has no weight hands in zeros.
        """
        if self._behind or (odd and not weight):
            v.zero_()
        own = weight + ODD * odd + BEHIND * self._behind
        mean = None if unit is None else lambda total: unit / (total % ODD or unit)
        total = self.comm.all_reduce(v, own, mean)
        self._someone_behind = total >= BEHIND
        return total % ODD, total % BEHIND >= ODD

    def finish(self, x: Tensor) -> None:
        while self.meet(x, 0):
            self._behind = True
        if self._someone_behind:
            take_latest(self.comm, x, self.steps)


def agree_on_unit(workers: Comm, like: Tensor, weight: int) -> int:
    """What a contribution weighs on average, so that all count in it; 0 if there is none yet.

    Any number would do. In this one, contributions of equal batches are added up as they are.
    """
    nothing = like.new_zeros(0)
    total = workers.all_reduce(nothing, weight)  # the wait for the others is one, and is charged
    contributors = workers.uncharged().all_reduce(nothing, int(weight > 0))
    return max(1, total // contributors) if contributors else 0


def take_latest(workers: Comm, x: Tensor, steps: int) -> None:
    """Take the parameters of the worker that has made the most steps; it tells its own."""
    while True:
        counts = x.new_zeros(workers.size).double()
        counts[workers.rank] = steps
        workers.all_reduce(counts)
        try:
            return workers.broadcast(x, int(counts.argmax()))
        except PeerLost:  # of those who are left, another has made the most
            if not workers.elastic:
                raise
