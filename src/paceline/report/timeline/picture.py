"""A timeline as a picture: a bar for each rank, and all runs on the same time scale."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape

from paceline.report.timeline.items import (
    APPLY,
    COMPUTE,
    IO,
    KINDS,
    NAMES,
    RECEIVE,
    SEND,
    WAIT,
    Arrow,
    Item,
    Step,
    Stretch,
)
from paceline.report.timeline.traced import TracedRun, names_of

COLORS = {
    COMPUTE: "#0072b2",
    WAIT: "#e69f00",
    SEND: "#cc79a7",
    RECEIVE: "#56b4e9",
    APPLY: "#009e73",
    IO: "#f0e442",
}
"""The palette of Okabe and Ito, which color-blind people can distinguish."""
MEANINGS = {
    COMPUTE: "compute",
    WAIT: "wait for others",
    SEND: "send",
    RECEIVE: "receive",
    APPLY: "apply",
    IO: "I/O",
}
WIDTH, LEFT, RIGHT = 960, 112, 16
BAR, ROW, TITLE, TOP, AXIS = 18, 26, 34, 44, 40
MOST_RANKS, MOST_ARROWS = 48, 400
_ARROW = 'fill="none" stroke="#000" stroke-opacity="0.55"'


class Picture:
    """Draws the items between two moments.

    Args:
        runs: from top to bottom.
        from_s: the start of the time axis.
        to_s: its end.
    """

    def __init__(self, runs: Sequence[TracedRun], from_s: float, to_s: float) -> None:
        self._from_s = from_s
        self._scale = (WIDTH - LEFT - RIGHT) / max(1e-9, to_s - from_s)
        self._to_s = to_s
        self._panels: dict[TracedRun, _Panel] = {}
        top = TOP
        for name, run in zip(names_of(runs), runs, strict=True):
            self._panels[run] = panel = _Panel(name, run, top)
            top = panel.bottom
        self._height = top + AXIS

    def add(self, run: TracedRun, item: Item) -> None:
        """Draw one item of one of the runs."""
        panel = self._panels[run]
        if isinstance(item, Stretch):
            panel.count(item)
            panel.bar(item.rank, item.kind, self._x(item.start_s), self._x(item.end_s))
        elif isinstance(item, Step):
            panel.tick(item.rank, self._x(item.end_s))
        elif isinstance(item, Arrow):
            panel.arrow(item, self._x(item.sent_s), self._x(item.taken_s))

    def svg(self) -> str:
        """The picture."""
        panels = list(self._panels.values())
        used = [kind for kind in KINDS if any(kind in panel.kinds for panel in panels)]
        title = "; ".join(f"{panel.name}: {panel.about}" for panel in panels)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}"'
            f' width="{WIDTH}" height="{self._height}" role="img" font-size="13"'
            ' font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>Timeline of {escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{self._height}" fill="#fff"/>',
            *_legend(used, any(panel.draws_arrows for panel in panels)),
            *self._axis(),
            *(part for panel in panels for part in panel.drawn()),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _x(self, time_s: float) -> float:
        return round(LEFT + (time_s - self._from_s) * self._scale, 1)

    def _axis(self) -> Iterator[str]:
        step_s = nice((self._to_s - self._from_s) / 8)
        unit, factor = ("s", 1.0) if step_s >= 0.5 else ("ms", 1e3)
        top, bottom = TOP + TITLE - 6, self._height - AXIS
        for number in range(math.ceil(self._from_s / step_s), math.floor(self._to_s / step_s) + 1):
            x, value = self._x(number * step_s), number * step_s * factor
            yield f'<path d="M{x} {top}V{bottom + 4}" stroke="#ddd"/>'
            yield _gray(x, bottom + 18, "middle", f"{value:g}")
        note = f"{unit} since the first gradient was ready; ticks mark the ends of steps"
        yield _gray(WIDTH - RIGHT, self._height - 6, "end", note)


class _Panel:
    """The part of a picture for one run: its title, and a bar for each rank."""

    def __init__(self, name: str, run: TracedRun, top: int) -> None:
        self.name, self.about = name, run.about
        self.kinds: set[str] = set()
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._workers = {rank for rank, times in run.times.items() if times.is_worker}
        ranks = list(run.times)
        self._left_out = len(ranks[MOST_RANKS:])
        self._rows = {rank: top + TITLE + ROW * row for row, rank in enumerate(ranks[:MOST_RANKS])}
        self._labels = {rank: run.label(rank) for rank in self._rows}
        self._top = top
        self._bars: defaultdict[str, list[str]] = defaultdict(list)
        self._ticks: list[str] = []
        self._arrows: list[str] = []
        self.bottom = top + TITLE + ROW * (len(self._rows) + bool(self._left_out))

    def count(self, span: Stretch) -> None:
        """Add the time of a worker's span to its kind."""
        if span.end_s > span.start_s:
            self.kinds.add(span.kind)
        if span.rank in self._workers:
            self._seconds[span.kind] += span.end_s - span.start_s

    def bar(self, rank: int, kind: str, start: float, end: float) -> None:
        """Draw a span; too narrow ones are left out, and their neighbors fill the space."""
        if rank in self._rows and end > start:
            width = round(end - start, 1)
            self._bars[kind].append(f"M{start} {self._rows[rank]}h{width}v{BAR}h{-width}z")

    def tick(self, rank: int, x: float) -> None:
        """Draw the end of a step."""
        if rank in self._rows:
            self._ticks.append(f"M{x} {self._rows[rank] - 3}v{BAR + 6}")

    def arrow(self, message: Arrow, sent: float, taken: float) -> None:
        """Draw a message."""
        if message.src in self._rows and message.dst in self._rows:
            low, high = (self._rows[rank] + BAR / 2 for rank in (message.src, message.dst))
            self._arrows.append(f"M{sent} {low:g}L{taken} {high:g}")

    def drawn(self) -> Iterator[str]:
        """The parts of the picture, from the lowest layer up."""
        y = self._top + TITLE - 12
        yield f'<text x="8" y="{y}"><tspan font-weight="bold">{escape(self.name)}</tspan>'
        yield f'<tspan fill="#555"> {escape(self.about)}: {self._shares()}</tspan></text>'
        for rank, top in self._rows.items():
            yield f'<text x="8" y="{top + 14}">{self._labels[rank]}</text>'
        if self._left_out:
            yield f'<text x="8" y="{self.bottom - 8}">and {self._left_out} more ranks</text>'
        for kind, paths in self._bars.items():
            yield f'<path fill="{COLORS[kind]}" d="{"".join(paths)}"/>'
        yield f'<path stroke="#222" stroke-width="0.8" d="{"".join(self._ticks)}"/>'
        if self.draws_arrows:
            yield f'<path d="{"".join(self._arrows)}" {_ARROW}/>'

    @property
    def draws_arrows(self) -> bool:
        """Whether there are messages, and not too many to distinguish."""
        return 0 < len(self._arrows) <= MOST_ARROWS

    def _shares(self) -> str:
        total_s = sum(self._seconds.values()) or 1.0
        shares = {kind: seconds / total_s for kind, seconds in self._seconds.items()}
        texts = [f"{NAMES[kind]} {share:.0%}" for kind, share in shares.items() if share >= 0.005]
        return "workers " + ", ".join(texts)


def _gray(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#555">{text}</text>'


def _legend(kinds: Sequence[str], arrows: bool) -> Iterator[str]:
    x = 8
    for kind in kinds:
        yield f'<rect x="{x}" y="12" width="14" height="14" fill="{COLORS[kind]}"/>'
        yield f'<text x="{x + 20}" y="24">{MEANINGS[kind]}</text>'
        x += 50 + round(6.5 * len(MEANINGS[kind]))
    if arrows:
        yield f'<path d="M{x} 19h20" {_ARROW}/>'
        yield f'<text x="{x + 28}" y="24">message</text>'


def nice(step: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten.

    >>> [nice(step) for step in (0.013, 0.3, 7.0)]
    [0.02, 0.5, 10.0]
    """
    power = 10.0 ** math.floor(math.log10(step))
    return float(next(f * power for f in (1, 2, 5, 10) if f * power >= step * (1 - 1e-9)))
