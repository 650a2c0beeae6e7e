"""Options as dataclass fields, built from user input; errors give name, value and rule."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paceline.errors import UsageError, unknown

T = TypeVar("T")
MOST = 2**63 - 1
"""The largest integer that every file format and random generator accepts."""


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make a dataclass of ``values``; each error message begins with ``where``."""
    hints = field_types(cast(Any, cls))
    for key in values:
        if key not in hints:
            raise UsageError(f"{where}: {unknown('option', key, hints)}")
    typed = {key: _convert(value, hints[key], key, where) for key, value in values.items()}
    for field in dataclasses.fields(cast(Any, cls)):
        required = field.init and field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in typed:
            raise UsageError(f"{where}: {field.name} is missing")
    try:
        return cls(**typed)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default value of a field."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


@functools.cache
def field_types(cls: type[Any]) -> Mapping[str, Any]:
    """The types of the fields that a user may set, by name."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def type_name(hint: Any) -> str:
    """A type as error messages name it.

    >>> type_name(int), type_name(float | None), type_name(Literal["keep", "reset"])
    ('int', 'float or none', 'keep|reset')
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join("none" if arg is type(None) else type_name(arg) for arg in args)
    return getattr(hint, "__name__", str(hint))


def parse_value(text: str) -> Any:
    """The value that a user typed after ``name=``.

    >>> [parse_value(text) for text in ("8", "0.5", "true", "none", "keep")]
    [8, 0.5, True, None, 'keep']
    """
    word = text.strip().strip("\"'")
    constants = {"true": True, "false": False, "none": None}
    if word.lower() in constants:
        return constants[word.lower()]
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            continue
    return word


def shown(value: object) -> str:
    """A value for an error message; a very long number is described by its length.

    >>> shown(0.5), shown(10**400)
    ('0.5', 'a number of about 400 digits')
    """
    if isinstance(value, int) and abs(value) > 10**40:
        return f"a number of about {int(value.bit_length() * math.log10(2))} digits"
    return str(value)


def at_least(name: str, value: float, low: float) -> None:
    """Refuse ``value`` below ``low``, and numbers that are not finite."""
    if not value >= low:
        raise UsageError(f"{name} ({shown(value)}) must be at least {low}")
    finite(name, value)


def at_most(name: str, value: float, high: float) -> None:
    """Refuse ``value`` above ``high``."""
    if not value <= high:
        raise UsageError(f"{name} ({shown(value)}) must be at most {high}")


def finite(name: str, value: float) -> None:
    """Refuse infinity, and integers above ``MOST``."""
    if isinstance(value, int):
        at_most(name, value, MOST)
    elif math.isinf(value):
        raise UsageError(f"{name} ({value}) must be finite")


def above(name: str, value: float, low: float) -> None:
    """Refuse ``value`` unless it is above ``low``; infinity is allowed."""
    if not value > low:
        raise UsageError(f"{name} ({value}) must be above {low}")


def positive(name: str, value: float) -> None:
    """Refuse ``value`` unless it is above 0 and finite."""
    above(name, value, 0)
    finite(name, value)


def one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse ``value`` unless it is one of ``choices``."""
    allowed = list(choices)
    if value not in allowed:
        raise UsageError(f"{name} ({value}) must be one of {', '.join(map(str, allowed))}")


def _convert(value: Any, hint: Any, name: str, where: str) -> Any:
    """``value`` as the type ``hint``, if nothing is lost; handles the structures of TOML only."""
    origin, args = get_origin(hint), get_args(hint)
    if type(value) is int and abs(value) > MOST:
        raise UsageError(f"{where}: {name} ({shown(value)}) must be from -{MOST} to {MOST}")
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), name, where)
    if origin is Literal:
        if value not in args:
            raise UsageError(f"{where}: {name} ({value}) must be one of {type_name(hint)}")
        return value
    if origin in (list, tuple) and isinstance(value, list):
        items = [_convert(v, args[0], f"{name} {i + 1}", where) for i, v in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict and isinstance(value, dict):
        return {
            _convert(parse_value(k), args[0], name, where): _convert(v, args[1], name, where)
            for k, v in value.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(cast(type[Any], hint), value, f"{where}, [{name}]")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UsageError(f"{where}: {name} ({value}) must be of type {type_name(hint)}")
    return value


def check_device(device: str) -> None:
    """Refuse what is not the name of a device; the run itself checks that it exists."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"device ({device}) must be cpu, cuda, or cuda:0, cuda:1, ...")
