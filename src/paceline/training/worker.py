"""The worker: what the user's ``train(worker)`` function holds on to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.checkpoint.states import load_state, save_state
from paceline.checkpoint.weights import read_weights
from paceline.common.generators import all_seeded, read_generators, write_generators
from paceline.common.options import above, at_least, one_of
from paceline.common.seeds import stream
from paceline.errors import UsageError
from paceline.model.checks import plain_model
from paceline.model.replica import DirectStep
from paceline.record.result import Metric
from paceline.strategies.base import warn_of_long_interval
from paceline.training.loader import PacedLoader, Position, Sharing, moved
from paceline.training.optimizer import PacedOptimizer
from paceline.training.rest import recalibrate
from paceline.training.session import Session

M = TypeVar("M", bound=nn.Module)
Model = TypeVar("Model", bound=nn.Module | list[nn.Module] | tuple[nn.Module, ...])
T = TypeVar("T")
_current: ContextVar[Worker | None] = ContextVar("worker", default=None)


def current_worker() -> Worker | None:
    """The worker of this process; in a simulation, of this thread. None outside of a run."""
    return _current.get()


def forget_worker() -> None:
    """Have no worker in this process any more: its run is over."""
    _current.set(None)


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
    """

    def __init__(self, session: Session) -> None:
        self.rank, self.size, self.seed = session.rank, session.size, session.seed
        self.device, self.strategy, self._session = session.device, session.strategy, session
        workers = range(self.size) if self.rank < self.size else [self.rank]
        self.comm = session.all_ranks.group(workers)
        _current.set(self)

    # Setting up ----------------------------------------------------------------------------------

    @overload
    def setup(
        self, model: M, optimizer: Optimizer, *, with_frozen: bool = False
    ) -> tuple[M, PacedOptimizer]: ...

    @overload
    def setup(
        self,
        model: Model,
        optimizer: list[Optimizer] | tuple[Optimizer, ...],
        *,
        with_frozen: bool = False,
    ) -> tuple[Model, Any]: ...

    def setup(self, model: Any, optimizer: Any, *, with_frozen: bool = False) -> tuple[Any, Any]:
        """Tie a model and its optimizer to the run; every worker starts with rank 0's parameters.

        The model is moved to ``worker.device``, its parameters into one vector. On a rank that is
        no worker this does not return: it serves, and ends with the run.

        Lists or tuples of models and of optimizers are set up together, as for a GAN, and come back
        in the same form. Then ``step()`` of each optimizer is one step of the method, for its own
        parameters; docs/how-to/gans.md tells what that means.

        Args:
            model: the model, or several.
            optimizer: its optimizer, or several.
            with_frozen: whether frozen parameters are in the vector that workers exchange, too.
                Then they can be unfrozen in mid-run, and be given to ``add_param_group``.
        """
        if self._session.stepper is not None:
            raise UsageError(
                "worker.setup must be called once, with all models and optimizers of the run:"
                " (g, d), (g_opt, d_opt) = worker.setup((g, d), (g_opt, d_opt))"
            )
        models, optimizers = (
            _several("model", model, nn.Module),
            _several("optimizer", optimizer, Optimizer),
        )
        if any(isinstance(each, PacedOptimizer) for each in optimizers):
            raise UsageError("worker.setup takes a plain optimizer, not one of another worker")
        paced = self._begin([*map(plain_model, models)], optimizers, with_frozen)
        return model, type(optimizer)(paced) if isinstance(optimizer, (list, tuple)) else paced[0]

    def _begin(
        self, models: list[nn.Module], optimizers: Sequence[Optimizer], with_frozen: bool
    ) -> list[PacedOptimizer]:
        return self._session.begin(models, optimizers, with_frozen)

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
        nothing has changed; docs/how-to/data.md has the whole rule. From a queue, whoever begins an
        epoch ends the one before for all. A worker may get no batch at all in an epoch.

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
        session = self._session
        session.epoch_samples = session.epoch_samples or paced[0].samples
        if epochs is not None and session.epochs is None:
            session.epochs = epochs
            warn_of_long_interval(self.strategy, len(paced[0]) * epochs)
        return paced[0] if len(paced) == 1 else paced

    def _paced(self, loader: object, data: Sharing) -> PacedLoader:
        if isinstance(loader, PacedLoader):
            return loader
        if not isinstance(loader, DataLoader):
            kind = type(loader).__name__
            raise UsageError(f"setup_dataloaders takes torch DataLoaders, got {kind}")
        session, loaders = self._session, self._session.loaders
        if id(loader) not in loaders:
            number = len(loaders)
            paced = loaders[id(loader)] = PacedLoader(loader, session, data, number)
            if number in session.positions:
                paced.resume(session.positions[number], session.catching_up)
        return loaders[id(loader)]

    def samples(self, number: int) -> None:
        """Count a batch that the script draws by itself: the next step's gradient is its mean.

        Without :meth:`setup_dataloaders`, nothing else tells how many samples a step has: for the
        weights of workers with unequal batches, for the result, and for virtual time, where
        loading and computing are charged as for a batch of a loader. Call it between drawing a
        batch and using it. Several calls before a step add up; without gradients
        (``torch.no_grad()``) a batch counts as evaluated.

        Nothing divides such data: each worker must draw other samples, by a seed with its rank.
        The global generators of torch, numpy and Python have one, until the script sets another.
        """
        at_least("number", number, 1)
        _ = self._session.running
        self._session.own_batch(number)

    def plan(self, *, steps: int) -> None:
        """Say how many steps this worker is to make, for :attr:`progress`.

        For a loop that is over a number of steps, not over the epochs of a loader.
        """
        at_least("steps", steps, 1)
        self._session.planned_steps = steps
        if self.began:
            warn_of_long_interval(self.strategy, steps)

    @property
    def leads(self) -> bool:
        """Whether this is the first of the workers that are left: the one that logs and saves."""
        return self._session.leads

    @property
    def began(self) -> bool:
        """Whether :meth:`setup` was called."""
        return self._session.stepper is not None

    @property
    def finished(self) -> bool:
        """Whether :meth:`finish` was called."""
        return self._session.finished

    @property
    def late(self) -> bool:
        """Whether this worker has come, or come again, after the start of the run."""
        return self._session.late

    @property
    def keeps_length(self) -> bool:
        """Whether the worker has the same number of batches in each epoch, come what may."""
        return self.strategy.synchronous and not self._session.all_ranks.elastic

    @property
    def saves(self) -> bool:
        """Whether the run makes checkpoints."""
        return self._session.checkpointing is not None

    @property
    def progress(self) -> float:
        """The share of the planned samples that all workers have taken, as this one knows it.

        From 0 to 1, by the place of this worker's last batch in the data; after :meth:`plan`, the
        share of this worker's own steps. Never waits.
        """
        return self._session.progress

    @property
    def steps(self) -> int:
        """The steps that this worker has made, those before a checkpoint included."""
        return self._session.running.steps

    @property
    def epoch_samples(self) -> int | None:
        """How many samples all workers take in an epoch; None where that is not known."""
        return self._session.epoch_samples

    @property
    def catching_up(self) -> bool:
        """Whether ``train`` is still before the checkpoint that the run goes on from.

        Steps are not made then, and what is logged is not recorded again.
        """
        return self._session.catching_up

    def track(self, **objects: Any) -> None:
        """Have checkpoints hold the state of more objects: schedulers, gradient scalers.

        Each has ``state_dict`` and ``load_state_dict``.
        """
        for name, thing in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(thing, method, None)):
                    raise UsageError(f"{name} ({type(thing).__name__}) must have {method}()")
            self._session.tracked[name] = thing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, ``optimizer.step()`` is the plain local step: nothing is exchanged or counted.

        ``sasgd``, ``downpour``, ``ssp``, ``cyclic`` and ``easgd`` with momentum forget such steps
        when they next exchange; with the others they stay in the worker's model.
        """
        stepper = self._session.running
        stepper.syncing = False
        try:
            yield
        finally:
            stepper.syncing = True

    def clip_gradients(self, max_norm: float) -> None:
        """Clip at the next ``optimizer.step()``: after the reduction, before the update.

        Where a server makes the update, before the gradient is sent to it.
        """
        above("max_norm", max_norm, 0)
        self._session.running.max_norm = max_norm

    def redirect_steps(self, act: DirectStep) -> None:
        """Have ``act`` called for steps of the optimizer that was given to :meth:`setup`."""
        self._session.running.replica.redirect(act)

    def gradients(self) -> list[Tensor]:
        """The gradients of this worker's own batches, of those parameters that have one."""
        spans = self._session.running.replica.flat.spans
        return [span.parameter.grad for span in spans if span.parameter.grad is not None]

    def settle(self) -> None:
        """Finish what the last step left pending, before parameters are read in an unusual way."""
        self._session.settle()

    @contextmanager
    def answer(self, *models: nn.Module) -> Iterator[None]:
        """Inside, the model holds the method's answer instead of this worker's replica.

        Of several models, all do, whichever are named.
        Its buffers are the average of all workers', as each has last shown them; afterwards they
        are this worker's own again, whatever was done with them inside.
        """
        session, stepper = self._session, self._session.running
        if not {*map(plain_model, models)} <= {*session.models}:
            raise UsageError("worker.answer takes the model that worker.setup was given")
        stepper.settle()
        flat = stepper.replica.flat
        own = stepper.alone or session.catching_up or session.loads.has_answer or session.finished
        with flat.lent() as x:
            answer = None if own else stepper.keep_up(lambda: self.strategy.answer(x), again=True)
            answer = x if answer is None else answer
            replica = None if answer is x else x.clone()
            if replica is not None:
                x.copy_(answer)
        rest = session.buffers.rest
        buffers = rest.read()
        if rest.averaged and not own:
            session.buffers.fit()
        before, stepper.paused = stepper.paused, "inside worker.answer"
        self._session.clock.switch_in()
        try:
            yield
        finally:
            stepper.paused = before
            rest.write(buffers)
            if replica is not None:
                with flat.lent() as x:
                    x.copy_(replica)

    def recalibrate(
        self, loader: Iterable[Any], batches: int | None = None, model: nn.Module | None = None
    ) -> None:
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
            model: which one, where there are several.
        """
        session, stepper = self._session, self._session.running
        if batches is not None:
            at_least("batches", batches, 1)
        if stepper.skipping:
            return
        if model is None and len(session.models) > 1:
            raise UsageError("worker.recalibrate needs to be told which model: model=...")
        model = session.models[0] if model is None else plain_model(model)
        source = loader.plain if isinstance(loader, PacedLoader) else loader
        parts = [source, *(getattr(source, name, None) for name in ("sampler", "batch_sampler"))]
        seed = int(stream(self.seed, "recalibrate").integers(2**31))
        buffers, taken = session.buffers.rest.read(), 0
        try:
            with all_seeded(seed, parts, self.device):
                resident = session.resident
                inputs = (moved(b, self.device, resident) for b in islice(source, batches))
                taken = recalibrate(model, inputs)
        finally:
            if not taken:
                session.buffers.rest.write(buffers)
        if not taken:
            raise UsageError("worker.recalibrate needs at least one batch, and the loader has none")

    def log(self, **metrics: Any) -> None:
        """Record numbers under their names; ``loss`` and ``accuracy`` become the run's."""
        if self._session.catching_up:
            return
        stepper = self._session.stepper
        record: Metric = {
            "t": self._session.clock.now(),
            "rank": self.rank,
            "step": stepper.steps if stepper else 0,
            "samples": stepper.samples if stepper else 0,
        }
        for name, value in metrics.items():
            record[name] = _plain(name, value)
        self._session.listener.metric(record)

    def reduce(self, value: float | Tensor, op: Literal["mean", "sum"] = "mean") -> Any:
        """The mean, or the sum, of a number or a tensor over all workers; the same on all of them.

        Every worker must call it, equally often: it waits for the others. Workers count alike,
        whatever their data: for a share, reduce both of its parts by ``sum``.
        """
        one_of("op", op, ("mean", "sum"))
        if self._session.catching_up:
            return value
        saves = self._session.checkpointing is not None
        if saves and self.size > 1 and not self.strategy.synchronous:
            name = type(self.strategy).__name__
            raise UsageError(
                f"worker.reduce waits for all workers, and under {name} with checkpoints one of"
                " them may be waiting for this one to save: evaluate with worker.answer(model) on"
                " the worker that leads instead, and end all with worker.stop_all()"
            )
        own = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        vector = torch.cat([own.reshape(-1), torch.ones(1, dtype=torch.float64)])
        act = partial(self.comm.all_reduce, vector)
        stepper = self._session.stepper
        total = act() if stepper is None else stepper.keep_up(act, again=True)
        self._session.clock.switch_in()
        if total is None or vector[-1] != total.weight:
            raise UsageError("worker.reduce must be called by every worker, equally often")
        whole = (vector[:-1] / total.weight if op == "mean" else vector[:-1]).view(own.shape)
        if not isinstance(value, Tensor):
            return whole.item()
        return whole.to(value.device, value.dtype if value.is_floating_point() else whole.dtype)

    def stop_all(self) -> None:
        """Have every worker come to its end: their loaders give no more batches to train on.

        For early stopping, when one worker decides for all. Each sees it before its next batch;
        ``worker.stopping`` tells, to leave the loop over epochs.
        """
        if not self._session.catching_up:
            self._session.ports.queue.close()

    @property
    def stopping(self) -> bool:
        """Whether a worker has called :meth:`stop_all`."""
        return self._session.stopping

    def finish(self) -> None:
        """Flush what is pending and leave the method's answer in the model. Idempotent.

        Weights that were loaded into the model after its last step are the answer of this worker
        instead; nothing touches the model any more.
        """
        self._session.finish()

    def save(self, folder: str | Path) -> None:
        """Write the state of this worker: call it on every worker, after the same step.

        Parameters, optimizer, strategy, what :meth:`track` was given, random generators, and how
        far each loader is. ``pl.launch(checkpoint_steps=...)`` does all that by itself.
        """
        stepper = self._session.running
        if self._session.catching_up:
            return
        if not stepper.alone and not self.strategy.resumable:
            raise UsageError(
                f"{type(self.strategy).__name__} cannot be saved: part of its state is on the way,"
                " or on ranks that are no workers; use pl.launch(checkpoint_steps=...)"
            )
        stepper.settle()
        self._session.clock.switch_in()
        state = {
            **self._session.own_state(),
            "strategy": self.strategy.state_dict(),
            "generators": read_generators(self.device),
            "steps": stepper.steps,
            "samples": stepper.samples,
        }
        save_state(Path(folder), f"rank{self.rank}", state)

    def load(self, folder: str | Path) -> None:
        """Take up what :meth:`save` wrote on this rank; after ``setup``.

        Loaders go on behind the last batch; ``loader.epoch`` is the epoch that comes next, or that
        is under way.
        """
        stepper = self._session.running
        if self._session.catching_up:
            return
        state = load_state(Path(folder), f"rank{self.rank}")
        places = [Position(*place) for place in self._session.fitted(state)["loaders"]]
        self._session.go_on_from(places, state["epochs_done"])
        self._session.load_own_state(state)
        self.strategy.load_state_dict(state["strategy"])
        stepper.steps, stepper.samples = state["steps"], state["samples"]
        write_generators(state["generators"], self.device)

    def load_weights(self, path: str | Path) -> None:
        """Begin with other weights; call it on every worker, between ``setup`` and the first step.

        The parameters are those that rank 0 read. A worker that comes late, or goes on from a
        checkpoint, has better ones: then this does nothing. After :meth:`finish` it only loads.

        Args:
            path: a safetensors file of a module's state dict, plain, wrapped in
                DistributedDataParallel or compiled; or the folder of a checkpoint.
        """
        stepper = self._session.running
        if stepper.steps and not self._session.finished:
            raise UsageError(
                "worker.load_weights must be called before the first step, got"
                f" {stepper.steps} steps"
            )
        if self._session.late or self._session.catching_up:
            return
        assert self._session.model is not None and self._session.loads is not None
        try:
            with self._session.loads.ignored():
                self._session.model.load_state_dict(read_weights(Path(path)))
        except RuntimeError as error:
            raise UsageError(f"weights ({path}) must fit the model: {error}") from None
        if not (stepper.alone or self._session.finished):
            with stepper.replica.flat.lent() as x:
                self.strategy.adopt(x)
            self._session.clock.switch_in()


def _several(what: str, given: Any, kind: type[T]) -> list[T]:
    """What ``worker.setup`` was given, one or several, as a list."""
    each = [*given] if isinstance(given, (list, tuple)) else [given]
    if not each or not all(isinstance(one, kind) for one in each):
        kinds = ", ".join(type(one).__name__ for one in each) or "nothing"
        raise UsageError(f"{what} ({kinds}) must be a torch {kind.__name__}, or a list of them")
    return each


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
