"""The charts of a report: each is a picture with a description and a table of its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.common.format import number
from paceline.lab.stats import Spread, spread
from paceline.report.material import Material, Setting
from paceline.report.svg import Axis, Plot, Point, Style

if TYPE_CHECKING:
    from paceline.record.result import Result

T = TypeVar("T")
Styles = Mapping[str, Style]
Row = Sequence[str]
KINDS = {"compute": "#7fb2d9", "wait": "url(#hatch)", "io": "#1f1f1f"}
"""How a worker spends its time, and the fill of each kind."""
MOST_ROWS = 12
_LINEAR_UP_TO = 15.0


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture with a caption, and a table of the same numbers."""

    caption: str
    svg: str
    columns: Row
    rows: Sequence[Row]


@dataclass(frozen=True)
class Unit:
    """A unit for numbers of some size."""

    scale: float
    name: str

    @classmethod
    def of(cls, largest: float, units: Sequence[tuple[float, str]]) -> Unit:
        """The largest unit that is at most ``largest``, or the smallest unit."""
        fitting = (unit for unit in units if largest >= unit[0])
        return cls(*next(fitting, units[-1]))


SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "B"))
SAMPLES = ((1e6, "million samples"), (1e3, "thousand samples"), (1.0, "samples"))
ONE = ((1.0, ""),)


# Against time, epochs and bytes ------------------------------------------------------------------


@dataclass(frozen=True)
class Across:
    """The x axis of a curve: its title, its units, and the x value of a record."""

    title: str
    units: Sequence[tuple[float, str]]
    x_of: Callable[[Result, Mapping[str, Any]], float | None]


TIME = Across("time", SECONDS, lambda result, record: record["t"] - result.first_step_s)
VIRTUAL_TIME = Across("virtual time", SECONDS, TIME.x_of)
BYTES_SENT = Across("bytes sent", BYTES, lambda result, record: record.get("all_bytes"))
EPOCHS = Across(
    "epochs",
    ONE,
    lambda result, record: _divide(record.get("all_samples"), result.epoch_samples),
)
SAMPLES_TAKEN = Across("", SAMPLES, lambda result, record: record.get("all_samples"))


def _divide(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def measure_of(material: Material) -> str:
    """What curves show: the accuracy if any run logged it, otherwise the loss."""
    logged = {name for run in material.runs if run.result for m in run.result.metrics for name in m}
    return "accuracy" if "accuracy" in logged else "loss"


@dataclass(frozen=True)
class Curve:
    """The mean over seeds at each evaluation, and the lowest and highest value."""

    middle: list[Point]
    low: list[Point]
    high: list[Point]


def curves(
    material: Material, setting: Setting, across: Across, styles: Styles, most: int
) -> Chart | None:
    """The accuracy of every method against ``across``; None if no run has values for it."""
    measure = measure_of(material)
    found = {
        method: curve
        for method in material.methods
        if (curve := _curve(material.results(setting, method), across, measure, most))
    }
    if not found:
        return None
    points = [p for curve in found.values() for p in (*curve.low, *curve.high)]
    unit = Unit.of(max(x for x, _ in points), across.units)
    title = _with_unit(across.title, unit)
    levels = [material.target] if material.target is not None and measure == "accuracy" else []
    low, high = _bounds([*levels, *(y for _, y in points)])
    if levels:
        low = max(low, _lowest(found, levels[0]))
    x_axis = Axis.of(title, 0.0, max(x for x, _ in points) / unit.scale * 1.03)
    plot = Plot(x_axis, Axis.of(measure, low, high))
    for level in levels:
        plot.level(level)
    seen = {method: [*_visible_parts(curve, low)] for method, curve in found.items()}
    for method, pieces in seen.items():
        for piece in pieces:
            if piece.low != piece.high:
                plot.band(_scaled(piece.low, unit), _scaled(piece.high, unit), styles[method])
    for method, pieces in seen.items():
        for piece in pieces:
            plot.line(_scaled(piece.middle, unit), styles[method], method)
    caption = f"{measure.capitalize()} against {across.title or 'samples'}"
    rows = [
        (method, number(round(x / unit.scale, 4)), number(y))
        for method, curve in found.items()
        for x, y in _thinned(curve.middle, MOST_ROWS)
    ]
    described = f"{caption}, {setting}: {_last_values(found, measure)}"
    return Chart(
        caption=caption, svg=plot.render(described), columns=("method", title, measure), rows=rows
    )


def _curve(results: Sequence[Result], across: Across, measure: str, most: int) -> Curve | None:
    runs = [points for result in results if (points := _points(result, across, measure))]
    if not runs:
        return None
    together = [[run[i] for run in runs] for i in range(min(map(len, runs)))]
    together = _thinned(together, most)
    xs = [fmean(x for x, _ in points) for points in together]
    ys = [[y for _, y in points] for points in together]
    return Curve(
        [*zip(xs, map(fmean, ys), strict=True)],
        [*zip(xs, map(min, ys), strict=True)],
        [*zip(xs, map(max, ys), strict=True)],
    )


def _points(result: Result, across: Across, measure: str) -> list[Point]:
    """The records of the first rank that logged the measure, as points."""
    records = [m for m in result.metrics if m.get(measure) is not None]
    own = [m for m in records if m["rank"] == records[0]["rank"]]
    points = [(across.x_of(result, m), float(m[measure])) for m in own]
    return [(x, y) for x, y in points if x is not None]


def _last_values(found: Mapping[str, Curve], measure: str) -> str:
    ends = [f"{method} {number(curve.middle[-1][1])}" for method, curve in found.items()]
    return f"last {measure} {', '.join(ends)}"


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Round numbers below and above all values."""
    low, high = min(values), max(values)
    step = 0.05 if high - low <= 1 else (high - low) / 10
    return step * (low // step), step * -(-high // step) or step


def _lowest(found: Mapping[str, Curve], target: float) -> float:
    """The lowest value to draw: well below the target, and below the best of every method."""
    worst = min(max(y for _, y in curve.middle) for curve in found.values())
    return 0.05 * math.floor(20 * min(target - 0.25, worst - 0.05))


def _visible_parts(curve: Curve, low: float) -> Iterator[Curve]:
    """The parts of a curve that are not below ``low``."""
    visible = [i for i, (_, y) in enumerate(curve.middle) if y >= low]
    for _, group in groupby(enumerate(visible), key=lambda pair: pair[1] - pair[0]):
        piece = [i for _, i in group]
        part = slice(piece[0], piece[-1] + 1)
        yield Curve(curve.middle[part], curve.low[part], curve.high[part])


def _with_unit(title: str, unit: Unit) -> str:
    return f"{title} ({unit.name})" if title and unit.name else title or unit.name


def _scaled(points: Sequence[Point], unit: Unit) -> list[Point]:
    return [(x / unit.scale, y) for x, y in points]


def _thinned(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the items, evenly spaced, including the first and the last.

    >>> _thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# By the number of workers ------------------------------------------------------------------------


@dataclass(frozen=True)
class ByWorkers:
    """A quantity of each method for each number of workers."""

    title: str
    units: Sequence[tuple[float, str]]
    values: Callable[[Setting, str], Sequence[float]]
    factor: float = 1.0


def by_workers(material: Material, system: str, what: ByWorkers, styles: Styles) -> Chart | None:
    """A quantity of each method against the number of workers, with a 90 % band over seeds."""
    settings = [setting for setting in material.settings if setting.system == system]
    found: dict[str, dict[int, Spread]] = {}
    for method in material.methods:
        for x, setting in enumerate(settings):
            values = [value * what.factor for value in what.values(setting, method)]
            if values:
                found.setdefault(method, {})[x] = spread(values)
    if not found:
        return None
    unit = Unit.of(max(s.mean for spreads in found.values() for s in spreads.values()), what.units)
    plot = Plot(_counts(settings), _heights(found, unit, what.title))
    _draw(plot, found, unit, styles)
    title = _with_unit(what.title, unit)
    rows = [
        (method, str(settings[x].workers), _number_with_interval(s, unit))
        for method, spreads in found.items()
        for x, s in spreads.items()
    ]
    caption = f"{what.title.capitalize()} by number of workers, {system}"
    described = f"{caption} ({unit.name}): " + "; ".join(
        f"{method} with {workers} workers {value}" for method, workers, value in rows
    )
    return Chart(
        caption=caption,
        svg=plot.render(described),
        columns=("method", "workers", title),
        rows=rows,
    )


def _counts(settings: Sequence[Setting]) -> Axis:
    marks = [(float(x), str(setting.workers)) for x, setting in enumerate(settings)]
    return Axis("workers", -0.5, len(settings) - 0.5, marks)


def _heights(found: Mapping[str, Mapping[int, Spread]], unit: Unit, title: str) -> Axis:
    """An axis from 0, or a logarithmic one if the values differ too much."""
    means = [s.mean / unit.scale for spreads in found.values() for s in spreads.values()]
    highs = [s.high / unit.scale for spreads in found.values() for s in spreads.values()]
    top = max(*means, min(max(highs), 1.6 * max(means))) or 1.0
    if min(means) > 0 and max(means) / min(means) > _LINEAR_UP_TO:
        return Axis.of(
            f"{_with_unit(title, unit)}, log scale", min(means) / 1.5, top * 1.2, log=True
        )
    return Axis.of(_with_unit(title, unit), 0.0, top * 1.05)


def _draw(
    plot: Plot, found: Mapping[str, Mapping[int, Spread]], unit: Unit, styles: Styles
) -> None:
    """Draw the methods shifted against each other, so that none hides another."""
    gap = 0.3 / max(1, len(found))
    for index, (method, spreads) in enumerate(found.items()):
        shift = (index - (len(found) - 1) / 2) * gap
        xs = {x: x + shift for x in spreads}
        middle = [(xs[x], s.mean / unit.scale) for x, s in spreads.items()]
        low = [(xs[x], s.low / unit.scale) for x, s in spreads.items()]
        high = [(xs[x], s.high / unit.scale) for x, s in spreads.items()]
        if low != high:
            plot.band(low, high, styles[method])
            for (x, bottom), (_, top) in zip(low, high, strict=True):
                plot.whisker(x, bottom, top, styles[method])
        plot.line(middle, styles[method], method)


def _number_with_interval(spread: Spread, unit: Unit) -> str:
    mean = number(round(spread.mean / unit.scale, 4))
    if spread.seeds == 1:
        return mean
    low, high = (number(round(v / unit.scale, 4)) for v in (spread.low, spread.high))
    return f"{mean} ({low} to {high})"


# How each worker spent its time ------------------------------------------------------------------


def splits(material: Material, setting: Setting, most: int) -> Iterator[Chart]:
    """For each method, a bar for each worker: compute, waiting, data; at most ``most`` bars."""
    found = {
        method: split
        for method in material.methods
        if (split := _split(material.results(setting, method)))
    }
    longest = max((sum(bar.values()) for split in found.values() for bar in split), default=0.0)
    unit = Unit.of(longest, SECONDS)
    for method, split in found.items():
        yield _split_chart(method, setting, split, _grouped(split, most), longest, unit)


Split = Sequence[Mapping[str, float]]
"""The seconds of each worker by kind."""
Groups = Sequence[tuple[str, Mapping[str, float]]]


def _split(results: Sequence[Result]) -> Split:
    """The seconds of each worker, as a mean over seeds."""
    known = [result.worker_seconds for result in results if result.worker_seconds]
    workers = min(map(len, known), default=0)
    return [
        {kind: fmean(run[rank][kind] for run in known) for kind in KINDS} for rank in range(workers)
    ]


def _split_chart(
    method: str, setting: Setting, split: Split, groups: Groups, longest: float, unit: Unit
) -> Chart:
    marks = [(index + 0.5, label) for index, (label, _) in enumerate(groups)]
    plot = Plot(
        Axis("worker", 0.0, float(len(groups)), marks[:: -(-len(marks) // 16)]),
        Axis.of(_with_unit("time", unit), 0.0, longest / unit.scale * 1.02),
    )
    tops = [0.0] * len(groups)
    for kind, fill in KINDS.items():
        highs = [low + bar[kind] / unit.scale for low, (_, bar) in zip(tops, groups, strict=True)]
        plot.bars([*zip(tops, highs, strict=True)], fill)
        tops = highs
    share = {kind: _share(split, kind) for kind in KINDS}
    caption = f"{method}: {share['wait']:.0%} waiting"
    described = (
        f"How each worker of {method} spent its time, {setting}: compute"
        f" {share['compute']:.0%}, waiting {share['wait']:.0%}, data {share['io']:.0%}"
    )
    rows = [
        (label, *(number(round(bar[kind] / unit.scale, 4)) for kind in KINDS))
        for label, bar in groups
    ]
    columns = ("worker", *(f"{kind} ({unit.name})" for kind in ("compute", "waiting", "data")))
    return Chart(caption=caption, svg=plot.render(described), columns=columns, rows=rows)


def _share(split: Split, kind: str) -> float:
    total = sum(sum(bar.values()) for bar in split)
    return sum(bar[kind] for bar in split) / total if total else 0.0


def _grouped(split: Split, most: int) -> Groups:
    """One bar per worker; if there are too many, means over neighboring workers."""
    size = -(-len(split) // most)
    groups: list[tuple[str, Mapping[str, float]]] = []
    for first in range(0, len(split), size):
        part = split[first : first + size]
        last = first + len(part) - 1
        label = str(first) if size == 1 else f"{first}-{last}"
        groups.append((label, {kind: fmean(bar[kind] for bar in part) for kind in KINDS}))
    return groups


# Staleness ---------------------------------------------------------------------------------------


def ages(material: Material, setting: Setting, styles: Styles, most: int) -> Iterator[Chart]:
    """For each method with staleness, a histogram of it in at most ``most`` bars."""
    for method in material.methods:
        counts: dict[int, int] = {}
        for result in material.results(setting, method):
            for age, count in result.staleness_counts:
                counts[age] = counts.get(age, 0) + count
        if max(counts, default=0):
            yield _histogram(method, setting, counts, styles[method], most)


def _histogram(
    method: str, setting: Setting, counts: Mapping[int, int], style: Style, most: int
) -> Chart:
    size = -(-(max(counts) + 1) // most)
    bins = [0.0] * (max(counts) // size + 1)
    for age, count in counts.items():
        bins[age // size] += 100 * count / sum(counts.values())
    labels = [
        str(i * size) if size == 1 else f"{i * size}-{(i + 1) * size - 1}" for i in range(len(bins))
    ]
    marks = [(index + 0.5, label) for index, label in enumerate(labels)]
    plot = Plot(
        Axis("staleness", 0.0, max(4.0, float(len(bins))), marks[:: -(-len(marks) // 14)]),
        Axis.of("share of all updates (%)", 0.0, max(bins) * 1.05),
    )
    plot.bars([(0.0, height) for height in bins], style.color)
    total = sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / total
    return Chart(
        caption=f"{method}: staleness {mean:.1f} on average, {max(counts)} at most",
        svg=plot.render(
            f"Staleness of {method}, {setting}: {mean:.1f} on average, {max(counts)} at"
            f" most, over {total:,} updates"
        ),
        columns=("staleness", "share (%)"),
        rows=[(label, f"{height:.2f}") for label, height in zip(labels, bins, strict=True)],
    )
