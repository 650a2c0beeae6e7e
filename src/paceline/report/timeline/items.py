"""The items of a timeline: spans of time, steps, messages, and logged numbers.

A rank does one thing at a time, so its time consists of consecutive spans of six kinds:

===========  =======================================================================================
``compute``  the user's code; in virtual time, the charged gradient
``wait``     waiting for another rank that has not sent yet
``send``     sending a message, or publishing a model
``receive``  receiving a message, a published model, or the sum of an all-reduce
``apply``    the rest of a step after the gradient; on a server, everything but waiting
``io``       loading a batch
===========  =======================================================================================

``wait_share`` of a result counts ``wait``, ``receive``, and ``send`` if the sender must wait until
its message is taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

KINDS = COMPUTE, WAIT, SEND, RECEIVE, APPLY, IO = (
    "compute",
    "wait",
    "send",
    "receive",
    "apply",
    "io",
)

NAMES = {**dict(zip(KINDS, KINDS, strict=True)), IO: "I/O"}
"""The kinds as users see them."""


class Stretch(NamedTuple):
    """A time in which a rank did one thing."""

    rank: int
    kind: str
    what: str
    start_s: float
    end_s: float
    facts: dict[str, Any]


class Step(NamedTuple):
    """A step of a worker, from the end of the step before it."""

    rank: int
    number: int
    start_s: float
    end_s: float
    samples: int


class Arrow(NamedTuple):
    """A message, from the span that sent it to the span that received it."""

    src: int
    sent_s: float
    dst: int
    taken_s: float


class Point(NamedTuple):
    """A number that a rank logged."""

    rank: int
    name: str
    time_s: float
    value: float


Item = Stretch | Step | Arrow | Point


def shift(item: Item, by_s: float) -> Item:
    """The same item, ``by_s`` later."""
    if isinstance(item, Arrow):
        return item._replace(sent_s=item.sent_s + by_s, taken_s=item.taken_s + by_s)
    if isinstance(item, Point):
        return item._replace(time_s=item.time_s + by_s)
    return item._replace(start_s=item.start_s + by_s, end_s=item.end_s + by_s)


def cut(item: Item, from_s: float, to_s: float) -> Item | None:
    """The part of an item between two moments; None if there is none.

    >>> cut(Step(0, 7, 1.0, 3.0, 32), 2.0, 9.0)
    Step(rank=0, number=7, start_s=2.0, end_s=3.0, samples=32)
    """
    if isinstance(item, Arrow):
        return item if from_s <= item.sent_s and item.taken_s <= to_s else None
    if isinstance(item, Point):
        return item if from_s <= item.time_s <= to_s else None
    start_s, end_s = max(item.start_s, from_s), min(item.end_s, to_s)
    if start_s > end_s or (start_s == end_s and item.start_s < item.end_s):
        return None
    return item._replace(start_s=start_s, end_s=end_s)
