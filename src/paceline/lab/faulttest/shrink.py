"""Reduce a failing schedule to a smaller one that breaks the same law."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import replace

from paceline.common.faults import format_fault
from paceline.errors import UsageError
from paceline.lab.faulttest.campaign import Failure
from paceline.lab.faulttest.hosts.schedule import HostsSchedule
from paceline.lab.faulttest.hosts.shrink import simpler_hosts
from paceline.lab.faulttest.schedule import Schedule
from paceline.lab.faulttest.worlds import AnySchedule, examine_any, parse

MOST_RUNS = 400


def smallest(failure: Failure) -> Failure:
    """The same failure with the smallest schedule found."""
    schedule = shrink(parse(failure.schedule), failure.law)
    _, violation = examine_any(schedule)
    return replace(failure, schedule=str(schedule), text=str(violation))


def shrink(schedule: AnySchedule, law: str) -> AnySchedule:
    """The smallest schedule found that breaks ``law``; removes faults first, then workers."""

    def breaks(smaller: AnySchedule) -> bool:
        _, violation = examine_any(smaller)
        return violation is not None and violation.law == law

    runs = 0
    while runs < MOST_RUNS:
        for smaller in simpler(schedule):
            runs += 1
            if breaks(smaller):
                schedule = smaller
                break
            if runs >= MOST_RUNS:
                return schedule
        else:
            break
    return schedule


def simpler(schedule: AnySchedule) -> Iterator[AnySchedule]:
    """Slightly simpler schedules; those that simplify most come first."""
    if isinstance(schedule, HostsSchedule):
        yield from simpler_hosts(schedule)
        return
    for make in (_fewer_faults, _fewer_workers, _fewer_steps, _fewer_options, _plainer):
        for smaller in make(schedule):
            try:
                smaller.cluster.check_faults(smaller.script, smaller.size)
                yield smaller
            except UsageError:
                continue


def _fewer_faults(schedule: Schedule) -> Iterator[Schedule]:
    for index in range(len(schedule.faults)):
        yield schedule.but(faults=schedule.faults[:index] + schedule.faults[index + 1 :])


def _fewer_workers(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules without one of the workers; the ranks after it move up by one."""
    for removed in reversed(range(schedule.workers)):
        named = {fault.rank for fault in schedule.script} | {f.peer for f in schedule.script}
        named.add(schedule.bad_rank)
        if schedule.workers > 2 and removed not in named:
            faults = tuple(_moved_up(sentence, removed) for sentence in schedule.faults)
            factors = schedule.factors[:removed] + schedule.factors[removed + 1 :] or (1.0,)
            bad = schedule.bad_rank
            moved = bad - 1 if bad is not None and bad > removed else bad
            fewer = {"workers": schedule.workers - 1, "bad_rank": moved}
            yield schedule.but(**fewer, faults=faults, factors=factors)


def _moved_up(sentence: str, removed: int) -> str:
    def move(match: re.Match[str]) -> str:
        rank = int(match[2])
        return f"{match[1]}={rank - (rank > removed)}"

    return re.sub(r"\b(rank|peer)=(\d+)", move, sentence)


def _fewer_steps(schedule: Schedule) -> Iterator[Schedule]:
    for steps in (schedule.steps // 2, schedule.steps - 1):
        if 1 <= steps < schedule.steps:
            yield schedule.but(steps=steps)


def _fewer_options(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules without one of the method's options."""
    name, _, inside = schedule.strategy.partition("(")
    options = [option for option in inside.rstrip(")").split(", ") if option]
    for index in range(len(options)):
        rest = ", ".join(options[:index] + options[index + 1 :])
        strategy = f"{name}({rest})" if rest else name
        try:
            smaller = schedule.but(strategy=strategy)
            if smaller.size == schedule.size:
                yield smaller
        except UsageError:
            continue


def _plainer(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with one field set to its default, or with one fault at a round time."""
    for field in dataclasses.fields(schedule):
        if field.name in ("strategy", "workers", "steps", "seed", "faults"):
            continue
        if getattr(schedule, field.name) != field.default:
            yield schedule.but(**{field.name: field.default})
    for index, fault in enumerate(schedule.script):
        if fault.at_s is not None and round(fault.at_s, 1) != fault.at_s:
            rounded = format_fault(replace(fault, at_s=round(fault.at_s, 1)))
            yield schedule.but(
                faults=schedule.faults[:index] + (rounded,) + schedule.faults[index + 1 :]
            )
