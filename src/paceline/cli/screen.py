"""The output of commands: lines and tables for people, one JSON object for programs."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.common.format import number as number
from paceline.common.format import seconds as seconds
from paceline.common.format import size as size
from paceline.sim.models import stands_for_note

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.record.result import Result


_MAX_WIDTH = 100


class Screen:
    """Writes for people to standard output, or with ``--json`` to standard error."""

    def __init__(self, *, as_json: bool, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose

    @property
    def console(self) -> Console:
        """A rich console, as wide as the terminal or ``COLUMNS``; else of 120 columns."""
        from rich.console import Console

        console = Console(stderr=self.as_json, highlight=False, soft_wrap=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = 120
        return console

    def say(self, text: str = "") -> None:
        """Show progress; nothing with ``--quiet``."""
        if not self.quiet:
            print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def tell(self, text: str) -> None:
        """Tell people what they need at once, also with ``--quiet``."""
        print(text, file=sys.stderr if self.as_json else sys.stdout, flush=True)

    @property
    def is_watched(self) -> bool:
        """Whether a person looks at a terminal, not a program at the output."""
        return not self.as_json and not self.quiet and self.console.is_terminal

    def show(self, text: str = "") -> None:
        """Show a part of the outcome to people."""
        if not self.as_json:
            print(text, flush=True)

    def wrap(self, text: str, head: str = "") -> str:
        """A text in lines that fit the screen, after ``head`` and indented by its length."""
        width, indent = min(self.console.width, _MAX_WIDTH), " " * len(head)
        return textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent)

    def emit(self, outcome: Mapping[str, Any]) -> None:
        """Print the outcome as the last line, with ``--json``."""
        if self.as_json:
            sys.stderr.flush()
            print(json.dumps(outcome), flush=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        brief: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Show a table of ``rows``; if they are too wide, of ``brief`` ones.

        If these are too wide as well, each row is shown as a list.
        """
        if self.as_json:
            return
        console, brief = self.console, rows if brief is None else brief
        unlimited = console.options.update(max_width=1000)
        for table in (_table(columns, rows), _compact(columns, rows), _compact(columns, brief)):
            if console.measure(table, options=unlimited).maximum <= console.width:
                console.print(table)
                return
        for row in rows:
            print(row[0])
            self.facts(dict(zip(columns[1:], row[1:], strict=True)))

    def facts(self, facts: Mapping[str, str]) -> None:
        """Show names and values, one pair per line."""
        if not self.as_json:
            width = max(map(len, facts))
            for name, value in facts.items():
                print(f"  {name:<{width}}  {value}", flush=True)

    @contextmanager
    def watch(self, steps: int | None) -> Iterator[LineView]:
        """Show the progress of a run: a bar on a terminal, lines elsewhere."""
        if not self.quiet and self.console.is_terminal:
            with BarView(self, steps) as bar:
                yield bar
        else:
            yield LineView(self)

    @contextmanager
    def tally(self, total: int, what: str) -> Iterator[Callable[[str], None]]:
        """Show how many runs are done; call the result with a line about each."""
        self.say(what)
        if self.quiet or not self.console.is_terminal:
            numbers = count(1)
            yield lambda line: self.say(f"[{next(numbers)}/{total}] {line}")
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("", total=total)

            def report(line: str) -> None:
                bar.console.print(line, markup=False, highlight=False)
                bar.advance(task)

            yield report


def _compact(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with little space between its columns, and headings no wider than their cells."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)] or [1] * len(columns)
    headings = [
        "\n".join(textwrap.wrap(name, max(width, 1), break_long_words=False))
        for name, width in zip(columns, widths, strict=True)
    ]
    return _table(headings, rows, compact=True)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], compact: bool = False) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=not compact,
        pad_edge=not compact,
        collapse_padding=compact,
    )
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


class LineView:
    """Shows a line for each record that a run logs."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def metric(self, record: Mapping[str, Any]) -> None:
        """Show a record of ``worker.log``."""
        if record["rank"] == 0 or self._screen.verbose:
            self._screen.say(line_of(record, with_rank=self._screen.verbose))

    def progress(self, record: Mapping[str, Any]) -> None:
        """Show the progress of a worker."""


class BarView(LineView):
    """Shows a bar with rate, loss and remaining time."""

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

    def __enter__(self) -> BarView:
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
    """One line about a record of ``worker.log``."""
    shown = {k: v for k, v in record.items() if k not in ("t", "rank", "step", "samples")}
    parts = [f"rank {record['rank']}"] if with_rank else []
    parts += [f"{seconds(record['t'])}", f"step {record['step']}"]
    return "  ".join(parts + [f"{name} {number(value)}" for name, value in shown.items()])


class Replayed(NamedTuple):
    """How a replay compares with the recorded run."""

    path: str
    same: bool
    verdict: str


def _together(facts: Mapping[str, Any]) -> str:
    """How the gradients of a simulation were computed."""
    if facts["mean"] is None:
        return "one at a time"
    return f"{facts['share']:.1%} together with others, {facts['mean']:.3g} at a time"


def show_result(
    screen: Screen, result: Result, task: str, where: str, replay: Replayed | None = None
) -> None:
    """Show the result of a run."""
    workers = f"{result.workers} worker{'s' if result.workers != 1 else ''}"
    screen.say(f"{task}: {result.strategy}, {workers}, {where}")
    facts = {"accuracy": number(result.accuracy), "loss": number(result.loss)}
    if result.virtual_seconds is not None:
        facts["virtual time"] = seconds(result.virtual_seconds)
    if result.as_model is not None:
        facts["as model"] = stands_for_note(result.as_model)
    facts["wall time"] = (
        f"{seconds(result.seconds)}, after {seconds(result.startup_seconds)} to start"
    )
    facts["steps"] = f"{number(result.steps)} on {number(result.samples)} samples"
    if result.batched is not None:
        facts["gradients"] = _together(result.batched)
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
