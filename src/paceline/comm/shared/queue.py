"""The batches of a run on one host: each is given out once, and again when its rank is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.comm.batches import Batch
from paceline.comm.ports import DataQueue
from paceline.comm.shared.layout import MAX_IN_HAND, MAX_QUEUES, MAX_RETURNED
from paceline.comm.shared.members import Entry, SharedMembers
from paceline.comm.shared.rank import SharedRank
from paceline.errors import UsageError

_NUMBERS = 1 << 31


class BatchTable:
    """The words that say which batch a queue gives out next, and which ranks have one in hand."""

    def __init__(self, shared: SharedRank) -> None:
        self._shared = shared

    def draw(self, queue: int, epoch: int) -> int | None:
        """Draw a batch: one that was taken back, or the next one."""
        words, layout = self._shared.words, self._shared.layout
        index, first = layout.queues + queue, _batch(queue, epoch, 0)
        with self._shared.locked(layout.queues):
            fresh = max(words[index], first)
            if fresh - first >= _NUMBERS:
                return None
            back = words.read(layout.returned, MAX_RETURNED)
            again = [b for b in back if 0 <= b - first < _NUMBERS] if any(back) else []
            batch = again[0] if again else fresh
            # In hand first: a rank that is killed between these stores has the batch.
            self._replace(layout.in_hand(self._shared.rank), MAX_IN_HAND, 0, batch)
            if again:
                self._replace(layout.returned, MAX_RETURNED, batch, 0)
            else:
                words[index] = fresh + 1
        return batch - first

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        """Take a batch out of this rank's hand."""
        start = self._shared.layout.in_hand(self._shared.rank)
        self._replace(start, MAX_IN_HAND, _batch(queue, epoch, number), 0)

    def in_hand(self, rank: int) -> list[int]:
        """The batches that a rank has drawn and not used yet, a word each."""
        words = self._shared.words.read(self._shared.layout.in_hand(rank), MAX_IN_HAND)
        return [batch for batch in words if batch]

    def put_in_hand(self, batches: Sequence[Batch]) -> None:
        """Give these batches to this rank."""
        words = tuple(_batch(*batch) for batch in batches)
        self._shared.words.write(self._shared.layout.in_hand(self._shared.rank), words)

    def returned(self) -> list[int]:
        """The batches that were taken back, and not drawn again."""
        words = self._shared.words.read(self._shared.layout.returned, MAX_RETURNED)
        return [batch for batch in words if batch]

    def take_back(self, rank: int, entry: Entry) -> None:
        """Give the batches of a lost rank out again, unless it has a new incarnation.

        A kill in the middle of drawing, or of this, leaves a batch in two places: then it is not
        put into a third one.
        """
        words, layout = self._shared.words, self._shared.layout
        with self._shared.locked(layout.queues):
            if self._shared.table.word(rank) != entry.word:
                return
            others = [self.in_hand(other) for other in range(self._shared.size) if other != rank]
            for index in range(layout.in_hand(rank), layout.in_hand(rank) + MAX_IN_HAND):
                batch = words[index]
                if batch and batch < words[layout.queues + parts(batch)[0]]:
                    elsewhere = words.read(layout.returned, MAX_RETURNED)
                    if batch not in elsewhere and not any(batch in held for held in others):
                        self._replace(layout.returned, MAX_RETURNED, 0, batch)
                words[index] = 0

    def state(self, without: Sequence[int]) -> dict[str, Any]:
        """How far the queues are, and which batches are taken back, or will be of these ranks.

        As :meth:`paceline.comm.batches.SharedBatches.state` has it.
        """
        words = self._shared.words.read(self._shared.layout.queues, MAX_QUEUES)
        queues = {str(queue): [*parts(word)[1:]] for queue, word in enumerate(words) if word}
        returned = [*self.returned(), *(batch for rank in without for batch in self.in_hand(rank))]
        return {"queues": queues, "returned": [parts(batch) for batch in returned]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Have the queues go on from there."""
        words = [0] * (MAX_QUEUES + MAX_RETURNED)
        for queue, (epoch, number) in state["queues"].items():
            words[int(queue)] = _batch(int(queue), epoch, number)
        returned = [_batch(*batch) for batch in state["returned"][:MAX_RETURNED]]
        words[MAX_QUEUES : MAX_QUEUES + len(returned)] = returned
        self._shared.words.write(self._shared.layout.queues, tuple(words))

    def _replace(self, start: int, count: int, old: int, new: int) -> None:
        """Put ``new`` where ``old`` is among some words; where there is none, leave it."""
        words = self._shared.words.read(start, count)
        if old in words:
            self._shared.words[start + words.index(old)] = new


class SharedQueue(DataQueue):
    """The data queue of one rank.

    Args:
        batches: the words of the batches.
        members: whoever looks at them takes back the batches of those that are lost.
    """

    def __init__(self, batches: BatchTable, members: SharedMembers) -> None:
        shared = self._shared = members.shared
        self._batches, self._members = batches, members
        self._words, self._layout = shared.words, shared.layout

    def draw(self, queue: int, epoch: int) -> int | None:
        if queue >= MAX_QUEUES:
            raise UsageError(f"a run must not use more than {MAX_QUEUES} data loaders")
        self._members.alive()
        return self._batches.draw(queue, epoch)

    def mark_used(self, queue: int, epoch: int, number: int) -> None:
        self._batches.mark_used(queue, epoch, number)

    def lost_batches(self) -> int:
        self._members.view()
        return len(self._batches.returned())

    def close(self) -> None:
        self._words[self._layout.closed] = 1

    def closed(self) -> bool:
        return bool(self._words[self._layout.closed])

    def mark_finished(self) -> None:
        rank = self._shared.rank
        self._words[self._layout.finished_in + rank] = self._shared.table.incarnation(rank)
        self._words.announce(self._layout.any_finished, 1)

    def finished(self) -> frozenset[int]:
        if not self._words[self._layout.any_finished]:
            return frozenset()
        table = self._shared.table
        at_end = self._words.read(self._layout.finished_in, self._shared.size)
        return frozenset(r for r, number in enumerate(at_end) if number == table.incarnation(r) > 0)


def _batch(queue: int, epoch: int, number: int) -> int:
    """A batch of a queue as one word, which is not 0."""
    return ((queue + 1) << 56) + (epoch << 31) + number


def parts(word: int) -> Batch:
    """The queue, the epoch and the number of the batch that is this word."""
    return (word >> 56) - 1, word >> 31 & (1 << 25) - 1, word & _NUMBERS - 1
