"""What a command shows: lines and tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.common.format import number as number
from paceline.common.format import seconds as seconds
from paceline.common.format import size as size
from paceline.sim.models import stands_for_note

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.record.result import Result


class Screen:
    """Where a command writes: to standard output; with ``--json`` to standard error instead."""

    def __init__(self, *, as_json: bool, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose

    @property
    def console(self) -> Console:
        """A console of rich, as wide as the terminal; where there is none, wide enough."""
        from rich.console import Console

        console = Console(stderr=self.as_json, highlight=False, soft_wrap=False)
        if not console.is_terminal:
            console.width = 120
        return console

    def say(self, text: str = "") -> None:
        """Say something on the way; not with ``--quiet``."""
        if not self.quiet:
            print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def show(self, text: str = "") -> None:
        """Show a piece of the outcome to people."""
        if not self.as_json:
            print(text, flush=True)

    def emit(self, outcome: Mapping[str, Any]) -> None:
        """Write the outcome as the last line, if a program asked for it."""
        if self.as_json:
            sys.stderr.flush()
            print(json.dumps(outcome), flush=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Show a table; where it is too wide, its rows one after the other."""
        if self.as_json:
            return
        from rich import box
        from rich.table import Table

        console, cells = self.console, list(rows)
        table = Table(box=box.SIMPLE_HEAD)
        for place, name in enumerate(columns):
            table.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in cells:
            table.add_row(*row)
        unlimited = console.options.update(max_width=1000)
        if console.measure(table, options=unlimited).maximum <= console.width:
            console.print(table)
        else:
            for row in cells:
                print(row[0])
                self.facts(dict(zip(columns[1:], row[1:], strict=True)))

    def facts(self, facts: Mapping[str, str]) -> None:
        """Show names and values below each other."""
        if not self.as_json:
            width = max(map(len, facts))
            for name, value in facts.items():
                print(f"  {name:<{width}}  {value}", flush=True)

    @contextmanager
    def watch(self, steps: int | None) -> Iterator[Watch]:
        """Show how a run gets on: a bar on a terminal, lines elsewhere."""
        if not self.quiet and self.console.is_terminal:
            with BarWatch(self, steps) as bar:
                yield bar
        else:
            yield Watch(self)

    @contextmanager
    def tally(self, total: int, what: str) -> Iterator[Callable[[str], None]]:
        """Show how many of some runs are done: call it with a line about each."""
        if self.quiet or not self.console.is_terminal:
            self.say(what)
            numbers = count(1)
            yield lambda line: self.say(f"[{next(numbers)}/{total}] {line}")
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(what, total=total)

            def tell(line: str) -> None:
                bar.console.print(line, markup=False, highlight=False)
                bar.advance(task)

            yield tell


class Watch:
    """Hears of a run while it goes on, and says a line for each record."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def metric(self, record: Mapping[str, Any]) -> None:
        """Hear a record of ``worker.log``."""
        if record["rank"] == 0 or self._screen.verbose:
            self._screen.say(line_of(record, with_rank=self._screen.verbose))

    def progress(self, record: Mapping[str, Any]) -> None:
        """Hear how far a worker is."""


class BarWatch(Watch):
    """A bar with rate, loss and time left."""

    def __init__(self, screen: Screen, steps: int | None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(screen)
        self._steps_planned, self._steps, self._share = steps, dict[int, int](), 0.0
        self._began_s = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(compact=True),
            console=screen.console,
            transient=True,
            expand=True,
        )
        self._numbers: dict[str, str] = {}

    def __enter__(self) -> BarWatch:
        self._bar.start()
        self._task = self._bar.add_task("", total=None, facts="starting")
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def metric(self, record: Mapping[str, Any]) -> None:
        for name in ("loss", "accuracy"):
            if record.get(name) is not None:
                self._numbers[name] = f"{name} {record[name]:.3f}"
        if self._screen.verbose:
            self._bar.console.print(line_of(record, with_rank=True))
        self._draw()

    def progress(self, record: Mapping[str, Any]) -> None:
        self._steps[record["rank"]] = record["steps"]
        self._share = max(self._share, record["progress"] or 0.0)
        if self._steps_planned:
            self._share = max(self._share, max(self._steps.values()) / self._steps_planned)
        self._draw()

    def _draw(self) -> None:
        rate = sum(self._steps.values()) / max(1e-9, time.monotonic() - self._began_s)
        facts = [f"{rate:.0f} steps/s", *self._numbers.values()]
        total = 1.0 if self._share else None
        self._bar.update(self._task, completed=self._share, total=total, facts="  ".join(facts))


def line_of(record: Mapping[str, Any], *, with_rank: bool) -> str:
    """A record of ``worker.log`` in one line."""
    shown = {k: v for k, v in record.items() if k not in ("t", "rank", "step", "samples")}
    parts = [f"rank {record['rank']}"] if with_rank else []
    parts += [f"{seconds(record['t'])}", f"step {record['step']}"]
    return "  ".join(parts + [f"{name} {number(value)}" for name, value in shown.items()])


class Replayed(NamedTuple):
    """How a replay compares with the run that was recorded."""

    path: str
    same: bool
    verdict: str


def show_result(
    screen: Screen, result: Result, task: str, place: str, replay: Replayed | None = None
) -> None:
    """Show what a run came to."""
    many = f"{result.workers} worker{'s' if result.workers != 1 else ''}"
    screen.say(f"{task}: {result.strategy}, {many}, {place}")
    facts = {"accuracy": number(result.accuracy), "loss": number(result.loss)}
    if result.virtual_seconds is not None:
        facts["virtual time"] = seconds(result.virtual_seconds)
    if result.as_model is not None:
        facts["as model"] = stands_for_note(result.as_model)
    facts["wall time"] = f"{seconds(result.seconds)} after {seconds(result.startup_seconds)}"
    facts["steps"] = f"{number(result.steps)} with {number(result.samples)} samples"
    facts["sent"] = size(result.bytes_sent)
    if result.wire_bytes is not None:
        facts["sent"] += f" ({size(result.wire_bytes)} on the links)"
    facts["waiting"] = f"{result.wait_share:.1%} of the time"
    if result.lost_workers:
        facts["lost workers"] = str(result.lost_workers)
    if result.lost_batches:
        facts["lost batches"] = str(result.lost_batches)
    if result.dropped_updates:
        facts["dropped updates"] = str(result.dropped_updates)
    if result.out is not None:
        facts["written to"] = result.out
    if replay is not None:
        facts["replay"] = replay.verdict
    screen.facts(facts)
    more = {} if replay is None else {"replay": replay.path, "same_parameters": replay.same}
    screen.emit({**result.to_json(), **more})
