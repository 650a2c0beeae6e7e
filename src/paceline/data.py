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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as Sequential

from paceline.errors import UsageError
from paceline.options import one_of
from paceline.seeds import stream
from paceline.sim.one_core import take_back_cores

if TYPE_CHECKING:
    from paceline.worker import Worker

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
        each, more = divmod(size, workers)  # the first ``more`` workers have one sample more
        first = start + rank * each + min(rank, more)
        parts.append(order[first : first + each + (rank < more)])
        start += size
    return [part for part in parts if len(part)]


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


class DrawnBatch(NamedTuple):
    """What a worker has to know of a batch: where it stands, and how many samples it has."""

    epoch: int
    number: int
    samples: int
    full: int
    epochs_done: float


class PacedLoader:
    """A DataLoader that shares its data with the other workers; each iteration is an epoch.

    ``epoch`` is the number of the epoch that comes next, from 0.
    """

    def __init__(
        self, loader: DataLoader[Any], worker: Worker, sharing: Sharing, number: int
    ) -> None:
        one_of("data", sharing, SHARINGS)
        if sharing == "auto":
            sharing = "shard" if worker.strategy.synchronous else "queue"
        self.sharing, self.epoch, self._worker, self._number = sharing, 0, worker, number
        self._user_loader = loader
        self._streams = isinstance(loader.dataset, IterableDataset)
        self._source = _Stream(self) if self._streams else _Map(self)

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        worker, full = self._worker, self._user_loader.batch_size or 0
        asked_s = worker.comm.now()
        for index, samples, share, batch in self._source.batches(epoch):
            drawn = DrawnBatch(epoch, index, samples, full, epoch + share)
            worker.batch_arrived(drawn, asked_s)
            yield batch if worker.device.type == "cpu" else _move(batch, worker.device)
            asked_s = worker.comm.now()

            asked_s = worker.comm.now()

    @property
    def samples(self) -> int | None:
        """The samples of the whole data set; None where only reading it would tell."""
        return None if self._streams else _samples(self._user_loader)

    def __len__(self) -> int:
        """Batches of this worker in its next epoch; of a queue, an equal part of them."""
        return self._source.length(self.epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._user_loader, name)

    def tickets(self, epoch: int) -> Iterator[int]:
        """The numbers of the batches that this worker takes from the queue."""
        comm = self._worker.comm
        while (ticket := comm.ticket(self._number, epoch)) is not None:
            comm.transport.resume()  # the data set may draw random numbers next
            yield ticket


class _Stream:
    """An iterable data set: every worker reads it, and keeps the batches that are its own."""

    def __init__(self, owner: PacedLoader) -> None:
        self._owner, self._loader = owner, owner._user_loader
        if owner.sharing == "skewed":
            raise UsageError("data (skewed) must not be used with an iterable data set")

    def length(self, epoch: int) -> int:
        owner = self._owner
        total = len(self._loader)
        return total if owner.sharing == "static" else -(-total // owner._worker.size)

    def batches(self, epoch: int) -> Iterator[tuple[int, int, float, Any]]:
        wanted = self._wanted(epoch)
        mine = next(wanted, None)
        for index, batch in enumerate(self._loader):
            if index == mine:
                yield index, _count(batch), 0.0, batch
                mine = next(wanted, None)

    def _wanted(self, epoch: int) -> Iterator[int]:
        rank, size = self._owner._worker.rank, self._owner._worker.size
        if self._owner.sharing == "queue":
            yield from self._owner.tickets(epoch)
            return
        step, index = (1, 0) if self._owner.sharing == "static" else (size, rank)
        while True:
            yield index
            index += step


class _Map:
    """A map-style data set: a plan of index lists, fed to a DataLoader like the user's own."""

    def __init__(self, owner: PacedLoader) -> None:
        self._owner, self._loader = owner, owner._user_loader
        self._taken: deque[tuple[int, int]] = deque()
        self._epoch, self._count = 0, 1
        if self._loader.batch_sampler is None:
            raise UsageError("batch_size (None) must be a number, unless the data set is iterable")
        self._order = _order(self._loader, owner._worker.seed, owner._number)
        self._shards = self._fixed_shards() if owner.sharing in ("static", "skewed") else None
        self._inner = _rebuild(self._loader, _Plan(self))

    def length(self, epoch: int) -> int:
        if self._owner.sharing == "queue":
            return -(-len(self._queue(epoch)) // self._owner._worker.size)
        return len(self._mine(epoch))

    def batches(self, epoch: int) -> Iterator[tuple[int, int, float, Any]]:
        self._epoch = epoch
        self._taken.clear()
        for batch in self._inner:
            index, samples = self._taken.popleft()
            yield index, samples, (index + 1) / self._count, batch

    def plan(self) -> Iterator[list[int]]:
        """The index lists of the present epoch, noted as they are drawn."""
        queued = self._owner.sharing == "queue"
        batches = self._queue(self._epoch) if queued else self._mine(self._epoch)
        self._count = max(1, len(batches))
        for index, batch in self._from_queue(batches) if queued else enumerate(batches):
            self._taken.append((index, len(batch)))
            yield batch if isinstance(batch, list) else batch.tolist()

    def _from_queue(self, queue: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for ticket in self._owner.tickets(self._epoch):
            if ticket >= len(queue):
                return
            yield ticket, queue[ticket]

    def _queue(self, epoch: int) -> Sequence[Any]:
        order = self._order(epoch)
        if isinstance(order, list):
            return order
        return self._cut(order)

    def _mine(self, epoch: int) -> Sequence[Any]:
        worker, order = self._owner._worker, self._order(epoch)
        if isinstance(order, list):
            return order[worker.rank :: worker.size]
        assert self._loader.batch_size is not None
        if self._shards is not None:
            shard = self._shards[worker.rank]
            random = stream(worker.seed, "shard", epoch, worker.rank)
            return self._cut(random.permutation(shard))
        if self._loader.drop_last:
            order = order[: len(order) - len(order) % (self._loader.batch_size * worker.size)]
        return shard_epoch(order, self._loader.batch_size, worker.size, worker.rank)

    def _cut(self, order: Indices) -> Cut:
        assert self._loader.batch_size is not None
        return Cut(order, self._loader.batch_size, self._loader.drop_last)

    def _fixed_shards(self) -> list[Indices]:
        worker, samples = self._owner._worker, _samples(self._loader)
        if isinstance(self._order(0), list) or not _is_plain(self._loader):
            raise UsageError(f"data ({self._owner.sharing}) must be used without a sampler")
        order = np.arange(samples)
        if self._owner.sharing == "skewed":
            order = np.argsort(_labels(self._loader.dataset), kind="stable")
        return np.array_split(order, worker.size)


class _Plan:
    """The batch sampler of a :class:`_Map`; an object, so that loader processes can copy it."""

    def __init__(self, source: _Map) -> None:
        self._source = source

    def __iter__(self) -> Iterator[list[int]]:
        return self._source.plan()

    def __len__(self) -> int:
        return self._source.length(self._source._epoch)


def _samples(loader: DataLoader[Any]) -> int:
    """How many samples a map-style data set has; torch's type does not promise a length."""
    return len(cast(Sized, loader.dataset))


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the loader goes once over its data, in order or shuffled."""
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == _samples(loader)
    return isinstance(sampler, Sequential)


def _order(
    loader: DataLoader[Any], seed: int, number: int
) -> Callable[[int], Indices | list[list[int]]]:
    """A function that gives an epoch's order: indices, or whole batches of the user's own."""
    batch_sampler = loader.batch_sampler
    assert batch_sampler is not None, "_Map has refused a loader without batches"
    own_batches = type(batch_sampler) is not BatchSampler
    if not own_batches and _is_plain(loader):
        samples = _samples(loader)
        if isinstance(loader.sampler, RandomSampler):
            return lambda epoch: shuffled(samples, seed, number, epoch)
        return lambda epoch: np.arange(samples)

    def drawn(epoch: int) -> Indices | list[list[int]]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(seed, "data", number, epoch).integers(2**31)))
            if own_batches:
                return [list(batch) for batch in batch_sampler]
            return np.fromiter(loader.sampler, dtype=np.int64)

    return drawn


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
