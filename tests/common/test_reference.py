"""References by name: another process finds functions and strategies without pickle."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args, get_origin

import pytest

import paceline as pl
from paceline.common import reference
from paceline.common.options import field_types
from paceline.common.reference import (
    find,
    load_script,
    plain_json,
    refer_to,
)
from paceline.errors import UsageError
from paceline.record.trace import Trace, merge
from paceline.strategies import STRATEGIES, strategy_class
from paceline.strategies.packing import pack_strategy, unpack_strategy


def through_json(value):
    return json.loads(json.dumps(value))


def python(*arguments, cwd):
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )
    return ended.stdout.strip(), ended.stderr


# Functions in modules ----------------------------------------------------------------------------


def top_level():
    return "found"


class Holder:
    @staticmethod
    def method():
        return "found inside"


@pytest.mark.parametrize("thing", [merge, Trace, Trace.record, top_level, Holder, Holder.method])
def test_a_function_or_class_of_a_module_is_found_by_its_name(thing):
    assert find(through_json(refer_to(thing))) is thing


def inner():
    def closure():
        return 0

    return closure


class Callable:
    def __call__(self):
        return 0


@pytest.mark.parametrize(
    ("thing", "named"),
    [
        (lambda: 0, "<lambda>"),
        (inner(), r"inner\.<locals>\.closure"),
        (partial(top_level), r"functools\.partial"),
        (Callable(), "Callable object"),
    ],
)
def test_what_other_processes_could_not_find_is_refused(thing, named):
    with pytest.raises(UsageError, match=f"{named}.* must be defined at the top level"):
        refer_to(thing)


def test_launch_refuses_a_closure_before_anything_starts():
    with pytest.raises(UsageError, match="must be defined at the top level of a module or script"):
        pl.launch(lambda worker: None, workers=2)


# Functions in scripts ----------------------------------------------------------------------------

_SCRIPT = """
import json
from helper import FACTOR
from paceline.common.reference import refer_to

calls = []

def train(number):
    calls.append(number)
    return FACTOR * number, len(calls)

if __name__ == "__main__":
    calls.append("main")
    print(json.dumps(refer_to(train)))
"""

_FIND = """
import json, sys
from paceline.common.reference import find
train = find(json.loads(sys.argv[1]))
again = find(json.loads(sys.argv[1]))
print(json.dumps([train(2), again(3), train is again, "torch" in sys.modules]))
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "helper.py").write_text("FACTOR = 10\n")
    (folder / "own_training.py").write_text(_SCRIPT)
    return folder / "own_training.py"


def test_a_function_of_a_script_is_found_without_what_the_script_does_as_main(script, tmp_path):
    reference, _ = python(script, cwd=tmp_path)
    assert json.loads(reference) == {"main": str(script), "name": "train"}
    found, errors = python("-c", _FIND, reference, cwd=tmp_path)
    assert json.loads(found or "null") == [[20, 1], [30, 2], True, False], errors


def test_a_script_that_runs_as_a_module_is_found_as_one(script):
    reference, _ = python("-m", "own_training", cwd=script.parent)
    assert json.loads(reference) == {"module": "own_training", "name": "train"}
    found, errors = python("-c", _FIND, reference, cwd=script.parent)
    assert json.loads(found or "null")[0] == [20, 1], errors


def test_a_function_that_was_typed_in_is_refused(script):
    _, errors = python("-c", _SCRIPT, cwd=script.parent)
    assert "train must be in a file, not typed in" in errors


@pytest.fixture
def own_imports(monkeypatch):
    """Restore the import system afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("own_training", "helper"):
        sys.modules.pop(name, None)


def test_a_script_is_loaded_under_its_own_name_from_its_own_folder(script, own_imports):
    module = load_script(script)
    assert module.__name__ == "own_training" and sys.modules["own_training"] is module
    assert module.train(2) == (20, 1)
    assert refer_to(module.train) == {"module": "own_training", "name": "train"}


def test_a_function_is_found_in_a_script_by_its_path(script, own_imports):
    train = find({"script": str(script), "name": "train"})
    assert train(2) == (20, 1)


# Strategies --------------------------------------------------------------------------------------


def other_value(default, hint) -> Any:
    """Another value than a field's default, if its type allows one."""
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != default)
    kinds = get_args(hint) or (hint,)
    if bool in kinds:
        return not default
    if int in kinds:
        return (default or 1) + 1
    return (default or 0.5) / 2 if float in kinds else default


def with_other_fields(cls):
    """One strategy for each field that can be changed by itself."""
    for field in dataclasses.fields(cls):
        value = other_value(field.default, field_types(cls)[field.name])
        try:
            changed = cls(**{field.name: value})
        except UsageError:
            continue  # this field depends on another one
        if changed != cls():
            yield field.name, changed


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_goes_through_json_with_its_fields(name):
    cls = strategy_class(name)
    changed = dict(with_other_fields(cls))
    assert changed or not dataclasses.fields(cls)
    for strategy in (cls(), *changed.values()):
        packed = through_json(pack_strategy(strategy))
        back = unpack_strategy(packed)
        assert type(back) is cls and back == strategy and back is not strategy


@dataclass(kw_only=True)
class Odd(pl.Strategy):
    """A user's own strategy, with a field that JSON cannot hold."""

    thing: Any = 3

    def step(self, x, g):
        self.local_update(g)


def test_the_users_own_strategy_is_packed_in_the_same_way():
    back = unpack_strategy(through_json(pack_strategy(Odd(thing=[1, {"a": None}]))))
    assert back == Odd(thing=[1, {"a": None}])


def test_a_field_that_json_cannot_hold_is_refused():
    with pytest.raises(UsageError, match=r"strategy must hold numbers, strings, lists and dicts"):
        pack_strategy(Odd(thing=object()))


def test_a_strategy_defined_in_a_function_is_refused():
    @dataclass(kw_only=True)
    class Local(Odd):
        pass

    with pytest.raises(UsageError, match=r"Local.* must be defined at the top level"):
        pack_strategy(Local())


# Arguments ---------------------------------------------------------------------------------------


def test_plain_values_stay_what_they_are():
    value = {"a": [1, 2.5, "x", None, True], "b": {"c": float("inf")}}
    assert plain_json("arguments", value) == value


@pytest.mark.parametrize("value", [{"a": object()}, {"a": {1, 2}}, {"a": b"x"}, {"a": {1: 2}}])
def test_values_that_json_cannot_hold_are_refused(value):
    with pytest.raises(UsageError, match=r"arguments must hold numbers, strings, lists and dicts"):
        plain_json("arguments", value)


def test_the_reference_module_has_no_pickle():
    assert not {"pickle", "marshal", "shelve"} & set(vars(reference))
