"""A token that goes round among workers: who has it, who is next, and which one is valid.

When a token may be lost, with its holder or on its way, a new one of a higher generation is made.
Whoever comes with an older one is refused, so that there is never more than one that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOBODY = -1
"""In place of a worker: there is none."""


def next_in(ring: Sequence[int], worker: int) -> int:
    """Who comes after ``worker``, which need not be in the ring itself."""
    return next((rank for rank in ring if rank > worker), min(ring, default=NOBODY))


@dataclass
class Token:
    """Where the valid token is, as its server knows it.

    Attributes:
        holder: the worker that has it, or will get it next.
        giver: the worker that was to pass it on to the holder.
        generation: of the valid token; those of a lower one are refused.

    Example:
        >>> token = Token(holder=0)
        >>> token.pass_on(0, ring=[0, 1, 2])
        1
        >>> token.leave(1, ring=[0, 2])  # with the token in its hand
        True
        >>> token.regenerate()
        >>> token.holder, token.generation, token.is_valid(0)
        (2, 1, False)
    """

    holder: int
    giver: int = NOBODY
    generation: int = 0

    def is_valid(self, generation: float) -> bool:
        """Whether a token of that generation is the one that counts."""
        return generation >= self.generation

    def pass_on(self, giver: int, ring: Sequence[int]) -> int:
        """End the turn of ``giver``, and return whose turn is next."""
        self.giver, self.holder = giver, next_in(ring, giver)
        return self.holder

    def leave(self, worker: int, ring: Sequence[int]) -> bool:
        """Continue without a worker; return whether the token may be lost with it."""
        had_it = self.holder == worker
        if had_it:
            self.holder = next_in(ring, worker)
        return had_it or self.giver == worker  # which may not have passed it on

    def regenerate(self) -> None:
        """Make a new one for the holder."""
        self.generation += 1
        self.giver = NOBODY
