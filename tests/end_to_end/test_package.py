"""The package as a whole: its names, its layers, its docstrings, and what it must not contain."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import paceline as pl
from paceline.report.methods import describe
from paceline.strategies import STRATEGIES, SYNC_FORMS, strategy_class
from paceline.strategies.base import Strategy

ROOT = Path(pl.__file__).parent
SHARED = [
    f"paceline.strategies.{name}"
    for name in ("about", "base", "elastic", "lockstep", "offers", "packing", "pairs", "place")
    + ("ring", "rounds", "served", "server", "service", "toolbox")
]


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}
NEEDS = {
    "paceline.integrations.accelerate": "accelerate",
    "paceline.integrations.fabric": "lightning",
    "paceline.integrations.huggingface": "transformers",
    "paceline.integrations.lightning": "lightning",
    "paceline.record.loggers.to_mlflow": "mlflow",
    "paceline.record.loggers.to_tensorboard": "tensorboard",
    "paceline.record.loggers.to_wandb": "wandb",
    "paceline.watch.page": "starlette",
}
"""The modules that import an optional package at their top, because each is made for it."""
MODULES = [
    name
    for name in FILES
    if not name.endswith(".__main__") and (name not in NEEDS or find_spec(NEEDS[name]))
]


@cache
def tree(name):
    return ast.parse(FILES[name].read_text())


@cache
def imports(name):
    """All imports in a module; ``from a import b`` counts as both ``a`` and ``a.b``."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return found


def load(name):
    """Import a module; ignore that torch warns about its own imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)


def within(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def in_packages(*packages):
    return [name for name in FILES if within(name, *packages)]


def dotted(node):
    """``a.b.c`` of an expression; of a call in it, the last attribute."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


# Importing it ------------------------------------------------------------------------------------

_LOADED = """
import json, sys
before = set(sys.modules)
import paceline
{then}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.parametrize(
    "then",
    ["", "paceline.__version__, dir(paceline)", "paceline.UsageError, paceline.PeerLost"],
    ids=["import", "look around", "errors"],
)
def test_importing_the_package_loads_nothing_heavy(then):
    program = _LOADED.format(then=then)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(ended.stdout)}
    assert loaded <= sys.stdlib_module_names | {"paceline"}, "only the standard library"
    assert not loaded & {"asyncio", "ctypes", "multiprocessing", "socket", "sqlite3", "subprocess"}


def test_public_names_are_sorted_and_have_a_module():
    assert pl.__all__ == sorted(pl.__all__)
    assert set(pl.__all__) == {*pl._MODULES, "__version__"}
    assert dir(pl) == pl.__all__


@pytest.mark.parametrize("name", pl.__all__)
def test_a_public_name_is_the_object_of_its_module(name):
    thing = getattr(pl, name)
    if name != "__version__":
        assert thing is getattr(importlib.import_module(pl._MODULES[name]), name)
        assert thing.__module__ == pl._MODULES[name]


def test_type_checkers_see_the_modules_that_are_used():
    (guarded,) = [node for node in tree("paceline").body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in guarded.body for alias in node.names}
    assert seen == pl._MODULES


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'lanch'"):
        _ = pl.lanch


def test_the_version_is_the_one_that_is_installed():
    from importlib.metadata import version

    assert pl.__version__ == version("paceline")


def test_the_package_is_marked_as_typed():
    assert (ROOT / "py.typed").exists()


# Layers ------------------------------------------------------------------------------------------


def assert_imports_none(names, *forbidden):
    for name in names:
        wrong = sorted(found for found in imports(name) if within(found, *forbidden))
        assert not wrong, f"{name} must not import {wrong}"


ARROWS = {
    "errors": "",
    "common": "errors",
    "checkpoint": "errors common",
    "record": "errors common checkpoint",
    "comm": "errors common record",
    "sim": "errors common record comm",
    "model": "errors",
    "strategies": "errors common comm model",
    "training": "errors common checkpoint record comm sim model strategies",
    "launcher": "errors common checkpoint record comm sim strategies training",
    "integrations": "errors common launcher strategies training",
    "lab": "errors common checkpoint record comm sim model strategies training launcher",
    "report": "errors common record strategies lab",
    "watch": "errors common record launcher",
    "cli": "errors common record comm sim strategies launcher lab report watch",
}
"""Each package, and all that it may import: at its top, in a function, or for types alone.

A package stands behind those that it imports, so that there is no cycle.
"""


def packages_of(name):
    """The packages of Paceline that a module imports, except its own."""
    parts = [found.split(".") for found in imports(name) if within(found, "paceline")]
    known = {part[1] for part in parts if len(part) > 1 and part[1] in ARROWS}
    return known - {name.split(".")[1]}


def test_each_package_is_in_the_table():
    entries = {path.stem for path in ROOT.iterdir() if path.suffix in (".py", "")}
    rest = {"__init__", "__main__", "_version", "__pycache__"}
    assert entries - rest == set(ARROWS)


def test_packages_import_what_the_table_allows():
    before = []
    for package, allowed in ARROWS.items():
        assert set(allowed.split()) <= set(before), f"{package} stands too far up"
        before.append(package)
        used = set().union(*(packages_of(name) for name in in_packages(f"paceline.{package}")))
        assert used == set(allowed.split()), package


def test_strategies_know_the_contract_and_no_world():
    names = in_packages("paceline.strategies")
    assert_imports_none(names, "torch.distributed")
    for name in names:
        comm = {found for found in imports(name) if within(found, "paceline.comm")}
        contract = ("paceline.comm.comm", "paceline.comm.ports")
        wrong = {found for found in comm if not within(found, *contract)}
        assert wrong <= {"paceline.comm"}, f"{name} must not import {wrong}"


def test_only_the_distributed_transport_needs_torch_distributed_to_run():
    allowed = in_packages("paceline.lab.bench", "paceline.comm.torch_distributed")
    assert_imports_none([name for name in FILES if name not in allowed], "torch.distributed")


# What is not in it -------------------------------------------------------------------------------

PICKLES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
PROCESSES = ("multiprocessing", "torch.multiprocessing", "concurrent.futures")
PICKLES += ("torch.distributed.rpc", "torch.distributed.checkpoint")


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_pickled(name):
    assert_imports_none([name], *PICKLES, *PROCESSES)
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute):
            used = dotted(node)
            assert used not in ("torch.load", "torch.save"), f"{name}:{node.lineno}"
            objects = re.search(r"\b(dist|distributed)\..*_object(_list|s)?$", used)
            assert not objects, f"{name}:{node.lineno}: {used} pickles"
            assert not node.attr.endswith("_pyobj"), f"{name}:{node.lineno}: {used} pickles"
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", f"{name}:{node.value.lineno}"


def test_torchs_own_files_are_not_imported_by_name():
    for name in FILES:
        assert not imports(name) & {"torch.load", "torch.save", "torch.serialization"}, name


INSIDE_A_RUN = in_packages(
    "paceline.strategies",
    "paceline.sim",
    "paceline.model",
    "paceline.training.worker",
    "paceline.training.optimizer",
    "paceline.training.stepper",
    "paceline.training.loader",
    "paceline.comm.comm",
)


@pytest.mark.parametrize("name", INSIDE_A_RUN)
def test_only_launchers_read_ranks_from_the_environment(name):
    assert not imports(name) & {"os.environ", "os.getenv"}
    used = {dotted(node) for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute)}
    assert not {use for use in used if within(use, "os.environ", "os.getenv", "os.environb")}


# Docstrings --------------------------------------------------------------------------------------


def public_definitions(body, inside=""):
    """Public classes and functions, and those of public classes, by their qualified names."""
    for node in body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        overload = any(getattr(each, "id", "") == "overload" for each in node.decorator_list)
        if not node.name.startswith("_") and not overload:
            yield f"{inside}{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{inside}{node.name}.")


def inherited_docstring(module, qualified):
    """The docstring of the method that a method overrides."""
    thing = load(module)
    owner, name = None, ""
    for name in qualified.split("."):
        owner, thing = thing, inspect.getattr_static(thing, name)
    bases = inspect.getmro(owner)[1:] if inspect.isclass(owner) else ()
    return any(inspect.getdoc(vars(base)[name]) for base in bases if name in vars(base))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name):
    assert ast.get_docstring(tree(name)), f"{name} has no docstring"
    missing = [
        qualified
        for qualified, node in public_definitions(tree(name).body)
        if not ast.get_docstring(node) and not inherited_docstring(name, qualified)
    ]
    assert not missing, f"{name}: {missing}"


@pytest.mark.parametrize(
    "name",
    [n for n in NEEDS if n.startswith("paceline.integrations.") and not find_spec(NEEDS[n])],
)
def test_a_trainer_that_is_not_there_says_what_to_install(name):
    message = r'needs .*: pip install "paceline\[(lightning|huggingface)\]"'
    with pytest.raises(ImportError, match=message):
        importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_are_true(name):
    module = load(name)
    runner = doctest.DocTestRunner()
    output = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)


def test_there_are_examples_to_be_true():
    assert sum(path.read_text().count(">>> ") for path in FILES.values()) > 20


# Strategies --------------------------------------------------------------------------------------


def docstring(name):
    return inspect.getdoc(strategy_class(name)) or ""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategys_docstring_has_its_parts_in_order(name):
    cls, text = strategy_class(name), docstring(name)
    parts = {
        "name and idea": r"\A\S.*\.\n\n\S",
        "symbol map": r"^symbol +here$",
        "update": r"^\.\. math::",
        "arguments": r"^Args:$" if dataclasses.fields(cls) else "",
        "example": r"^Example:$",
    }
    places = {part: re.search(rule, text, re.M) for part, rule in parts.items() if rule}
    assert not [part for part, place in places.items() if place is None]
    starts = [place.start() for place in places.values()]
    assert starts == sorted(starts), list(places)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_tells_users_what_they_must_know(name):
    about = strategy_class(name).about
    assert re.search(r"\bdead\b", about.faults)
    assert all(dataclasses.astuple(about))
    assert not [text for text in dataclasses.astuple(about) if "`" in text or not text[0].isupper()]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_shows_a_run_and_names_its_paper_and_options(name):
    examples = doctest.DocTestParser().get_examples(docstring(name))
    assert any("pl.simulate" in example.source for example in examples)
    assert any(example.want for example in examples)
    facts = describe(name)
    assert facts["paper"]
    assert not [option["name"] for option in facts["options"] if not option["help"]]


def test_every_strategy_file_holds_one_registered_method():
    paths = [*STRATEGIES.values(), *SYNC_FORMS.values()]
    registered = {path.partition(":")[0] for path in paths}
    names = [name for name in in_packages("paceline.strategies") if not within(name, *SHARED)]
    assert registered == set(names) - {"paceline.strategies"}
    for name in STRATEGIES:
        cls = strategy_class(name)
        assert issubclass(cls, Strategy) and dataclasses.is_dataclass(cls)
        assert all(field.kw_only for field in dataclasses.fields(cls))
        cls()  # every field has a default that passes its own rules
