"""Faults as sentences: ``kill(rank=2).at(step=10)``, or the same in a cluster file.

.. code-block:: toml

    [[faults]]
    kind = "freeze"
    rank = 1
    at_s = 2.0
    for_s = 3.0
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.options import above, at_least, one_of

KINDS = ("kill", "freeze", "slow", "join")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens to one rank, at a time or before one of its own steps.

    Args:
        kind: ``kill`` ends the rank, ``freeze`` stops it, ``slow`` stretches its computing,
            ``join`` lets it start only then.
        rank: whom it happens to.
        at_s: when, in seconds of virtual time.
        at_step: or before which of the rank's own optimizer steps, from 0.
        for_s: how long a ``freeze`` or ``slow`` lasts; for ever when not given.
        factor: how many times longer computing takes while ``slow``.
    """

    kind: Literal["kill", "freeze", "slow", "join"]
    rank: int
    at_s: float | None = None
    at_step: int | None = None
    for_s: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        at_least("rank", self.rank, 0)
        if self.at_s is not None and self.at_step is not None:
            raise UsageError(f"{self.kind} takes at_s or at_step, not both")
        at_least("at_s", self.at_s or 0.0, 0)
        at_least("at_step", self.at_step or 0, 0)
        if self.for_s is not None:
            above("for_s", self.for_s, 0)
        self._check_kind()

    def _check_kind(self) -> None:
        if self.kind == "join" and self.at_step is not None:
            raise UsageError("join takes at_s: a rank that is not there has no steps")
        if self.for_s is not None and self.kind not in ("freeze", "slow"):
            raise UsageError(
                f"for_s ({self.for_s}) goes with freeze and slow, not with {self.kind}"
            )
        if (self.factor is not None) != (self.kind == "slow"):
            raise UsageError(f"factor ({self.factor}) goes with slow, and slow needs one")
        above("factor", 1.0 if self.factor is None else self.factor, 0)

    def at(self, *, seconds: float | None = None, step: int | None = None) -> Fault:
        """The same fault, at a time or a step."""
        if (seconds is None) == (step is None):
            raise UsageError("a fault happens at(seconds=...) or at(step=...)")
        return dataclasses.replace(self, at_s=seconds, at_step=step)


def kill(*, rank: int) -> Fault:
    """End ``rank`` without a word, as ``kill -9`` does.

    >>> kill(rank=2).at(step=10)
    Fault(kind='kill', rank=2, at_s=None, at_step=10, for_s=None, factor=None)
    """
    return Fault(kind="kill", rank=rank)


def freeze(*, rank: int, for_s: float | None = None) -> Fault:
    """Stop ``rank``, as SIGSTOP does, and let it go on after ``for_s``."""
    return Fault(kind="freeze", rank=rank, for_s=for_s)


def slow(*, rank: int, factor: float, for_s: float | None = None) -> Fault:
    """Let ``rank`` compute ``factor`` times longer, for ``for_s`` or for good."""
    return Fault(kind="slow", rank=rank, factor=factor, for_s=for_s)


def join(*, rank: int) -> Fault:
    """Let ``rank`` start only at the given time."""
    return Fault(kind="join", rank=rank)
