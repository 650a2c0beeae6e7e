"""The worker: what the user's ``train(worker)`` function holds on to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.checkpoint import load_state, save_state
from paceline.comm.base import Comm
from paceline.comm.metered import Meter, MeteredTransport
from paceline.data import DrawnBatch, PacedLoader, Sharing
from paceline.errors import CommTimeout, PeersGone, UsageError
from paceline.history import DatedMeter
from paceline.optimizer import PacedOptimizer
from paceline.pace import Pace
from paceline.replica import Replica
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.sim.compute import Costs

M = TypeVar("M", bound=nn.Module)
Metric = dict[str, Any]
HEARTBEAT_S = 0.25
"""How often, at most, a worker tells how far it is."""


class Served(BaseException):
    """Ends a rank that is not a worker, once it has served."""


class Worker:
    """One worker of a run: its place, its data, its model.

    Attributes:
        rank: this worker's number, from 0.
        size: the number of workers.
        seed: the run's seed; data is shuffled by it.
        device: where the model and the batches go.
        strategy: the method, as an object.
        epoch_samples: how many samples all workers take in an epoch; None where that is not known.
    """

    def __init__(
        self,
        transport: MeteredTransport,
        strategy: Strategy,
        *,
        workers: int,
        seed: int,
        device: str = "cpu",
        costs: Costs | None = None,
        report: Callable[[Metric], None] | None = None,
        on_progress: Callable[[Metric], None] | None = None,
    ) -> None:
        self.rank, self.size, self.seed = transport.rank, workers, seed
        self.strategy = strategy
        self.device = torch.device(device)
        self.comm = Comm(transport)
        self.consensus: float | None = None
        self.epoch_samples: int | None = None
        self._transport, self._costs, self._report = transport, costs, report
        self._on_progress, self._told_s = on_progress, 0.0
        self._pace: Pace | None = None
        self._model: nn.Module | None = None
        self._loaders: dict[int, PacedLoader] = {}
        self._epochs_to_resume: dict[int, int] = {}
        self._epochs: int | None = None
        self._epochs_done = 0.0
        self._finished = False

    # Setting up ----------------------------------------------------------------------------------

    def setup(self, model: M, optimizer: Optimizer) -> tuple[M, PacedOptimizer]:
        """Tie a model and its optimizer to the run; every worker starts with rank 0's parameters.

        The model is moved to ``worker.device``, its parameters into one vector. On a rank that is
        no worker this does not return: it serves, and ends with the run.
        """
        if self._pace is not None:
            raise UsageError("worker.setup must be called once: one model and one optimizer a run")
        if isinstance(optimizer, PacedOptimizer):
            raise UsageError("worker.setup takes a plain optimizer, not one of another worker")
        model.to(self.device)
        replica = Replica(model, optimizer, self._transport.allocate)
        self._transport.know_model(replica.flat.x.nbytes, len(replica.flat.spans))
        alone = self.size == 1
        self._pace = Pace(self.strategy, replica, self._transport, self._costs, alone)
        self._model = model
        self.strategy.bind(self.comm, replica, self.size, self.seed)
        if not alone:
            self._start(replica.flat.x, model)
        self._pace.account()
        if self.strategy.defers and not alone:
            _settle_before_reading(model, self.settle)
        self._transport.resume()
        return model, PacedOptimizer(optimizer, self._pace)

    def _start(self, x: Tensor, model: nn.Module) -> None:
        if self.rank not in self.comm.starters():
            self.strategy.join(x)
            return
        self.strategy.setup(x)
        self._serve_unless_worker(x)
        self._share_the_rest(model)

    def _serve_unless_worker(self, x: Tensor) -> None:
        if self.rank < self.size:
            return
        assert self._pace is not None
        self._pace.account()
        note, now = self._pace.history.note, self._transport.now
        self._transport.meter = DatedMeter(self.meter, lambda sent: note(now(), 0, sent))
        with suppress(PeersGone):
            self.strategy.serve(x)
        self._pace.account(last=True)
        raise Served

    def _share_the_rest(self, model: nn.Module) -> None:
        """Give every worker rank 0's buffers, and its parameters that are not trained."""
        assert self._pace is not None
        trained = {id(span.parameter) for span in self._pace.replica.flat.spans}
        rest = [t for t in chain(model.parameters(), model.buffers()) if id(t) not in trained]
        workers = Comm(self._transport.inner, self.strategy.first_workers())
        for dtype in sorted({t.dtype for t in rest}, key=str):
            tensors = [t.detach() for t in rest if t.dtype is dtype]
            together = torch.cat([t.reshape(-1) for t in tensors])
            workers.broadcast(together.view(torch.uint8))
            parts = torch.split(together, [t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def setup_dataloaders(
        self, *loaders: DataLoader[Any], data: Sharing = "auto", epochs: int | None = None
    ) -> Any:
        """Share the data of each loader with the other workers; each iteration is one epoch.

        Args:
            loaders: map-style or iterable; ``batch_size`` is that of one worker. Given again, a
                loader goes on with its next epoch.
            data: ``auto`` is ``shard`` for synchronous methods and ``queue`` for asynchronous
                ones; ``static`` and ``skewed`` give each worker a fixed shard.
            epochs: how many are planned, for :attr:`progress`.
        """
        if not loaders:
            raise UsageError("setup_dataloaders needs at least one DataLoader")
        paced = [self._paced(loader, data) for loader in loaders]
        self.epoch_samples = self.epoch_samples or paced[0].samples
        if epochs is not None and self._epochs is None:
            self._epochs = epochs
            self.strategy.plan(len(paced[0]) * epochs)
        return paced[0] if len(paced) == 1 else paced

    def _paced(self, loader: object, data: Sharing) -> PacedLoader:
        if isinstance(loader, PacedLoader):
            return loader
        if not isinstance(loader, DataLoader):
            kind = type(loader).__name__
            raise UsageError(f"setup_dataloaders takes torch DataLoaders, got {kind}")
        if id(loader) not in self._loaders:
            number = len(self._loaders)
            paced = self._loaders[id(loader)] = PacedLoader(loader, self, data, number)
            paced.epoch = self._epochs_to_resume.get(number, 0)
        return self._loaders[id(loader)]

    def batch_arrived(self, batch: DrawnBatch, asked_s: float) -> None:
        """Hear from a loader of a batch: charge its loading, and count its samples."""
        transport, costs, training = self._transport, self._costs, torch.is_grad_enabled()
        if costs is not None:
            transport.compute(costs.loading_s(batch.samples, transport.now()))
        load_s = transport.now() - asked_s
        facts: Metric = {"epoch": batch.epoch, "index": batch.number, "samples": batch.samples}
        facts["load_s"] = load_s
        if costs is not None and not training:
            facts["forward_s"] = costs.forward_s(batch.samples)
            transport.compute(facts["forward_s"])
        transport.note("batch", **facts)
        if self._pace is not None:
            self._pace.io_s += load_s
        if training and self._pace is not None:
            self._pace.drew(batch.samples, batch.full)
            self._epochs_done = max(self._epochs_done, batch.epochs_done)
            if self._on_progress is not None:
                self._tell_progress(self._on_progress)
        transport.resume()

    # While training ------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """The share of the planned samples that all workers have taken, as this one knows it.

        From 0 to 1, by the place of this worker's last batch in the data; never waits.
        """
        if self._epochs is None:
            raise UsageError("progress needs a plan: worker.setup_dataloaders(loader, epochs=...)")
        return min(1.0, self._epochs_done / self._epochs)

    def _tell_progress(self, tell: Callable[[Metric], None]) -> None:
        now_s = time.monotonic()
        if now_s >= self._told_s + HEARTBEAT_S and self._pace is not None:
            self._told_s = now_s
            share = self.progress if self._epochs else None
            tell({"rank": self.rank, "steps": self._pace.steps, "progress": share})

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, ``optimizer.step()`` is the plain local step: nothing is exchanged or counted.

        A method that takes its next model from elsewhere (a server, a look-ahead) forgets them.
        """
        pace = self._running()
        pace.syncing = False
        try:
            yield
        finally:
            pace.syncing = True

    def clip_gradients(self, max_norm: float) -> None:
        """Clip at the next ``optimizer.step()``: after the reduction, before the update.

        Where a server makes the update, before the gradient is sent to it.
        """
        if not max_norm > 0:
            raise UsageError(f"max_norm ({max_norm}) must be above 0")
        self._running().replica.max_norm = max_norm

    def settle(self) -> None:
        """Finish what the last step left pending, before parameters are read in an unusual way."""
        self._running().settle()
        self._transport.resume()

    @contextmanager
    def answer(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside, the model holds the method's answer instead of this worker's replica."""
        pace = self._running()
        if model is not None and model is not self._model:
            raise UsageError("worker.answer takes the model that worker.setup was given")
        pace.settle()
        x = pace.replica.flat.x
        answer = x if pace.alone else self.strategy.answer(x)
        replica = None if answer is x else x.clone()
        if replica is not None:
            x.copy_(answer)
        pace.paused = "inside worker.answer"
        self._transport.resume()
        try:
            yield
        finally:
            pace.paused = None
            if replica is not None:
                x.copy_(replica)

    def log(self, **metrics: Any) -> None:
        """Record numbers under their names; ``loss`` and ``accuracy`` become the run's."""
        pace = self._pace
        record: Metric = {
            "t": self._transport.now(),
            "rank": self.rank,
            "step": pace.steps if pace else 0,
            "samples": pace.samples if pace else 0,
        }
        for name, value in metrics.items():
            record[name] = _plain(name, value)
        if self._report is not None:
            self._report(record)

    # Ending --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Flush what is pending and leave the method's answer in the model. Idempotent."""
        pace = self._pace
        if pace is None or self._finished:
            return
        self._finished = True
        pace.settle()
        x = pace.replica.flat.x
        if not pace.alone:
            before = x.clone()
            self.strategy.finish(x)
            self.consensus = self._consensus_distance(before)
        pace.account(last=True)
        pace.paused = "after worker.finish"
        self._transport.note("finish")
        self._transport.resume()

    def _consensus_distance(self, x: Tensor) -> float | None:
        """Root mean square distance of the workers to their mean, over the norm of the mean."""
        try:
            mean, square, count = self.strategy.among_live(partial(_spread, x), measuring=True)
        except CommTimeout:
            return None
        norm = float(mean.double().norm())
        return math.sqrt(float(square) / count) / norm if norm else 0.0

    def save(self, folder: str | Path) -> None:
        """Write the state of this worker: call it on every worker, between two epochs.

        Parameters, optimizer and strategy, and how many epochs each loader has begun.
        """
        pace = self._running()
        if not pace.alone and not self.strategy.resumable:
            raise UsageError(
                f"{type(self.strategy).__name__} cannot be saved: part of its state is on the way,"
                " or on ranks that are no workers; save the answer instead"
            )
        pace.settle()
        state = {
            "model": self._model.state_dict() if self._model else {},
            "optimizer": pace.replica.optimizer.state_dict(),
            "strategy": self.strategy.state_dict(),
            "steps": pace.steps,
            "samples": pace.samples,
            "epochs": [loader.epoch for loader in self._loaders.values()],
        }
        save_state(Path(folder), f"rank{self.rank}", state)
        self._transport.resume()

    def load(self, folder: str | Path) -> None:
        """Take up what :meth:`save` wrote on this rank; after ``setup``.

        Loaders go on with the epoch that comes next; ``loader.epoch`` is its number.
        """
        pace = self._running()
        state = load_state(Path(folder), f"rank{self.rank}")
        assert self._model is not None
        self._model.load_state_dict(state["model"])
        pace.replica.optimizer.load_state_dict(state["optimizer"])
        self.strategy.load_state_dict(state["strategy"])
        pace.steps, pace.samples = state["steps"], state["samples"]
        self._epochs_to_resume = dict(enumerate(state["epochs"]))
        for number, loader in enumerate(self._loaders.values()):
            loader.epoch = self._epochs_to_resume.get(number, 0)

    # For the run ---------------------------------------------------------------------------------

    @property
    def pace(self) -> Pace | None:
        """The stepping of this worker; None before :meth:`setup`."""
        return self._pace

    @property
    def model(self) -> nn.Module | None:
        """The model that :meth:`setup` was given."""
        return self._model

    def measuring(self) -> Comm:
        """The workers among themselves, for what measures the run: it counts and costs nothing."""
        return Comm(self._transport.inner.uncharged(), range(self.size))

    @property
    def meter(self) -> Meter:
        """What this worker has sent, and how long it has waited."""
        return self._transport.meter

    def _running(self) -> Pace:
        if self._pace is None:
            raise UsageError("call worker.setup(model, optimizer) first")
        return self._pace


def _spread(x: Tensor, workers: Comm) -> tuple[Tensor, Tensor, int]:
    """The mean of all ``x``, the sum of their squared distances to it, and their number."""
    mean = x.clone()
    mean /= workers.all_reduce(mean)
    square = (x - mean).double().square().sum().reshape(1).cpu()
    return mean, square, workers.all_reduce(square)


class _Settle:
    """A hook that settles; copies and pickles of the model carry one that does nothing."""

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._settle is not None:
            self._settle()

    def __reduce__(self) -> tuple[type[_Settle], tuple[()]]:
        return _Settle, ()


def _settle_before_reading(model: nn.Module, settle: Callable[[], None]) -> None:
    hook = _Settle(settle)
    for module in model.modules():
        module.register_forward_pre_hook(hook)
        module.register_state_dict_pre_hook(hook)


def _plain(name: str, value: Any) -> Any:
    """A metric as JSON can hold it; what is not finite is nothing."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UsageError(f"{name} (shape {tuple(value.shape)}) must be a single number")
        value = value.detach().item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise UsageError(f"{name} ({type(value).__name__}) must be a number or a text")
    return value
