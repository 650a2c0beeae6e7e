"""Measure the source: sizes, interfaces, functions, and the path from ``step()`` to the wire.

    .venv/bin/python scripts/figures.py

Prints one JSON object. Code lines are lines without docstrings, comments, blanks, and the texts
that methods have for their users (``about``).
"""

from __future__ import annotations

import ast
import io
import json
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import paceline as pl
from paceline.strategies import STRATEGIES, SYNC_FORMS

ROOT = Path(pl.__file__).parent
PORTS = ("Mail", "Collectives", "Members", "DataQueue", "Clock", "Rendezvous", "Ports")
INTERFACES = {
    **{f"comm.ports.{port}": "comm/ports.py" for port in PORTS},
    "comm.comm.Comm": "comm/comm.py",
    "strategies.base.Strategy": "strategies/base.py",
    "strategies.base.Traits": "strategies/base.py",
    "strategies.base.Roles": "strategies/base.py",
    "comm.comm.Board": "comm/comm.py",
    "comm.comm.GroupMembers": "comm/comm.py",
    "strategies.place.Place": "strategies/place.py",
    "training.worker.Worker": "training/worker.py",
}


NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER),
    *(tokenize.INDENT, tokenize.DEDENT),
}


def code_lines(path: Path) -> int:
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = [token for token in tokens if token.type not in NO_CODE]
    lines = {line for token in code for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        match node:  # a docstring, or a text below an assignment
            case (
                ast.Expr(value=ast.Constant(value=str()))
                | ast.Assign(value=ast.Call(func=ast.Name(id="About")))
            ):
                lines -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(lines)


def packages() -> dict[str, dict[str, int]]:
    counts_by_package: dict[str, Counter[str]] = defaultdict(Counter)
    for path in ROOT.rglob("*.py"):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        counts_by_package[package] += Counter(
            files=1, lines=len(path.read_text().splitlines()), code=code_lines(path)
        )
    return {name: dict(counts) for name, counts in sorted(counts_by_package.items())}


def methods_of(path: str, name: str) -> list[str]:
    tree = ast.parse((ROOT / path).read_text())
    (cls,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    functions = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
    return [function.name for function in functions if not function.name.startswith("_")]


def functions() -> dict[str, Any]:
    sizes = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                where = f"{path.relative_to(ROOT)}:{node.name}"
                sizes[where] = (node.end_lineno or 0) - node.lineno + 1
    longest = max(sizes, key=lambda where: sizes[where])
    return {
        "count": len(sizes),
        "median": statistics.median(sizes.values()),
        "p90": statistics.quantiles(sizes.values(), n=10)[-1],
        "longest": {longest: sizes[longest]},
    }


def doubled_classes() -> list[str]:
    names: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def train(worker: pl.Worker) -> None:
    """Make three steps, and profile the third."""
    net = torch.nn.Linear(64, 64)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(3):
        sgd.zero_grad()
        net(torch.ones(4, 64)).sum().backward()
        profile = StepProfile(net.weight.nbytes)
        if step == 2:
            sys.setprofile(profile)
        sgd.step()
        sys.setprofile(None)
    worker.log(frames=profile.frames or 0, copies=profile.copies)


COPIES = {"copy_", "clone", "cat"}
MEMORY, STORES = "paceline.comm.shared.memory", {"write", "announce"}
"""Where ranks of one host store what others see, and by which functions."""


class StepProfile:
    """Counts the frames up to the first byte that others see, and full-vector copies."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.depth, self.frames, self.copies = nbytes, 0, 0, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            self.depth += 1
            if frame.f_globals["__name__"] == MEMORY and frame.f_code.co_name in STORES:
                self.frames = self.frames or self.depth
        elif event == "return":
            self.depth -= 1
        elif event == "c_call" and getattr(arg, "__name__", "") in COPIES:
            self.copies += self._is_whole(getattr(arg, "__self__", None))

    def _is_whole(self, vector: Any) -> bool:
        return not isinstance(vector, torch.Tensor) or vector.nbytes >= self.nbytes


def main() -> None:
    figures = {
        "packages": packages(),
        "interfaces": {
            name: len(methods_of(path, name.rpartition(".")[2]))
            for name, path in INTERFACES.items()
        },
        "strategy_hooks": sum(
            len(methods_of("strategies/base.py", name)) for name in ("Strategy", "Roles")
        ),
        "method_files": {
            name: code_lines(ROOT / "strategies" / f"{name}.py")
            for name in [*STRATEGIES, *(f"{name}_sync" for name in SYNC_FORMS)]
        },
        "functions": functions(),
        "doubled_classes": doubled_classes(),
        "steps": {},
    }
    for strategy in ("allreduce", "gossip", "downpour"):
        run = pl.launch(train, workers=2, strategy=strategy)
        profile = next(m for m in run.metrics if m["rank"] == 0)
        figures["steps"][strategy] = {"frames": profile["frames"], "copies": profile["copies"]}
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
