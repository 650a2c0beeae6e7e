"""``paceline timeline``: write the traces of runs for Perfetto, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.cli.screen import Screen, number, seconds
from paceline.common.reading import refuse_malformed
from paceline.errors import UsageError
from paceline.record.folder import TIMELINE
from paceline.report.timeline.chrome import ChromeTrace, open_text
from paceline.report.timeline.items import KINDS, NAMES
from paceline.report.timeline.picture import Picture
from paceline.report.timeline.traced import Tally, TracedRun, names_of, rule


def show_timeline(
    screen: Screen,
    folders: Sequence[Path],
    out: Path | None,
    svg: Path | None,
    from_s: float | None,
    to_s: float | None,
) -> None:
    """Write the timeline of runs, and show how their ranks spent their time."""
    runs = [TracedRun(folder) for folder in folders]
    shown = _window(runs, from_s, to_s)
    path = out or folders[0] / TIMELINE
    tallies = [Tally(run) for run in runs]
    with refuse_malformed(rule(folders)):
        with _writing("out", path):
            events = _write_trace(path, runs, tallies, from_s, to_s)
        if svg is not None:
            with _writing("svg", svg):
                _draw(svg, runs, *shown)
    _show(screen, runs, tallies, {"path": str(path), "svg": svg and str(svg), "events": events})


def _window(
    runs: Sequence[TracedRun], from_s: float | None, to_s: float | None
) -> tuple[float, float]:
    """The time that a picture shows: from the first step to the last, within the options."""
    first_s, last_s = min(run.begin_s for run in runs), max(run.end_s for run in runs)
    if from_s is not None and to_s is not None and not from_s < to_s:
        raise UsageError(f"--from ({from_s} s) must be before --to ({to_s} s)")
    if from_s is not None and not from_s < last_s:
        raise UsageError(
            f"--from ({from_s} s) must be before the last step of the runs, at {last_s:g} s"
        )
    if to_s is not None and not to_s > first_s:
        raise UsageError(
            f"--to ({to_s} s) must be after the first step of the runs, at {first_s:g} s"
        )
    low_s = first_s if from_s is None else max(from_s, first_s)
    return low_s, last_s if to_s is None else min(to_s, last_s)


@contextmanager
def _writing(name: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{name} ({path}) must be a writable file: {error.strerror}") from None


def _write_trace(
    path: Path,
    runs: Sequence[TracedRun],
    tallies: Sequence[Tally],
    from_s: float | None,
    to_s: float | None,
) -> int:
    """Write the trace events and tally the time; return the number of events."""
    low_s = -math.inf if from_s is None else from_s
    high_s = math.inf if to_s is None else to_s
    with open_text(path) as file:
        trace = ChromeTrace(file, runs, low_s)
        for run, tally in zip(runs, tallies, strict=True):
            for item in run.items(low_s, high_s):
                trace.add(run, item)
                tally.add(item)
        trace.close()
    return trace.events


def _draw(path: Path, runs: Sequence[TracedRun], from_s: float, to_s: float) -> None:
    picture = Picture(runs, from_s, to_s)
    for run in runs:
        for item in run.items(from_s, to_s):
            picture.add(run, item)
    path.write_text(picture.svg(), encoding="utf-8")


def _show(
    screen: Screen, runs: Sequence[TracedRun], tallies: Sequence[Tally], files: dict[str, Any]
) -> None:
    rows, table = [], []
    for run, name, tally in zip(runs, names_of(runs), tallies, strict=True):
        for rank, spent in tally.seconds.items():
            where = {"run": str(run.path), "rank": rank, "worker": run.times[rank].is_worker}
            rows.append({**where, "seconds": spent})
            table.append([f"{name} {run.label(rank)}", *(seconds(spent[kind]) for kind in KINDS)])
    screen.table(["", *NAMES.values()], table)
    screen.facts(
        {
            "timeline": files["path"],
            "events": f"{number(files['events'])}; open the file in Perfetto (ui.perfetto.dev)",
        }
    )
    if files["svg"]:
        screen.facts({"picture": files["svg"]})
    screen.emit({**files, "rows": rows})
