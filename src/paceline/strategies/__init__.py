"""The methods by name, and how a name with options becomes one of them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.options import build, field_types, parse_value, type_name
from paceline.strategies.base import Strategy

STRATEGIES = {
    "allreduce": "paceline.strategies.allreduce:AllReduce",
    "sasgd": "paceline.strategies.sasgd:SASGD",
    "hierarchical": "paceline.strategies.hierarchical:Hierarchical",
    "diloco": "paceline.strategies.diloco:DiLoCo",
    "downpour": "paceline.strategies.downpour:Downpour",
    "easgd": "paceline.strategies.easgd:EASGD",
    "cyclic": "paceline.strategies.cyclic:Cyclic",
    "layered": "paceline.strategies.layered:Layered",
    "gossip": "paceline.strategies.gossip:Gossip",
    "ssp": "paceline.strategies.ssp:SSP",
    "adpsgd": "paceline.strategies.adpsgd:ADPSGD",
}
"""Name to class. A new method is one file, and one line here."""


def strategy_class(name: str) -> type[Strategy]:
    """The class of a registered method."""
    if name not in STRATEGIES:
        raise unknown("strategy", name, STRATEGIES)
    module, _, attribute = STRATEGIES[name].partition(":")
    cls: type[Strategy] = getattr(importlib.import_module(module), attribute)
    return cls


def strategy_name(strategy: Strategy) -> str:
    """The registered name of a strategy, or that of its class."""
    cls = type(strategy)
    names = {path: name for name, path in STRATEGIES.items()}
    return names.get(f"{cls.__module__}:{cls.__qualname__}", cls.__name__)


def make_strategy(spec: str | Strategy, settings: Mapping[str, Any] | None = None) -> Strategy:
    """A strategy from ``"sasgd"``, ``"sasgd(interval=8)"`` or an object, with more ``settings``.

    A strategy object is copied, so that each run and each rank has its own.
    """
    if isinstance(spec, Strategy):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
        return build(type(spec), fields | dict(settings or {}), strategy_name(spec))
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise UsageError(f'strategy ({spec}) must look like "sasgd" or "sasgd(interval=8)"')
    name, inside = match.groups()
    values = parse_settings((inside or "").split(",")) | dict(settings or {})
    return build(strategy_class(name), values, name)


def parse_settings(items: list[str]) -> dict[str, Any]:
    """Settings from ``name=value`` texts.

    >>> parse_settings(["interval=8", "momentum=reset"])
    {'interval': 8, 'momentum': 'reset'}
    """
    settings = {}
    for item in filter(str.strip, items):
        name, equals, value = item.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"setting ({item.strip()}) must look like name=value")
        settings[name.strip()] = parse_value(value)
    return settings


def describe(name: str) -> dict[str, Any]:
    """What ``paceline strategies`` tells of a method."""
    cls = strategy_class(name)
    helps = _argument_helps(inspect.getdoc(cls) or "")
    options = [
        {
            "name": field.name,
            "type": type_name(field_types(cls)[field.name]),
            "default": field.default,
            "help": helps.get(field.name, ""),
        }
        for field in dataclasses.fields(cls)
    ]
    return {
        "name": name,
        "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
        "paper": cls.paper,
        "options": options,
        "synchronous": cls().synchronous,
        "servers": len(cls().roles(2)) - 2,
    }


def _argument_helps(doc: str) -> dict[str, str]:
    """The help of each argument, from the ``Args:`` part of a docstring."""
    match = re.search(r"^Args:\n((?: {4}.*\n|\n)+)", doc + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\w+): ((?:.*\n(?: {8}.*\n)*))", match[1] if match else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}
