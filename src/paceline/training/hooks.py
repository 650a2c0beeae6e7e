"""Hooks on the user's model between ``worker.setup`` and ``worker.finish``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.training.stepper import Stepper


class Hook:
    """Calls ``act`` with the module; in copies of the model it does nothing."""

    def __init__(self, act: Callable[[nn.Module], None] | None = None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self._act is not None:
            self._act(module)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Loads:
    """Notices ``load_state_dict`` on a model that is being trained, and keeps the former values.

    Weights that the user loads after the last step are this worker's answer. After weights were
    loaded in mid-run, the next step is refused: the method has other copies of the model, on
    servers, on peers or in its own state, and would continue from them.

    Args:
        model: the user's model; of several, a list of them.
        models: the user's models, each by itself.
        stepper: the stepper that trains it.
        settle: completes what the last step deferred, before parameters are read or overwritten.
    """

    def __init__(
        self,
        model: nn.Module,
        models: Sequence[nn.Module],
        stepper: Stepper,
        settle: Callable[[], None],
    ) -> None:
        self._model, self._stepper, self._settle = model, stepper, settle
        self._former: list[Tensor] | None = None
        self._times = dict.fromkeys(models, 0)
        self._ignored = False
        hook = Hook(self._about_to_load)
        self._hooks = [m.register_load_state_dict_pre_hook(hook) for m in model.modules()]
        if stepper.strategy.defers and not stepper.alone:
            hook = Hook(lambda module: settle())
            for module in model.modules():
                self._hooks.append(module.register_forward_pre_hook(hook))
                self._hooks.append(module.register_state_dict_pre_hook(hook))

    def _about_to_load(self, module: nn.Module) -> None:
        stepper = self._stepper
        if self._ignored or stepper.alone or stepper.skipping:
            return
        if stepper.paused:
            raise UsageError(
                f"load_state_dict must not be called {stepper.paused}, which restores the worker's"
                " own parameters at its end: call it after that"
            )
        self._settle()
        if self._former is None:
            self._former, self._times = self._read(), dict.fromkeys(self._times, 0)
        if module in self._times:
            self._times[module] += 1

    def _read(self) -> list[Tensor]:
        with self._tensors() as tensors:
            return [tensor.clone() for tensor in tensors]

    @contextmanager
    def _tensors(self) -> Iterator[list[Tensor]]:
        with self._stepper.replica.flat.lent() as x:
            yield [x, *(buffer.detach() for buffer in self._model.buffers())]

    def _write(self, values: list[Tensor]) -> None:
        with self._tensors() as tensors:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    @property
    def _is_restored(self) -> bool:
        """Whether the parameters are the same as before the first load."""
        assert self._former is not None
        with self._stepper.replica.flat.lent() as x:
            return bool((self._former[0] == x).all())

    @property
    def has_answer(self) -> bool:
        """Whether the user loaded the answer, and not other weights and then the former ones."""
        twice = max(self._times.values()) > 1
        return self._former is not None and not (twice and self._is_restored)

    def check_step(self) -> None:
        """Refuse a step from weights that the method does not know."""
        if self._former is None:
            return
        if not self._is_restored:
            raise UsageError(
                "optimizer.step() must not follow load_state_dict:"
                f" {type(self._stepper.strategy).__name__} has other copies of the model and would"
                " continue from them; load weights before worker.setup, or with worker.load_weights"
                " before the first step, or after the last step to end with them"
            )
        self.forget()

    def forget(self) -> None:
        """Accept the current parameters as those of the method."""
        self._former = None

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore loads inside: they are made by Paceline itself."""
        self._ignored = True
        try:
            yield
        finally:
            self._ignored = False

    def end(self, finish: Callable[[], None]) -> None:
        """Finish with the trained weights; then put back those that the user loaded, if any."""
        loaded = self._read() if self.has_answer else None
        if loaded is not None and self._former is not None:
            self._write(self._former)
        self._former = None
        finish()
        if loaded is not None:
            self._write(loaded)
        for hook in self._hooks:
            hook.remove()
