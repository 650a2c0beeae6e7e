"""Where a rank stands in the table of members."""

from __future__ import annotations

from enum import IntEnum


class Standing(IntEnum):
    """Where a rank stands."""

    EXPECTED = 0
    JOINING = 1
    HERE = 2
    LEFT = 3
    DIED = 4
    STOPPED = 5
    WAITING = 6


PRESENT = (Standing.JOINING, Standing.WAITING, Standing.HERE)
LOST = (Standing.DIED, Standing.STOPPED)
GONE = (Standing.LEFT, *LOST)
