"""The worker: what the user's ``train(worker)`` function holds on to."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.agreement import check_agreement, facts_of
from paceline.checkpoint.states import load_state, save_state
from paceline.checkpoint.weights import read_weights
from paceline.comm.base import Comm
from paceline.comm.metered import Meter, MeteredTransport
from paceline.data import PacedLoader, Place, Sharing, moved
from paceline.errors import (
    CommTimeout,
    LeftBehind,
    PeerLost,
    PeersGone,
    Served,
    Untrained,
    UsageError,
)
from paceline.hand import DrawnBatch, Hand, Pass
from paceline.hooks import Loads
from paceline.keeper import Keeper, read_generators, write_generators
from paceline.optimizer import PacedOptimizer
from paceline.options import at_least, one_of
from paceline.pace import Pace
from paceline.replica import Replica
from paceline.rest import Rest, recalibrate
from paceline.seeds import all_seeded, stream
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.sim.compute import Costs

M = TypeVar("M", bound=nn.Module)
Metric = dict[str, Any]
HEARTBEAT_S = 0.25
"""How often, at most, a worker tells how far it is."""
BUFFERS, FIXED = 0, 1
"""The shelves for what the model holds beside its trained parameters: see :class:`Rest`."""
SHELVED_EVERY = 8
"""Steps after which a worker shows its buffers anew; in the beginning, after each."""


class Worker:
    """One worker of a run: its place, its data, its model.

    Attributes:
        rank: this worker's number, from 0.
        size: the number of workers.
        seed: the run's seed; data is shuffled by it.
        device: where the model and the batches go.
        strategy: the method, as an object.
        comm: the workers among themselves, for exchanges of your own; see docs/comm-contract.md.
            Every worker has to take part. Servers and communicators have no part in it.
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
        on_event: Callable[[Metric], None] | None = None,
        on_ready: Callable[[], None] = lambda: None,
        elastic: bool = False,
        keeper: Keeper | None = None,
    ) -> None:
        self.rank, self.size, self.seed = transport.rank, workers, seed
        self.strategy = strategy
        self.device = torch.device(device)
        self.world = Comm(transport, elastic=elastic)
        others = [*range(workers)] if self.rank < workers else [self.rank]
        self.comm = self.world.group(others)
        self.consensus: float | None = None
        self.unseen_batches = 0
        self.epoch_samples: int | None = None
        self._transport, self._costs, self._report = transport, costs, report
        self._on_progress, self._told_s = on_progress, 0.0
        self._on_event, self._on_ready = on_event, on_ready
        self._pace: Pace | None = None
        self._model: nn.Module | None = None
        self._loads: Loads | None = None
        self._loaders: dict[int, PacedLoader] = {}
        self.hand = Hand(self.world.done_with, self._forget)
        self._places: dict[int, Place] = {}
        self._tracked: dict[str, Any] = {}
        self._keeper = keeper
        self._stepped = False
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
        alone = self._transport.size == 1  # then this is the plain optimizer, bit for bit
        replica = Replica(model, optimizer, self._transport.allocate, aligned=alone)
        self._transport.know_model(replica.flat.x.nbytes, len(replica.flat.spans))
        self._pace = Pace(self.strategy, replica, self._transport, self._costs, alone)
        self._pace.choose_batches = self.hand.before_step
        self._pace.on_step = self._after_step
        self._pace.may_return = self.rank < self.size and not self.strategy.synchronous
        self._pace.on_return = self._has_returned
        self._pace.rejoin = lambda: self._rejoin(replica.flat.x)
        self._model, self._shown = model, torch.empty(0, dtype=torch.uint8)
        self._rest = Rest(model, {id(span.parameter) for span in replica.flat.spans})
        self._loads = Loads(model, self._pace, self.settle)
        self.strategy.bind(self.world, replica, self.size, self.seed)
        self.strategy.guard.tell = self.tell
        if self._keeper is not None:
            self._keeper.bind(self)
        try:
            if not alone:
                self._agree(model, replica)
            if self._keeper is not None and self._keeper.resumes and not self._transport.late:
                self._go_on(self._keeper, replica.flat.x)
            elif not alone:
                self._start(replica.flat.x)
        except LeftBehind:
            self._pace.come_back()
        self._on_ready()
        self._pace.account_first()
        self._transport.resume()
        return model, PacedOptimizer(optimizer, self._pace)

    def _agree(self, model: nn.Module, replica: Replica) -> None:
        """Find out whether all that begin together have the same model, method, seed, version."""
        if not self._transport.late:
            starters = self._transport.starters()
            comm = Comm(self._transport.inner.uncharged(), starters, self.world.elastic)
            check_agreement(comm, facts_of(model, replica, self.strategy, self.seed))

    def _go_on(self, keeper: Keeper, x: Tensor) -> None:
        """Go on from a checkpoint, instead of a start."""
        if self._transport.size > 1:
            with self._transport.free():
                self.strategy.setup(x)
        keeper.take_up()
        self._serve_unless_worker(x)

    def _start(self, x: Tensor) -> None:
        if not self._transport.late:
            self._shelve_fixed()
            if self.rank == self.strategy.first_workers()[0]:
                self._shelve_buffers()
            self.strategy.setup(x)
            self._serve_unless_worker(x)
            self._share_the_rest()
        elif self.rank < self.size:
            if self._keeper is not None and self._keeper.resumes:
                self._keeper.await_starters()
            self._join(self.strategy.join, x)
            fixed = self.world.shelved(self.strategy.first_workers()[0], FIXED)
            if fixed is not None:
                self._rest.load_fixed(fixed)
            self._adopt_buffers()
            self._transport.arrived()
            self.tell("joined")
        else:
            facts = self.strategy.succeed(x)
            self._transport.arrived()
            self.tell("succeeded", **facts)
            self._serve_unless_worker(x)

    def _join(self, join: Callable[[Tensor], None], x: Tensor) -> None:
        """Take part, for the first time or again, unless the others have come to their end."""
        others = {*range(self.size)} - {self.rank}
        while True:
            try:
                return join(x)
            except (PeersGone, PeerLost) as error:
                if not others.isdisjoint(self.world.alive()):
                    raise error from None
                if not others.isdisjoint(self.world.left()):
                    raise Served from None
                self.world.await_change(error)  # one that was merely stopped may come back

    def _rejoin(self, x: Tensor) -> None:
        try:
            self._join(self.strategy.rejoin, x)
        except Served:
            self.tell("outlived")
            raise
        self._adopt_buffers()

    def _serve_unless_worker(self, x: Tensor) -> None:
        if self.rank < self.size:
            return
        assert self._pace is not None
        self._on_ready()
        self._pace.account_first()
        self._transport.on_sent = self._pace.account
        with suppress(PeersGone):
            self.strategy.serve(x)
        self._pace.account(last=True)
        raise Served

    # Buffers, and parameters that are not trained -----------------------------------------------

    def _shelve_fixed(self) -> None:
        """Let those who come late see what is not averaged: the first worker does."""
        someone_may = self.world.elastic or len(self.world.starters()) < self.world.size
        first = self.rank == self.strategy.first_workers()[0]
        if first and someone_may and self._rest.has_fixed:
            self.world.shelve(self._rest.fixed(), FIXED)

    def _share_the_rest(self) -> None:
        """Give every worker rank 0's buffers, and its parameters that are not trained."""
        workers = Comm(self._transport.inner, self.strategy.first_workers())
        for tensors in self._rest.by_dtype():
            together = torch.cat([t.reshape(-1) for t in tensors])
            workers.broadcast(together.view(torch.uint8))
            parts = torch.split(together, [t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))
        self._rest.begin()

    @property
    def _weight(self) -> int:
        """What this worker's buffers count for: the samples, or else the steps, that it trained."""
        pace = self._running()
        return 0 if self.set_aside else pace.samples or pace.steps

    def _shelve_buffers(self) -> None:
        """Let others see the buffers as they are now."""
        parcel = self._rest.parcel(self._weight) if self._rest.averaged else None
        if parcel is not None:
            self._shown = parcel
            self.world.shelve(parcel, BUFFERS)

    def _buffers_of(self, ranks: Iterable[int]) -> list[Tensor]:
        """The buffers of other workers, as they have last shown them."""
        if not self._rest.averaged:
            return []
        seen = [self.world.shelved(rank, BUFFERS) for rank in ranks if rank != self.rank]
        return [parcel for parcel in seen if parcel is not None]

    def _adopt_buffers(self) -> None:
        """Take the buffers of the others; of one that comes again, not its own."""
        first = self.strategy.first_workers()[:1]
        self._rest.adopt(self._buffers_of(self.strategy.live_workers()) or self._buffers_of(first))

    def _fit_buffers(self) -> None:
        """Give the model the average of all workers' buffers, as far as they are to be seen."""
        total = self._rest.share(self._weight)
        for parcel in self._buffers_of(self.strategy.live_workers()):
            total += self._rest.share_of(parcel)
        self._rest.fit(total)

    def _average_buffers(self) -> None:
        """At the end: give the model the average of all workers' buffers."""

        def average(workers: Comm) -> None:
            if workers.size == 1:
                return self._fit_buffers()
            total = self._rest.share(self._weight)
            workers.all_reduce(total)
            self._rest.fit(total)

        self.strategy.among_live(average, measuring=True)

    def setup_dataloaders(
        self, *loaders: DataLoader[Any], data: Sharing = "auto", epochs: int | None = None
    ) -> Any:
        """Share the data of each loader with the other workers; each iteration is one epoch.

        Over all workers an epoch is one pass over the data. What a sampler of your own draws for an
        epoch is one draw, too, by the run's seed and the epoch: its samples are shared out as those
        of a plain loader are, and a ``batch_sampler``'s batches go to one worker each, as they are.
        A DistributedSampler gives way to this sharing: nothing of it is used but ``shuffle``.

        An iteration that is left (``break``) after a step has had its epoch: the next one is over
        the next epoch, and what was drawn for no step counts for none. One that is left before any
        step was a look, as by ``next(iter(loader))``: the next one goes over the same epoch, and
        nothing has changed; docs/loops.md has the whole rule. From a queue, whoever begins an epoch
        ends the one before for all. A worker may get no batch at all in an epoch.

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
            if number in self._places:
                paced.go_on(self._places[number], self.catching_up)
        return self._loaders[id(loader)]

    def batch_arrived(self, loop: Pass, batch: DrawnBatch, asked_s: float) -> None:
        """Hear from a loader of a batch: charge its loading, and count its samples."""
        transport, costs, training = self._transport, self._costs, self.trains
        self.hand.draw(loop, training)
        loop.held.append(batch)
        if self.catching_up:
            return
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
            loop.samples += batch.samples
            self._epochs_done = max(self._epochs_done, batch.epochs_done)
            if self._on_progress is not None:
                self._tell_progress(self._on_progress)
        transport.resume()

    @property
    def trains(self) -> bool:
        """Whether a step may be made of a batch that comes now."""
        return torch.is_grad_enabled() and not (self._pace and self._pace.paused)

    def _forget(self, samples: int) -> None:
        """Have samples count for no step: their batch was only looked at."""
        if self._pace is not None:
            self._pace.forget(samples)

    def _after_step(self) -> None:
        self.hand.after_step()
        pace = self._running()
        due = pace.steps <= SHELVED_EVERY or pace.steps % SHELVED_EVERY == 0
        if due and self._rest.averaged and not pace.alone:
            pace.keep_up(self._shelve_buffers)
        if self._keeper is not None:
            self._stepped = True
            if not any(loader.under_way for loader in self._loaders.values()):
                self.between_batches()

    def between_batches(self) -> None:
        """Hear that the loop's body is through; after a step, a checkpoint may be due."""
        if self._keeper is not None and self._stepped:
            self._stepped = False
            self._running().keep_up(self._keeper.after_step)

    def _has_returned(self) -> None:
        """In another life, nothing counts that was under way: others have its batches by now."""
        assert self._loads is not None
        self._loads.forget()
        self.hand.drop()
        for loader in self._loaders.values():
            loader.give_up_tickets()
        for span in self._running().replica.flat.spans:
            span.parameter.grad = None
        self.tell("rejoined")

    def draw(self, queue: int, epoch: int) -> int | None:
        """Draw the number of the next batch; see :meth:`Comm.ticket`."""
        while True:
            try:
                return self.world.ticket(queue, epoch)
            except LeftBehind:
                self._running().keep_up(self._transport.alive)

    # While training ------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this is the first of the workers that are left: the one that logs and saves."""
        return self.rank == 0 or self.world.lost().issuperset(range(self.rank))

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

    @property
    def steps(self) -> int:
        """The steps that this worker has made, those before a checkpoint included."""
        return self._running().steps

    @property
    def catching_up(self) -> bool:
        """Whether ``train`` is still before the checkpoint that the run goes on from.

        Steps are not made then, and what is logged is not recorded again.
        """
        return self._pace is not None and self._pace.on_skip is not None

    def track(self, **objects: Any) -> None:
        """Have checkpoints hold the state of more objects: schedulers, gradient scalers.

        Each has ``state_dict`` and ``load_state_dict``.
        """
        for name, thing in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(thing, method, None)):
                    raise UsageError(f"{name} ({type(thing).__name__}) must have {method}()")
            self._tracked[name] = thing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, ``optimizer.step()`` is the plain local step: nothing is exchanged or counted.

        ``sasgd``, ``downpour``, ``ssp``, ``cyclic`` and ``easgd`` with momentum forget such steps
        when they next exchange; with the others they stay in the worker's model.
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
        """Inside, the model holds the method's answer instead of this worker's replica.

        Its buffers are the average of all workers', as each has last shown them; afterwards they
        are this worker's own again, whatever was done with them inside.
        """
        pace = self._running()
        if model is not None and model is not self._model:
            raise UsageError("worker.answer takes the model that worker.setup was given")
        pace.settle()
        x = pace.replica.flat.x
        assert self._loads is not None
        own = pace.alone or self.catching_up or self._loads.has_answer or self._finished
        answer = None if own else pace.keep_up(lambda: self.strategy.answer(x), again=True)
        answer = x if answer is None else answer
        replica = None if answer is x else x.clone()
        if replica is not None:
            x.copy_(answer)
        buffers = self._rest.read()
        if self._rest.averaged and not own:
            self._fit_buffers()
        before, pace.paused = pace.paused, "inside worker.answer"
        self._transport.resume()
        try:
            yield
        finally:
            pace.paused = before
            self._rest.write(buffers)
            if replica is not None:
                x.copy_(replica)

    def recalibrate(self, loader: Iterable[Any], batches: int | None = None) -> None:
        """Take the running statistics of BatchNorm anew, for the model as it is now.

        Inside ``worker.answer(model)``, or after ``worker.finish()``, that is the method's answer.
        The model is run without gradients, only its BatchNorm modules as in training, on this
        worker alone: no other has to act, none misses a batch, no virtual time passes, and random
        generators are left as they were. All workers that are given the same loader take the same
        batches. What is done inside ``worker.answer`` ends with it.

        Args:
            loader: batches, each the model's input, or a tuple or list that begins with it; of a
                loader that ``worker.setup_dataloaders`` gave, those of the whole data set.
            batches: how many of them to take; all, when not given.
        """
        self._running()
        assert self._model is not None
        if batches is not None:
            at_least("batches", batches, 1)
        if self.catching_up:
            return
        source = loader.plain if isinstance(loader, PacedLoader) else loader
        parts = [source, *(getattr(source, name, None) for name in ("sampler", "batch_sampler"))]
        seed = int(stream(self.seed, "recalibrate").integers(2**31))
        buffers, generators = self._rest.read(), read_generators(self.device)
        taken = 0
        try:
            with all_seeded(seed, [getattr(part, "generator", None) for part in parts]):
                inputs = (moved(batch, self.device) for batch in islice(source, batches))
                taken = recalibrate(self._model, inputs)
        finally:
            write_generators(generators, self.device)
            if not taken:
                self._rest.write(buffers)
        if not taken:
            raise UsageError("worker.recalibrate needs at least one batch, and the loader has none")

    def log(self, **metrics: Any) -> None:
        """Record numbers under their names; ``loss`` and ``accuracy`` become the run's."""
        if self.catching_up:
            return
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

    def reduce(self, value: float | Tensor, op: Literal["mean", "sum"] = "mean") -> Any:
        """The mean, or the sum, of a number or a tensor over all workers; the same on all of them.

        Every worker must call it, equally often: it waits for the others. Workers count alike,
        whatever their data: for a share, reduce both of its parts by ``sum``.
        """
        one_of("op", op, ("mean", "sum"))
        if self.catching_up:
            return value
        if self._keeper is not None and self.size > 1 and not self.strategy.synchronous:
            name = type(self.strategy).__name__
            raise UsageError(
                f"worker.reduce waits for all workers, and under {name} with checkpoints one of"
                " them may be waiting for this one to save: evaluate with worker.answer(model) on"
                " the worker that leads instead, and end all with worker.stop_all()"
            )
        own = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        vector = torch.cat([own.reshape(-1), torch.ones(1, dtype=torch.float64)])
        act = partial(self.comm.all_reduce, vector)
        count = act() if self._pace is None else self._pace.keep_up(act, again=True)
        self._transport.resume()
        if count is None or vector[-1] != count:
            raise UsageError("worker.reduce must be called by every worker, equally often")
        total = (vector[:-1] / count if op == "mean" else vector[:-1]).view(own.shape)
        if not isinstance(value, Tensor):
            return total.item()
        return total.to(value.device, value.dtype if value.is_floating_point() else total.dtype)

    def stop_all(self) -> None:
        """Have every worker come to its end: their loaders give no more batches to train on.

        For early stopping, when one worker decides for all. Each sees it before its next batch;
        ``worker.stopping`` tells, to leave the loop over epochs.
        """
        if not self.catching_up:
            self._transport.stop_all()

    @property
    def stopping(self) -> bool:
        """Whether a worker has called :meth:`stop_all`."""
        return self._transport.stopping()

    def tell(self, event: str, **facts: Any) -> None:
        """Have something that happened to this rank written into the run's record."""
        if self._on_event is not None:
            self._on_event({"t": self._transport.now(), "event": event, "rank": self.rank, **facts})

    @property
    def set_aside(self) -> bool:
        """Whether this worker's updates count for nothing any more: its loaders have ended."""
        return self._pace is not None and self.rank in self.strategy.guard.aside

    # Ending --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Flush what is pending and leave the method's answer in the model. Idempotent.

        Weights that were loaded into the model after its last step are the answer of this worker
        instead; nothing touches the model any more.
        """
        pace = self._pace
        if pace is None or self._finished:
            return
        self._finished = True
        assert self._loads is not None
        self.hand.close_all()
        self._loads.end(partial(self._come_to_the_end, pace))

    def _come_to_the_end(self, pace: Pace) -> None:
        self.catch_up()
        self._transport.retire()
        pace.settle()
        x, trained = pace.replica.flat.x, pace.steps > 0
        if not pace.alone:
            before = x.clone()
            pace.keep_up(lambda: self.strategy.finish(x), again=True)
            self.unseen_batches = sum(loader.unseen() for loader in self._loaders.values())
            if self._rest.averaged:
                pace.keep_up(self._average_buffers, again=True)
            trained = (
                pace.keep_up(lambda: self._measure(before, pace.steps), again=True) is not False
            )
            if self.strategy.synchronous:
                with suppress(CommTimeout):
                    pace.keep_up(pace.rates.at_end, again=True)
        pace.account(last=True)
        pace.paused = "after worker.finish"
        pace.replica.release()
        self._transport.note("finish")
        self._transport.resume()
        if pace.drew_in_vain and not trained:
            raise Untrained(
                "batches were drawn to train with, and no worker made a step: call step() of the"
                " optimizer that worker.setup returned; only to evaluate, use torch.no_grad()"
            )

    def _measure(self, x: Tensor, steps: int) -> bool | None:
        """Find out how far the workers are apart, and whether any of them has made a step.

        None where that is not known. The distance is the root of the workers' mean square distance
        to their mean, over the norm of the mean.
        """
        try:
            measured = self.strategy.among_live(partial(_spread, x, steps), measuring=True)
        except CommTimeout:
            return None
        mean, square, all_steps, count = measured
        norm = float(mean.double().norm())
        distance = math.sqrt(square / count) / norm if norm else 0.0
        self.consensus = distance if math.isfinite(distance) else None
        return None if count == 1 else all_steps > 0

    def save(self, folder: str | Path) -> None:
        """Write the state of this worker: call it on every worker, after the same step.

        Parameters, optimizer, strategy, what :meth:`track` was given, random generators, and how
        far each loader is. ``pl.launch(checkpoint_steps=...)`` does all that by itself.
        """
        pace = self._running()
        if self.catching_up:
            return
        if not pace.alone and not self.strategy.resumable:
            raise UsageError(
                f"{type(self.strategy).__name__} cannot be saved: part of its state is on the way,"
                " or on ranks that are no workers; use pl.launch(checkpoint_steps=...)"
            )
        pace.settle()
        self._transport.resume()
        state = {
            **self.own_state(),
            "strategy": self.strategy.state_dict(),
            "generators": read_generators(self.device),
            "steps": pace.steps,
            "samples": pace.samples,
        }
        save_state(Path(folder), f"rank{self.rank}", state)

    def load(self, folder: str | Path) -> None:
        """Take up what :meth:`save` wrote on this rank; after ``setup``.

        Loaders go on behind the last batch; ``loader.epoch`` is the epoch that comes next, or that
        is under way.
        """
        pace = self._running()
        if self.catching_up:
            return
        state = load_state(Path(folder), f"rank{self.rank}")
        self.go_on_from([Place(*place) for place in state["loaders"]], state["epochs_done"])
        self.load_own_state(state)
        self.strategy.load_state_dict(state["strategy"])
        pace.steps, pace.samples = state["steps"], state["samples"]
        write_generators(state["generators"], self.device)

    def load_weights(self, path: str | Path) -> None:
        """Begin with other weights; call it on every worker, between ``setup`` and the first step.

        The parameters are those that rank 0 read. A worker that comes late, or goes on from a
        checkpoint, has better ones: then this does nothing. After :meth:`finish` it only loads.

        Args:
            path: a safetensors file of a module's state dict, plain, wrapped in
                DistributedDataParallel or compiled; or the folder of a checkpoint.
        """
        pace = self._running()
        if pace.steps and not self._finished:
            raise UsageError(
                f"worker.load_weights must be called before the first step, got {pace.steps} steps"
            )
        if self._transport.late or self.catching_up:
            return
        assert self._model is not None and self._loads is not None
        try:
            with self._loads.ignored():
                self._model.load_state_dict(read_weights(Path(path)))
        except RuntimeError as error:
            raise UsageError(f"weights ({path}) must fit the model: {error}") from None
        if not (pace.alone or self._finished):
            self.strategy.adopt(pace.replica.flat.x)
            self._transport.resume()

    # For checkpoints -----------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the user's objects on this worker."""
        assert self._model is not None
        return {
            "model": self._model.state_dict(),
            "optimizer": self._running().replica.optimizer.state_dict(),
            "rest": {**self._rest.state(), "shown": self._shown},
            "tracked": {name: thing.state_dict() for name, thing in self._tracked.items()},
            "loaders": [tuple(loader.place) for loader in self._loaders.values()],
            "epochs_done": self._epochs_done,
        }

    def check_places(self) -> None:
        """Refuse a place in the data that nobody can go on from."""
        loaders = self._loaders.values()
        if any(loader.under_way for loader in loaders):
            return
        if any(loader.sharing == "queue" and loader.epoch for loader in loaders):
            raise UsageError(
                "a checkpoint needs steps to be made inside the loop over a loader whose batches"
                ' come from a queue; or share them out: setup_dataloaders(loader, data="static")'
            )

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Put the user's objects into the state that :meth:`own_state` gave."""
        replica = self._running().replica
        self._load_model(state)
        replica.optimizer.load_state_dict(state["optimizer"])
        replica.optimizer.zero_grad()
        for name, thing in self._tracked.items():
            if name not in state["tracked"]:
                raise UsageError(f"the checkpoint has no {name} that worker.track was given")
            thing.load_state_dict(state["tracked"][name])

    def _load_model(self, state: dict[str, Any]) -> None:
        assert self._model is not None and self._loads is not None
        with self._loads.ignored():
            self._model.load_state_dict(state["model"])
        if "rest" in state:  # a checkpoint of an earlier version has none
            self._rest.load_state(state["rest"])
            self._shown = state["rest"]["shown"]

    def show_again(self, state: dict[str, Any]) -> None:
        """Let others see what they saw of this worker when its state was saved."""
        if not (self._running().alone or self._rest.is_empty):
            self._load_model(state)
            self._shelve_fixed()
            if self._shown.numel():
                self.world.shelve(self._shown, BUFFERS)

    def go_on_from(self, places: list[Place], epochs_done: float) -> None:
        """Have the loaders, those that are here and those to come, go on from these places."""
        self._places, self._epochs_done = dict(enumerate(places)), epochs_done
        for number, loader in enumerate(self._loaders.values()):
            if number in self._places:
                loader.go_on(self._places[number], self.catching_up)

    def catch_up(self) -> None:
        """Be where the checkpoint was made that the run goes on from, if there is one."""
        if self._keeper is not None:
            self._keeper.catch_up()

    @contextmanager
    def for_nothing(self) -> Iterator[None]:
        """Inside, steps are not made and nothing is recorded; afterwards all is as it was."""
        pace, state = self._running(), copy.deepcopy(self.own_state())
        generators = read_generators(self.device)
        pace.on_skip = lambda: None
        try:
            yield
        finally:
            pace.on_skip = None
            self.load_own_state(state)
            write_generators(generators, self.device)

    # For the run ---------------------------------------------------------------------------------

    @property
    def pace(self) -> Pace | None:
        """The stepping of this worker; None before :meth:`setup`."""
        return self._pace

    @property
    def transport(self) -> MeteredTransport:
        """The world of this rank."""
        return self._transport

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


def _spread(x: Tensor, steps: int, workers: Comm) -> tuple[Tensor, float, float, int]:
    """The mean of all ``x``; the sums of squared distances to it and of steps; their number."""
    mean = x.clone()
    mean /= workers.all_reduce(mean)
    sums = torch.tensor([float((x - mean).double().square().sum()), steps], dtype=torch.float64)
    count = workers.all_reduce(sums)
    square, all_steps = sums.tolist()
    return mean, square, all_steps, count


def _plain(name: str, value: Any) -> Any:
    """A metric as JSON can hold it; what is not finite is nothing."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UsageError(f"{name} (shape {tuple(value.shape)}) must be a single number")
        value = value.detach().item()
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise UsageError(f"{name} ({type(value).__name__}) must be a number or a text")
    return value
