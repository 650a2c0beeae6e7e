"""Slightly simpler runs over many hosts, from which a smaller one that fails is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from paceline.errors import UsageError
from paceline.lab.faulttest.hosts.schedule import HostsFault, HostsSchedule


def simpler_hosts(schedule: HostsSchedule) -> Iterator[HostsSchedule]:
    """Slightly simpler schedules; those that simplify most come first."""
    for make in (_fewer_faults, _fewer_acts, _fewer_workers, _plainer, _plainer_faults):
        yield from make(schedule)


def _fewer_faults(schedule: HostsSchedule) -> Iterator[HostsSchedule]:
    for index in range(len(schedule.faults)):
        yield schedule.but(faults=schedule.faults[:index] + schedule.faults[index + 1 :])


def _fewer_acts(schedule: HostsSchedule) -> Iterator[HostsSchedule]:
    acts = schedule.acts
    if len(acts) > 2:
        yield schedule.but(acts=acts[: len(acts) // 2])
        yield schedule.but(acts=acts[len(acts) // 2 :])
    for index in range(len(acts) if len(acts) > 1 else 0):
        yield schedule.but(acts=acts[:index] + acts[index + 1 :])


def _fewer_workers(schedule: HostsSchedule) -> Iterator[HostsSchedule]:
    """Schedules without a worker that no fault names, and without the server."""
    named = {rank for fault in schedule.faults for rank in (fault.rank, fault.peer)}
    for removed in range(schedule.workers if schedule.workers > 2 else 0):
        if removed not in named:
            faults = tuple(_moved_up(fault, removed) for fault in schedule.faults)
            yield schedule.but(workers=schedule.workers - 1, faults=faults)
    if schedule.server and "push" not in schedule.acts and schedule.workers not in named:
        yield schedule.but(server=False)


def _moved_up(fault: HostsFault, removed: int) -> HostsFault:
    rank = fault.rank - (fault.rank > removed)
    peer = None if fault.peer is None else fault.peer - (fault.peer > removed)
    return dataclasses.replace(fault, rank=rank, peer=peer)


def _plainer(schedule: HostsSchedule) -> Iterator[HostsSchedule]:
    """Schedules with one field set to its default."""
    for field in dataclasses.fields(schedule):
        kept = ("world", "workers", "server", "acts", "seed", "faults")
        if field.name not in kept and getattr(schedule, field.name) != field.default:
            yield schedule.but(**{field.name: field.default})


def _plainer_faults(schedule: HostsSchedule) -> Iterator[HostsSchedule]:
    """Schedules with a fault that has a field less, or rounder numbers."""
    for index, fault in enumerate(schedule.faults):
        changes: list[dict[str, object]] = [{"again_s": None}, {"peer": None}, {"for_s": 0.5}]
        changes += [{"at_s": round(fault.at_s, 1)}, {"for_s": round(fault.for_s, 1)}]
        for change in changes:
            try:
                other = dataclasses.replace(fault, **change)  # type: ignore[arg-type]
            except UsageError:
                continue
            if other != fault:
                faults = (*schedule.faults[:index], other, *schedule.faults[index + 1 :])
                yield schedule.but(faults=faults)
