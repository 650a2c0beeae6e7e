"""Fit the numbers of a cluster to measured times; pure arithmetic.

Every fit minimizes the squares of the relative errors, so that microseconds count as much as
seconds, and yields no negative cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TRACE_LENGTH = 256
GOOD_FIT = 0.05
"""A distribution fits if its quantiles differ by at most this from the recorded, on average."""


class Line(NamedTuple):
    """``start + slope * amount`` seconds; ``error`` is the root mean square relative error."""

    start: float
    slope: float
    error: float

    def seconds(self, amount: float) -> float:
        """The fitted time."""
        return self.start + self.slope * amount


def fit_costs(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The costs, none below 0, whose products with the features come nearest to the times.

    >>> [round(cost, 6) for cost in fit_costs([[1, 10], [1, 20], [1, 40]], [3.0, 5.0, 9.0])]
    [1.0, 0.2]
    """
    times = np.asarray(seconds, dtype=float)
    rows = np.asarray(features, dtype=float) / times[:, None]
    scale = np.abs(rows).max(axis=0)
    rows = rows / np.where(scale > 0, scale, 1.0)
    best, least = np.zeros(rows.shape[1]), math.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            costs, *_ = np.linalg.lstsq(rows[:, chosen], np.ones(len(times)), rcond=None)
            residual = float(np.square(rows[:, chosen] @ costs - 1).sum())
            if (costs >= 0).all() and residual < least - 1e-12:
                best, least = np.zeros(rows.shape[1]), residual
                best[chosen] = costs
    return [float(cost) for cost in best / np.where(scale > 0, scale, 1.0)]


def relative_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The root mean square of the relative errors.

    >>> relative_error([1.1, 0.9], [1.0, 1.0])
    0.1
    """
    errors = [(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    return round(math.sqrt(sum(error * error for error in errors) / len(errors)), 12)


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> Line:
    """The cost of a call, and of each unit in it (a byte, a sample)."""
    if len(set(amounts)) == 1:
        start, slope = sum(seconds) / len(seconds), 0.0
    else:
        start, slope = fit_costs([[1.0, amount] for amount in amounts], seconds)
    fitted = [start + slope * amount for amount in amounts]
    return Line(start, slope, relative_error(fitted, seconds))


class Variation(NamedTuple):
    """How times vary around their mean; ``error`` is the mean distance of the quantiles."""

    kind: Literal["none", "spread", "lognormal", "trace"]
    value: float
    trace: tuple[float, ...]
    error: float


def fit_variation(factors: Sequence[float]) -> Variation:
    """The distribution of ``factors``: times over their mean, in the order of measurement.

    It is uniform or lognormal if one of these fits; otherwise the recorded factors themselves.
    """
    ordered = np.sort(np.asarray(factors, dtype=float))
    deviation = float(ordered.std())
    if deviation < 0.005:
        return Variation("none", 0.0, (), deviation)
    levels = (np.arange(len(ordered)) + 0.5) / len(ordered)
    width = min(0.99, math.sqrt(3) * deviation)
    sigma = math.sqrt(math.log1p(deviation**2))
    normal = np.array([NormalDist().inv_cdf(float(level)) for level in levels])
    uniform = Variation("spread", width, (), _distance(ordered, 1 + width * (2 * levels - 1)))
    skewed = np.exp(sigma * normal - sigma**2 / 2)
    lognormal = Variation("lognormal", sigma, (), _distance(ordered, skewed))
    best = min(uniform, lognormal, key=lambda variation: variation.error)
    if best.error <= GOOD_FIT:
        return best
    recorded = np.asarray(factors[:TRACE_LENGTH], dtype=float)
    recorded = np.maximum(recorded / recorded.mean(), 1e-6)
    return Variation("trace", 0.0, tuple(map(float, recorded)), 0.0)


def _distance(one: Floats, other: Floats) -> float:
    return float(np.abs(one - other).mean())
