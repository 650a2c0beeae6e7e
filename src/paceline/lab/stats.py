"""Means over seeds, with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

LEVEL = "90 %"
# The 95 % quantiles of Student's t from 1 degree of freedom on: a two-sided interval of 90 %.
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771)
_T_BEYOND = 1.761


class Spread(NamedTuple):
    """A mean and its confidence interval; for a single value, an interval of width zero."""

    mean: float
    low: float
    high: float
    seeds: int


def spread(values: Sequence[float]) -> Spread:
    """The mean of ``values`` with its 90 % confidence interval, by Student's t.

    >>> [round(number, 2) for number in spread([1.0, 2.0, 3.0])]
    [2.0, 0.31, 3.69, 3]
    """
    mean, freedom = statistics.fmean(values), len(values) - 1
    if not freedom:
        return Spread(mean, mean, mean, 1)
    quantile = _T[freedom - 1] if freedom <= len(_T) else _T_BEYOND
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Spread(mean, mean - half, mean + half, len(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The mean ratio of ``over`` to ``under``, paired by seed.

    >>> [round(number, 2) for number in ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])]
    [2.0, 2.0, 2.0, 3]
    """
    logs = spread([math.log(a / b) for a, b in zip(over, under, strict=True)])
    return Spread(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.seeds)
