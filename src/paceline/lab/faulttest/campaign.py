"""Run many seeds of many methods on all cores, and report violations and coverage."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.common.reading import read_text
from paceline.lab.faulttest.worlds import AnySchedule, draw_any, examine_any, parse
from paceline.lab.pool import cores, run_jobs, serve_jobs

CHUNK = 10
"""How many seeds a process is given at a time."""


@dataclass
class Failure:
    """A schedule that breaks a law."""

    method: str
    seed: int | None
    schedule: str
    law: str
    text: str

    @property
    def command(self) -> str:
        """The command that repeats it."""
        return f"paceline faulttest --replay {shlex.quote(self.schedule)}"


@dataclass
class Report:
    """The results of a campaign.

    Attributes:
        runs: the number of runs, by method.
        sites: in how many runs each event happened, by method.
        failures: the runs that broke a law.
        seconds: how long the campaign took.
    """

    runs: Counter[str] = field(default_factory=Counter)
    sites: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def seeds_per_s(self) -> float:
        """The runs per second; the second run of a comparison does not count."""
        return self.runs.total() / self.seconds if self.seconds else 0.0


def campaign(methods: Sequence[str], seeds: range, processes: int | None = None) -> Report:
    """Run these seeds of each method in ``processes`` processes (default: one per core).

    The world of many hosts, ``hosts``, stands for a method.
    """
    report, began_s = Report(), time.monotonic()
    jobs = [
        json.dumps([method, first, min(CHUNK, seeds.stop - first)])
        for first in range(seeds.start, seeds.stop, CHUNK)
        for method in methods
    ]
    for job, result in run_jobs(
        jobs, "paceline.lab.faulttest.campaign", try_seeds, processes or cores()
    ):
        method, _, count = json.loads(job)
        answer = json.loads(result)
        report.runs[method] += count
        report.sites.setdefault(method, Counter()).update(answer["sites"])
        report.failures += [Failure(**failure) for failure in answer["failures"]]
    report.seconds = time.monotonic() - began_s
    return report


def try_seeds(job: str) -> str:
    """Run a few seeds of a method; job and result are JSON."""
    method, first, count = json.loads(job)
    sites: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        events, failure = try_one(draw_any(method, seed), seed)
        sites.update((+events).keys())  # only what happened at least once
        failures += [vars(failure)] if failure else []
    return json.dumps({"sites": sites, "failures": failures})


def try_one(schedule: AnySchedule, seed: int | None = None) -> tuple[Counter[str], Failure | None]:
    """Run one schedule; return how often each event happened, and the failure if a law broke."""
    sites, violation = examine_any(schedule)
    if violation is None:
        return sites, None
    return sites, Failure(schedule.name, seed, str(schedule), violation.law, str(violation))


def read_corpus(path: Path) -> Iterator[AnySchedule]:
    """The schedules of a file, one per line; a line that starts with # describes the next one."""
    for line in read_text(path).splitlines():
        if line.strip() and not line.startswith("#"):
            yield parse(line)


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON data."""
    return {
        "runs": report.runs.total(),
        "methods": dict(report.runs),
        "seconds": report.seconds,
        "seeds_per_s": report.seeds_per_s,
        "sites": {method: dict(sites) for method, sites in report.sites.items()},
        "violations": [{**vars(f), "command": f.command} for f in report.failures],
    }


if __name__ == "__main__":
    serve_jobs(try_seeds)
