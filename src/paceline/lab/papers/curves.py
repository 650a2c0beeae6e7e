"""What is read off the records of a run: how high its curve is, and when it comes to a target."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.record.result import Result

MARKS = np.linspace(0.125, 1.0, 8)
"""The shares of the planned samples at which curves are compared."""
ANSWER, REPLICA = "accuracy", "replica_accuracy"
"""The method's answer, and the model of worker 0 alone."""

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]


def height(result: Result, whose: str = ANSWER) -> float:
    """The mean accuracy over the run, at equal numbers of samples: how high its curve lies."""
    progress, accuracy = curve(result, "progress", whose)
    return float(np.interp(MARKS, progress, accuracy).mean())


def last(result: Result, whose: str = ANSWER) -> float:
    """The accuracy at the end."""
    return float(curve(result, "progress", whose)[1][-1])


def times_sooner(one: Result, other: Result, whose: str = ANSWER) -> float:
    """How many times sooner ``one`` is at an accuracy that both reach, the lower of their best.

    Of three records each: the best of single ones is a lucky peak, which favours the noisier run.
    """
    curves = [smoothed(result, whose) for result in (one, other)]
    target = min(accuracy.max() for _, accuracy in curves)
    ours, theirs = (seconds_to(target, *curve) for curve in curves)
    return theirs / ours


def smoothed(result: Result, whose: str = ANSWER) -> Curve:
    """Accuracy against time since the first step, from 0: means of three records."""
    times, accuracy = curve(result, "t", whose)
    third = np.full(min(3, len(times)), 1 / min(3, len(times)))
    means = [np.convolve(x, third, "valid") for x in (times - result.first_step_s, accuracy)]
    return np.append(0.0, means[0]), np.append(0.0, means[1])


def seconds_to(target: float, times: NDArray[np.float64], accuracy: NDArray[np.float64]) -> float:
    """When a curve first comes to ``target``; a line between two of its points."""
    reached = int(np.argmax(accuracy >= target))
    before = reached - 1
    share = (target - accuracy[before]) / (accuracy[reached] - accuracy[before])
    return float(times[before] + share * (times[reached] - times[before]))


def lead_in_time(one: Result, other: Result, whose: str = ANSWER) -> float:
    """How much higher the curve of ``one`` lies, in the mean, until the first of both runs ends."""
    curves = [smoothed(result, whose) for result in (one, other)]
    marks = MARKS * min(times[-1] for times, _ in curves)
    ours, theirs = (float(np.interp(marks, *points).mean()) for points in curves)
    return ours - theirs


def curve(result: Result, against: str, whose: str) -> Curve:
    """The records of an accuracy, against ``t`` or ``progress``."""
    records = [record for record in result.metrics if whose in record]
    x, y = ([record[name] for record in records] for name in (against, whose))
    return np.array(x, float), np.array(y, float)
