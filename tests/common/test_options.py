"""Options from user input: accepted with their types, or refused with name, value and rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline as pl
from paceline.common.options import (
    above,
    at_least,
    build,
    field_types,
    one_of,
    parse_value,
    type_name,
)
from paceline.report.methods import describe
from paceline.strategies import make_strategy, parse_settings
from paceline.strategies.sasgd import SASGD


@dataclass(kw_only=True)
class Inner:
    size: int

    def __post_init__(self):
        at_least("size", self.size, 1)


@dataclass(kw_only=True)
class Options:
    count: int = 1
    rate: float = 0.5
    limit: float | None = None
    fast: bool = False
    mode: Literal["keep", "reset"] = "keep"
    name: str = ""
    factors: tuple[float, ...] = ()
    slow: dict[int, float] = field(default_factory=dict)
    inner: Inner | None = None
    seen: int = field(default=0, init=False)

    def __post_init__(self):
        at_least("count", self.count, 1)
        above("rate", self.rate, 0)


# What a user types -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-3", -3),
        (" 8 ", 8),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("inf", math.inf),
        ("true", True),
        ("False", False),
        ("none", None),
        ("None", None),
        ("keep", "keep"),
        ("'keep'", "keep"),
        ('"keep"', "keep"),
        ("", ""),
        ("1.2.3", "1.2.3"),
        ("0x10", "0x10"),
    ],
)
def test_a_text_becomes_the_value_that_it_denotes(text, value):
    parsed = parse_value(text)
    assert (type(parsed), parsed) == (type(value), value)


@given(st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none())
def test_what_python_writes_is_read_back(value):
    parsed = parse_value(str(value))
    assert (type(parsed), parsed) == (type(value), value)


def test_settings_are_names_with_values():
    assert parse_settings(["a=1", " b = x ", "", "c=a=b"]) == {"a": 1, "b": "x", "c": "a=b"}


@pytest.mark.parametrize("item", ["interval", "=8", " = 8"])
def test_a_setting_without_name_or_value_is_refused(item):
    with pytest.raises(pl.UsageError, match=r"setting \(.*\) must look like name=value"):
        parse_settings([item])


# What fields take --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"count": 3},
        {"rate": 0.25},
        {"limit": None},
        {"limit": 2.5},
        {"fast": True},
        {"mode": "reset"},
        {"name": "8"},
        {"factors": [1.0, 2.0]},
        {"inner": None},
    ],
)
def test_a_value_of_the_fields_own_type_is_taken(values):
    options = build(Options, values, "here")
    for name, value in values.items():
        taken = getattr(options, name)
        assert (tuple(value) if isinstance(value, list) else value) == taken


@pytest.mark.parametrize(("name", "value"), [("rate", 2), ("limit", 3)])
def test_an_integer_is_accepted_for_a_float(name, value):
    taken = getattr(build(Options, {name: value}, "here"), name)
    assert (type(taken), taken) == (float, value)


def test_tables_become_dicts_and_dataclasses():
    options = build(Options, {"slow": {"3": 4}, "inner": {"size": 2}}, "here")
    assert options.slow == {3: 4.0} and options.inner == Inner(size=2)


def test_missing_values_get_their_defaults():
    assert build(Options, {}, "here") == Options()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"conut": 3}, 'here: no option "conut"; did you mean "count"\\? available: count, fa'),
        ({"zzz": 3}, 'here: no option "zzz"; available: '),
        ({"seen": 3}, 'here: no option "seen"'),
        ({"count": 2.0}, r"here: count \(2.0\) must be of type int"),
        ({"count": "3"}, r"here: count \(3\) must be of type int"),
        ({"count": True}, r"here: count \(True\) must be of type int"),
        ({"count": None}, r"here: count \(None\) must be of type int"),
        ({"count": math.nan}, r"here: count \(nan\) must be of type int"),
        ({"count": 0}, r"here: count \(0\) must be at least 1"),
        ({"rate": False}, r"here: rate \(False\) must be of type float"),
        ({"rate": "fast"}, r"here: rate \(fast\) must be of type float"),
        ({"rate": math.nan}, r"here: rate \(nan\) must be above 0"),
        ({"rate": -1}, r"here: rate \(-1.0\) must be above 0"),
        ({"limit": "x"}, r"here: limit \(x\) must be of type float"),
        ({"limit": True}, r"here: limit \(True\) must be of type float"),
        ({"fast": 1}, r"here: fast \(1\) must be of type bool"),
        ({"fast": "yes"}, r"here: fast \(yes\) must be of type bool"),
        ({"mode": "kept"}, r"here: mode \(kept\) must be one of keep\|reset"),
        ({"mode": None}, r"here: mode \(None\) must be one of keep\|reset"),
        ({"name": 8}, r"here: name \(8\) must be of type str"),
        ({"factors": 2.0}, r"here: factors \(2.0\) must be of type tuple"),
        ({"factors": [1, "x"]}, r"here: factors 2 \(x\) must be of type float"),
        ({"slow": {"x": 1}}, r"here: slow \(x\) must be of type int"),
        ({"inner": 3}, r"here: inner \(3\) must be of type Inner"),
        ({"inner": {}}, r"here, \[inner\]: size is missing"),
        ({"inner": {"size": 0}}, r"here, \[inner\]: size \(0\) must be at least 1"),
        ({"inner": {"sise": 1}}, r'here, \[inner\]: no option "sise"; did you mean "size"'),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_name_value_and_rule(values, message):
    with pytest.raises(pl.UsageError, match=f"^{message}"):
        build(Options, values, "here")


def test_only_what_a_user_may_set_is_a_field():
    assert "seen" not in field_types(Options)
    assert list(field_types(Inner)) == ["size"]


@pytest.mark.parametrize(
    ("hint", "name"),
    [
        (int, "int"),
        (float | None, "float or none"),
        (Literal["a", "b"], "a|b"),
        (Literal["a"] | None, "a or none"),
        (dict[int, float], "dict"),
    ],
)
def test_types_are_named_as_a_user_would(hint, name):
    assert type_name(hint) == name


# Rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 1.0, 7])
def test_at_least_takes_its_bound_and_more(value):
    at_least("n", value, 1)


@pytest.mark.parametrize("value", [0, 0.999, -math.inf, math.inf, math.nan])
def test_at_least_refuses_less_and_what_is_no_number(value):
    with pytest.raises(pl.UsageError, match=r"n \(.*\) must be (at least 1|finite)"):
        at_least("n", value, 1)


@pytest.mark.parametrize("value", [0, -1, -math.inf, math.nan])
def test_above_refuses_its_bound_and_less(value):
    above("n", 1e-300, 0)
    with pytest.raises(pl.UsageError, match=r"n \(.*\) must be above 0"):
        above("n", value, 0)


def test_one_of_names_the_choices():
    one_of("n", "b", "ab")
    with pytest.raises(pl.UsageError, match=r"n \(c\) must be one of a, b"):
        one_of("n", "c", "ab")


# Strategies by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        ("sasgd", {}, SASGD()),
        (" sasgd ( ) ", {}, SASGD()),
        ("sasgd(interval=8, momentum=reset)", {}, SASGD(interval=8, momentum="reset")),
        ("sasgd(global_lr=1)", {}, SASGD(global_lr=1.0)),
        ("sasgd(interval=8)", {"interval": 4}, SASGD(interval=4)),
        (SASGD(interval=8), {"warmup": 2}, SASGD(interval=8, warmup=2)),
    ],
)
def test_a_strategy_is_a_name_with_options_or_an_object(spec, settings, expected):
    assert make_strategy(spec, settings) == expected


def test_an_object_is_copied():
    given_one = SASGD(interval=8)
    made = make_strategy(given_one)
    assert made == given_one and made is not given_one


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sagd", r'no strategy "sagd"; did you mean "sasgd"\?'),
        ("sasgd(intervall=8)", r'sasgd: no option "intervall"; did you mean "interval"\?'),
        ("sasgd(interval=2.5)", r"sasgd: interval \(2.5\) must be of type int"),
        ("sasgd(interval=true)", r"sasgd: interval \(True\) must be of type int"),
        ("sasgd(interval=0)", r"sasgd: interval \(0\) must be at least 1"),
        ("sasgd(global_lr=nan)", r"sasgd: global_lr \(nan\) must be above 0"),
        ("sasgd(momentum=avg)", r"sasgd: momentum \(avg\) must be one of keep\|reset\|average"),
        ("sasgd(interval)", r"setting \(interval\) must look like name=value"),
        ("sasgd(interval=8", r'must look like "sasgd" or "sasgd\(interval=8\)"'),
        ("", r'strategy \(\) must look like "sasgd"'),
        ("allreduce(interval=8)", r'allreduce: no option "interval"; available: none'),
    ],
)
def test_a_strategy_that_is_not_one_is_refused(spec, message):
    with pytest.raises(pl.UsageError, match=message):
        make_strategy(spec)


def test_a_method_describes_its_options():
    facts = describe("sasgd")
    by_name = {option["name"]: option for option in facts["options"]}
    assert facts["synchronous"] is True and facts["servers"] == 0
    assert by_name["interval"]["default"] == 16
    assert by_name["global_lr"]["type"] == "float or none"
    assert by_name["momentum"]["type"] == "keep|reset|average"
    assert all(option["help"] for option in facts["options"])
