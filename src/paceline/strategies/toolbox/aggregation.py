"""The form of an aggregated step, and its learning rate for each parameter group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.model.replica import Replica

Form = Literal["auto", "gradient", "pseudo"]


def sums_gradients(form: Form, replica: Replica) -> bool:
    """Whether a run begins with sums of gradients, and not with differences of models."""
    plain = replica.is_plain_sgd()
    if form == "gradient" and not plain:
        raise UsageError("form (gradient) must be pseudo or auto unless plain SGD is used")
    if replica.stands_still():
        if not plain:
            raise UsageError("lr (0) accumulates gradients, which needs SGD without momentum")
        return True
    return plain if form == "auto" else form == "gradient"


def rates(
    global_lr: float, lrs: Sequence[float], base_lrs: Sequence[float], of_moves: bool
) -> list[float]:
    """The rate of each group for a sum of gradients, or of moves: gradients times their rate.

    The global rate follows the optimizer's own: as that falls to a tenth of what it began with, so
    does this. Moves have fallen already.
    """
    if not of_moves:
        pairs = zip(lrs, base_lrs, strict=True)
        return [global_lr * (lr / base if base else 1) for lr, base in pairs]
    if 0 in base_lrs:
        raise UsageError(
            "global_lr with lr (0) accumulates gradients, which needs learning rates that stay as"
            " they are"
        )
    return [global_lr / base for base in base_lrs]
