"""The runs that can be tested: methods in the simulator, and acts in the world of many hosts."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from paceline.lab.faulttest.hosts.schedule import HOSTS, HostsSchedule, draw_hosts
from paceline.lab.faulttest.schedule import Schedule, draw

if TYPE_CHECKING:
    from paceline.lab.faulttest.watched import Violation

AnySchedule = Schedule | HostsSchedule


def draw_any(name: str, seed: int) -> AnySchedule:
    """Draw the schedule of a method, or of the world of many hosts, for ``seed``."""
    return draw_hosts(seed) if name == HOSTS else draw(name, seed)


def parse(text: str) -> AnySchedule:
    """Parse the text form of a schedule."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if isinstance(fields, dict) and "world" in fields:
        return HostsSchedule.of(fields)
    return Schedule.parse(text)


def examine_any(schedule: AnySchedule) -> tuple[Counter[str], Violation | None]:
    """Run a schedule; return how often each event happened, and the first law that it broke."""
    if isinstance(schedule, HostsSchedule):
        from paceline.lab.faulttest.hosts.world import examine_hosts

        return examine_hosts(schedule)[:2]
    from paceline.lab.faulttest.laws import examine

    outcome = examine(schedule)
    return outcome.sites, outcome.violation
