"""The claims of the papers as experiments: ``paceline papers`` runs and judges them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paceline.errors import unknown

if TYPE_CHECKING:
    from paceline.lab.papers.claim import Claim

CLAIMS = {
    "sasgd-convergence": "paceline.lab.papers.sasgd:Convergence",
    "sasgd-communication": "paceline.lab.papers.sasgd:Communication",
    "sasgd-rate": "paceline.lab.papers.sasgd:Rate",
    "downpour-lr": "paceline.lab.papers.server:StableRate",
    "cyclic-same-accuracy": "paceline.lab.papers.cyclic:SameAccuracy",
    "cyclic-faster": "paceline.lab.papers.cyclic:Faster",
    "layered-equal": "paceline.lab.papers.layered:Equal",
    "layered-scaling": "paceline.lab.papers.layered:Scaling",
    "gossip-small": "paceline.lab.papers.gossip:Small",
    "gossip-large": "paceline.lab.papers.gossip:Large",
    "gossip-faults": "paceline.lab.papers.gossip:Faults",
    "ps-contention": "paceline.lab.papers.server:Contention",
}
"""The class of each claim. To add one, write a class in its paper's file and add a line here."""


def find_claim(name: str) -> Claim:
    """The claim with this name."""
    if name not in CLAIMS:
        raise unknown("claim", name, CLAIMS)
    module, _, attribute = CLAIMS[name].partition(":")
    claim: Claim = getattr(importlib.import_module(module), attribute)()
    return claim
