"""The methods by name, and how a name with options becomes one of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from paceline.common.options import build, default_of, parse_value
from paceline.errors import UsageError, summary_of, unknown
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
"""Name to class. A new method is one file, and one line at the end of this."""

SYNC_FORMS = {
    "easgd": "paceline.strategies.easgd_sync:EASGDSync",
    "gossip": "paceline.strategies.gossip_sync:GossipSync",
}
"""Name to the class that the option ``sync=true`` asks for."""

GROUP = "paceline.strategies"
"""The entry points by which other packages give a method a name."""


def strategy_names() -> list[str]:
    """Every method: the built-in ones, then those of other packages."""
    return [*STRATEGIES, *_foreign()]


def strategy_class(name: str) -> type[Strategy]:
    """The class of a registered method; packages are asked for a name that is not built in."""
    if name in STRATEGIES:
        return _import(STRATEGIES[name])
    foreign = _foreign()
    if name not in foreign:
        raise unknown("strategy", name, [*STRATEGIES, *foreign])
    return _load(foreign[name])


def _import(path: str) -> type[Strategy]:
    module, _, attribute = path.partition(":")
    cls: type[Strategy] = getattr(importlib.import_module(module), attribute)
    return cls


def strategy_name(strategy: Strategy) -> str:
    """The registered name of a strategy, or that of its class."""
    cls = type(strategy)
    names = {path: name for name, path in [*STRATEGIES.items(), *SYNC_FORMS.items()]}
    path = f"{cls.__module__}:{cls.__qualname__}"
    if path in names:
        return names[path]
    return next((name for name, point in _foreign().items() if _names(point, cls)), cls.__name__)


def strategy_spec(strategy: Strategy) -> str:
    """The name of a strategy, and the options that are not as they are by default.

    >>> strategy_spec(make_strategy("sasgd")), strategy_spec(make_strategy("sasgd(interval=8)"))
    ('sasgd', 'sasgd(interval=8)')
    """
    name = strategy_name(strategy)
    cls = strategy_class(name) if name in SYNC_FORMS else type(strategy)
    defaults = {field.name: default_of(field) for field in dataclasses.fields(cls) if field.init}
    options = [
        f"{option}={value}"
        for option, default in defaults.items()
        if (value := getattr(strategy, option, default)) != default
    ]
    return name + (f"({', '.join(options)})" if options else "")


def _foreign() -> dict[str, EntryPoint]:
    """The methods of other packages by name; of two with one name, that which is found first."""
    found: dict[str, EntryPoint] = {}
    for point in _entry_points(tuple(sys.path)):
        if point.name not in STRATEGIES:
            found.setdefault(point.name, point)
    return found


@functools.cache
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """What the packages on ``path`` have registered; looked up once for each path.

    A package whose records cannot be read has registered nothing: it must not spoil the others.
    """
    from importlib.metadata import distributions

    found: dict[str, list[EntryPoint]] = {}
    for package in distributions():
        with suppress(Exception):
            found.setdefault(package.name, [p for p in package.entry_points if p.group == GROUP])
    return tuple(point for points in found.values() for point in points)


def _load(point: EntryPoint) -> type[Strategy]:
    """The class of an entry point, which works without options as every method must."""
    try:
        cls = point.load()
    except Exception as error:
        raise _unusable(point, f"{point.value} cannot be imported: {summary_of(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise _unusable(point, f"{point.value} must be a subclass of paceline.Strategy")
    try:
        cls()
    except Exception as error:
        raise _unusable(point, f"{cls.__name__}() fails: {summary_of(error)}") from error
    return cls


def _unusable(point: EntryPoint, reason: str) -> UsageError:
    package = point.dist.name if point.dist is not None else "an unknown package"
    return UsageError(f'strategy "{point.name}" of package {package}: {reason}')


def _names(point: EntryPoint, cls: type) -> bool:
    """Whether an entry point stands for a class that is loaded; imports nothing."""
    try:
        return bool(attrgetter(point.attr)(sys.modules[point.module]) is cls)
    except Exception:  # a malformed one raises what its Python pleases
        return False


def make_strategy(spec: str | Strategy, settings: Mapping[str, Any] | None = None) -> Strategy:
    """A strategy from ``"sasgd"``, ``"sasgd(interval=8)"`` or an object, with more ``settings``.

    A strategy object is copied, so that each run and each rank has its own.
    """
    if isinstance(spec, Strategy):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
        return build(type(spec), fields | dict(settings or {}), strategy_name(spec))
    match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise UsageError(f'strategy ({spec}) must look like "sasgd" or "sasgd(interval=8)"')
    name, inside = match.groups()
    values = parse_settings((inside or "").split(",")) | dict(settings or {})
    path = SYNC_FORMS.get(name) if values.get("sync") else None
    return build(_import(path) if path else strategy_class(name), values, name)


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
