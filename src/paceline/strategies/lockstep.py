"""What methods share whose workers take part in one all-reduce after another.

Workers need not have equally many batches. One that runs out goes on to take part with weight 0, so
that the others never wait for it. The exchange to which nobody contributes is the last one. A
worker that fell behind then takes the parameters of the worker that made the most steps.

Nor need batches be equally large. Every mean over workers is ``sum n_i v_i / sum n_i``, where n_i
is the number of samples that worker i has taken since the last exchange.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.common.options import at_least
from paceline.errors import PeerLost, UsageError
from paceline.strategies.base import Strategy
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm
    from paceline.model.gradient import Gradient
    from paceline.model.part import Part

ODD, BEHIND = 1, 2
"""Flags of an all-reduce: a worker lacks a gradient or found a bad one; a worker has no data left
while others have."""


@dataclass(kw_only=True)
class Lockstep(Strategy):
    """A bulk-synchronous method: subclasses say how workers :meth:`synchronize`."""

    state: ClassVar[tuple[str, ...]] = ("steps", "unit")

    def __post_init__(self) -> None:
        self.steps = self.unit = 0
        self._behind = self._someone_behind = False

    def join(self, x: Tensor) -> None:
        """What a member has is all that a worker needs, where all have the same model."""

    @abstractmethod
    def synchronize(self, x: Tensor, weight: int) -> bool:
        """Exchange with all workers; return whether anybody contributed.

        The weight is the number of samples since the last exchange. With weight 0 this worker has
        nothing to contribute, and must take part in every all-reduce all the same. The answer is
        also true when the guard dropped every contribution: the others have not come to their end.
        """

    def judge(self, v: Tensor, weight: int) -> tuple[int, bool]:
        """The weight that ``v`` counts with, and whether the guard dropped it.

        A vector that was dropped counts for nothing, and the optimizer forgets what led to it.
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

        With ``unit``, the weight of a whole contribution, ``v`` becomes the mean instead. If nobody
        contributes, the ``v`` of a worker that is behind or odd is zero afterwards.
        """
        if self._behind or (odd and not weight):
            v.zero_()
        mean = None if unit is None else lambda total: unit / total
        total = self.comm.all_reduce(v, weight, mean, ODD * odd | BEHIND * self._behind)
        self._someone_behind = bool(total.flags & BEHIND)
        return total.weight, bool(total.flags & ODD)

    def agree_on_part(self, part: Part | None) -> Part | None:
        """Of several optimizers, the one that all workers step now; refuse more than one.

        A worker that has come to its end gives None, and gets it when all have.
        """
        parts = self.replica.parts
        if len(parts) == 1:
            return parts[0]
        told = self.replica.flat.x.new_zeros(len(parts))
        if part is not None:
            told[part.number] = 1
        total, _ = self.reduce(told, int(part is not None))
        stepped = [number for number, workers in enumerate(told.tolist()) if workers]
        if total and len(stepped) > 1:
            counts = " and ".join(f"{round(told[n].item())} that of optimizer {n}" for n in stepped)
            raise UsageError(
                "all workers must call step() of the same optimizer in the same step, got"
                f" {counts} after {self.steps} steps"
            )
        return parts[stepped[0]] if total else None

    def average_models(self, x: Tensor, weight: int, dropped: bool) -> bool:
        """Make ``x`` the mean over the workers; return whether anybody contributed."""
        v = x.new_zeros(x.shape) if dropped or self._behind else x
        whole, anyone_dropped = self.weigh(v, weight, dropped)
        if whole and v is not x:
            x.copy_(v)
        return whole > 0 or anyone_dropped

    def treat_moments(self, how: str, x: Tensor, weight: int) -> None:
        """``keep`` the buffers of the optimizer, ``reset`` them, or ``average`` them."""
        if how == "reset":
            self.replica.forget_moments()
        for name in self.replica.moments() if how == "average" else ():
            v = x.new_zeros(x.shape)
            self.replica.read_moment(name, v)
            self.weigh(v, weight)
            self.replica.write_moment(name, v)

    def count_contributors(self, x: Tensor, weight: int) -> int:
        """How many workers contribute."""
        return self.reduce(x.new_zeros(1), int(weight > 0))[0]

    def finish(self, x: Tensor) -> None:
        while self.synchronize(x, 0):
            self._behind = True
        if self._someone_behind:
            take_latest(self.comm, x, self.steps)


@dataclass(kw_only=True)
class Periodic(Lockstep):
    """A method that makes local steps, and synchronizes after every ``interval`` of them.

    Attributes:
        pending: the steps since workers last synchronized; ``samples``: those in them.
    """

    state: ClassVar[tuple[str, ...]] = ("pending", "samples")

    interval: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("interval", self.interval, 1)
        self.pending = self.samples = 0

    @property
    def is_due(self) -> bool:
        """Whether workers synchronize after this step."""
        return self.pending == self.interval

    def local_step(self, x: Tensor, g: Gradient) -> None:
        """One step of this worker alone."""
        self.local_update(g)

    def step(self, x: Tensor, g: Gradient) -> None:
        self.local_step(x, g)
        self.steps += 1
        self.pending += 1
        self.samples += g.samples
        if self.is_due:
            self._end_interval(x)

    def finish(self, x: Tensor) -> None:
        if self.pending:
            self._end_interval(x)
        super().finish(x)

    def _end_interval(self, x: Tensor) -> None:
        self.synchronize(x, self.samples)
        self.pending = self.samples = 0


def agree_on_unit(workers: Comm, like: Tensor, weight: int) -> int:
    """The unit in which workers express weights: the mean weight of a contribution, or 0 if none.

    Any common unit would do. With this one, contributions of equal batches need no scaling.
    """
    nothing = like.new_zeros(0)
    # The wait for the others happens here, and is charged.
    total = workers.all_reduce(nothing, weight).weight
    contributors = workers.group(metered=False).all_reduce(nothing, int(weight > 0)).weight
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
