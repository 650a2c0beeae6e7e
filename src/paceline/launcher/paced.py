"""A run around a loop that knows nothing of it: :func:`paced`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.launcher.init import init
from paceline.strategies import make_strategy, strategy_spec
from paceline.strategies.base import Strategy
from paceline.training.paced import paced_steps
from paceline.training.worker import Worker, current_worker


@contextmanager
def paced(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    strategy: str | Strategy | None = None,
    **options: Any,
) -> Iterator[Worker]:
    """Inside, each ``optimizer.step()`` of a loop is a step of the method; the loop stays as it is.

    It takes part in the run of ``pl.launch``, ``pl.simulate`` or ``paceline run``; outside of one,
    in a run of its own, as :func:`~paceline.init` does, alone or under torchrun. At the end the
    model holds the method's answer. It gives the worker: data that a loop does not divide among
    processes by itself goes through ``worker.setup_dataloaders``.

    Args:
        model: the loop's, or several.
        optimizer: of the model, or several; schedulers and gradient scalers may have it already.
        strategy: the method; in a run that has one, it must be the same, or left out.
        options: of ``pl.init``, for a run of its own.
    """
    models = [model] if isinstance(model, nn.Module) else [*model]
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
    worker = current_worker()
    if worker is None or worker.finished:
        with (
            init(strategy=strategy or "allreduce", **options) as own,
            paced_steps(own, models, optimizers),
        ):
            yield own
        return
    check_method(worker, strategy)
    if options:
        raise UsageError(f"{', '.join(options)} must be given to what starts the run")
    with paced_steps(worker, models, optimizers):
        yield worker


def check_method(worker: Worker, method: str | Strategy | None) -> None:
    """Refuse a method that is not the run's."""
    run = strategy_spec(worker.strategy)
    if method is not None and strategy_spec(make_strategy(method)) != run:
        raise UsageError(f"strategy ({method}) must be that of the run, {run}; or leave it out")
