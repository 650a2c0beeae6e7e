"""Small charts as inline SVG, readable at the width of a phone.

A chart is 360 units wide and is shown at about that many pixels; wider pages have more charts in a
row. So labels never shrink, and never overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 46
SIZE, LETTER = 13, 8.0
"""The height of letters, and the space reserved for the width of one."""

Point = tuple[float, float]
Span = tuple[float, float]

COLORS = (
    "#0060a8",  # blue
    "#c04000",  # vermilion
    "#007a55",  # green
    "#a3308b",  # purple
    "#7a5c00",  # ochre
    "#1f1f1f",  # black
    "#5a4fcf",  # violet
    "#b00040",  # crimson
    "#00788a",  # teal
    "#6b6b6b",  # grey
    "#8a4b2a",  # brown
)
"""Their contrast on white is at least 3 to 1; lines also differ in dash and mark."""
DASHES = (
    "",
    "7 3",
    "2 3",
    "9 3 2 3",
    "12 4",
    "4 2",
    "1 2",
    "9 3 2 3 2 3",
    "5 5",
    "3 1",
    "14 3 3 3",
)
_MARKS: dict[str, list[Point]] = {
    "circle": [],
    "square": [(-3.4, -3.4), (3.4, -3.4), (3.4, 3.4), (-3.4, 3.4)],
    "triangle": [(0, -4.6), (4.4, 3.4), (-4.4, 3.4)],
    "diamond": [(0, -4.8), (4.8, 0), (0, 4.8), (-4.8, 0)],
    "down": [(0, 4.6), (4.4, -3.4), (-4.4, -3.4)],
    "wide": [(-5, -1.8), (5, -1.8), (5, 1.8), (-5, 1.8)],
    "tall": [(-1.8, -5), (1.8, -5), (1.8, 5), (-1.8, 5)],
    "bow": [(-4.4, -4), (4.4, 4), (4.4, -4), (-4.4, 4)],
}
MARKS = (*_MARKS,)


class Style(NamedTuple):
    """How a method is drawn in every chart of a page."""

    color: str
    dash: str
    mark: str


def style(number: int) -> Style:
    """The style of the method with this number; styles differ in more than color."""
    return Style(
        COLORS[number % len(COLORS)], DASHES[number % len(DASHES)], MARKS[number % len(MARKS)]
    )


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``most`` of them.

    >>> ticks(0.0, 1.0), ticks(0, 7.3, 4), ticks(3, 3)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 2.0, 4.0, 6.0], [3.0])
    """
    if not high > low:
        return [float(low)]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten with multiples of them, at most about six."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for shares in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**p for p in powers for m in shares if low <= m * 10.0**p <= high]
        if len(found) <= 6:
            break
    return found[:: -(-len(found) // 6) or 1]


def plain(value: float) -> str:
    """The label of a tick.

    >>> plain(0.30000000000000004), plain(12.0), plain(1500.0)
    ('0.3', '12', '1,500')
    """
    return f"{value:,.10g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Axis:
    """One axis of a plot: its range, and its labeled ticks."""

    title: str
    low: float
    high: float
    marks: Sequence[tuple[float, str]]
    log: bool = False

    @classmethod
    def of(cls, title: str, low: float, high: float, log: bool = False, most: int = 5) -> Axis:
        """An axis with ticks at round numbers."""
        if high <= low:
            high = low + (abs(low) or 1.0)
        found = log_ticks(low, high) if log else ticks(low, high, most)
        return cls(title, low, high, [(tick, plain(tick)) for tick in found], log)

    def share(self, value: float) -> float:
        """The position of a value on the axis, from 0 to 1."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)


@dataclass
class Plot:
    """A plot with two axes, to which lines and bars are added."""

    x: Axis
    y: Axis
    parts: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """The coordinates of a point in the picture."""
        across, up = self.x.share(point[0]), self.y.share(point[1])
        inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        down = TOP + inner_h * (1 - min(max(up, 0.0), 1.0))
        return LEFT + inner_w * min(max(across, 0.0), 1.0), down

    def line(self, points: Sequence[Point], how: Style, name: str) -> None:
        """Draw a line with marks; its name is shown on hover."""
        points_drawn = [self.at(point) for point in points]
        dash = f' stroke-dasharray="{how.dash}"' if how.dash else ""
        every = -(-len(points_drawn) // 14) or 1
        marks = "".join(mark(how, point) for point in points_drawn[::every])
        self.parts.append(
            f'<g><title>{escape(name)}</title><path d="{_path(points_drawn)}" fill="none"'
            f' stroke="{how.color}" stroke-width="2"{dash}/>{marks}</g>'
        )

    def band(self, low: Sequence[Point], high: Sequence[Point], how: Style) -> None:
        """Draw the area between two lines."""
        edge = _path([*map(self.at, low), *map(self.at, reversed(high))])
        self.parts.append(f'<path d="{edge}Z" fill="{how.color}" opacity="0.16"/>')

    def whisker(self, x: float, low: float, high: float, how: Style) -> None:
        """Draw a vertical line from ``low`` to ``high``."""
        (left, top), (_, bottom) = self.at((x, high)), self.at((x, low))
        self.parts.append(
            f'<path d="M{left:.1f} {top:.1f}V{bottom:.1f}" stroke="{how.color}" stroke-width="2"/>'
        )

    def level(self, y: float) -> None:
        """Draw a horizontal dotted line."""
        left, top = self.at((self.x.low, y))
        self.parts.append(
            f'<path d="M{left:.1f} {top:.1f}H{WIDTH - RIGHT}" stroke="#333" stroke-width="1.5"'
            ' stroke-dasharray="1 4" stroke-linecap="round"/>'
        )

    def bars(self, spans: Sequence[Span], fill: str) -> None:
        """Draw bars side by side, each one unit wide, from one height to another."""
        drawn = []
        for index, (low, high) in enumerate(spans):
            x, top = self.at((index + 0.1, high))
            end, bottom = self.at((index + 0.9, low))
            if bottom - top >= 0.05:
                width = end - x
                drawn.append(f"M{x:.1f} {top:.1f}h{width:.1f}v{bottom - top:.1f}h-{width:.1f}z")
        if drawn:
            self.parts.append(f'<path d="{"".join(drawn)}" fill="{fill}"/>')

    def render(self, title: str) -> str:
        """The picture as SVG; screen readers read ``title``."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
            f"{''.join(self._grid())}{''.join(self.parts)}</svg>"
        )

    def _grid(self) -> Iterator[str]:
        floor = HEIGHT - BOTTOM
        yield _text(4, SIZE + 3, self.y.title, "start")
        yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, self.x.title, "middle")
        for y, label in self._y_marks():
            yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
            yield _text(LEFT - 6, y + SIZE * 0.35, label, "end")
        for x, label in self._x_marks():
            yield f'<path d="M{x:.1f} {floor}v5" stroke="#555"/>'
            yield _text(x, floor + SIZE + 6, label, "middle")
        yield f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="#555"/>'

    def _y_marks(self) -> Iterator[tuple[float, str]]:
        """The heights and labels of ticks that do not overlap."""
        used = math.inf
        for value, label in self.y.marks:
            _, y = self.at((self.x.low, value))
            if y <= used - SIZE - 3:
                used = y
                yield y, label

    def _x_marks(self) -> Iterator[tuple[float, str]]:
        """The x coordinates and labels of ticks that do not overlap."""
        used = 0.0
        for value, label in self.x.marks:
            half = len(label) * LETTER / 2
            x = min(self.at((value, self.y.low))[0], WIDTH - half - 1)
            if x - half >= used:
                used = x + half + LETTER
                yield x, label


def mark(how: Style, point: Point) -> str:
    """A method's mark at a point."""
    x, y = point
    drawn = _MARKS[how.mark]
    shape = "M" + "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in drawn) + "Z"
    if how.mark == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.6" fill="{how.color}"/>'
    return f'<path d="{shape}" fill="{how.color}"/>'


def sample(how: Style) -> str:
    """A method's line and mark for the legend."""
    dash = f' stroke-dasharray="{how.dash}"' if how.dash else ""
    return (
        '<svg class="sample" viewBox="0 0 44 14" aria-hidden="true">'
        f'<path d="M1 7H43" stroke="{how.color}" stroke-width="2"{dash}/>'
        f"{mark(how, (22, 7))}</svg>"
    )


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
