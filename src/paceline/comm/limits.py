"""How long ranks wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.common.options import above


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a rank waits for another before it says so, and before it gives up.

    Args:
        dead_s: a peer whose process is stopped for this long is lost (a dead one is lost at once).
        start_s: how long ranks of torch.distributed wait at the start for those that never come.
        progress_limit_s: the longest wait for a peer that is alive but busy.
        notice_s: after this long, a wait says on standard error whom it waits for.
    """

    dead_s: float = 5.0
    start_s: float = 300.0
    progress_limit_s: float = 600.0
    notice_s: float = 10.0

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            above(name, seconds, 0)
