"""The claims about accuracy at the papers' scale: ``paceline papers --full``.

All methods have the same momentum, weight decay, warm-up and drops of the rate; each has the best
of a few rates at its own number of workers, and trains until its curve is flat. What matters most
is done first, so that a study that is stopped has something to say; the next call goes on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.lab.papers.full.claim import FullClaim

FULL_CLAIMS = {
    "gossip-small": "paceline.lab.papers.full.gossip:Small",
    "gossip-large": "paceline.lab.papers.full.gossip:Large",
    "sasgd-convergence": "paceline.lab.papers.full.sasgd:Convergence",
    "cyclic-same-accuracy": "paceline.lab.papers.full.cyclic:SameAccuracy",
    "cyclic-faster": "paceline.lab.papers.full.cyclic:Faster",
}
"""The class of each claim that has a full form, in the order in which they are tested."""


def find_full(name: str) -> FullClaim:
    """The full form of the claim with this name."""
    if name not in FULL_CLAIMS:
        raise UsageError(
            f"claim ({name}) must be one of {', '.join(FULL_CLAIMS)} with --full: the others need"
            " no larger set-up"
        )
    module, _, attribute = FULL_CLAIMS[name].partition(":")
    claim: FullClaim = getattr(importlib.import_module(module), attribute)()
    return claim
