"""``paceline faulttest``: inject random faults in virtual time, and check every method's laws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.screen import Screen, number
from paceline.common.files import reason_of
from paceline.common.options import at_least, one_of
from paceline.common.seeds import check_seed
from paceline.errors import UsageError, unknown
from paceline.lab.faulttest.hosts.schedule import HOSTS
from paceline.strategies import STRATEGIES

if TYPE_CHECKING:
    from paceline.lab.faulttest.campaign import Failure


WORLDS = ("simulated", HOSTS)


def show_campaign(
    screen: Screen, methods: list[str], world: str | None, seeds: int, first: int
) -> None:
    """Run many seeds; shrink each that breaks a law, and show it as a command."""
    check_seed(first)
    at_least("seeds", seeds, 1)
    if world is not None:
        one_of("world", world, WORLDS)
    if world == HOSTS and methods:
        raise UsageError(f"world ({HOSTS}) must come without --method: its runs have none")
    for name in methods:
        if name not in STRATEGIES:
            raise unknown("strategy", name, STRATEGIES)
    from paceline.lab.faulttest.campaign import as_json, campaign
    from paceline.lab.faulttest.shrink import smallest

    simulated = [] if world == HOSTS else methods or list(STRATEGIES)
    others = [] if world == "simulated" or methods else [HOSTS]
    report = campaign([*simulated, *others], range(first, first + seeds))
    report.failures = [smallest(failure) for failure in report.failures]
    screen.table(
        ["method", "seeds", "violations"],
        [
            (name, number(count), str(sum(f.method == name for f in report.failures)))
            for name, count in report.runs.items()
        ],
    )
    for failure in report.failures:
        show_failure(screen, failure)
    rate = f"{report.seeds_per_s:.0f} seeds per second"
    screen.show(f"{number(report.runs.total())} runs in {report.seconds:.1f} s, {rate}.")
    screen.emit(as_json(report))
    if report.failures:
        raise typer.Exit(1)


def show_failure(screen: Screen, failure: Failure) -> None:
    """Show which law was broken, and the command that repeats it."""
    screen.show(f"{failure.method}: {failure.text}\n  {failure.command}\n")


def replay(screen: Screen, schedules: list[str]) -> None:
    """Run given schedules."""
    from paceline.lab.faulttest.campaign import Report, as_json, try_one
    from paceline.lab.faulttest.worlds import parse

    report = Report()
    for text in schedules:
        schedule = parse(text)
        sites, failure = try_one(schedule)
        report.runs[schedule.name] += 1
        report.sites.setdefault(schedule.name, sites)
        if failure is None:
            screen.show(f"{schedule.name}: all laws hold")
        else:
            report.failures.append(failure)
            show_failure(screen, failure)
    screen.emit(as_json(report))
    if report.failures:
        raise typer.Exit(1)


def schedules_in(path: Path) -> list[str]:
    """The schedules in a corpus file."""
    from paceline.lab.faulttest.campaign import read_corpus

    try:
        return [str(schedule) for schedule in read_corpus(path)]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {reason_of(error)}") from None
