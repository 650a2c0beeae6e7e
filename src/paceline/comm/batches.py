"""The batches of a run in one table: each is given out once, and again when its rank is lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Batch = tuple[int, int, int]
"""A batch: its queue, its epoch, and its number in the epoch."""


class SharedBatches:
    """Which batches of each queue were given out, and to whom.

    Attributes:
        queues: of each queue, its epoch and the next number.
        in_hand: the batches that each rank has drawn and not used yet.
        returned: the batches that were taken back from lost ranks, and not drawn again.
    """

    def __init__(self) -> None:
        self.queues: dict[int, list[int]] = {}
        self.in_hand: defaultdict[int, set[Batch]] = defaultdict(set)
        self.returned: list[Batch] = []

    def draw(self, rank: int, queue: int, epoch: int) -> int | None:
        """Give ``rank`` the next batch; None when others are in a later epoch."""
        state = self.queues.setdefault(queue, [epoch, 0])
        if state[0] > epoch:
            return None
        if state[0] < epoch:
            state[:] = [epoch, 0]
        again = next((batch for batch in self.returned if batch[:2] == (queue, epoch)), None)
        if again is not None:
            self.returned.remove(again)
            number = again[2]
        else:
            number = state[1]
            state[1] += 1
        self.in_hand[rank].add((queue, epoch, number))
        return number

    def mark_used(self, rank: int, queue: int, epoch: int, number: int) -> None:
        """Take a batch out of the hand of ``rank``."""
        self.in_hand[rank].discard((queue, epoch, number))

    def take_back(self, rank: int) -> None:
        """Give the batches that a lost rank had in hand out again."""
        self.returned += sorted(self.in_hand.pop(rank, ()))

    def state(self, without: Iterable[int] = ()) -> dict[str, Any]:
        """How far the queues are; batches in the hands of ``without`` count as taken back."""
        more = [batch for rank in without for batch in sorted(self.in_hand[rank])]
        queues = {str(queue): [*state] for queue, state in self.queues.items()}
        return {"queues": queues, "returned": [*self.returned, *more]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned; nobody has a batch in hand."""
        self.queues = {int(queue): [*next_batch] for queue, next_batch in state["queues"].items()}
        self.returned = [as_batch(batch) for batch in state["returned"]]


def as_batch(numbers: Sequence[int]) -> Batch:
    """A batch that was written as JSON."""
    queue, epoch, number = numbers
    return queue, epoch, number
