"""Several optimizers of one run, as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from paceline.errors import UsageError


class Joined(Optimizer):
    """What several optimizers have: their parameter groups in order, their state.

    Groups and state are read from them each time, for loading replaces them. Each optimizer makes
    its own steps.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        # Optimizer.__init__ would copy the groups; __setstate__ only makes the hooks.
        super().__setstate__({"joined": tuple(parts), "defaults": {}})

    joined: tuple[Optimizer, ...]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch: an attribute
        """The groups of all."""
        return [group for part in self.joined for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]  # torch: an attribute
        """The state of each parameter; to add or remove one, go to its optimizer."""
        return {parameter: own for part in self.joined for parameter, own in part.state.items()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refused: a step is that of one of them."""
        raise UsageError("step() must be called on one of the optimizers that are joined here")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients."""
        for part in self.joined:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of all."""
        return {"optimizers": [part.state_dict() for part in self.joined]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave."""
        states = state_dict.get("optimizers", ())
        if len(states) != len(self.joined):
            raise UsageError(
                f"a state of {len(states) or 1} optimizers was saved; there are {len(self.joined)}"
            )
        for part, state in zip(self.joined, states, strict=True):
            part.load_state_dict(state)
