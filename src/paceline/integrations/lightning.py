"""Lightning's ``Trainer`` on workers of Paceline: ``Trainer(strategy=PacelineStrategy("gossip"))``.

To import this also registers the strategy: then ``Trainer(strategy="paceline")`` finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.errors import UsageError
from paceline.integrations.exchange import clip_norm, refuse_clipping_by_value
from paceline.strategies import strategy_spec
from paceline.training.loader import PacedLoader, Position

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
except ImportError:
    needs = 'paceline.integrations.lightning needs Lightning: pip install "paceline[lightning]"'
    raise ImportError(needs) from None

from paceline.integrations.leading import OnWorker


class PacelineStrategy(OnWorker, SingleDeviceStrategy):
    """Trains on the worker of this process, with the method of the run.

    Training data is divided among the workers. Each worker validates, tests and predicts on all
    that it is given, in ``fit`` with the method's answer. ``is_global_zero`` is the worker that
    leads: it logs, and saves the answer. Workers of an asynchronous method never wait for others:
    a barrier does nothing there, and each decides for itself.

    Args:
        method: of the run, if it is to be checked.
    """

    optimizers: list[Optimizer]
    strategy_name = "paceline"
    is_distributed = True
    """Else Lightning would not call :meth:`reduce` for ``self.log(..., sync_dist=True)``."""

    def __init__(self, method: str | None = None) -> None:
        super().__init__(method)
        self._answering = ExitStack()
        self._configuring = False
        self._shared: object = None

    @property
    def _trainer(self) -> Trainer:
        return self.lightning_module.trainer

    # Setting up ----------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Meet the module, and divide its data in Lightning's place."""
        super().connect(model)
        model.trainer._accelerator_connector.use_distributed_sampler = False

    def setup(self, trainer: Trainer) -> None:
        """Tie the model and its optimizer to the run, if they are to be trained."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        self._check(trainer)
        _, optimizer = self.worker.setup(self.lightning_module, self.optimizers[0])
        self.optimizers = [optimizer]
        self.precision_plugin.clip_gradients = self._clip_gradients
        self._wait_for_nobody(trainer)

    def _wait_for_nobody(self, trainer: Trainer) -> None:
        """Under torchrun, Lightning would wait at each batch, and metrics where they are computed.

        A metric of a validation has seen all data on each worker.
        """
        for module in self.lightning_module.modules():
            if hasattr(module, "distributed_available_fn"):
                module.distributed_available_fn = lambda: False
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def _check(self, trainer: Trainer) -> None:
        """Refuse what cannot do here what it does elsewhere."""
        if len(self.optimizers) != 1:
            count = len(self.optimizers)
            raise UsageError(f"configure_optimizers ({count} optimizers) must return one optimizer")
        if trainer._accelerator_connector._layer_sync is not None:
            raise UsageError(
                "sync_batchnorm must not be given: it needs torch.distributed; Paceline averages"
                " the running statistics of BatchNorm by itself (docs/batchnorm.md)"
            )
        if trainer.reload_dataloaders_every_n_epochs:
            raise UsageError(
                "reload_dataloaders_every_n_epochs must not be given: workers share one loader"
            )

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the module make its optimizer."""
        self._configuring = True
        super().setup_optimizers(trainer)
        self._configuring = False

    def _clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip the gradient that the next step applies, as ``worker.clip_gradients`` does."""
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == "norm":
            clip_norm(self.worker, clip_val)
        else:
            refuse_clipping_by_value(self.worker)
            self.precision_plugin.clip_grad_by_value(optimizer, clip_val)

    # Data ----------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Divide the training data among the workers; leave other data as it is."""
        trainer = self._trainer
        if not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            kind = type(dataloader).__name__
            raise UsageError(f"train_dataloaders ({kind}) must be a torch DataLoader")
        if self._shared not in (None, dataloader):
            raise UsageError("train_dataloaders must be one loader: workers share its data")
        self._shared = dataloader
        planned = trainer.max_epochs if self.worker.began and trainer.max_epochs else 0
        paced = self.worker.setup_dataloaders(dataloader, epochs=planned if planned > 0 else None)
        if self.worker.keeps_length:
            return SizedEpochs(paced, trainer, self)
        if self._configuring and trainer.max_steps == -1:
            raise UsageError(
                "trainer.estimated_stepping_batches needs the number of a worker's steps, which"
                f" depends under {strategy_spec(self.worker.strategy)} on how fast it is: drive the"
                " schedule by trainer.strategy.worker.progress (docs/how-to/schedules.md), or give"
                " max_steps"
            )
        paced.looks_ahead = True
        return Epochs(paced, trainer, self)

    # What workers do together --------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or the sum over all workers of a lockstep method.

        Where workers do not wait, it is the worker's own value, which a validation has over all
        data; for other values that would be wrong.
        """
        if self._trainer.training and self.worker.began:
            self._exchange.must_wait("sync_dist=True in training_step")
        return self._exchange.reduce(tensor, reduce_op)

    # The answer ----------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Put the method's answer into the model."""
        if self.worker.began and not self._trainer.sanity_checking:
            self._answering.enter_context(self.worker.answer())

    def on_validation_end(self) -> None:
        """Put the worker's own model back."""
        self._answering.close()

    def on_exception(self, exception: BaseException) -> None:
        """Leave the answer, if the exception came from a validation."""
        self._answering.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The method's answer, on the worker that saves it."""
        answer = ExitStack()
        inside = self._trainer.validating and not self._trainer.sanity_checking
        if self.worker.began and self.is_global_zero and not inside:
            answer.enter_context(self.worker.answer())
        with answer:
            state = self.lightning_module.state_dict()
            return {name: value.clone() for name, value in state.items()}

    def on_train_end(self) -> None:
        """Leave the answer in the model; end all workers, if the one that leads ends early."""
        trainer = self._trainer
        if trainer.should_stop and self.worker.leads:
            self.worker.stop_all()
        self.worker.finish()


class Epochs:
    """The training data of one worker, as Lightning wants it.

    Lightning would draw a batch ahead, to know which is the last; but what a worker has drawn and
    not trained on is lost to the others when it is lost. So the loader looks ahead, and says so.

    Args:
        paced: the loader that shares its data.
        trainer: whose training it is.
        strategy: of the trainer.
    """

    def __init__(self, paced: PacedLoader, trainer: Trainer, strategy: PacelineStrategy) -> None:
        self._paced, self._trainer, self._strategy = paced, trainer, strategy

    def __iter__(self) -> Iterator[Any]:
        if self._paced.epoch < self._trainer.current_epoch:  # it goes on from a checkpoint
            self._paced.resume(Position(self._trainer.current_epoch), from_the_top=False)
        self._trainer.fit_loop._data_fetcher.prefetch_batches = 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        loop, empty = self._trainer.fit_loop, True
        for batch in self._paced:
            empty = False
            if self._paced.looks_ahead:
                loop._data_fetcher.done = self._paced.at_last
            yield batch
        if empty:  # then Lightning forgets the schedules that count epochs
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self._strategy.worker.stopping:
            self._trainer.should_stop = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._paced, name)


class SizedEpochs(Epochs):
    """Those of a worker that has the same number of batches in each epoch."""

    def __len__(self) -> int:
        return len(self._paced)


if PacelineStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        PacelineStrategy.strategy_name, PacelineStrategy, description="the method of Paceline's run"
    )
