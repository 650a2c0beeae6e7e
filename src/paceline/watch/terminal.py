"""A run in a terminal: the same numbers as on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.common.date import time_of_day
from paceline.common.format import number, seconds, size

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
LAST_EVENTS = 5


def view(summary: dict[str, Any]) -> RenderableType:
    """All of a summary, for a rich console."""
    parts: list[RenderableType] = [_headline(summary)]
    if summary["progress"] is not None:
        bar = Table.grid(expand=True)
        bar.add_row(ProgressBar(total=1.0, completed=summary["progress"]))
        parts.append(bar)
    parts += [_facts(summary["totals"]), _workers(summary["workers"])]
    if summary["charts"]:
        parts.append(_charts(summary["charts"]))
    parts += [Text(event["text"]) for event in summary["events"][-LAST_EVENTS:]]
    return Group(*parts)


def _headline(summary: dict[str, Any]) -> Text:
    words = [summary["name"], summary["strategy"] or "", summary["state"], seconds(summary["t"])]
    if summary["progress"] is not None:
        words.append(f"{summary['progress']:.0%}")
    if summary["left_s"] is not None:
        left_s = summary["left_s"]
        words.append(f"{seconds(left_s)} left, until {time_of_day(left_s)}")
    return Text("  ".join(filter(None, words)), style="bold")


def _facts(totals: dict[str, Any]) -> Table:
    """The numbers of the whole run, in two lines that fit the width."""
    shown = {
        "loss": number(totals["loss"]),
        "accuracy": number(totals["accuracy"]),
        "samples/s": _rate(totals["rate"]),
        "waiting": _percent(totals["wait"]),
        "staleness": _rate(totals["staleness"]),
        "spread": _spread(totals["spread"]),
        "steps": number(totals["steps"]),
        "sent": size(totals["bytes"]),
    }
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in shown:
        table.add_column(name, justify="right")
    table.add_row(*shown.values())
    return table


def _workers(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("worker", "state", "steps", "samples/s", "waiting", "staleness", "sent", "loss"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for row in rows:
        table.add_row(
            str(row["rank"]),
            row["state"],
            number(row["steps"]),
            _rate(row["rate"]),
            _percent(row["wait"]),
            _rate(row["staleness"]),
            size(row["bytes"]),
            number(row["loss"]),
            style="red" if row["state"] == "lost" else None,
        )
    return table


def _charts(charts: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for chart in charts:
        values = [row[1] for row in chart["rows"]]
        table.add_row(chart["name"], sparkline(values), number(values[-1]))
    return table


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """A line of bars, as high as the values.

    >>> sparkline([0.0, 1.0, 2.0, 3.0])
    '▁▃▅█'
    """
    shown = [values[index * len(values) // width] for index in range(width)]
    shown = [*values] if len(values) <= width else shown
    low, span = min(shown), max(shown) - min(shown)
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1)) if span else 0] for v in shown)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _spread(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
