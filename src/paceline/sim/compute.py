"""How long a rank computes and loads data, according to the cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Any

import numpy as np

from paceline.common.seeds import stream
from paceline.sim.cluster import Cluster, Compute


class Costs:
    """The time model of one rank; faults change its ``slowdown``."""

    def __init__(self, cluster: Cluster, rank: int, seed: int) -> None:
        compute, self._loading = cluster.compute, cluster.loading
        factor = compute.factors[rank % len(compute.factors)] * compute.slow.get(rank, 1.0)
        step_s, sample_s = compute.step_s, compute.sample_s
        if cluster.stands_for is not None:
            step_s, sample_s = 0.0, cluster.stands_for.sample_s
        self._step_s, self._sample_s = step_s * factor, sample_s * factor
        self._random = stream(seed, "compute", rank)
        self._draw_factor = _variation(compute, self._random)
        self._requested_s: deque[float] = deque(maxlen=self._loading.prefetch or None)
        self._loaded_s = 0.0
        self._drawn = 0
        self._foreseen: float | None = None
        self.slowdown = 1.0

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        asked_s = [*self._requested_s]
        drawn = self._drawn - (self._foreseen is not None)
        return {"drawn": drawn, "asked_s": asked_s, "loaded_s": self._loaded_s}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned, in a new object."""
        self._requested_s.extend(state["asked_s"])
        self._loaded_s, self._drawn = state["loaded_s"], state["drawn"]
        if self._draw_factor is not None:
            for _ in range(self._drawn):
                self._draw_factor()

    def usual_s(self, samples: float) -> float:
        """How long forward and backward of ``samples`` take in the mean, without faults."""
        return self._step_s + self._sample_s * samples

    def gradient_s(self, samples: int) -> float:
        """How long forward and backward of ``samples`` take in this step."""
        seconds = self.usual_s(samples) * self.slowdown
        if self._draw_factor is None:
            return seconds
        factor, self._foreseen = self._next_factor(self._draw_factor), None
        return seconds * factor

    def foresee_s(self, samples: int) -> float:
        """What :meth:`gradient_s` is going to return for ``samples``, if nothing slows it down."""
        seconds = (self._step_s + self._sample_s * samples) * self.slowdown
        if self._draw_factor is None:
            return seconds
        self._foreseen = self._next_factor(self._draw_factor)
        return seconds * self._foreseen

    def _next_factor(self, draw: Callable[[], float]) -> float:
        if self._foreseen is not None:
            return self._foreseen
        self._drawn += 1
        return draw()

    def forward_s(self, samples: int) -> float:
        """How long a forward pass alone takes: a third, as backward costs about two of them."""
        return self._sample_s * samples * self.slowdown / 3

    def loading_s(self, samples: int, now_s: float) -> float:
        """How long a rank waits for a batch that it requests now.

        The loader loads one batch at a time, up to ``prefetch`` ahead: it starts on a batch when
        the previous one is loaded and the buffer has room.
        """
        seconds = self._loading.batch_s + self._loading.sample_s * samples
        if not self._loading.prefetch:
            return seconds
        full = len(self._requested_s) == self._loading.prefetch
        self._loaded_s = max(self._loaded_s, self._requested_s[0] if full else 0.0) + seconds
        self._requested_s.append(now_s)
        return max(0.0, self._loaded_s - now_s)


def _variation(compute: Compute, random: np.random.Generator) -> Callable[[], float] | None:
    """Draws the factor of each step's time; None if the time does not vary."""
    if compute.spread:
        return lambda: 1.0 + compute.spread * float(2.0 * random.random() - 1.0)
    if compute.lognormal:
        sigma = compute.lognormal
        return lambda: float(random.lognormal(-sigma * sigma / 2, sigma))
    if compute.trace:
        start = int(random.integers(len(compute.trace)))
        steps = islice(cycle(compute.trace), start, None)
        return lambda: next(steps)
    return None
