"""What users read of a method, beside its docstring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class About:
    """Plain texts without markup, in which line breaks do not count.

    Attributes:
        faults: what a dead, a slow and a late worker do.
        bytes: who sends how much, and when.
        when_to_use: which links, machines and learning rates suit the method.
        reference: the paper, and where this method differs from it.
    """

    faults: str = ""
    bytes: str = ""
    when_to_use: str = ""
    reference: str = ""
