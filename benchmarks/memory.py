"""Write the table of docs/memory.md: the memory of a run with a model of 100 million parameters.

    python benchmarks/memory.py [METHOD...]

With methods, their rows are printed. An MLP in float32, SGD with momentum, two workers on shared
memory. While a run goes on, the memory of its processes is read every millisecond: what each has
for itself, and what they share. What a run with a tiny model needs is subtracted: the memory of
Python and torch. The unit is a copy of the model, 403 MB. Takes about six minutes, and 10 GB.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from methods_table import replace_table
from torch import nn

import paceline as pl

PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
METHODS = ["allreduce", "sasgd(interval=4)", "gossip", "downpour", "easgd"]
LAYERS, BATCH, WORKERS = 6, 4, 2
WIDTH, STEPS = 4096, 9
TINY, MORE_STEPS = 16, 2000
COPY = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
SECTIONS = ("training", "ending")


def make_model(width: int) -> nn.Module:
    layers = [nn.Linear(width, width) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def learn(model: nn.Module, optimizer: Any, width: int, steps: int) -> None:
    x = torch.randn(BATCH, width)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def train(worker: pl.Worker, width: int, steps: int) -> None:
    torch.set_num_threads(1)
    model = make_model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = worker.setup(model, optimizer)
    learn(model, optimizer, width, 2)
    worker.log(section="training")
    learn(model, optimizer, width, steps)
    worker.log(section="ending")
    worker.finish()


def train_plainly(section: Any, width: int, steps: int) -> None:
    torch.set_num_threads(1)
    model = make_model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    learn(model, optimizer, width, 2)
    section("training")
    learn(model, optimizer, width, steps)
    section("ending")


class Watch:
    """Reads the memory of this process or of its descendants, until it is closed."""

    def __init__(self, itself: bool) -> None:
        self._itself, self._section = itself, ""
        self._first = anonymous(os.getpid()) if itself else 0
        self.peaks = dict.fromkeys(SECTIONS, 0)
        self._thread = threading.Thread(target=self._watch)
        self._over = False

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def section(self, name: str) -> None:
        self._section = name

    def _watch(self) -> None:
        while not self._over:
            if self._section:
                now = self._read()
                self.peaks[self._section] = max(self.peaks[self._section], now)
            time.sleep(0.001)

    def _read(self) -> int:
        if self._itself:
            return anonymous(os.getpid()) - self._first
        ranks = descendants(os.getpid())
        return sum(map(anonymous, ranks)) + max(map(shared, ranks), default=0)


def descendants(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            own = [int(number) for number in task.read_text().split()]
        except OSError:
            continue
        for child in own:
            found += [child, *descendants(child)]
    return found


def anonymous(process: int) -> int:
    """What a process has for itself."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"RssAnon:\s+(\d+) kB", status)
    return 1024 * int(match[1]) if match else 0


def shared(process: int) -> int:
    """The memory that the processes of a run share, as one of them has it open."""
    try:
        for file in os.scandir(f"/proc/{process}/fd"):
            if "memfd:paceline" in os.readlink(file.path):
                return 512 * os.stat(file.path).st_blocks
    except OSError:
        pass
    return 0


def measure(method: str, width: int, steps: int) -> list[int]:
    """The bytes of the whole run, in each section."""
    if method == "plain":
        with Watch(itself=True) as watch:
            train_plainly(watch.section, width, steps)
        return [watch.peaks[name] for name in SECTIONS]
    with Watch(itself=False) as watch:

        def on_metric(record: Any) -> None:
            watch.section(record["section"])

        how = {"width": width, "steps": steps}
        pl.launch(train, workers=WORKERS, strategy=method, on_metric=on_metric, arguments=how)
    return [watch.peaks[name] for name in SECTIONS]


def copies(method: str) -> list[float]:
    """The copies of the model per worker, in each section."""
    workers = 1 if method == "plain" else WORKERS
    tiny, large = measure(method, TINY, MORE_STEPS), measure(method, WIDTH, STEPS)
    if method == "plain":  # what this process had before is subtracted already
        tiny = [0] * len(SECTIONS)
    pairs = zip(large, tiny, strict=True)
    return [(with_model - without) / workers / COPY for with_model, without in pairs]


def main() -> None:
    table = ["| | during training | at the end |", "|---|---|---|"]
    for method in sys.argv[1:] or ["plain", *METHODS]:
        name = "a plain loop" if method == "plain" else f"`{method}`"
        table.append(f"| {name} | {' | '.join(f'{number:.1f}' for number in copies(method))} |")
        print(table[-1], flush=True)
    if not sys.argv[1:]:
        replace_table("memory", table, PAGE)


if __name__ == "__main__":
    main()
