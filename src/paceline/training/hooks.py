"""What hangs on the user's model between ``worker.setup`` and ``worker.finish``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.training.stepper import Stepper


class Hook:
    """Calls ``act`` with the module; copies of the model carry one that does nothing."""

    def __init__(self, act: Callable[[nn.Module], None] | None = None) -> None:
        self._act = act

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self._act is not None:
            self._act(module)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Loads:
    """Notices ``load_state_dict`` on a model that is being trained, and keeps what it held before.

    Weights that the user loads after the last step are the answer of this worker. Those that are
    loaded in mid-run are refused at the next step: the method has other copies of the model, on
    servers, on peers or in its own state, and would go on from them.

    Args:
        model: the user's.
        stepper: whose steps are looked after.
        settle: finishes what a step left pending, before parameters are read or overwritten.
    """

    def __init__(self, model: nn.Module, stepper: Stepper, settle: Callable[[], None]) -> None:
        self._model, self._stepper, self._settle = model, stepper, settle
        self._before: list[Tensor] | None = None
        self._times = 0
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
                f"load_state_dict must not be called {stepper.paused}, whose end puts the worker's"
                " own parameters back: call it after that"
            )
        self._settle()
        if self._before is None:
            self._before, self._times = self._read(), 0
        self._times += module is self._model

    def _read(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        return [self._stepper.replica.flat.x, *(b.detach() for b in self._model.buffers())]

    def _write(self, tensors: list[Tensor]) -> None:
        for tensor, value in zip(self._tensors(), tensors, strict=True):
            tensor.copy_(value)

    @property
    def _is_back(self) -> bool:
        """Whether the parameters are those that were there before the first load."""
        assert self._before is not None
        return bool((self._before[0] == self._stepper.replica.flat.x).all())

    @property
    def has_answer(self) -> bool:
        """Whether the user has loaded the answer; not by a look at other weights and back."""
        return self._before is not None and not (self._times > 1 and self._is_back)

    def check_step(self) -> None:
        """Refuse a step from weights that the method knows nothing of."""
        if self._before is None:
            return
        if not self._is_back:
            raise UsageError(
                "optimizer.step() must not follow load_state_dict:"
                f" {type(self._stepper.strategy).__name__} has other copies of the model and would"
                " go on from them; load weights before worker.setup, or with worker.load_weights"
                " before the first step, or after the last step to end with them"
            )
        self.forget()

    def forget(self) -> None:
        """Take the present parameters for those of the method."""
        self._before = None

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Inside, loads are those of the run itself."""
        self._ignored = True
        try:
            yield
        finally:
            self._ignored = False

    def end(self, finish: Callable[[], None]) -> None:
        """Come to the end with what was trained; then leave what was loaded, if anything was."""
        loaded = self._read() if self.has_answer else None
        if loaded is not None and self._before is not None:
            self._write(self._before)
        self._before = None
        finish()
        if loaded is not None:
            self._write(loaded)
        for hook in self._hooks:
            hook.remove()
