"""The gradient of one step. Its fields never change; an exchange may overwrite its vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.model.part import WHOLE, Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one worker in one step; its fields never change.

    The values themselves are in the parameters' ``.grad``: an exchange changes them in place, and
    the user's optimizer reads them there.

    Attributes:
        gathered: the gradients of all parameters as one vector; None if the method does not use
            it.
        present: which parameters have a gradient; empty if it was not gathered.
        samples: the number of samples that it is the mean of; 1 if no loader counts them, 0 if the
            worker has used all its data.
        overflow: whether a gradient scaler found it to be infinite.
        dropped: whether the guard dropped it: it is not finite, or it explodes.
        max_norm: the update must still clip it to this norm, if given.
        part: whose gradient it is: in a run with several optimizers, only the parameters of one
            have a gradient in a step.
    """

    gathered: Tensor | None = None
    present: tuple[bool, ...] = ()
    samples: int = 1
    overflow: bool = False
    dropped: bool = False
    max_norm: float | None = None
    part: Part = WHOLE

    @property
    def vector(self) -> Tensor:
        """The gradients of all parameters; a parameter without one has zeros."""
        if self.gathered is None:
            raise UsageError("g.vector must not be read where uses_gradient is False")
        return self.gathered

    @property
    def own(self) -> Tensor:
        """Of the vector, the numbers of its own part."""
        return self.vector if self.part is WHOLE else self.vector[self.part.place]

    @property
    def usable(self) -> bool:
        """Whether a worker may step with it."""
        return not (self.overflow or self.dropped)

    @property
    def weight(self) -> int:
        """Its weight in a mean over workers: its samples, or 0 if the guard dropped it."""
        return 0 if self.dropped else self.samples

    @property
    def ordinary(self) -> bool:
        """Whether it is usable and complete, so that workers need not exchange flags in a mean."""
        return self.usable and (not self.samples or all(self.present[self.part.spans]))

    @classmethod
    def nothing(cls, vector: Tensor, parameters: int, part: Part = WHOLE) -> Gradient:
        """The gradient of a worker that has used all its data; ``vector`` receives the mean."""
        return cls(gathered=vector, present=(False,) * parameters, samples=0, part=part)
