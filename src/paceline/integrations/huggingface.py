"""Hugging Face's ``Trainer`` on workers of Paceline: the same class, in place of transformers' own.

A trainer class of your own becomes one by ``class MyTrainer(OnWorkers, transformers.Trainer)``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from paceline.errors import UsageError
from paceline.integrations.exchange import Exchange, clip_norm, worker_of_run
from paceline.training.loader import PacedLoader
from paceline.training.worker import Worker

try:
    import transformers
    from transformers import TrainerCallback
except ImportError:
    needs = (
        "paceline.integrations.huggingface needs transformers and accelerate:"
        ' pip install "paceline[huggingface]"'
    )
    raise ImportError(needs) from None


Base: Any = object
"""What a mixin for any trainer is, to type checkers."""


class OnWorkers(Base):
    """Trains on the worker of this process, with the method of the run; comes before ``Trainer``.

    Training data is divided among the workers. Each worker evaluates on the whole evaluation set,
    with the method's answer. The worker that leads logs, and saves the answer. Under an
    asynchronous method the schedule follows the steps of all workers, and ``max_steps`` are those
    of each.
    """

    args: Any
    optimizer: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.worker = worker_of_run()
        self._exchange = Exchange(self.worker)
        super().__init__(*args, **kwargs)
        _check(self.args, self.worker)
        self.args = _arguments_of(self.args, self.worker)
        self.add_callback(_Leading(self.worker, self._exchange))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the method's answer in the model."""
        if resume_from_checkpoint:
            raise UsageError(
                f"resume_from_checkpoint ({resume_from_checkpoint}) must not be given: a checkpoint"
                " is of one worker; begin with its model, by from_pretrained"
            )
        self.callback_handler.callbacks.sort(key=lambda callback: isinstance(callback, _Leading))
        output = super().train(None, *args, **kwargs)
        self.worker.finish()
        return output

    def get_train_dataloader(self) -> Any:
        """Divide the training data among the workers."""
        self.create_optimizer()
        prepared = super().get_train_dataloader()
        loader = getattr(prepared, "base_dataloader", prepared)
        by_steps = self.args.max_steps > 0
        epochs = None if by_steps else math.ceil(self.args.num_train_epochs)
        paced = self.worker.setup_dataloaders(loader, epochs=epochs)
        if self.worker.keeps_length:
            return paced
        return Epochs(paced, self.worker) if by_steps else SizedEpochs(paced, self.worker, epochs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, and tie it and the model to the run."""
        super().create_optimizer(*args, **kwargs)
        if not self.worker.began:
            _, self.optimizer = self.worker.setup(self.model, self.optimizer)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule; where a worker's steps are not known, all workers' steps drive it."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        plain = not hasattr(schedule, "num_bad_epochs")  # one that a metric drives
        if plain and not self.worker.keeps_length and self.args.max_steps <= 0:
            _follow_progress(schedule, self.worker, num_training_steps)
        return schedule

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return clip_norm(self.worker, self.args.max_grad_norm)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the method's answer."""
        with self._answer():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.worker.leads:
            super()._save_checkpoint(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the answer, each parameter by itself: here they are parts of one vector."""
        if not self.worker.leads:
            return
        with self._answer():
            copies: dict[tuple[int, Any], Tensor] = {}
            state = {
                name: copies.setdefault((value.data_ptr(), value.shape), value.clone())
                for name, value in (state_dict or self.model.state_dict()).items()
            }
        super()._save(output_dir, state)

    def _answer(self) -> Any:
        return self.worker.answer() if self.worker.began else ExitStack()

    def is_world_process_zero(self) -> bool:
        """Whether this worker leads."""
        return self.worker.leads

    is_local_process_zero = is_world_process_zero


class Trainer(OnWorkers, transformers.Trainer):
    """``transformers.Trainer`` on the worker of this process; see :class:`OnWorkers`."""


def _check(args: Any, worker: Worker) -> None:
    """Refuse what Hugging Face would do by itself, or what cannot be done."""
    if args.world_size > 1:
        raise UsageError(
            f"RANK and WORLD_SIZE ({args.world_size}) make Accelerate train by"
            " DistributedDataParallel: start with paceline run or pl.launch, not with torchrun"
        )
    if args.fp16:
        raise UsageError("fp16 (True) must be False: use bf16, which needs no scaler")
    if args.auto_find_batch_size:
        raise UsageError("auto_find_batch_size (True) must be False: workers would differ")
    if args.device.type != worker.device.type:
        raise UsageError(
            f"device ({args.device}) must be that of the run, {worker.device}: give use_cpu=True to"
            ' TrainingArguments, or device="cuda" to pl.launch'
        )


def _arguments_of(args: Any, worker: Worker) -> Any:
    """A copy of the trainer's arguments by which the worker that leads is process 0."""

    def index(self: Any) -> int:
        return 0 if worker.leads else worker.rank or worker.size

    def reduce(self: Any, protocol: Any) -> Any:
        plain = copy.copy(args)
        vars(plain).update(vars(self))
        return copy.copy, (plain,)

    kind: Any = type(
        type(args).__name__,
        (type(args),),
        {
            "process_index": property(index),
            "local_process_index": property(index),
            "__reduce_ex__": reduce,
        },
    )
    own = copy.copy(args)
    own.__class__ = kind
    return own


def _follow_progress(schedule: Any, worker: Worker, total: int) -> None:
    """Have the steps of a schedule follow the share of the data that all workers have taken."""
    plain: Any = type(schedule)

    def follow(self: Any, *args: Any, **kwargs: Any) -> None:
        while self.last_epoch < int(worker.progress * (total - 1)):
            plain.step(self, *args, **kwargs)

    schedule.__class__ = type(plain.__name__, (plain,), {"step": follow})  # its state is saved


class _Leading(TrainerCallback):
    """Keeps who leads, and lets workers end early together; the last of all callbacks."""

    def __init__(self, worker: Worker, exchange: Exchange) -> None:
        self._worker, self._exchange = worker, exchange

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note whether this worker leads now."""
        state.is_world_process_zero = state.is_local_process_zero = self._worker.leads

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop early all together, or when the worker that leads says so."""
        stop = self._exchange.decide(control.should_training_stop, all_must=False)
        control.should_training_stop = stop or self._worker.stopping
        if stop and self._worker.leads:
            self._worker.stop_all()


class Epochs:
    """The training data of a worker whose number of batches in an epoch is not known.

    A worker that comes late, to epochs that are over, begins with the one that is not: Hugging
    Face's trainer ends at an epoch without batches.

    Args:
        paced: the loader that shares its data.
        worker: whose batches they are.
        epochs: how many are planned; None if there is no end.
    """

    def __init__(self, paced: PacedLoader, worker: Worker, epochs: int | None = None) -> None:
        self._paced, self._worker, self._epochs = paced, worker, epochs

    def __iter__(self) -> Iterator[Any]:
        while self._epochs is None or self._paced.epoch < self._epochs:
            had = False
            for batch in self._paced:
                had = True
                yield batch
            if had or self._worker.stopping:
                return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paced, name)


class SizedEpochs(Epochs):
    """Those of a plan by epochs; a worker has at most the batches of all."""

    def __len__(self) -> int:
        return len(self._paced) * self._worker.size
