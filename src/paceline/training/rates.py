"""Check that the workers of a synchronous method step with the same learning rates.

A scheduler that follows a metric of one worker, such as ``ReduceLROnPlateau`` on its own loss,
gives each worker different rates. If all apply the same update, their replicas then drift apart.
Workers compare their rates now and then without waiting, and once more at the end.
"""

from __future__ import annotations

import math
import warnings
from collections import deque

import torch

from paceline.comm.comm import Comm
from paceline.errors import UsageError
from paceline.model.flat import NO_GROUP
from paceline.model.replica import Replica
from paceline.strategies.base import Strategy

EVERY = 64
"""Steps between two comparisons."""
REMEMBERED = 4096
"""How many changes of its rates a worker remembers: others may have made fewer steps."""


class Rates:
    """The learning rates of one worker, compared with those of the others.

    Args:
        strategy: a synchronous strategy.
        replica: the replica whose optimizer has the rates.
    """

    def __init__(self, strategy: Strategy, replica: Replica) -> None:
        self._strategy, self._replica = strategy, replica
        self._step = 0
        self._most = len(replica.lrs()) + sum(s.group == NO_GROUP for s in replica.flat.spans)
        self._changes = deque[tuple[int, list[float]]](maxlen=REMEMBERED)

    def after_step(self, step: int) -> None:
        """Remember the rates of a step; now and then compare them with a neighbor's."""
        self._step, lrs = step, self._replica.lrs()
        if not self._changes or lrs != self._changes[-1][1]:
            self._changes.append((step, lrs))
        if step % EVERY == 0 and self._strategy.equal_rates:
            self._compare()

    def _at(self, step: int) -> list[float] | None:
        """The rates of a step; None if they are unknown, or no longer remembered."""
        if step > self._step:
            return None
        return next((lrs for first, lrs in reversed(self._changes) if first <= step), None)

    def _compare(self) -> None:
        comm = self._strategy.comm.group(metered=False)
        rates = self._at(self._step) or []
        own = [float(self._step), *rates, *[math.nan] * (self._most - len(rates))]
        comm.board.publish(torch.tensor(own, dtype=torch.float64))
        others = [rank for rank in comm.members.alive() if rank < self._strategy.workers]
        neighbor = next((rank for rank in others if rank > comm.rank), others[0])
        if neighbor == comm.rank or (published := comm.board.peek(neighbor)) is None:
            return
        step, *padded = published[1].tolist()
        theirs = [rate for rate in padded if not math.isnan(rate)]
        ours = self._at(round(step))
        if ours is not None and ours != theirs:
            difference = _difference(round(step), {comm.rank: ours, neighbor: theirs})
            raise UsageError(f"{difference}. {self._advice}")

    def at_end(self) -> None:
        """Compare the rates of the last step that all workers with any steps have made."""
        step, rates = self._strategy.among_live(self._gather, measuring=True)
        if all(lrs == next(iter(rates.values())) for lrs in rates.values()):
            return
        message = f"{_difference(step, rates)}. {self._advice}"
        if self._strategy.equal_rates:
            raise UsageError(message)
        if self._strategy.comm.rank == min(rates):
            warnings.warn(message, stacklevel=2)

    def _gather(self, workers: Comm) -> tuple[int, dict[int, list[float]]]:
        """The step to compare, and each worker's rates in it, if the worker remembers them."""
        own, count = self._strategy.comm.rank, self._strategy.workers
        steps = torch.zeros(count, dtype=torch.float64)
        steps[own] = self._step
        workers.all_reduce(steps)
        step = round(min((step for step in steps.tolist() if step), default=0))
        table = torch.zeros(count, 1 + self._most, dtype=torch.float64)
        if (lrs := self._at(step)) is not None:
            table[own, : 1 + len(lrs)] = torch.tensor([len(lrs), *lrs], dtype=torch.float64)
        workers.all_reduce(table)
        known = [(rank, row) for rank, row in enumerate(table.tolist()) if row[0]]
        return step, {rank: lrs[: round(groups)] for rank, (groups, *lrs) in known}

    @property
    def _advice(self) -> str:
        name = type(self._strategy).__name__
        rule = f"{name} needs equal rates to keep replicas equal; " * self._strategy.equal_rates
        return (
            f"{rule}a scheduler must follow a value that is the same on all workers, such as the"
            " mean of a metric: scheduler.step(worker.reduce(loss))"
        )


def _difference(step: int, rates: dict[int, list[float]]) -> str:
    """A message that names two ranks with unequal rates in a step, and their rates."""
    first, *others = rates
    other = next(rank for rank in others if rates[rank] != rates[first])
    if len(rates[first]) != len(rates[other]):
        return (
            f"in step {step} the optimizer has {len(rates[first])} parameter groups on rank {first}"
            f" and {len(rates[other])} on rank {other}"
        )
    pairs = enumerate(zip(rates[first], rates[other], strict=True))
    group, (one, two) = next((group, pair) for group, pair in pairs if pair[0] != pair[1])
    where = f" of parameter group {group}" if len(rates[first]) > 1 else ""
    return (
        f"in step {step} the learning rate{where} is {one:g} on rank {first} and {two:g} on rank"
        f" {other}"
    )
