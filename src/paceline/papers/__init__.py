"""The claims of the papers as experiments: ``paceline papers`` runs them and says what holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.errors import unknown

if TYPE_CHECKING:
    from paceline.papers.claim import Claim

CLAIMS = {
    "sasgd-convergence": "paceline.papers.sasgd:Convergence",
    "sasgd-communication": "paceline.papers.sasgd:Communication",
    "sasgd-rate": "paceline.papers.sasgd:Rate",
    "downpour-lr": "paceline.papers.server:StableRate",
    "cyclic-same-accuracy": "paceline.papers.cyclic:SameAccuracy",
    "cyclic-faster": "paceline.papers.cyclic:Faster",
    "layered-equal": "paceline.papers.layered:Equal",
    "layered-scaling": "paceline.papers.layered:Scaling",
    "gossip-small": "paceline.papers.gossip:Small",
    "gossip-large": "paceline.papers.gossip:Large",
    "gossip-faults": "paceline.papers.gossip:Faults",
    "ps-contention": "paceline.papers.server:Contention",
}
"""Name to class. A new claim is a class in the file of its paper, and one line here."""


def find_claim(name: str) -> Claim:
    """The claim of a name."""
    if name not in CLAIMS:
        raise unknown("claim", name, CLAIMS)
    module, _, attribute = CLAIMS[name].partition(":")
    claim: Claim = getattr(importlib.import_module(module), attribute)()
    return claim
