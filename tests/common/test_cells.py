"""Functions of a notebook as modules: what they use is written, and what cannot be is named."""

from __future__ import annotations

import linecache
import math
import sys
import types
from pathlib import Path

import pytest
import torch

from paceline.common import cells
from paceline.errors import UsageError


class Notebook:
    """Runs cells in a ``__main__`` that no file has."""

    def __init__(self, main):
        self._main, self._count = main, 0

    def run(self, text):
        self._count += 1
        name = f"<ipython-input-{self._count}-{id(self)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), vars(self._main))

    def __getitem__(self, name):
        return vars(self._main)[name]

    def module(self, name="train"):
        """The module of a function, as another process would import it."""
        module = types.ModuleType("from_notebook")
        self.text = cells.module_of(self[name])
        exec(compile(self.text, "from_notebook.py", "exec", dont_inherit=True), vars(module))
        return module


@pytest.fixture
def notebook(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    known = {*linecache.cache}
    yield Notebook(main)
    for name in {*linecache.cache} - known:
        del linecache.cache[name]


def test_what_a_function_uses_comes_with_it_and_nothing_else(notebook):
    notebook.run("import math\nimport os.path as p\nfrom torch.nn import functional as F, Linear\n")
    notebook.run("SCALE = 2.5\nunused = object()\n")
    notebook.run("def half(x):\n    return x / 2\n\n\ndef scaled(x):\n    return half(x) * SCALE\n")
    notebook.run("def train(x):\n    unused = Linear\n    return scaled(x) + math.floor(1.5)\n")
    module = notebook.module()
    assert module.train(4) == 6.0 and module.Linear is torch.nn.Linear
    assert not {"unused", "F", "p", "os"} & set(vars(module))
    assert notebook.text.splitlines()[0] == '"""What train uses of a notebook."""'


def test_classes_come_before_what_needs_them_to_be_defined(notebook):
    notebook.run("from dataclasses import dataclass\nfrom enum import Enum\nfrom torch import nn\n")
    notebook.run(
        "class Base(nn.Module):\n    width = 3\n    def size(self): return helper(self)\n"
        "class Kind(Enum):\n    ONE = 1\n"
        "@dataclass\nclass Plain:\n    width: int = 4\n    kind: Kind = Kind.ONE\n"
    )
    notebook.run("def helper(model, default=Base): return default.width + Net.extra\n")
    notebook.run("class Net(Base):\n    extra = Plain().width\n")
    notebook.run("def train(): return Net().size(), Plain().kind.name\n")
    assert notebook.module().train() == (7, "ONE")


@pytest.mark.parametrize(
    "value",
    [
        3,
        -2.5,
        1e400,
        True,
        None,
        "a 'text'\n",
        b"\0",
        2j,
        (1,),
        (),
        [1, [2, (3, {"k": {4, 5}})]],
        set(),
        {"lr": 0.1, 2: None},
        Path("/data/x"),
        torch.device("cuda:1"),
        torch.float16,
        torch.tensor,
        math.pi,
    ],
)
def test_plain_constants_and_what_modules_have_come_as_they_are(notebook, value):
    notebook.run("def train(): return VALUE\n")
    notebook._main.VALUE = value
    found = notebook.module().train()
    assert found == value and type(found) is type(value)


def test_numbers_of_numpy_are_plain(notebook):
    notebook.run(
        "import numpy as np\nLR, N = np.float32(0.5), np.int64(7)\ndef train(): return LR, N"
    )
    assert notebook.module().train() == (0.5, 7)


def test_the_last_definition_counts(notebook):
    for number in (1, 2):
        notebook.run(f"class Net:\n    number = {number}\n")
        notebook.run(f"def number(): return {number}\n")
    notebook.run("def train(): return Net.number, number()\n")
    assert notebook.module().train() == (2, 2)


def test_decorators_lambdas_aliases_and_globals_that_are_assigned(notebook):
    notebook.run("import functools\nimport xml.dom.minidom\ncount = 5\n")
    notebook.run("@functools.cache\ndef once(x):\n    return x + 1\n")
    notebook.run("if True:\n    def inner(x):\n        return [once(y) for y in x]\n")
    notebook.run("double = lambda x: 2 * x\nagain = inner\n")
    notebook.run(
        "def train():\n    global count\n    count += 1\n"
        "    xml.dom.minidom.parseString('<a/>')\n    return again([double(1)]), count\n"
    )
    module = notebook.module()
    assert module.train() == ([3], 6) and module.train() == ([3], 7)
    assert "import xml.dom.minidom\n" in notebook.text


def test_annotations_that_are_not_evaluated_stay_so(notebook):
    notebook.run(
        "from __future__ import annotations\ndef train(x: nowhere.Thing) -> nothing: return x\n"
    )
    assert notebook.module().train(3) == 3


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("import torch\nTHING = torch.nn.Linear(1, 1)", r"train uses THING \(Linear\)"),
        ("THING = object()", r"train uses THING \(object\)"),
        ("THING = [1, object()]", r"train uses THING \(list\)"),
        ("THING = list(range(50_000))", r"train uses THING \(338890 characters long\)"),
        ("class Net: pass\nTHING = Net()", r"train uses THING \(Net\)"),
        ("import torch\nTHING = torch.ones(3)", r"train uses THING \(Tensor\)"),
    ],
)
def test_what_cannot_be_written_is_named_with_what_to_do(notebook, setting, named):
    notebook.run(f"{setting}\ndef train(): return THING\n")
    rest = r" of the notebook, .*: make it inside of train, or pass it by arguments=\{\.\.\.\}"
    with pytest.raises(UsageError, match=named + rest):
        notebook.module()


def test_the_user_of_a_global_is_named(notebook):
    notebook.run("THING = object()\ndef helper(): return THING\ndef train(): return helper()\n")
    with pytest.raises(UsageError, match=r"helper uses THING \(object\) .* inside of train"):
        notebook.module()


def test_what_was_typed_at_a_prompt_has_no_source(notebook):
    exec(compile("def train(): pass", "<stdin>", "exec"), vars(notebook._main))
    assert cells.is_typed_in(notebook["train"])
    with pytest.raises(UsageError, match="train must be in a file, not typed in at a prompt"):
        notebook.module()


def test_what_is_in_a_file_is_not_typed_in(notebook):
    assert not cells.is_typed_in(math.floor) and not cells.is_typed_in(Notebook)
