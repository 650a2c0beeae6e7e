"""The gradient of one step. Its fields never change; an exchange may overwrite its vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """What one worker brings to a step; what an exchange makes of it is another one.

    The numbers themselves are those of the parameters' ``.grad``: an exchange changes them in
    place, and the user's optimizer reads them there.

    Attributes:
        gathered: the gradients of all parameters as one vector; None where the method does not ask
            for it.
        present: which parameters have a gradient; nothing where it was not gathered.
        samples: how many samples it is the mean of; 1 where no loader counts them, 0 where the
            worker has no data any more.
        overflow: whether a gradient scaler found it to be infinite.
        dropped: whether the guard dropped it: it is not finite, or it explodes.
        max_norm: the norm that the update has still to clip it to, if any.
    """

    gathered: Tensor | None = None
    present: tuple[bool, ...] = ()
    samples: int = 1
    overflow: bool = False
    dropped: bool = False
    max_norm: float | None = None

    @property
    def vector(self) -> Tensor:
        """The gradients of all parameters; a parameter without one has zeros."""
        if self.gathered is None:
            raise UsageError("g.vector must not be read where uses_gradient is False")
        return self.gathered

    @property
    def usable(self) -> bool:
        """Whether a worker may step with it."""
        return not (self.overflow or self.dropped)

    @property
    def weight(self) -> int:
        """What it counts for in a mean over workers: its samples, unless the guard dropped it."""
        return 0 if self.dropped else self.samples

    @property
    def ordinary(self) -> bool:
        """Whether it is usable and complete, so that a mean has nothing else to agree on."""
        return self.usable and (not self.samples or all(self.present))

    @classmethod
    def nothing(cls, vector: Tensor, parameters: int) -> Gradient:
        """What a worker hands in that has no data any more; ``vector`` is only room for a mean."""
        return cls(gathered=vector, present=(False,) * parameters, samples=0)
