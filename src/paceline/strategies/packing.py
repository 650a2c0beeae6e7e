"""Strategies as JSON: a rank's process makes them anew from their class and its fields."""

from __future__ import annotations

import dataclasses

from paceline.common.options import build
from paceline.common.reference import Reference, as_json, find, refer_to
from paceline.errors import UsageError
from paceline.strategies.base import Strategy


def pack_strategy(strategy: Strategy) -> Reference:
    """A strategy as its class and its fields."""
    fields = {f.name: getattr(strategy, f.name) for f in dataclasses.fields(strategy) if f.init}
    return {"class": refer_to(type(strategy)), "fields": as_json("strategy", fields)}


def unpack_strategy(packed: Reference) -> Strategy:
    """The strategy that :func:`pack_strategy` packed."""
    cls: type[Strategy] = find(packed["class"])
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise UsageError(f"strategy ({packed['class']}) must be a class of strategies")
    return build(cls, packed["fields"], cls.__name__)
