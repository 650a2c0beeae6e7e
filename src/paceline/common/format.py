"""Numbers, durations and sizes as text for people."""

from __future__ import annotations

from typing import Any


def number(value: Any) -> str:
    """A value as text for people.

    >>> number(0.123456), number(12), number(None), number(1234567)
    ('0.1235', '12', '-', '1,234,567')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def seconds(value: float | None) -> str:
    """A duration as text for people.

    >>> seconds(0.01234), seconds(12.345), seconds(360), seconds(None)
    ('12.3 ms', '12.3 s', '6.0 min', '-')
    """
    if value is None:
        return "-"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value < 300 else f"{value / 60:.1f} min"


def size(nbytes: float | None) -> str:
    """A number of bytes as text for people.

    >>> size(512), size(83_000), size(4.5e9), size(None)
    ('512 B', '83.0 KB', '4.5 GB', '-')
    """
    if nbytes is None:
        return "-"
    units = ("B", "KB", "MB", "GB", "TB")
    power = 0
    while nbytes >= 1000 and power < len(units) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.1f} {units[power]}" if power else f"{nbytes:.0f} B"
