"""Measures of an accuracy curve: its mean, its end, and the time to a target."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.record.result import Result

SHARES = np.linspace(0.125, 1.0, 8)
"""The shares of the planned samples at which curves are compared."""
ANSWER, REPLICA = "accuracy", "replica_accuracy"
"""The accuracy of the method's answer, and of worker 0's replica."""

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]


def mean_accuracy(result: Result, metric: str = ANSWER) -> float:
    """The mean accuracy over the run, at equal numbers of samples."""
    progress, accuracy = curve(result, "progress", metric)
    return float(np.interp(SHARES, progress, accuracy).mean())


def final_accuracy(result: Result, metric: str = ANSWER) -> float:
    """The accuracy at the end."""
    return float(curve(result, "progress", metric)[1][-1])


def speedup(one: Result, other: Result, metric: str = ANSWER) -> float:
    """How many times sooner ``one`` reaches an accuracy that both reach: the lower of their best.

    Curves are means over three records: the best single record is a lucky peak, which would favor
    the noisier run.
    """
    curves = [smoothed(result, metric) for result in (one, other)]
    target = min(accuracy.max() for _, accuracy in curves)
    ours, theirs = (time_to(target, *curve) for curve in curves)
    return theirs / ours


def smoothed(result: Result, metric: str = ANSWER) -> Curve:
    """Accuracy over time since the first step, starting at (0, 0): means of three records."""
    times, accuracy = curve(result, "t", metric)
    window = np.full(min(3, len(times)), 1 / min(3, len(times)))
    means = [np.convolve(x, window, "valid") for x in (times - result.first_step_s, accuracy)]
    return np.append(0.0, means[0]), np.append(0.0, means[1])


def time_to(target: float, times: NDArray[np.float64], accuracy: NDArray[np.float64]) -> float:
    """When a curve first reaches ``target``, interpolated between two of its points."""
    reached = int(np.argmax(accuracy >= target))
    before = reached - 1
    share = (target - accuracy[before]) / (accuracy[reached] - accuracy[before])
    return float(times[before] + share * (times[reached] - times[before]))


def mean_lead(one: Result, other: Result, metric: str = ANSWER) -> float:
    """The mean lead in accuracy of ``one`` until the first of both runs ends."""
    curves = [smoothed(result, metric) for result in (one, other)]
    moments = SHARES * min(times[-1] for times, _ in curves)
    ours, theirs = (float(np.interp(moments, *points).mean()) for points in curves)
    return ours - theirs


def curve(result: Result, against: str, metric: str) -> Curve:
    """An accuracy over ``t`` or ``progress``."""
    records = [record for record in result.metrics if metric in record]
    x, y = ([record[name] for record in records] for name in (against, metric))
    return np.array(x, float), np.array(y, float)
