"""Many seeds of many methods, on all cores: what broke, and what was seen on the way."""

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
from paceline.lab.faulttest.schedule import Schedule, draw
from paceline.lab.pool import answers, cores, serve

CHUNK = 10
"""Seeds that a process is given at a time."""


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
        """The command that makes it again."""
        return f"paceline faulttest --replay {shlex.quote(self.schedule)}"


@dataclass
class Report:
    """What came of many seeds.

    Attributes:
        runs: by method.
        sites: in how many runs each thing happened, by method.
        failures: those that broke a law.
        seconds: how long it all took.
    """

    runs: Counter[str] = field(default_factory=Counter)
    sites: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def seeds_per_s(self) -> float:
        """How many runs were made in a second, second runs of the same seed not counted."""
        return self.runs.total() / self.seconds if self.seconds else 0.0


def campaign(methods: Sequence[str], seeds: range, processes: int | None = None) -> Report:
    """Try these seeds of each method, in so many processes; one a core when not given."""
    report, began_s = Report(), time.monotonic()
    jobs = [
        json.dumps([method, first, min(CHUNK, seeds.stop - first)])
        for first in range(seeds.start, seeds.stop, CHUNK)
        for method in methods
    ]
    for job, told in answers(
        jobs, "paceline.lab.faulttest.campaign", try_seeds, processes or cores()
    ):
        method, _, count = json.loads(job)
        answer = json.loads(told)
        report.runs[method] += count
        report.sites.setdefault(method, Counter()).update(answer["sites"])
        report.failures += [Failure(**failure) for failure in answer["failures"]]
    report.seconds = time.monotonic() - began_s
    return report


def try_seeds(job: str) -> str:
    """The schedules of some seeds of a method, texts in and out."""
    method, first, count = json.loads(job)
    sites: Counter[str] = Counter()
    failures = []
    for seed in range(first, first + count):
        outcome, failure = try_one(draw(method, seed), seed)
        sites.update((+outcome).keys())  # what has happened, and not what was only counted
        failures += [vars(failure)] if failure else []
    return json.dumps({"sites": sites, "failures": failures})


def try_one(schedule: Schedule, seed: int | None = None) -> tuple[Counter[str], Failure | None]:
    """Run one schedule: what happened in it, and the law that it broke."""
    from paceline.lab.faulttest.laws import examine

    outcome = examine(schedule)
    broken = outcome.violation
    if broken is None:
        return outcome.sites, None
    failure = Failure(schedule.name, seed, str(schedule), broken.law, str(broken))
    return outcome.sites, failure


def read_corpus(path: Path) -> Iterator[Schedule]:
    """The schedules of a file, one a line; those that begin with # say what the next one was."""
    for line in read_text(path).splitlines():
        if line.strip() and not line.startswith("#"):
            yield Schedule.parse(line)


def as_json(report: Report) -> dict[str, Any]:
    """A report as other programs read it."""
    return {
        "runs": report.runs.total(),
        "methods": dict(report.runs),
        "seconds": report.seconds,
        "seeds_per_s": report.seeds_per_s,
        "sites": {method: dict(sites) for method, sites in report.sites.items()},
        "violations": [{**vars(f), "command": f.command} for f in report.failures],
    }


if __name__ == "__main__":
    serve(try_seeds)
