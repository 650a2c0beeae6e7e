"""Methods of other packages: found by their entry points, and used as the built-in ones are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm

import paceline as pl
from paceline import strategies
from paceline.common.reference import find
from paceline.report.methods import describe
from paceline.strategies import (
    STRATEGIES,
    SYNC_FORMS,
    make_strategy,
    strategy_class,
    strategy_name,
    strategy_names,
    strategy_spec,
)
from paceline.strategies.packing import pack_strategy, unpack_strategy

RING = '''
from dataclasses import dataclass

import paceline as pl
from paceline.common.options import at_least


@dataclass(kw_only=True)
class Ring(pl.Strategy):
    """Ring: local steps, and now and then a mean with the left neighbour.

    Args:
        interval: steps between means.
    """

    paper = "a test"
    uses_gradient = False
    state = ("steps",)

    interval: int = 4

    def __post_init__(self):
        at_least("interval", self.interval, 1)
        self.steps = 0

    def step(self, x, g):
        self.local_update(g)
        self.steps += 1
        if self.steps % self.interval == 0:
            rank, size = self.comm.rank, self.comm.size
            left = self.comm.exchange(x, dst=(rank + 1) % size, src=(rank - 1) % size)
            x.lerp_(left, 0.5)

    def finish(self, x):
        self.comm.all_reduce(x, factor=lambda workers: 1 / workers)
'''
ODD = '''
import paceline as pl

class Stepless(pl.Strategy):
    """Has no step."""

def helper():
    """No class."""
'''
POINTS = {
    "acme-ring": "acme_pace:Ring",
    "allreduce": "acme_pace:Ring",
    "lost": "acme_pace.nonesuch:Ring",
    "nameless": "acme_pace:Rong",
    "stepless": "acme_pace.odd:Stepless",
    "function": "acme_pace.odd:helper",
    "malformed": "what is this?",
}
GOOD = ("acme-ring", "allreduce")


def install(folder: Path, *names: str) -> Path:
    """Put a package into ``folder`` as an installer would, with these entry points."""
    package, info = folder / "acme_pace", folder / "acme_pace-1.0.dist-info"
    package.mkdir(), info.mkdir()
    (package / "__init__.py").write_text("from acme_pace.ring import Ring as Ring\n")
    (package / "ring.py").write_text(RING)
    (package / "odd.py").write_text(ODD)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-pace\nVersion: 1.0\n")
    lines = [f"{name} = {POINTS[name]}\n" for name in names]
    (info / "entry_points.txt").write_text("".join(["[paceline.strategies]\n", *lines]))
    return folder


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install the package for this process, and forget it afterwards."""
    yield lambda *names: monkeypatch.syspath_prepend(install(tmp_path, *names))
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_pace"]:
        del sys.modules[name]


# As a user would ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Run a command in another process that has the package; the object on its last line."""
    folder = install(tmp_path_factory.mktemp("site"), *GOOD)
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    def run(line: str) -> dict[str, object]:
        done = subprocess.run(
            [warm.python(), "-m", "paceline", *line.split(), "--json"],
            capture_output=True,
            text=True,
            cwd=tmp_path_factory.mktemp("here"),
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return told

    return run


def test_a_foreign_method_is_listed_after_the_built_in_ones(outcome):
    told = outcome("strategies")["strategies"]
    assert [about["name"] for about in told] == [*STRATEGIES, "acme-ring"]
    ring = {"name": "interval", "type": "int", "default": 4, "help": "steps between means."}
    assert told[-1]["options"] == [ring]
    assert told[0]["summary"].startswith("Synchronous SGD"), "a built-in name stays built in"


def test_a_foreign_method_is_explained(outcome):
    (told,) = outcome("strategies acme-ring")["strategies"]
    assert told["summary"] == "Ring: local steps, and now and then a mean with the left neighbour."
    assert told["paper"] == told["reference"] == "a test"
    assert told["faults"] == ""


@pytest.mark.transport("shared_memory")
def test_a_foreign_method_trains_in_real_processes(outcome):
    told = outcome("run --strategy acme-ring --workers 2 --epochs 1 --model mlp --lr 0.04")
    assert (told["strategy"], told["workers"]) == ("acme-ring", 2)
    assert told["samples"] == 4000 and told["accuracy"] > 0.6
    assert told["bytes_sent"] > 0


@pytest.mark.transport("simulated")
def test_a_foreign_method_trains_in_virtual_time(outcome):
    told = outcome("sim --strategy acme-ring --set interval=2 -w 3 --steps 4 --model mlp")
    assert (told["strategy"], told["steps"]) == ("acme-ring", 12)
    assert told["virtual_seconds"] > 0


def test_a_foreign_method_is_compared(outcome):
    specs = ["acme-ring(interval=1)", "acme-ring(interval=2)", "allreduce"]
    told = outcome(f"compare --strategy {','.join(specs)} -w 2 --steps 2 --model mlp")
    assert [row["strategy"] for row in told["rows"]] == specs
    often, seldom, _ = (row["bytes_sent"] for row in told["rows"])
    assert seldom < often


# In one process ----------------------------------------------------------------------------------


def test_a_foreign_method_has_its_name_everywhere(installed):
    installed(*GOOD)
    cls = strategy_class("acme-ring")
    assert strategy_names() == [*STRATEGIES, "acme-ring"]
    assert make_strategy("acme-ring(interval=2)") == cls(interval=2)
    assert strategy_name(cls()) == "acme-ring", "though it is defined in another module than named"
    assert describe("acme-ring")["synchronous"] is True


def test_a_foreign_method_goes_to_a_rank_by_name(installed):
    installed(*GOOD)
    packed = json.loads(json.dumps(pack_strategy(make_strategy("acme-ring(interval=3)"))))
    assert packed["class"] == {"module": "acme_pace.ring", "name": "Ring"}
    back = unpack_strategy(packed)
    assert type(back) is find(packed["class"]) and back.interval == 3
    assert strategy_name(back) == "acme-ring"


def test_a_built_in_name_is_not_taken_over(installed):
    installed(*GOOD)
    assert strategy_class("allreduce").__module__ == "paceline.strategies.allreduce"
    assert strategy_names().count("allreduce") == 1


def test_an_unknown_name_is_compared_with_foreign_ones(installed):
    installed(*GOOD)
    with pytest.raises(pl.UsageError, match=r'no strategy "acme-rong"; did you mean "acme-ring"\?'):
        make_strategy("acme-rong")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lost", r"acme_pace\.nonesuch:Ring cannot be imported: ModuleNotFoundError: No module"),
        ("nameless", "acme_pace:Rong cannot be imported: AttributeError"),
        ("malformed", r"what is this\? cannot be imported"),
        ("function", r"acme_pace\.odd:helper must be a subclass of paceline\.Strategy"),
        ("stepless", r"Stepless\(\) fails: TypeError: .*abstract"),
    ],
)
def test_what_cannot_be_used_is_refused_with_package_name_and_reason(installed, name, reason):
    installed(*GOOD, name)
    with pytest.raises(pl.UsageError, match=f'strategy "{name}" of package acme-pace: {reason}'):
        make_strategy(name)
    assert make_strategy("acme-ring").interval == 4, "the others of the package are not touched"


def test_a_class_that_nobody_registered_goes_by_its_own_name(installed):
    class Mine(strategy_class("allreduce")):
        pass

    installed("malformed", *GOOD)
    assert strategy_name(Mine()) == "Mine"


BROKEN = {
    "no name": ("METADATA", b""),
    "no text": ("METADATA", b"Name: \xff\n"),
    "points that are no text": ("entry_points.txt", b"[paceline.strategies]\n\xff = a:b\n"),
    "points without a value": ("entry_points.txt", b"[paceline.strategies]\nwhat is this\n"),
    "points of no group": ("entry_points.txt", b"acme-ring = acme_pace:Ring\n[["),
    "a folder for points": ("entry_points.txt", None),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_package_does_not_spoil_the_others(installed, how, tmp_path_factory, monkeypatch):
    name, content = BROKEN[how]
    folder = tmp_path_factory.mktemp("broken")
    broken = folder / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Name: broken\n")
    (broken / name).write_bytes(content) if content is not None else (broken / name).mkdir()
    installed(*GOOD)
    monkeypatch.syspath_prepend(folder)  # found before the good one
    assert make_strategy("acme-ring").interval == 4
    assert strategy_names() == [*STRATEGIES, "acme-ring"]
    assert strategy_name(strategy_class("acme-ring")()) == "acme-ring"


_LAZY = """
import contextlib, io, sys
from paceline.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
from paceline import strategies
print(strategies._entry_points.cache_info().misses, "torch" in sys.modules)
"""


@pytest.mark.parametrize("line", ["--help", "run --help", "strategies --help"])
def test_packages_are_not_looked_at_for_help(line):
    done = subprocess.run(
        [sys.executable, "-c", _LAZY, *line.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "False"]


def test_packages_are_not_looked_at_for_a_built_in_name(monkeypatch):
    monkeypatch.setattr(strategies, "_foreign", lambda: pytest.fail("packages were looked at"))
    for name in STRATEGIES:
        assert strategy_name(make_strategy(name)) == name


@pytest.mark.parametrize("name", SYNC_FORMS)
def test_sync_is_an_option_that_asks_for_another_class(name):
    method = make_strategy(f"{name}(sync=true, interval=3)")
    assert type(method) is not strategy_class(name) and method.synchronous
    assert strategy_name(method) == name
    assert make_strategy(strategy_spec(method)) == method
    for copy in (make_strategy(method), unpack_strategy(pack_strategy(method))):
        assert type(copy) is type(method) and strategy_spec(copy) == strategy_spec(method)
    assert not make_strategy(name, {"sync": False}).synchronous


@pytest.mark.parametrize("name", SYNC_FORMS)
def test_the_wrong_class_for_sync_is_refused(name):
    with pytest.raises(pl.UsageError, match=r"sync .True. must be one of False"):
        strategy_class(name)(sync=True)
