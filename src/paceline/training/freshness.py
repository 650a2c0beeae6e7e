"""Which gradients are new, in a run with several optimizers.

One backward may make the gradients of several optimizers: then it is charged once, and a checkpoint
between their steps holds what is left of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from paceline.model.flat import Span
from paceline.model.part import Part
from paceline.model.replica import Replica


class Seen(NamedTuple):
    """A gradient as it was: which tensor, and how often that had been written."""

    tensor: weakref.ref[Tensor] | None
    version: int

    @classmethod
    def of(cls, grad: Tensor | None) -> Seen:
        """The gradient as it is now."""
        return cls(None, 0) if grad is None else cls(weakref.ref(grad), grad._version)

    def is_still(self, grad: Tensor | None) -> bool:
        """Whether nothing has been written since."""
        if grad is None or self.tensor is None:
            return grad is None and self.tensor is None
        return self.tensor() is grad and self.version == grad._version


class Freshness:
    """Which gradients were made since a step.

    Args:
        replica: whose gradients they are.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._after_any: dict[int, list[Seen]] = {}
        self._after_own: dict[int, list[Seen]] = {}

    def _spans(self, part: Part) -> list[Span]:
        return self._replica.flat.spans[part.spans]

    def is_new(self, part: Part) -> bool:
        """Whether a gradient of this part was made since the last step, of whichever part."""
        return any(self._new(part, self._after_any))

    def after_step(self, part: Part) -> None:
        """Note that a step for this part was made."""
        self._look()
        self._after_own[part.number] = self._after_any[part.number]

    def _look(self) -> None:
        for part in self._replica.parts:
            grads = [span.parameter.grad for span in self._spans(part)]
            self._after_any[part.number] = [*map(Seen.of, grads)]

    def unused(self) -> dict[int, Tensor]:
        """The gradients that were made since the last step for them, by parameter."""
        new = [
            is_new for part in self._replica.parts for is_new in self._new(part, self._after_own)
        ]
        grads = [span.parameter.grad for span in self._replica.flat.spans]
        pairs = enumerate(zip(new, grads, strict=True))
        return {i: grad.clone() for i, (is_new, grad) in pairs if is_new and grad is not None}

    def restore(self, unused: dict[int, Tensor]) -> None:
        """Have gradients again that :meth:`unused` gave, after the same step."""
        for number, grad in unused.items():
            parameter = self._replica.flat.spans[number].parameter
            parameter.grad = grad.to(parameter.device)
        self._look()

    def _new(self, part: Part, before: dict[int, list[Seen]]) -> Iterator[bool]:
        spans = self._spans(part)
        seen: Iterable[Seen] = before.get(part.number) or [Seen(None, 0)] * len(spans)
        for span, then in zip(spans, seen, strict=True):
            yield not then.is_still(span.parameter.grad)
