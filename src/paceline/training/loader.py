"""Distribute the samples of a data set over the workers.

There are four ways to share a data set; each gives out every sample once an epoch:

=========  =========================================================================================
``shard``  each global batch of the shuffled set is divided among workers; synchronous methods
``queue``  workers take batches from one queue, so that a slow one takes fewer; asynchronous methods
``static`` each worker keeps a fixed shard and shuffles it
``skewed`` like ``static``, with shards cut by label: each worker sees only a few classes
=========  =========================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import lru_cache, partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data import DistributedSampler as Distributed
from torch.utils.data import SequentialSampler as Sequential

from paceline.common.generators import all_seeded
from paceline.common.one_core import take_back_cores
from paceline.common.options import one_of
from paceline.common.seeds import stream
from paceline.errors import UsageError
from paceline.training.batches import Batches, as_list, reader, reads_here
from paceline.training.division import Division, Indices, LastCollective, shard_epoch
from paceline.training.pending import DrawnBatch, Pass

if TYPE_CHECKING:
    from paceline.sim.resident import Resident
    from paceline.training.session import Session

Sharing = Literal["auto", "shard", "queue", "static", "skewed"]


class Slices(Sequence[Indices]):
    """``order`` in batches, of which the last may be shorter; each is sliced when it is needed.

    >>> [batch.tolist() for batch in Slices(np.arange(5), 2, drop_last=False)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, order: Indices, batch_size: int, drop_last: bool) -> None:
        self._order, self._size = order, batch_size
        self._count = len(order) // batch_size if drop_last else -(-len(order) // batch_size)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._order[index * self._size : (index + 1) * self._size]


@lru_cache(maxsize=4)
def shuffled(samples: int, seed: int, number: int, epoch: int) -> Indices:
    """The order of an epoch, the same for all workers; simulated workers share one copy."""
    order: Indices = stream(seed, "data", number, epoch).permutation(samples)
    order.setflags(write=False)
    return order


class Position(NamedTuple):
    """The position of a worker in the data of a loader.

    Attributes:
        epoch: the current epoch, or the next one between two epochs.
        taken: how many batches of the epoch this worker has had.
        under_way: whether the checkpoint was made during an iteration over the loader.
        tickets: the batches of a queue that this worker has drawn and not used.
        division: of data that workers divide among themselves, where they are in it.
    """

    epoch: int = 0
    taken: int = 0
    under_way: bool = False
    tickets: tuple[int, ...] = ()
    division: dict[str, Any] | None = None


class PacedLoader:
    """A DataLoader that shares its data with the other workers; each iteration is an epoch.

    ``epoch`` is the number of the next epoch, from 0. When a run resumes from a checkpoint, the
    interrupted epoch continues after the last used batch. An epoch that was only previewed starts
    again (:mod:`paceline.training.pending`). ``plain`` is the user's loader, which is not shared.
    If it ``looks_ahead``, it draws one batch ahead, so that it knows which is :attr:`at_last`.
    """

    def __init__(
        self, loader: DataLoader[Any], session: Session, sharing: Sharing, number: int
    ) -> None:
        one_of("data", sharing, get_args(Sharing))
        if sharing == "auto":
            sharing = "shard" if session.strategy.synchronous else "queue"
        self.sharing, self._next_epoch, self._session, self._number = sharing, 0, session, number
        self.plain = loader
        streams = isinstance(loader.dataset, IterableDataset)
        self._source: _Stream | _Map = _Stream(self) if streams else _Map(self)
        by_speed = session.shares is not None
        if self.division is None and (session.global_batch is not None or by_speed):
            option = "batch (by-speed)" if by_speed else f"global_batch ({session.global_batch})"
            raise UsageError(
                f"{option} needs data that workers divide: a map-style data set,"
                ' data="shard", and no batch_sampler'
            )
        self.queue = number if sharing == "queue" else None
        self._pass: Pass | None = None
        self._resume_at: Position | None = None
        self._done_before = 0
        self.looks_ahead = False

    def __iter__(self) -> Iterator[Any]:
        self._session.take_part()
        if self._pass is not None:
            self._session.pending.close(self._pass)
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        saved = self._resume_at
        resume_at = saved if saved is not None and saved.epoch == epoch else Position()
        this = self._pass = Pass(self, epoch, resume_at)
        try:
            if epoch < self._done_before:
                yield from self._sample(this)
            else:
                yield from self._share(this, resume_at)
            this.open = False
        finally:  # may run in any thread, when an abandoned iterator is collected
            this.leave()

    def _share(self, this: Pass, resume_at: Position) -> Iterator[Any]:
        """This worker's batches of an epoch, except those that it had before a checkpoint."""
        session, full, epoch = self._session, self.plain.batch_size or 0, this.epoch
        catching_up, asked_s = session.catching_up, session.clock.now()
        if self._is_over():
            return
        for index, samples, share, batch in self._source.batches(epoch, resume_at):
            drawn = DrawnBatch(epoch, index, samples, full, epoch + share, self.queue)
            this.taken += 1
            session.batch_arrived(this, drawn, asked_s)
            yield moved(batch, session.device, session.resident)
            self._body_done(this)
            session.between_batches()
            if self._is_over():
                return
            asked_s = session.clock.now()
        if catching_up and this.taken == resume_at.taken > 0:  # no batches were left in it
            with session.for_nothing():
                yield from self._sample(this)

    def _body_done(self, this: Pass) -> None:
        if self._pass is not this:
            raise UsageError(
                "a loop over a loader must not continue after another loop over it was started: end"
                " one before the next; to look at samples there, use loader.dataset"
            )
        self._session.pending.body_done(this)

    def _is_over(self) -> bool:
        """Whether this worker should train on no more batches: others can use them."""
        session = self._session
        return torch.is_grad_enabled() and (session.set_aside or session.stopping)

    def _sample(self, this: Pass) -> Iterator[Any]:
        """One batch of an epoch before the checkpoint: the loop's body runs without training.

        So variables that the body sets exist afterwards; the worker makes no step.
        """
        session = self._session
        if session.catching_up and (batch := self._source.first(this.epoch)) is not None:
            session.pending.draw(this, session.trains)
            yield moved(batch, session.device, session.resident)
            self._body_done(this)

    def begin(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Start to iterate over a loader; if that resumes in mid-epoch, restore the state first.

        A DataLoader draws a random number when it starts; this one drew it before the checkpoint.
        """
        if self._resume_at is None or not self._resume_at.under_way:
            return iter(loader)
        self._resume_at = None
        with torch.random.fork_rng(devices=[]):
            batches = iter(loader)
        self._session.catch_up()
        return batches

    @property
    def epoch(self) -> int:
        """The number of the next epoch."""
        this = self._pass
        return this.epoch if this is not None and this.is_preview else self._next_epoch

    @property
    def under_way(self) -> bool:
        """Whether a loop over its data is running."""
        this = self._pass
        return this is not None and this.open and this.epoch >= self._done_before

    def ahead(self) -> list[int]:
        """The batches of a queue that were prefetched, but that the loop has not had yet."""
        return self._source.ahead()

    @property
    def at_last(self) -> bool:
        """Whether the loop has this worker's last batch of the epoch; it must look ahead."""
        return self._source.at_last

    def repeat_epoch(self, this: Pass) -> None:
        """Repeat an epoch that was only previewed, including batches drawn from its queue."""
        self._next_epoch = this.epoch
        if this.epoch < self._done_before:
            return
        held = [batch.number for batch in this.held if batch.queue is not None]
        tickets = dict.fromkeys([*held, *self.ahead(), *this.began.tickets])
        if self.division is not None:
            self.division.restore()
        began = this.began
        self._resume_at = Position(this.epoch, began.taken, False, tuple(tickets), began.division)

    def give_up_tickets(self) -> None:
        """Forget the batches drawn from a queue: others have taken them."""
        if self._resume_at is not None:
            self._resume_at = self._resume_at._replace(tickets=())

    @property
    def position(self) -> Position:
        """The current position of this worker."""
        this, division = self._pass, None if self.division is None else self.division.state()
        if division is not None and not self.under_way:
            division |= {"used": 0, "again": division["again"][:0]}
        if this is not None and self.under_way:
            return Position(this.epoch, this.taken, True, tuple(self.ahead()), division)
        if self._resume_at is not None and self._resume_at.epoch == self.epoch:
            return self._resume_at
        return Position(self.epoch, division=division)

    def resume(self, position: Position, from_the_top: bool) -> None:
        """Resume at a position; ``from_the_top``: the user's loop repeats all earlier epochs."""
        self._resume_at = position
        self._done_before = position.epoch if from_the_top else 0
        self._next_epoch = 0 if from_the_top else position.epoch

    @property
    def samples(self) -> int | None:
        """The samples of an epoch of all workers; None if only reading them would tell."""
        return self._source.samples

    def unseen(self) -> int:
        """At the end: how many batches were lost with their workers and not trained on again."""
        return 0 if self.division is None else self.division.unseen()

    @property
    def division(self) -> Division | None:
        """How workers divide its data among themselves; None where each has a part of its own."""
        return self._source.division

    def last_collective(self) -> LastCollective:
        """The last collective of all workers, as this one knows it."""
        session, members = self._session, self._session.who_divides()
        shares = () if session.shares is None else session.shares.of(members)
        return LastCollective(session.all_ranks.collectives_done, members, shares)

    def __len__(self) -> int:
        """This worker's batches in its next epoch; with a queue, an equal share of all."""
        return self._source.length(self.epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def tickets(self, epoch: int) -> Iterator[int]:
        """The numbers of the batches that this worker takes from the queue, until it is empty."""
        session = self._session
        while True:
            ticket = session.draw(self._number, epoch)
            # the data set or the loop may draw random numbers
            session.clock.switch_in()
            if ticket is None:
                return
            yield ticket


class _Stream:
    """An iterable data set: every worker reads all of it, and keeps its own batches."""

    samples: int | None = None
    division: Division | None = None
    at_last = False

    def __init__(self, owner: PacedLoader) -> None:
        self._owner, self._loader, self._session = owner, owner.plain, owner._session
        if owner.sharing == "skewed":
            raise UsageError("data (skewed) must not be used with an iterable data set")

    def length(self, epoch: int) -> int:
        total = len(self._loader)
        return total if self._owner.sharing == "static" else -(-total // self._session.size)

    def batches(self, epoch: int, resume_at: Position) -> Iterator[tuple[int, int, float, Any]]:
        own = self._own_batches(epoch, resume_at)
        if not self._owner.looks_ahead:
            yield from own
            return
        self.at_last, batch = False, next(own, None)
        while batch is not None:
            following = next(own, None)
            self.at_last = following is None
            yield batch
            batch = following

    def _own_batches(
        self, epoch: int, resume_at: Position
    ) -> Iterator[tuple[int, int, float, Any]]:
        stream = self._owner.begin(self._loader)
        indices = self._own_indices(epoch, resume_at)
        own = next(indices, None)
        for index, batch in enumerate(stream):
            if index == own:
                yield index, _count(batch), 0.0, batch
                own = next(indices, None)

    def first(self, epoch: int) -> Any:
        """The first batch of the data set."""
        return next(iter(self._loader), None)

    def ahead(self) -> list[int]:
        """Always empty: a ticket is drawn only when its batch is needed."""
        return []

    def _own_indices(self, epoch: int, resume_at: Position) -> Iterator[int]:
        rank, size = self._session.rank, self._session.size
        if self._owner.sharing == "queue":
            yield from sorted(resume_at.tickets)
            yield from self._owner.tickets(epoch)
            return
        step, first = (1, 0) if self._owner.sharing == "static" else (size, rank)
        yield from count(first + step * resume_at.taken, step)


class _Map:
    """A map-style data set: the batch sampler of a DataLoader that is else like the user's."""

    def __init__(self, owner: PacedLoader) -> None:
        self._owner, self._loader, self._session = owner, owner.plain, owner._session
        self._drawn: deque[_Drawn] = deque()
        self._epoch, self._count, self._resume_at = 0, 1, Position()
        if self._loader.batch_sampler is None:
            raise UsageError("batch_size (None) must be a number, unless the data set is iterable")
        self._recipe = _recipe(self._loader)
        self._order = _order(self._recipe, self._session.seed, owner._number)
        self._shards = self._fixed_shards() if owner.sharing in ("static", "skewed") else None
        self.division: Division | None = None
        if owner.sharing == "shard" and not self._recipe.draws_batches:
            self.division = Division(self._session.rank, self._size, owner.last_collective)
        self._inner: Iterable[Any]
        if reads_here(self._loader):
            self._inner = Batches(self._loader, self.drawn, self._session.resident)
        else:
            self._inner = _rebuild(self._loader, self)

    @property
    def samples(self) -> int:
        if self._recipe.sampler is None:
            return self._recipe.samples
        order = self._order(self._epoch)
        return sum(map(len, order)) if isinstance(order, list) else len(order)

    def length(self, epoch: int) -> int:
        if self._owner.sharing == "queue":
            return -(-len(self._queue(epoch)) // self._session.size)
        return len(self._own(epoch))

    def batches(self, epoch: int, resume_at: Position) -> Iterator[tuple[int, int, float, Any]]:
        self._epoch, self._resume_at = epoch, resume_at
        self._drawn.clear()
        division, taken = self.division, resume_at.taken
        if division is not None:
            self._begin_division(division)
        batches = self._owner.begin(self._inner)
        while True:
            for batch in batches:
                drawn = self._drawn.popleft()
                # batches that an earlier incarnation prefetched were given to other workers
                if drawn.incarnation != self._incarnation:
                    continue
                if division is None:
                    yield drawn.number, drawn.samples, (drawn.number + 1) / self._count, batch
                    continue
                division.used, taken = drawn.end, taken + 1
                yield taken - 1, drawn.samples, division.share, batch
                if division.regroup():
                    break
            else:
                return
            self._drawn.clear()
            with torch.random.fork_rng(devices=[]):
                batches = iter(self._inner)

    def _begin_division(self, division: Division) -> None:
        order, resume_at = self._order(self._epoch), self._resume_at
        assert not isinstance(order, list)
        division.begin(self._whole(order), resume_at.division)
        if resume_at.division is None:  # what was saved by an earlier version says only how many
            for _, end in islice(division.draw(), resume_at.taken):
                division.used = end

    def __len__(self) -> int:
        return self.length(self._epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """The index lists of the current epoch, for a DataLoader."""
        return map(as_list, self.drawn())

    def drawn(self) -> Iterator[Any]:
        """The indices of each batch of the current epoch; each is noted when it is drawn."""
        drawn = self._draw()
        return _one_ahead(drawn) if self._owner.looks_ahead else drawn

    def _draw(self) -> Iterator[Any]:
        if self.division is not None:
            for batch, end in self.division.draw():
                self._drawn.append(_Drawn(0, len(batch), self._incarnation, end))
                yield batch
            return
        queued = self._owner.sharing == "queue"
        batches = self._queue(self._epoch) if queued else self._own(self._epoch)
        self._count = max(1, len(batches))
        numbered = (
            self._from_queue(batches)
            if queued
            else islice(enumerate(batches), self._resume_at.taken, None)
        )
        for index, batch in numbered:
            self._drawn.append(_Drawn(index, len(batch), self._incarnation))
            yield batch

    @property
    def _incarnation(self) -> int:
        return self._session.ports.members.incarnation(self._session.rank)

    def first(self, epoch: int) -> Any:
        """The first batch of an epoch; None if the epoch is empty."""
        batches = self._queue(epoch) if self._owner.sharing == "queue" else self._own(epoch)
        if not len(batches):
            return None
        return reader(self._loader)(batches[0])

    def ahead(self) -> list[int]:
        """The batches of a queue that were drawn and not yielded: the loader prefetches them."""
        return [drawn.number for drawn in self._drawn] if self._owner.sharing == "queue" else []

    @property
    def at_last(self) -> bool:
        """Whether nothing was drawn beyond the batch that the loop has."""
        return not self._drawn

    def _size(self, workers: int) -> int:
        """The size of a global batch of so many workers."""
        return self._session.global_batch or self._recipe.batch_size * workers

    def _whole(self, order: Indices) -> Indices:
        """``order`` without its last incomplete global batch, if the loader drops that."""
        if not self._recipe.drop_last:
            return order
        return order[: len(order) - len(order) % self._size(self._session.size)]

    def _from_queue(self, queue: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for ticket in self._resume_at.tickets:
            yield ticket, queue[ticket]
        for ticket in self._owner.tickets(self._epoch):
            if ticket >= len(queue):
                self._session.ports.queue.mark_used(self._owner._number, self._epoch, ticket)
                return
            yield ticket, queue[ticket]

    def _queue(self, epoch: int) -> Sequence[Any]:
        order = self._order(epoch)
        return order if isinstance(order, list) else self._split(order)

    def _own(self, epoch: int) -> Sequence[Any]:
        session, order = self._session, self._order(epoch)
        if isinstance(order, list):
            return order[session.rank :: session.size]
        if self._shards is not None:
            shard = self._shards[session.rank]
            random = stream(session.seed, "shard", epoch, session.rank)
            return self._split(random.permutation(shard))
        size = self._size(session.size)
        return shard_epoch(self._whole(order), size, session.size, session.rank)

    def _split(self, order: Indices) -> Slices:
        return Slices(order, self._recipe.batch_size, self._recipe.drop_last)

    def _fixed_shards(self) -> list[Indices]:
        if self._recipe.sampler is not None:
            raise UsageError(f"data ({self._owner.sharing}) must be used without a sampler")
        order = np.arange(self._recipe.samples)
        if self._owner.sharing == "skewed":
            order = np.argsort(_labels(self._loader.dataset), kind="stable")
        return np.array_split(order, self._session.size)


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield each batch after the next one was drawn."""
    drawn = next(batches, None)
    while drawn is not None:
        following = next(batches, None)
        yield drawn
        drawn = following


class _Drawn(NamedTuple):
    """A batch that a loader has drawn and the loop has not had yet.

    Attributes:
        number: in the epoch, where its place is fixed.
        samples: how many it has.
        incarnation: of this rank, when it was drawn.
        end: how far it goes in the order of the epoch, where workers divide that.
    """

    number: int
    samples: int
    incarnation: int
    end: int = 0


class _Recipe(NamedTuple):
    """How a loader makes the batches of an epoch.

    Attributes:
        samples: the number of samples in the data set.
        shuffle: whether they are shuffled.
        batch_size: the size of the batches that an order of samples is split into.
        drop_last: whether an incomplete last batch is dropped.
        sampler: the user's own sampler of samples or batches; None for a plain loader.
        draws_batches: whether ``sampler`` draws whole batches.
    """

    samples: int
    shuffle: bool
    batch_size: int
    drop_last: bool
    sampler: Any = None
    draws_batches: bool = False


def _recipe(loader: DataLoader[Any]) -> _Recipe:
    """Determine from a loader's samplers how it makes batches.

    A DistributedSampler is replaced: together with our sharing, each worker would get a part of a
    part.
    """
    batches, samples = loader.batch_sampler, len(cast(Sized, loader.dataset))
    if type(batches) is not BatchSampler:  # the user's own batch sampler
        _refuse_sharing(batches)
        return _Recipe(samples, False, 0, False, batches, draws_batches=True)
    sampler: Any = batches.sampler
    size, drop_last = batches.batch_size, batches.drop_last
    if type(sampler) is Distributed:
        return _Recipe(len(cast(Sized, sampler.dataset)), sampler.shuffle, size, drop_last)
    if type(sampler) is Sequential:
        return _Recipe(len(sampler), False, size, drop_last)
    once = type(sampler) is RandomSampler and not sampler.replacement
    if once and sampler.num_samples == len(sampler.data_source):
        return _Recipe(sampler.num_samples, True, size, drop_last)
    _refuse_sharing(sampler)
    return _Recipe(samples, False, size, drop_last, sampler)


def _refuse_sharing(sampler: Any) -> None:
    """Refuse a sampler that divides the data among replicas itself."""
    for part in (sampler, getattr(sampler, "sampler", None)):
        replicas = getattr(part, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise UsageError(
                f"{type(part).__name__} (num_replicas {replicas}) must not divide the data, because"
                " setup_dataloaders does so; remove it, or give it num_replicas=1 and rank=0"
            )


def _order(recipe: _Recipe, seed: int, number: int) -> Callable[[int], Indices | list[list[int]]]:
    """A function from an epoch to its order: sample indices, or the user's own batches.

    Each worker computes it by itself, and all must get the same.
    """
    if recipe.sampler is not None:
        return _Draws(recipe.sampler, recipe.draws_batches, seed, number)
    if recipe.shuffle:
        return lambda epoch: shuffled(recipe.samples, seed, number, epoch)
    return lambda epoch: np.arange(recipe.samples)


class _Draws:
    """The order that the user's own sampler draws; it depends only on seed and epoch."""

    def __init__(self, sampler: Any, batches: bool, seed: int, number: int) -> None:
        self._sampler, self._batches = sampler, batches
        self._seed, self._number = seed, number
        self._last: tuple[int, Indices | list[list[int]]] | None = None

    def __call__(self, epoch: int) -> Indices | list[list[int]]:
        if self._last is None:
            self._check(epoch)
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, self._draw(epoch)
        return self._last[1]

    def _draw(self, epoch: int) -> Indices | list[list[int]]:
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
        seed = int(stream(self._seed, "data", self._number, epoch).integers(2**31))
        parts = (self._sampler, getattr(self._sampler, "sampler", None))
        with all_seeded(seed, parts, torch.device("cpu")):
            if self._batches:
                return [list(batch) for batch in self._sampler]
            return np.fromiter(self._sampler, dtype=np.int64)

    def _check(self, epoch: int) -> None:
        """Refuse a sampler that would draw something else on each worker."""
        one, other = self._draw(epoch), self._draw(epoch)
        if len(one) != len(other) or any(
            not np.array_equal(a, b) for a, b in zip(one, other, strict=True)
        ):
            raise UsageError(
                f"{type(self._sampler).__name__} must draw the same for the same seed on every"
                " worker: from the global generators of torch, numpy or Python, from a torch"
                " generator in its attribute generator, or by set_epoch(epoch)"
            )


def _rebuild(loader: DataLoader[Any], plan: _Map) -> DataLoader[Any]:
    """A loader like the user's, with our batch sampler."""
    return DataLoader(
        loader.dataset,
        batch_sampler=plan,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=partial(_start_on_all_cores, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _start_on_all_cores(start: Callable[[int], None] | None, number: int) -> None:
    """Start a loader's process on all cores, even in a simulation, then as the user wants."""
    take_back_cores()
    if start is not None:
        start(number)


def _labels(dataset: Any) -> Indices:
    labels = getattr(dataset, "targets", None)
    if labels is None and len(getattr(dataset, "tensors", ())) > 1:
        labels = dataset.tensors[1]
    if labels is None:
        labels = [int(dataset[i][1]) for i in range(len(dataset))]
    return np.asarray(labels)


def _count(batch: Any) -> int:
    """The number of samples in a batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, dict):
        return _count(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, (list, tuple)):
        return _count(batch[0]) if batch else 0
    return 1


def moved(batch: Any, device: torch.device, resident: Resident | None = None) -> Any:
    """A batch whose tensors are on ``device``, in the batch's own structure."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True) if resident is None else resident.moved(batch)
    if isinstance(batch, dict):
        return {key: moved(value, device, resident) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        values = [moved(value, device, resident) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
