"""What the trainers' modules share: the worker that they act for, and what it means to wait."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from paceline.common.options import one_of
from paceline.errors import UsageError
from paceline.launcher.paced import check_method
from paceline.strategies import strategy_spec
from paceline.training.worker import Worker, current_worker


def worker_of_run(method: str | None = None) -> Worker:
    """The worker of this process or simulated rank; ``method``, if given, must be the run's."""
    worker = current_worker()
    if worker is None:
        raise UsageError(
            "there is no run yet: call this in the function that pl.launch or pl.simulate is given,"
            " or inside of `with pl.init(...)`"
        )
    check_method(worker, method)
    if worker.saves:
        raise UsageError(
            "checkpoint_steps, checkpoint_minutes and resume must not be used with a trainer, whose"
            " loop they cannot repeat: it makes checkpoints of its own"
        )
    if worker.late and worker.strategy.synchronous:
        run = strategy_spec(worker.strategy)
        raise UsageError(f"a trainer cannot join {run} in mid-run: its workers keep step")
    return worker


class Exchange:
    """What trainers ask of all workers; those of an asynchronous method do not wait for others.

    Args:
        worker: who takes part.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def together(self) -> bool:
        """Whether workers wait for each other: since the start, and until the end."""
        worker = self._worker
        return worker.strategy.synchronous and worker.began and not worker.finished

    def barrier(self) -> None:
        """Wait for all workers of a lockstep method; those of others go on."""
        if self.together:
            self._worker.reduce(0)

    def reduce(self, value: Any, op: Any = "mean") -> Any:
        """The mean, sum, maximum or minimum over all workers; the own value, if they do not wait.

        Args:
            value: a tensor or a number.
            op: its name, or torch's name for it.
        """
        name = str(op).rpartition(".")[2].lower().replace("avg", "mean")
        one_of("reduce_op", name, ("mean", "sum", "max", "min"))
        if not self.together:
            return value
        if name in ("mean", "sum"):
            return self._worker.reduce(value, "mean" if name == "mean" else "sum")
        rows = self.gather(torch.as_tensor(value))
        return rows.amax(0) if name == "max" else rows.amin(0)

    def must_wait(self, what: str) -> None:
        """Refuse what needs all workers at once, where they do not wait for each other."""
        worker = self._worker
        if worker.size > 1 and not self.together:
            raise UsageError(
                f"{what} waits for all workers, and those of {strategy_spec(worker.strategy)} do"
                " not wait: use what each worker has, or evaluate on the one that leads"
            )

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all workers, stacked."""
        worker = self._worker
        self.must_wait("gather")
        rows = torch.zeros(worker.size, *tensor.shape, dtype=torch.float64)
        rows[worker.rank] = tensor.detach().double().cpu()
        gathered: Tensor = worker.reduce(rows, "sum") if worker.size > 1 else rows
        return gathered.to(tensor.device, tensor.dtype)

    def gather_rows(self, tensor: Tensor) -> Tensor:
        """The rows of all workers' tensors, one after the other; each may have its own number."""
        rows = tensor if tensor.dim() else tensor[None]
        counts = self.gather(torch.tensor(len(rows))).tolist()
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = zip(self.gather(padded), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])

    def broadcast(self, thing: Any, src: int = 0) -> Any:
        """What worker ``src`` has, on all workers of a lockstep method: what JSON can hold."""
        if not self.together or self._worker.size == 1:
            return thing
        try:
            text = json.dumps(thing).encode()
        except TypeError:
            raise UsageError(f"broadcast ({thing!r}) must be plain text or numbers") from None
        own = self._worker.rank == src
        length = int(self._worker.reduce(len(text) if own else 0, "sum"))
        codes = torch.zeros(length)
        if own:
            codes += torch.frombuffer(bytearray(text), dtype=torch.uint8)
        whole: Tensor = self._worker.reduce(codes, "sum")
        return json.loads(bytes(whole.to(torch.uint8).tolist()))

    def decide(self, decision: bool, all_must: bool) -> bool:
        """One decision for all workers; without waiting, each decides for itself.

        There what *any* worker may decide for the others is up to the one that leads.
        """
        worker = self._worker
        if self.together:
            votes = int(worker.reduce(int(decision), "sum"))
            return votes == int(worker.reduce(1, "sum")) if all_must else votes > 0
        return decision and (all_must or worker.leads)


def clip_norm(worker: Worker, max_norm: float) -> Tensor:
    """Have the next step clip the gradient that it applies; return the norm of this worker's."""
    worker.clip_gradients(float(max_norm))
    return torch.nn.utils.get_total_norm(worker.gradients())


def refuse_clipping_by_value(worker: Worker) -> None:
    """Refuse what each worker would do to its own gradient before the mean of all is applied."""
    if worker.size > 1 and worker.strategy.equal_rates:
        name = strategy_spec(worker.strategy)
        raise UsageError(f"{name} clips the mean gradient, by its norm alone: clip by norm")
