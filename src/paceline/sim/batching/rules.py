"""Batching rules that are faster than those of ``torch.func.vmap``, or that it lacks.

Workers are merged into the channels where an operation has channels (convolution: as groups), into
the batch where it has no weights (attention), and a linear layer is one batched product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

RULES: dict[Any, Callable[..., Any]] = {}
"""The rule of each function of torch; it returns NotImplemented where torch's own must do."""


class Rules(TorchFunctionMode):
    """Inside, functions of torch follow :data:`RULES`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result
