"""The page: charts, verdicts and tables in one HTML file."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.common.format import number, seconds, size
from paceline.common.reading import refuse_malformed
from paceline.errors import UsageError
from paceline.lab.stats import spread
from paceline.report.charts import (
    BYTES_SENT,
    EPOCHS,
    SAMPLES_TAKEN,
    SECONDS,
    TIME,
    VIRTUAL_TIME,
    ByWorkers,
    Chart,
    Styles,
    ages,
    by_workers,
    curves,
    measure_of,
    splits,
)
from paceline.report.material import Material, Run, Setting, read_material, rule
from paceline.report.methods import describe
from paceline.report.svg import sample, style
from paceline.report.verdict import MethodTimes, headline, standings, verdict
from paceline.strategies import strategy_names

if TYPE_CHECKING:
    from jinja2 import Template

MAX_BYTES = 2_000_000
REPORT = "report.html"
_DETAIL = ((120, 32), (40, 16), (12, 8), (6, 4), (0, 0))
"""The most points in a line and bars in a chart. If the page is too large, the next pair is tried;
the last one draws no charts of single settings."""


def write_report(
    folders: Sequence[Path], *, target: float | None = None, out: Path | None = None
) -> Path:
    """Write the report of a comparison or of runs; returns its path."""
    material = read_material(folders, target)
    path = folders[0] / REPORT if out is None else out
    with refuse_malformed(rule(folders)):
        text = render(material)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"out ({path}) must be a writable file: {error.strerror}") from None
    return path


def render(material: Material) -> str:
    """The page as text, of at most 2 MB."""
    template = load_template()
    for detail in _DETAIL:
        text = template.render(**_content(material, *detail))
        if len(text.encode()) <= MAX_BYTES:
            return text
    raise UsageError(f"runs ({len(material.runs)}) must be fewer: their report would be over 2 MB")


def load_template() -> Template:
    """The template of the page; refuses to continue without jinja2."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise UsageError('the report needs jinja2: pip install "paceline[report]"') from None
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["no_break"] = no_break
    return environment.from_string(files("paceline.report").joinpath("page.html").read_text())


def no_break(text: str) -> str:
    """Put no-break spaces between numbers and their units.

    >>> no_break("after 1.5 s, 90 % of 3 MB in 4 runs").count("\\u00a0")
    3
    """
    return re.sub(r"(?<=\d) (?=(?:ms|s|min|h|[KMGT]?B|%)(?:\W|$))", "\u00a0", text)


# Content -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChartGroup:
    """Charts that belong together, under one heading."""

    title: str
    charts: Sequence[Chart]


def _content(material: Material, points: int, bars: int) -> dict[str, Any]:
    styles = {method: style(number) for number, method in enumerate(material.methods)}
    verdicts = [verdict(material, setting) for setting in material.settings]
    virtual = [run.virtual for run in material.runs]
    drawn = material.settings if points else []
    return {
        "material": material,
        "headline": headline(verdicts),
        "verdicts": verdicts,
        "world": "simulated" if all(virtual) else "mixed" if any(virtual) else "real",
        "boards": [_board(material, setting) for setting in material.settings],
        "legend": [(method, sample(styles[method]), _about(method)) for method in styles],
        "measure": measure_of(material),
        "drawn": bool(drawn),
        "curves": _filled(
            ChartGroup(title=str(s), charts=_curves(material, s, styles, points)) for s in drawn
        ),
        "by_workers": _by_workers(material, styles),
        "splits": _filled(
            ChartGroup(title=str(s), charts=[*splits(material, s, bars)]) for s in drawn
        ),
        "ages": _filled(
            ChartGroup(title=str(s), charts=[*ages(material, s, styles, bars)]) for s in drawn
        ),
        "fresh": _never_stale(material),
        "consensus": _consensus(material, styles),
        "columns": _COLUMNS,
        "rows": [_row(material, s, m) for s in material.settings for m in material.methods],
        "systems": _systems(material),
        "rates": _rates(material),
        "facts": _facts(material),
        "runs": [_run_cells(run) for run in material.runs],
    }


def _filled(groups: Iterable[ChartGroup]) -> list[ChartGroup]:
    return [group for group in groups if group.charts]


def _about(method: str) -> str:
    """The summary of a registered method; empty for others."""
    name = method.partition("(")[0]
    return str(describe(name)["summary"]) if name in strategy_names() else ""


def _curves(material: Material, setting: Setting, styles: Styles, points: int) -> list[Chart]:
    runs = [run for run in material.runs if run.setting == setting]
    clock = VIRTUAL_TIME if any(run.virtual for run in runs) else TIME
    known = all(run.result is None or run.result.epoch_samples for run in runs)
    found = [
        curves(material, setting, across, styles, points)
        for across in (clock, EPOCHS if known else SAMPLES_TAKEN, BYTES_SENT)
    ]
    return [chart for chart in found if chart is not None]


def _by_workers(material: Material, styles: Styles) -> list[Chart]:
    """The time to the target by number of workers, one chart per system; none for one number."""
    target, systems = material.target, [setting.system for setting in material.settings]
    if target is None or len(systems) == len(set(systems)):
        return []
    table = {
        (setting, standing.method): standing.reached
        for setting in material.settings
        for standing in standings(material, setting)
        if standing.always
    }
    what = ByWorkers(f"time to accuracy {target:g}", SECONDS, lambda s, m: table.get((s, m), ()))
    return _for_each_system(material, what, styles)


def _consensus(material: Material, styles: Styles) -> list[Chart]:
    def values(setting: Setting, method: str) -> list[float]:
        results = material.results(setting, method)
        return [r.consensus_distance for r in results if r.consensus_distance is not None]

    what = ByWorkers("distance from the mean model", ((1.0, "%"),), values, factor=100.0)
    return _for_each_system(material, what, styles)


def _for_each_system(material: Material, what: ByWorkers, styles: Styles) -> list[Chart]:
    systems = dict.fromkeys(setting.system for setting in material.settings)
    found = [by_workers(material, system, what, styles) for system in systems]
    return [chart for chart in found if chart is not None]


def _never_stale(material: Material) -> list[str]:
    """The methods whose staleness is always 0."""
    oldest: dict[str, float] = {}
    for run in material.runs:
        if run.result is not None and (most := run.result.staleness_max) is not None:
            oldest[run.strategy] = max(most, oldest.get(run.strategy, 0))
    return [method for method in material.methods if oldest.get(method) == 0]


# The board: times as bars ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The methods of a setting, ordered by time, each with a bar."""

    title: str
    rows: Sequence[Mapping[str, Any]]


def _board(material: Material, setting: Setting) -> Ranking:
    ranked = standings(material, setting)
    longest = max((s.spread.mean for s in ranked if s.always), default=1.0)
    rows = [
        {
            "method": standing.method,
            "share": round(100 * standing.spread.mean / longest, 1) if standing.always else None,
            "text": _time_text(standing),
        }
        for standing in ranked
    ]
    return Ranking(title=str(setting), rows=rows)


def _time_text(standing: MethodTimes) -> str:
    if standing.errors:
        return "failed"
    if not standing.always:
        return f"not reached{_of(standing)}"
    return _ranged(standing.reached, seconds)


def _of(standing: MethodTimes) -> str:
    runs, missed = len(standing.times), len(standing.times) - len(standing.reached)
    return f" in {missed} of {runs} runs" if runs > 1 else ""


# The table ---------------------------------------------------------------------------------------

_COLUMNS = (
    "method",
    "workers",
    "system",
    "runs",
    "accuracy",
    "time to target",
    "bytes to target",
    "total time",
    "waiting",
    "bytes sent",
    "staleness",
    "consensus distance",
)


def _row(material: Material, setting: Setting, method: str) -> list[str]:
    """The means of a method in a setting, with their ranges over seeds."""
    results, target = material.results(setting, method), material.target
    standing = next((s for s in standings(material, setting) if s.method == method), None)
    to_target = [None if target is None else r.bytes_to(target) for r in results]
    total = [r.seconds if r.virtual_seconds is None else r.virtual_seconds for r in results]
    return [
        method,
        str(setting.workers),
        setting.system,
        str(len(results)),
        _ranged([r.accuracy for r in results], lambda v: f"{v:.3f}"),
        "-" if standing is None or target is None else _time_text(standing),
        _ranged(to_target, size),
        _ranged(total, seconds),
        _ranged([r.wait_share for r in results], lambda v: f"{v:.0%}"),
        _ranged([r.bytes_sent for r in results], size),
        _ranged([r.staleness_mean for r in results], lambda v: f"{v:.1f}"),
        _ranged([r.consensus_distance for r in results], lambda v: f"{v:.2%}"),
    ]


def _ranged(values: Sequence[float | None], show: Any) -> str:
    """A mean and its range; ``-`` if a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "-"
    mean, low, high = (show(value) for value in (spread(known).mean, min(known), max(known)))
    return f"{mean}" if low == high else f"{mean} ({low} to {high})"


# Provenance --------------------------------------------------------------------------------------


def _facts(material: Material) -> list[tuple[str, str]]:
    """The command, the task and the versions."""
    arguments = [_listed(run.config.get("arguments") or {}) for run in material.runs]
    versions = [dict(run.made["versions"]) for run in material.runs]
    return [
        ("command", material.command or "paceline report"),
        ("made", material.made_at or "by several commands"),
        ("task", material.task),
        ("arguments", _distinct(text or "none (defaults of the task)" for text in arguments)),
        ("seeds", ", ".join(map(str, material.seeds))),
        ("versions", _distinct(_listed(text) for text in versions)),
        ("platform", _distinct(str(run.made["platform"]) for run in material.runs)),
        ("git revision", _distinct(run.made["git_revision"] or "unknown" for run in material.runs)),
        ("report by", f"Python {platform.python_version()}"),
    ]


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _systems(material: Material) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Each system with its description and its numbers."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for run in material.runs:
        cluster = dict(run.config.get("cluster") or {})
        about = str(cluster.pop("about", "")) or "real processes on one machine"
        cluster.pop("name", None)
        found.setdefault(run.setting.system, (about, [*_flatten(cluster)]))
    return [(system, about, numbers) for system, (about, numbers) in found.items()]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested values under dotted names; empty values are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif value not in (None, "", [], {}, ()):
            large = isinstance(value, float) and value >= 10_000
            shown = f"{value:,.0f}" if large else json.dumps(value)
            yield f"{prefix}{name}", value if isinstance(value, str) else shown


def _rates(material: Material) -> list[list[str]]:
    """The learning rate and batch of each method in each setting, and its options."""
    rows = []
    for setting in material.settings:
        for method in material.methods:
            results = material.results(setting, method)
            runs = material.of(setting, method)
            if results:
                lrs = _distinct(number(r.lr) if r.lr is None else f"{r.lr:.4g}" for r in results)
                batches = _distinct(number(r.batch_size or None) for r in results)
                rows.append([method, str(setting), lrs, batches, _options(runs[0])])
    return rows


def _options(run: Run) -> str:
    """All options of the method."""
    packed = run.config["strategy"]
    if isinstance(packed, Mapping):
        return _listed(packed["fields"]) or "none"
    inside = re.sub(r"^\w+\((.*)\)$", r"\1", str(packed))
    return inside.replace("=", " ") or "none"


def _run_cells(run: Run) -> list[str]:
    outcome = run.result.trace_hash if run.result else run.error
    return [
        run.strategy,
        str(run.setting),
        str(run.seed),
        (outcome or "-").partition("\n")[0][:80],
    ]
