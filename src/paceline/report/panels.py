"""Pictures of several small charts with one legend, as SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from paceline.lab.papers.full.claim import Panel
from paceline.report.svg import HEIGHT, SIZE, WIDTH, Axis, Plot, mark, style

COLUMNS, HEAD, ROW = 2, 26, 22
"""Charts beside each other; the height of a chart's title, and of a line of the legend."""


def picture(panels: Sequence[Panel], about: str) -> str:
    """The charts that have lines, as the text of an SVG file; screen readers read ``about``.

    A name has one style in all charts of a picture.
    """
    drawn = [panel for panel in panels if any(panel.lines.values())]
    names = list(dict.fromkeys(name for panel in drawn for name in panel.lines))
    rows = -(-len(drawn) // COLUMNS)
    width, height = COLUMNS * WIDTH, rows * (HEAD + HEIGHT) + ROW * len(names) + 8
    parts = [_placed(panel, number, names) for number, panel in enumerate(drawn)]
    legend_top = rows * (HEAD + HEIGHT)
    parts += [_legend(name, number, legend_top) for number, name in enumerate(names)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" role="img" aria-label="{escape(about)}" font-family="sans-serif"'
        f' font-size="{SIZE}"><rect width="{width}" height="{height}" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _placed(panel: Panel, number: int, names: Sequence[str]) -> str:
    """A chart at its place, with its title above it."""
    left, top = number % COLUMNS * WIDTH, number // COLUMNS * (HEAD + HEIGHT)
    chart = _plot(panel, names).render(panel.title)
    placed = chart.replace("<svg ", f'<svg y="{HEAD}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    title = f'<text x="8" y="{HEAD - 6}" font-weight="bold">{escape(panel.title)}</text>'
    return f'<g transform="translate({left} {top})">{title}{placed}</g>'


def _plot(panel: Panel, names: Sequence[str]) -> Plot:
    points = [point for line in panel.lines.values() for point in line]
    xs, ys = zip(*points, strict=True)
    plot = Plot(Axis.of(panel.x, 0.0, max(xs)), Axis.of(panel.y, min(ys), max(ys)))
    for name, line in panel.lines.items():
        if line:
            plot.line(line, style(names.index(name)), name)
    return plot


def _legend(name: str, number: int, top: int) -> str:
    how, y = style(number), top + ROW * number + ROW // 2
    dash = f' stroke-dasharray="{how.dash}"' if how.dash else ""
    return (
        f'<path d="M12 {y}H56" stroke="{how.color}" stroke-width="2"{dash}/>{mark(how, (34, y))}'
        f'<text x="66" y="{y + 4}">{escape(name)}</text>'
    )
