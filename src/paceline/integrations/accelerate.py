"""Hugging Face's ``Accelerator`` on workers of Paceline: the same class, in place of theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.integrations.exchange import (
    Exchange,
    clip_norm,
    refuse_clipping_by_value,
    worker_of_run,
)
from paceline.training.loader import PacedLoader

try:
    import accelerate
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import recursively_apply
except ImportError:
    needs = 'paceline.integrations.accelerate needs accelerate: pip install "paceline[huggingface]"'
    raise ImportError(needs) from None


class Accelerator(accelerate.Accelerator):
    """Trains on the worker of this process, with the method of the run.

    ``prepare`` ties the model and its optimizer to the run, and divides the data of each loader
    that it is given among the workers. The main process is the worker that leads.

    Attributes:
        worker: that this trains on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.worker = worker_of_run()
        self._exchange = Exchange(self.worker)
        super().__init__(*args, **kwargs)
        if self.use_distributed:
            raise UsageError(
                f"RANK and WORLD_SIZE ({self.state.num_processes}) make Accelerate train by"
                " DistributedDataParallel: start with paceline run or pl.launch, not with torchrun"
            )
        if self.mixed_precision == "fp16":
            raise UsageError("mixed_precision (fp16) must be no or bf16, which needs no scaler")
        if self.device.type != self.worker.device.type:
            raise UsageError(
                f"device ({self.device}) must be that of the run, {self.worker.device}: give"
                ' cpu=True, or device="cuda" to pl.launch'
            )

    # Who this is ---------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """The number of workers."""
        return self.worker.size

    @property
    def process_index(self) -> int:
        """0 on the worker that leads; another number on each of the others."""
        return 0 if self.worker.leads else self.worker.rank or self.worker.size

    @property
    def is_main_process(self) -> bool:
        """Whether this worker leads."""
        return self.worker.leads

    local_process_index, is_local_main_process = process_index, is_main_process

    def on_main_process(self, function: Any = None) -> Any:
        """Have a function act on the worker that leads alone."""

        def act(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.worker.leads else None

        return act

    on_local_main_process = on_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the worker that leads."""
        if self.worker.leads:
            print(*args, **kwargs)

    # Setting up ----------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Tie a model and its optimizer to the run; divide data among the workers."""
        models = [thing for thing in args if isinstance(thing, nn.Module)]
        optimizers = [thing for thing in args if isinstance(thing, Optimizer)]
        ours: dict[int, Any] = {}
        if optimizers:
            if len(models) != 1 or len(optimizers) != 1:
                raise UsageError("prepare must get one model and its optimizer, in one call")
            ours[id(optimizers[0])] = self.worker.setup(models[0], optimizers[0])[1]
        for loader in args:
            if isinstance(loader, DataLoader):
                paced = self.worker.setup_dataloaders(loader)
                paced.looks_ahead = True
                ours[id(loader)] = Epochs(paced, self.gradient_state)
        return super().prepare(
            *(ours.get(id(thing), thing) for thing in args), device_placement=device_placement
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Have a schedule make a step for each worker, at a step of this one, as in Accelerate."""
        prepared = super().prepare_scheduler(scheduler)
        once = prepared.step

        def step(*args: Any, **kwargs: Any) -> None:
            for _ in range(1 if self.split_batches else self.worker.size):
                once(*args, **kwargs)

        assert isinstance(prepared, AcceleratedScheduler)
        prepared.step = step
        return prepared

    # Training ------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the gradient that the next step applies; returns the norm of this worker's own."""
        if norm_type != 2:
            raise UsageError(f"norm_type ({norm_type}) must be 2")
        return clip_norm(self.worker, max_norm) if self.sync_gradients else None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each number of this worker's gradient."""
        refuse_clipping_by_value(self.worker)
        super().clip_grad_value_(parameters, clip_value)

    # What workers do together --------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait for all workers of a lockstep method; those of others go on."""
        self._exchange.barrier()

    def gather(self, tensor: Any) -> Any:
        """The rows of all workers of a lockstep method; refused where they do not wait."""
        return recursively_apply(self._exchange.gather_rows, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same: no row is there twice."""
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean over all workers; refused where they do not wait."""
        self._exchange.must_wait("accelerator.reduce")

        def reduce(each: Tensor) -> Any:
            return self._exchange.reduce(each, reduction) * scale

        return recursively_apply(reduce, tensor, error_on_other_type=True)

    # The answer ----------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The method's answer on the worker that leads; on others, what they have."""
        if not (self.worker.began and self.worker.leads):
            state: dict[str, Tensor] = super().get_state_dict(model, unwrap)
            return state
        with self.worker.answer():
            answer = super().get_state_dict(model, unwrap)
            return {name: value.clone() for name, value in answer.items()}

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object, on the worker that leads."""
        if self.worker.leads:
            super().save(obj, f, safe_serialization)

    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Write the method's answer, on the worker that leads."""
        if self.worker.leads:
            super().save_model(model, *args, **kwargs)

    def save_state(self, *args: Any, **kwargs: Any) -> None:
        """Refused: it would write the state of one worker as that of all."""
        raise UsageError("save_state must not be called: use accelerator.worker.save(folder)")

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Refused: see :meth:`save_state`."""
        raise UsageError("load_state must not be called: use accelerator.worker.load(folder)")


class Epochs:
    """A worker's part of the data, which tells Accelerate of the last batch of an epoch.

    Args:
        paced: the loader that shares its data.
        state: of the accumulation of gradients.
    """

    remainder = -1

    def __init__(self, paced: PacedLoader, state: Any) -> None:
        self._paced, self._state = paced, state
        self.end_of_dataloader = False

    def __iter__(self) -> Iterator[Any]:
        for batch in self._paced:
            self.end_of_dataloader = self._paced.at_last
            # Accelerate has one state for a process; simulated workers take turns between batches
            self._state._dataloader_references_ref = [None]
            self._state._add_dataloader(self)
            yield batch
        self._state._dataloader_references_ref = [None]

    def __len__(self) -> int:
        return len(self._paced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paced, name)
