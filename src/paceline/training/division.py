"""Divide the samples of an epoch among workers that come and go.

All workers divide alike: they see the same members after the same collective, and so come to the
same global batches and the same parts of them without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def global_batches(samples: int, size: int, workers: int) -> list[int]:
    """The sizes of an epoch's global batches, such that every worker has a part in each.

    All but the last one or two have the full ``size``. A remainder that is too small to give each
    worker a sample is merged with the batch before it.

    >>> global_batches(100, 32, 4), global_batches(66, 32, 4), global_batches(5, 4, 4)
    ([32, 32, 32, 4], [32, 17, 17], [5])
    """
    full, remainder = divmod(samples, size)
    if remainder == 0 or remainder >= workers or full == 0:
        return [size] * full + ([remainder] if remainder else [])
    tail = size + remainder
    parts = 2 if tail >= 2 * workers else 1
    return [size] * (full - 1) + [tail // parts + (i < tail % parts) for i in range(parts)]


def shard_epoch(order: Indices, size: int, workers: int, rank: int) -> list[Indices]:
    """The batches of ``rank``: its part of each global batch of ``order``."""
    ends = np.cumsum(global_batches(len(order), size, workers))
    parts = [part_of(batch, workers, rank) for batch in np.split(order, ends)]
    return [part for part in parts if len(part)]


def part_of(batch: Indices, workers: int, index: int, shares: Sequence[int] = ()) -> Indices:
    """The part of a global batch for the worker at ``index``; the first may get one more.

    With ``shares``, the parts are in proportion to these, and none is empty.

    >>> [part_of(np.arange(8), 3, index).tolist() for index in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]
    >>> [part_of(np.arange(8), 2, index, (1, 5)).tolist() for index in range(2)]
    [[0], [1, 2, 3, 4, 5, 6, 7]]
    """
    if shares and len(batch) >= workers:
        sizes = sizes_of(len(batch), tuple(shares))
        first = sum(sizes[:index])
        return batch[first : first + sizes[index]]
    each, more = divmod(len(batch), workers)
    first = index * each + min(index, more)
    return batch[first : first + each + (index < more)]


@lru_cache(maxsize=64)
def sizes_of(samples: int, shares: tuple[int, ...]) -> list[int]:
    """How many samples each has, such that none is far behind: at least one.

    >>> sizes_of(128, (1, 1, 2, 10)), sizes_of(5, (1, 1, 98))
    ([9, 9, 18, 92], [1, 1, 3])
    """
    everyone = range(len(shares))
    sizes = [max(1, samples * share // sum(shares)) for share in shares]
    while sum(sizes) < samples:
        sizes[min(everyone, key=lambda i: Fraction(sizes[i] + 1, shares[i]))] += 1
    while sum(sizes) > samples:  # for some have one although their share is less
        sizes[max(everyone, key=lambda i: Fraction(sizes[i] * (sizes[i] > 1), shares[i]))] -= 1
    return sizes


Member = tuple[int, int]
"""A worker, and its incarnation."""


class LastCollective(NamedTuple):
    """The last collective of all workers.

    Attributes:
        number: of it.
        members: after it.
        shares: of a global batch that they have from then on; empty where these are equal.
    """

    number: int
    members: tuple[Member, ...]
    shares: tuple[int, ...] = ()


class GlobalBatch(NamedTuple):
    """Samples that are divided among the members; ``end`` is where they end in the epoch's order.

    Those of an earlier epoch end at 0.
    """

    end: int
    samples: Indices


class Division:
    """How the workers divide the epochs of a loader, one global batch after the other.

    A worker that is lost has not contributed its parts of the batches since the last collective.
    These come again at the end of the epoch in which the others notice the loss, and the rest of
    the epoch is divided among those that are left. In the same way it is divided among more, when
    a worker was taken in, and in other parts, when the members' shares have changed. Batches that a
    loader has prefetched by then are divided anew.

    Args:
        worker: this worker.
        size: the size of a global batch, given the number of members.
        last_collective: returns the last collective.

    Attributes:
        used: how many samples of the epoch's order are in batches that the loop has had.
    """

    def __init__(
        self, worker: int, size: Callable[[int], int], last_collective: Callable[[], LastCollective]
    ) -> None:
        self._worker, self._size, self._last_collective = worker, size, last_collective
        self._order: Indices = np.empty(0, np.int64)
        self._epoch_samples = self._end = self.used = 0
        self._given: list[GlobalBatch] = []
        self._last: LastCollective | None = None
        self._known: tuple[tuple[Member, ...], tuple[int, int]] = (), (0, 0)
        self.save()

    def begin(self, order: Indices, saved: Mapping[str, Any] | None) -> None:
        """Begin an epoch that has this order; or go on where ``saved``, a :meth:`state`, was."""
        self._given = [batch._replace(end=0) for batch in self._given]
        self.save()
        self._order, self._epoch_samples = order, len(order)
        self._end = self.used = 0
        if saved is not None:
            self.load(saved)
            self._order = np.concatenate([order, saved["again"].numpy()])
            self._end = self.used = saved["used"]
        self.regroup()

    def save(self) -> None:
        """Remember what was given out before the epoch, for :meth:`restore`."""
        self._saved = [*self._given], self._last

    def restore(self) -> None:
        """Go back to before the epoch, which was only previewed."""
        self._given, self._last = [*self._saved[0]], self._saved[1]

    def regroup(self) -> bool:
        """Between two batches: whether the rest of the epoch is to be divided in another way now.

        Then what was drawn and the loop has not had yet is to be drawn again.
        """
        now, last = self._last_collective(), self._last
        self._last = now
        if last is None:
            return False
        had = [batch for batch in self._given if batch.end <= self.used]
        ahead, kept = self._given[len(had) :], had if now.number == last.number else []
        if now.members == last.members and now.shares == last.shares:
            self._given = [*kept, *ahead]
            return False
        self._order = np.concatenate([self._order, *self._lost(last, now)])
        self._given, self._end = kept, self.used
        return True

    def _lost(self, last: LastCollective, now: LastCollective) -> list[Indices]:
        """The parts of those who were lost, of the batches that the loop has had since ``last``."""
        workers, here = len(last.members), {*now.members}
        lost = [index for index, member in enumerate(last.members) if member not in here]
        had = [batch.samples for batch in self._given if batch.end <= self.used]
        parts = [part_of(batch, workers, index, last.shares) for batch in had for index in lost]
        return [part for part in parts if len(part)]

    def unseen(self) -> int:
        """How many parts of lost workers nobody has trained on."""
        last = self._last
        return 0 if last is None else len(self._lost(last, self._last_collective()))

    def draw(self) -> Iterator[tuple[Indices, int]]:
        """This worker's batches of the rest of the epoch, and how far each goes in the order."""
        assert self._last is not None  # since it has begun
        while self._end < len(self._order):
            index, workers = self._place(self._last.members)
            size, rest = self._size(workers), len(self._order) - self._end
            if rest < 2 * size:
                size = global_batches(rest, size, workers)[0]
            batch = self._order[self._end : self._end + size]
            self._end += size
            self._given.append(GlobalBatch(self._end, batch))
            own = part_of(batch, workers, index, self._last.shares)
            if len(own):
                yield own, self._end

    def _place(self, members: tuple[Member, ...]) -> tuple[int, int]:
        """The index of this worker among the members, and how many they are."""
        if members is not self._known[0]:
            index = next(i for i, (rank, _) in enumerate(members) if rank == self._worker)
            self._known = members, (index, len(members))
        return self._known[1]

    @property
    def share(self) -> float:
        """How much of the epoch was used, at most 1."""
        return min(1.0, self.used / self._epoch_samples) if self._epoch_samples else 1.0

    # For checkpoints, and for those who join -----------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where it is, between two batches."""
        had = [batch.samples for batch in self._given if batch.end <= self.used]
        last = self._last or self._last_collective()
        return {
            "used": self.used,
            "again": torch.from_numpy(self._order[self._epoch_samples :].copy()),
            "given": [torch.from_numpy(batch.copy()) for batch in had],
            "last": [last.number, [[*member] for member in last.members], [*last.shares]],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Know what was given out when ``state`` was saved."""
        number, members, *shares = state["last"]  # an earlier version has saved no shares
        self._given = [GlobalBatch(0, batch.numpy()) for batch in state["given"]]
        lives = tuple((rank, life) for rank, life in members)
        self._last = LastCollective(number, lives, tuple(*shares))


def renumbered(
    state: Mapping[str, Any], then: Mapping[int, int], now: Mapping[int, int]
) -> dict[str, Any]:
    """The state of a :class:`Division` for a run in which ranks have other incarnations.

    Args:
        state: what :meth:`Division.state` returned.
        then: the incarnations of the members when it was saved.
        now: their incarnations in this run.
    """
    number, members, *shares = state["last"]
    last = [[rank, now.get(rank, 0) if then.get(rank) == life else 0] for rank, life in members]
    return {**state, "last": [number, last, *shares]}
