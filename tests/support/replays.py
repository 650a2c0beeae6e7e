"""A recorder for the CPU: it repeats the functions that it was given, with results in fixed places.

As on a GPU, to record computes nothing that can be used: the results are not numbers until the
first replay.
"""

from __future__ import annotations

import torch

from paceline.sim.batching.batching import Repeating
from paceline.sim.batching.rows import Rows


class Replay:
    def __init__(self, compute):
        self._compute, self.results, self.count = compute, compute(), 0
        for result in self.results:
            if result.is_floating_point():
                result.data.fill_(torch.nan)

    def replay(self):
        self.count += 1
        for place, result in zip(self.results, self._compute(), strict=True):
            place.data.copy_(result.detach())


class Replays:
    """Records by running once.

    Attributes:
        graphs: the pairs that it has made.
    """

    def __init__(self):
        self.graphs = []

    def record(self, forward, between, backward):
        there = Replay(forward)
        between()
        self.graphs.append((there, Replay(backward)))
        return self.graphs[-1]


def repeating(spec, at_most=4):
    """How a run repeats its joint computations, in place of a GPU."""
    return Repeating(Replays(), Rows(spec.workers), at_most, least=2)
