"""Which worker sees which samples, and when.

Four ways to share a data set, each giving every sample once an epoch:

=========  =========================================================================================
``shard``  each global batch of the shuffled set is divided among the ranks; synchronous methods
``queue``  workers take the next batch from one queue, so that a slow one takes fewer; asynchronous
``static`` each rank keeps a fixed shard and shuffles it
``skewed`` as ``static``, with shards cut by label: each worker sees a few classes only
=========  =========================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data import DistributedSampler as Distributed
from torch.utils.data import SequentialSampler as Sequential

from paceline.common.one_core import take_back_cores
from paceline.common.options import one_of
from paceline.common.seeds import all_seeded, stream
from paceline.errors import UsageError
from paceline.training.hand import DrawnBatch, Pass

if TYPE_CHECKING:
    from paceline.training.session import Session

Sharing = Literal["auto", "shard", "queue", "static", "skewed"]
SHARINGS = ("auto", "shard", "queue", "static", "skewed")
Indices = NDArray[np.int64]


def global_batches(samples: int, batch_size: int, workers: int) -> list[int]:
    """The sizes of an epoch's global batches, such that every worker has a part in each.

    All but the last one or two are full. A rest too small to give each worker a sample is put
    together with the batch before it and divided anew.

    >>> global_batches(100, 8, 4), global_batches(66, 8, 4), global_batches(5, 1, 4)
    ([32, 32, 32, 4], [32, 17, 17], [5])
    """
    whole = batch_size * workers
    full, rest = divmod(samples, whole)
    if rest == 0 or rest >= workers or full == 0:
        return [whole] * full + ([rest] if rest else [])
    tail = whole + rest
    parts = 2 if tail >= 2 * workers else 1
    return [whole] * (full - 1) + [tail // parts + (i < tail % parts) for i in range(parts)]


def shard_epoch(order: Indices, batch_size: int, workers: int, rank: int) -> list[Indices]:
    """The batches of ``rank``: its part of each global batch of ``order``."""
    parts, start = [], 0
    for size in global_batches(len(order), batch_size, workers):
        parts.append(part_of(order[start : start + size], workers, rank))
        start += size
    return [part for part in parts if len(part)]


def part_of(batch: Indices, workers: int, place: int) -> Indices:
    """The part of a global batch that the worker at this place has; the first have one more."""
    each, more = divmod(len(batch), workers)
    first = place * each + min(place, more)
    return batch[first : first + each + (place < more)]


class Meeting(NamedTuple):
    """Who took part in the last collective of all workers, and how many there were by then."""

    number: int
    members: tuple[int, ...]


class Given:
    """The global batches that workers were given since they last met, in whatever epoch."""

    def __init__(self) -> None:
        self._batches: list[Indices] = []
        self._last: Meeting | None = None
        self.keep()

    def keep(self) -> None:
        """Keep what there is, to :meth:`restore` it after a mere look at an epoch."""
        self._kept = [*self._batches], self._last

    def restore(self) -> None:
        """Be what was kept."""
        self._batches, self._last = [*self._kept[0]], self._kept[1]

    def add(self, batch: Indices) -> None:
        """Note that a batch is divided among those who were at the last meeting."""
        self._batches.append(batch)

    def met(self, now: Meeting) -> list[Indices]:
        """Hear of the last meeting; return the parts of those who did not come to it.

        What they had since the one before is lost with them.
        """
        last, self._last = self._last or now, now
        workers = len(last.members)
        lost = [place for place, member in enumerate(last.members) if member not in now.members]
        parts = [part_of(batch, workers, place) for batch in self._batches for place in lost]
        if now.number != last.number:
            self._batches.clear()
        return [part for part in parts if len(part)]


def divide_epoch(
    order: Indices,
    batch_size: int,
    worker: int,
    meeting: Callable[[], Meeting],
    given: Given | None = None,
) -> Iterator[Indices]:
    """As :func:`shard_epoch`, among those who are left; ``meeting`` tells of the last one.

    When a worker is lost, what it had been ``given`` since the meeting before, in this epoch or in
    those before, comes again at the end of the epoch, and the rest is divided among the others. All
    of them see the loss at the same meeting, and so divide alike.
    """
    given = Given() if given is None else given
    given.keep()
    here = meeting()
    order = np.concatenate([order, *given.met(here)])
    while len(order):
        size = batch_size * len(here.members)
        if len(order) < 2 * size:
            size = global_batches(len(order), batch_size, len(here.members))[0]
        batch, order = order[:size], order[size:]
        given.add(batch)
        mine = part_of(batch, len(here.members), here.members.index(worker))
        if len(mine):
            yield mine
        here = meeting()
        if again := given.met(here):
            order = np.concatenate([order, *again])


class Cut(Sequence[Indices]):
    """``order`` in batches, the last one as short as it is; each is cut off when it is asked for.

    >>> [batch.tolist() for batch in Cut(np.arange(5), 2)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(self, order: Indices, batch_size: int, drop_last: bool = False) -> None:
        self._order, self._size = order, batch_size
        self._count = len(order) // batch_size if drop_last else -(-len(order) // batch_size)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Indices: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Indices]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [*self][index]
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._order[index * self._size : (index + 1) * self._size]


@lru_cache(maxsize=4)
def shuffled(samples: int, seed: int, number: int, epoch: int) -> Indices:
    """The order of an epoch, the same for all workers: those of one process share it."""
    order: Indices = stream(seed, "data", number, epoch).permutation(samples)
    order.setflags(write=False)
    return order


class Place(NamedTuple):
    """How far a worker has come in the data of a loader.

    Attributes:
        epoch: that comes next; while one is under way, that one.
        taken: how many batches of it this worker has had.
        under_way: whether the checkpoint was made while the loader was iterated over.
        tickets: the batches of a queue that this worker has drawn and made no use of.
    """

    epoch: int = 0
    taken: int = 0
    under_way: bool = False
    tickets: tuple[int, ...] = ()


class PacedLoader:
    """A DataLoader that shares its data with the other workers; each iteration is an epoch.

    ``epoch`` is the number of the epoch that comes next, from 0. After a checkpoint was taken up,
    an epoch that was under way goes on behind the last batch that was made use of. One that was
    only looked at comes again (:mod:`paceline.training.hand`).
    """

    def __init__(
        self, loader: DataLoader[Any], session: Session, sharing: Sharing, number: int
    ) -> None:
        one_of("data", sharing, SHARINGS)
        if sharing == "auto":
            sharing = "shard" if session.strategy.synchronous else "queue"
        self.sharing, self._next, self._session, self._number = sharing, 0, session, number
        self._user_loader = loader
        self._streams = isinstance(loader.dataset, IterableDataset)
        self._source: _Stream | _Map = _Stream(self) if self._streams else _Map(self)
        self.queue = number if sharing == "queue" else None
        self._pass: Pass | None = None
        self._goes_on: Place | None = None
        self._done_before = 0

    def __iter__(self) -> Iterator[Any]:
        if self._pass is not None:
            self._session.hand.close(self._pass)
        epoch, self._next = self._next, self._next + 1
        goes_on = self._goes_on if self._goes_on and self._goes_on.epoch == epoch else Place()
        this = self._pass = Pass(self, epoch, goes_on)
        try:
            if epoch < self._done_before:
                yield from self._sample(this)
            else:
                yield from self._share(this, goes_on)
            this.end()
        finally:  # in whatever thread a loop that was left is thrown away
            this.leave()

    def _share(self, this: Pass, goes_on: Place) -> Iterator[Any]:
        """This worker's batches of an epoch, less those that it has had."""
        session, full, epoch = self._session, self._user_loader.batch_size or 0, this.epoch
        catching_up, asked_s = session.catching_up, session.world.now()
        if self._is_over():
            return
        for index, samples, share, batch in self._source.batches(epoch, goes_on):
            drawn = DrawnBatch(epoch, index, samples, full, epoch + share, self.queue)
            this.taken += 1
            session.batch_arrived(this, drawn, asked_s)
            yield self._moved(batch)
            self._came_round(this)
            session.between_batches()
            if self._is_over():
                return
            asked_s = session.world.now()
        if catching_up and this.taken == goes_on.taken > 0:  # nothing was left of it
            with session.for_nothing():
                yield from self._sample(this)

    def _came_round(self, this: Pass) -> None:
        if self._pass is not this:
            raise UsageError(
                "a loop over a loader must not go on after another one over it was begun: end one"
                " before the next; to look at samples there, use loader.dataset"
            )
        self._session.hand.came_round(this)

    def _is_over(self) -> bool:
        """Whether to train on more would be in vain: others have use for those batches."""
        session = self._session
        return torch.is_grad_enabled() and (session.set_aside or session.stopping)

    def _sample(self, this: Pass) -> Iterator[Any]:
        """One batch of an epoch that was begun before a checkpoint: the body runs, for nothing.

        What it leaves behind in variables is then there; the worker makes no step of it.
        """
        if self._session.catching_up and (batch := self._source.first(this.epoch)) is not None:
            self._session.hand.draw(this, self._session.trains)
            yield self._moved(batch)
            self._came_round(this)

    def _moved(self, batch: Any) -> Any:
        return moved(batch, self._session.device)

    def begin(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate over a loader; over one that goes on behind a checkpoint, once all is as it was.

        A loader draws a random number when it begins: this one has drawn it before.
        """
        if self._goes_on is None or not self._goes_on.under_way:
            return iter(loader)
        self._goes_on = None
        with torch.random.fork_rng(devices=[]):
            batches = iter(loader)
        self._session.catch_up()
        return batches

    @property
    def epoch(self) -> int:
        """The number of the epoch that comes next."""
        this = self._pass
        return this.epoch if this is not None and this.is_look else self._next

    @property
    def under_way(self) -> bool:
        """Whether a loop goes over its data."""
        this = self._pass
        return this is not None and this.open and this.epoch >= self._done_before

    def ahead(self) -> list[int]:
        """The batches of a queue that were drawn for the loop, and that it has not had."""
        return self._source.ahead()

    def looked_at(self, this: Pass) -> None:
        """Have an epoch come again of which no use was made, with what was drawn of its queue."""
        self._next = this.epoch
        if this.epoch < self._done_before:
            return
        held = [batch.number for batch in this.held if batch.queue is not None]
        tickets = dict.fromkeys([*held, *self.ahead(), *this.began.tickets])
        self._source.given.restore()
        self._goes_on = Place(this.epoch, this.began.taken, False, tuple(tickets))

    def give_up_tickets(self) -> None:
        """Forget what was drawn of a queue: others have it by now."""
        if self._goes_on is not None:
            self._goes_on = self._goes_on._replace(tickets=())

    @property
    def place(self) -> Place:
        """How far this worker has come."""
        this = self._pass
        if this is not None and self.under_way:
            return Place(this.epoch, this.taken, True, tuple(self.ahead()))
        if self._goes_on is not None and self._goes_on.epoch == self.epoch:
            return self._goes_on
        return Place(self.epoch)

    def go_on(self, place: Place, from_the_top: bool) -> None:
        """Go on from a place; ``from_the_top``, after as many iterations as there were before."""
        self._goes_on = place
        self._done_before = place.epoch if from_the_top else 0
        self._next = 0 if from_the_top else place.epoch

    @property
    def plain(self) -> DataLoader[Any]:
        """The loader that was given: its data are nobody's share."""
        return self._user_loader

    @property
    def samples(self) -> int | None:
        """The samples of an epoch, of all workers; None where only reading them would tell."""
        return self._source.samples

    def unseen(self) -> int:
        """How many batches were lost with their workers, and come again no more: at the end."""
        return self._source.unseen()

    def __len__(self) -> int:
        """Batches of this worker in its next epoch; of a queue, an equal part of them."""
        return self._source.length(self.epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._user_loader, name)

    def tickets(self, epoch: int) -> Iterator[int]:
        """The numbers of the batches that this worker takes from the queue."""
        session = self._session
        while True:
            ticket = session.draw(self._number, epoch)
            session.world.transport.resume()  # the data set or the loop may draw random numbers
            if ticket is None:
                return
            yield ticket


class _Stream:
    """An iterable data set: every worker reads it, and keeps the batches that are its own."""

    samples: int | None = None

    def __init__(self, owner: PacedLoader) -> None:
        self._owner, self._loader = owner, owner._user_loader
        self.given = Given()
        if owner.sharing == "skewed":
            raise UsageError("data (skewed) must not be used with an iterable data set")

    def length(self, epoch: int) -> int:
        owner = self._owner
        total = len(self._loader)
        return total if owner.sharing == "static" else -(-total // owner._session.size)

    def batches(self, epoch: int, goes_on: Place) -> Iterator[tuple[int, int, float, Any]]:
        stream = self._owner.begin(self._loader)
        wanted = self._wanted(epoch, goes_on)
        mine = next(wanted, None)
        for index, batch in enumerate(stream):
            if index == mine:
                yield index, _count(batch), 0.0, batch
                mine = next(wanted, None)

    def unseen(self) -> int:
        return 0

    def first(self, epoch: int) -> Any:
        """The first batch there is."""
        return next(iter(self._loader), None)

    def ahead(self) -> list[int]:
        """No ticket is drawn before its batch is wanted."""
        return []

    def _wanted(self, epoch: int, goes_on: Place) -> Iterator[int]:
        rank, size = self._owner._session.rank, self._owner._session.size
        if self._owner.sharing == "queue":
            yield from sorted(goes_on.tickets)
            yield from self._owner.tickets(epoch)
            return
        step, index = (1, 0) if self._owner.sharing == "static" else (size, rank)
        index += step * goes_on.taken
        while True:
            yield index
            index += step


class _Map:
    """A map-style data set: a plan of index lists, fed to a DataLoader like the user's own."""

    def __init__(self, owner: PacedLoader) -> None:
        self._owner, self._loader = owner, owner._user_loader
        self._taken: deque[tuple[int, int, int]] = deque()
        self.given = Given()
        self._epoch, self._count, self._goes_on = 0, 1, Place()
        if self._loader.batch_sampler is None:
            raise UsageError("batch_size (None) must be a number, unless the data set is iterable")
        self._recipe = _recipe(self._loader)
        self._order = _order(self._recipe, owner._session.seed, owner._number)
        self._shards = self._fixed_shards() if owner.sharing in ("static", "skewed") else None
        self._inner = _rebuild(self._loader, _Plan(self))

    @property
    def samples(self) -> int:
        if self._recipe.sampler is None:
            return self._recipe.samples
        order = self._order(self._epoch)
        return sum(map(len, order)) if isinstance(order, list) else len(order)

    def length(self, epoch: int) -> int:
        if self._owner.sharing == "queue":
            return -(-len(self._queue(epoch)) // self._owner._session.size)
        return len(self._mine(epoch))

    def batches(self, epoch: int, goes_on: Place) -> Iterator[tuple[int, int, float, Any]]:
        self._epoch, self._goes_on = epoch, goes_on
        self._taken.clear()
        batches = self._owner.begin(self._inner)
        for batch in batches:
            index, samples, life = self._taken.popleft()
            if life == self._life:  # those that an earlier life had drawn ahead, others have
                yield index, samples, (index + 1) / self._count, batch

    def plan(self) -> Iterator[list[int]]:
        """The index lists of the present epoch, noted as they are drawn."""
        queued = self._owner.sharing == "queue"
        batches = self._queue(self._epoch) if queued else self._mine(self._epoch)
        self._count = max(1, len(batches))
        if queued:
            numbered = self._from_queue(batches)
        else:
            mine = self._divided() if self._may_shrink() else batches
            numbered = islice(enumerate(mine), self._goes_on.taken, None)
        for index, batch in numbered:
            self._taken.append((index, len(batch), self._life))
            yield _as_list(batch)

    @property
    def _life(self) -> int:
        session = self._owner._session
        return session.world.life(session.rank)

    def first(self, epoch: int) -> Any:
        """The first batch of an epoch; None when there is none."""
        batches = self._queue(epoch) if self._owner.sharing == "queue" else self._mine(epoch)
        if not len(batches):
            return None
        indices, data = _as_list(batches[0]), cast(Any, self._loader.dataset)
        many = hasattr(data, "__getitems__")
        chosen = data.__getitems__(indices) if many else [data[index] for index in indices]
        return self._loader.collate_fn(chosen)

    def ahead(self) -> list[int]:
        """The batches that were drawn and not yielded; what the loader fetches ahead is."""
        return [index for index, *_ in self._taken] if self._owner.sharing == "queue" else []

    def _may_shrink(self) -> bool:
        """Whether workers may be lost on the way whose part of the data the others take over."""
        session = self._owner._session
        plain = not isinstance(self._order(self._epoch), list)
        return session.world.elastic and self._owner.sharing == "shard" and plain

    def _divided(self) -> Iterator[Indices]:
        """This worker's part of the epoch among those who are left."""
        order = self._order(self._epoch)
        assert not isinstance(order, list)
        rank, size = self._owner._session.rank, self._recipe.batch_size
        return divide_epoch(self._whole(order), size, rank, self._meeting, self.given)

    def _meeting(self) -> Meeting:
        comm = self._owner._session.world
        return Meeting(comm.meetings, tuple(r for r in comm.present() if r < self._workers))

    def unseen(self) -> int:
        """How many batches were lost with their workers after the last epoch was divided."""
        return len(self.given.met(self._meeting()))

    def _whole(self, order: Indices) -> Indices:
        """Without what is left over, where the loader drops that."""
        if not self._recipe.drop_last:
            return order
        return order[: len(order) - len(order) % (self._recipe.batch_size * self._workers)]

    def _from_queue(self, queue: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for ticket in self._goes_on.tickets:
            yield ticket, queue[ticket]
        for ticket in self._owner.tickets(self._epoch):
            if ticket >= len(queue):
                self._owner._session.world.done_with(self._owner._number, self._epoch, ticket)
                return
            yield ticket, queue[ticket]

    def _queue(self, epoch: int) -> Sequence[Any]:
        order = self._order(epoch)
        if isinstance(order, list):
            return order
        return self._cut(order)

    def _mine(self, epoch: int) -> Sequence[Any]:
        session, order = self._owner._session, self._order(epoch)
        if isinstance(order, list):
            return order[session.rank :: session.size]
        if self._shards is not None:
            shard = self._shards[session.rank]
            random = stream(session.seed, "shard", epoch, session.rank)
            return self._cut(random.permutation(shard))
        return shard_epoch(self._whole(order), self._recipe.batch_size, session.size, session.rank)

    def _cut(self, order: Indices) -> Cut:
        return Cut(order, self._recipe.batch_size, self._recipe.drop_last)

    @property
    def _workers(self) -> int:
        return self._owner._session.size

    def _fixed_shards(self) -> list[Indices]:
        if self._recipe.sampler is not None:
            raise UsageError(f"data ({self._owner.sharing}) must be used without a sampler")
        order = np.arange(self._recipe.samples)
        if self._owner.sharing == "skewed":
            order = np.argsort(_labels(self._loader.dataset), kind="stable")
        return np.array_split(order, self._workers)


def _as_list(batch: Any) -> list[int]:
    indices: list[int] = batch if isinstance(batch, list) else batch.tolist()
    return indices


class _Plan:
    """The batch sampler of a :class:`_Map`; an object, so that loader processes can copy it."""

    def __init__(self, source: _Map) -> None:
        self._source = source

    def __iter__(self) -> Iterator[list[int]]:
        return self._source.plan()

    def __len__(self) -> int:
        return self._source.length(self._source._epoch)


class _Recipe(NamedTuple):
    """How a loader makes an epoch's batches.

    Attributes:
        samples: of the data set.
        shuffle: whether a plain loader shuffles them.
        batch_size: of the batches that are cut from an order of samples.
        drop_last: whether what is left over then is dropped.
        sampler: who draws the order, or whole batches, where that is not a plain loader's business.
        draws_batches: whether it is whole batches.
    """

    samples: int
    shuffle: bool
    batch_size: int
    drop_last: bool
    sampler: Any = None
    draws_batches: bool = False


def _recipe(loader: DataLoader[Any]) -> _Recipe:
    """Take a loader's samplers apart.

    A DistributedSampler gives way to our own sharing: it would leave each worker a part of a part.
    """
    batches, samples = loader.batch_sampler, len(cast(Sized, loader.dataset))
    if type(batches) is not BatchSampler:  # one with a rule of its own
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
    """Refuse a sampler that leaves out what it takes to be the share of others."""
    for each in (sampler, getattr(sampler, "sampler", None)):
        replicas = getattr(each, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise UsageError(
                f"{type(each).__name__} (num_replicas {replicas}) must not share the data out:"
                " setup_dataloaders does so; leave it out, or give it num_replicas=1 and rank=0"
            )


def _order(recipe: _Recipe, seed: int, number: int) -> Callable[[int], Indices | list[list[int]]]:
    """A function that gives an epoch's order: indices, or whole batches of the user's own.

    All workers have to come to the same one, each by itself.
    """
    if recipe.sampler is not None:
        return _Draws(recipe.sampler, recipe.draws_batches, seed, number)
    if recipe.shuffle:
        return lambda epoch: shuffled(recipe.samples, seed, number, epoch)
    return lambda epoch: np.arange(recipe.samples)


class _Draws:
    """What a sampler of the user's own draws for an epoch: one draw, by seed and epoch alone."""

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
        if callable(tell := getattr(self._sampler, "set_epoch", None)):
            tell(epoch)
        seed = int(stream(self._seed, "data", self._number, epoch).integers(2**31))
        parts = (self._sampler, getattr(self._sampler, "sampler", None))
        with all_seeded(seed, [getattr(part, "generator", None) for part in parts]):
            if self._batches:
                return [list(batch) for batch in self._sampler]
            return np.fromiter(self._sampler, dtype=np.int64)

    def _check(self, epoch: int) -> None:
        """Refuse a sampler of which each worker would have another draw."""
        one, other = self._draw(epoch), self._draw(epoch)
        if len(one) != len(other) or any(
            not np.array_equal(a, b) for a, b in zip(one, other, strict=True)
        ):
            raise UsageError(
                f"{type(self._sampler).__name__} must draw the same for the same seed, so that"
                " workers can share what it draws: by the global generators of torch, numpy or"
                " Python, by a torch generator that it calls generator, or by set_epoch(epoch)"
            )


def _rebuild(loader: DataLoader[Any], plan: _Plan) -> DataLoader[Any]:
    """A loader like the user's, on our plan of batches."""
    return DataLoader(
        loader.dataset,
        batch_sampler=plan,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=_StartOnAllCores(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class _StartOnAllCores:
    """Starts a loader's process: not on the one core of a simulation, then as the user wants."""

    def __init__(self, start: Callable[[int], None] | None) -> None:
        self._start = start

    def __call__(self, number: int) -> None:
        take_back_cores()
        if self._start is not None:
            self._start(number)


def _labels(dataset: Any) -> Indices:
    labels = getattr(dataset, "targets", None)
    if labels is None and len(getattr(dataset, "tensors", ())) > 1:
        labels = dataset.tensors[1]
    if labels is None:
        labels = [int(dataset[i][1]) for i in range(len(dataset))]
    return np.asarray(labels)


def _count(batch: Any) -> int:
    """The samples of a batch: the first length that is found in it."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, dict):
        return _count(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, (list, tuple)):
        return _count(batch[0]) if batch else 0
    return 1


def moved(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors are on ``device``."""
    return batch if device.type == "cpu" else _move(batch, device)


def _move(batch: Any, device: torch.device) -> Any:
    """The tensors of a batch on ``device``, in the batch's own structure."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _move(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [_move(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
