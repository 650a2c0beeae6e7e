"""Lightning Fabric on workers of Paceline: ``Fabric(strategy=PacelineStrategy("gossip"))``.

To import this also registers the strategy: then ``Fabric(strategy="paceline")`` finds it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.integrations.exchange import clip_norm, refuse_clipping_by_value

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy
except ImportError:
    needs = 'paceline.integrations.fabric needs Lightning: pip install "paceline[lightning]"'
    raise ImportError(needs) from None

from paceline.integrations.leading import OnWorker


class PacelineStrategy(OnWorker, SingleDeviceStrategy):
    """Trains on the worker of this process, with the method of the run.

    ``fabric.setup(model, optimizer)`` is ``worker.setup``, and ``fabric.setup_dataloaders`` is
    ``worker.setup_dataloaders``: what is given to it is divided among the workers.
    ``fabric.is_global_zero`` is the worker that leads. Workers of an asynchronous method never wait
    for others: a barrier does nothing there.

    Args:
        method: of the run, if it is to be checked.
    """

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Tie a model and its optimizer to the run."""
        if len(optimizers) != 1:
            count = len(optimizers)
            raise UsageError(f"fabric.setup ({count} optimizers) must get one optimizer")
        model, optimizer = self.worker.setup(module, optimizers[0])
        return model, [optimizer], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refused: a method needs the model and its optimizer together."""
        raise UsageError(
            "fabric.setup_optimizers must not be called: give the model and its optimizer to"
            " fabric.setup(model, optimizer)"
        )

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Divide the data of a loader among the workers."""
        return self.worker.setup_dataloaders(dataloader)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradient that the next step applies; returns the norm of this worker's own.

        What is not finite is left to the guard of the method (docs/guards.md).
        """
        if norm_type != 2.0:
            raise UsageError(f"norm_type ({norm_type}) must be 2")
        self.precision.unscale_gradients(optimizer)
        return clip_norm(self.worker, max_norm)

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clip each number of this worker's gradient."""
        refuse_clipping_by_value(self.worker)
        super().clip_gradients_value(module, optimizer, clip_val)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or the sum over all workers; refused where they do not wait."""
        self._exchange.must_wait("fabric.all_reduce")
        return self._exchange.reduce(tensor, reduce_op)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """The method's answer, on the worker that saves it."""
        if not (self.worker.began and self.is_global_zero):
            state: dict[str, Tensor] = module.state_dict()
            return state
        with self.worker.answer():
            return {name: torch.clone(value) for name, value in module.state_dict().items()}


if "paceline" not in STRATEGY_REGISTRY:
    STRATEGY_REGISTRY.register(
        "paceline", PacelineStrategy, description="the method of Paceline's run"
    )
