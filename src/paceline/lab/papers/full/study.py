"""Run the full form of several claims: what matters most first, in pieces of any length.

For each claim in turn, the rates of its ways are swept with one seed, and each way is run with
another at its best rate; then all ways with the second seed, then with the third; then what is only
shown. Whenever a process is idle, it takes the first run of that order that is known to be needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.lab.papers.claim import ClaimResult
from paceline.lab.papers.full.claim import FullClaim, FullRuns, Panel, Results
from paceline.lab.papers.full.setup import Extent, Way
from paceline.lab.papers.verdict import UNFINISHED
from paceline.lab.pool import run_next
from paceline.lab.sweep import Arm
from paceline.lab.trials import PROGRAM, OutcomeCache, TrialOutcome, run_trial
from paceline.record.result import Result

RUNS = "runs"


@dataclass(frozen=True)
class FullResult(ClaimResult):
    """The result of testing a claim's full form, so far.

    Attributes:
        rates: the best rate of each way, as far as it is known.
        minutes: what its runs took, all added up; some are runs of other claims, too.
        missing: the runs that decide it and are not made, as far as that is known.
    """

    rates: dict[str, float]
    minutes: float
    missing: int

    @property
    def verdict(self) -> str:
        """That of its figures, once all are there."""
        return UNFINISHED if self.missing else super().verdict

    def to_json(self) -> dict[str, Any]:
        """The result as ``--json`` prints it."""
        facts = {"rates": self.rates, "minutes": self.minutes, "missing": self.missing}
        return {**super().to_json(), **facts}


class Study:
    """The runs of several claims.

    Args:
        claims: those that matter most first.
        extent: how they are run.
        folder: of finished runs; those in it are not repeated.
        seconds: no run begins that would end later than after so long, as far as one can tell.
    """

    def __init__(
        self, claims: Sequence[FullClaim], extent: Extent, folder: Path, seconds: float
    ) -> None:
        self._claims, self._extent, self.folder = claims, extent, folder
        self._cache = OutcomeCache(folder / RUNS)
        self._end_s, self._longest_s = time.monotonic() + seconds, 0.0
        ways = dict.fromkeys(way for claim in claims for way in (*claim.ways, *claim.beside))
        self._arms = {way: extent.arm(way) for way in ways}
        self._jobs: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._begun: set[str] = set()
        self._results: dict[str, Result | None] = {}
        self.failures: dict[str, str] = {}

    def run(self, processes: int, say: Callable[[str], None]) -> None:
        """Make the runs that are missing, as long as there is time."""
        # what waits for a GPU keeps to the core on which it began
        apart = self._extent.device != "cpu"
        for job, answer in run_next(self._next_job, PROGRAM, run_trial, processes, apart):
            outcome = TrialOutcome.from_dict(json.loads(answer))
            what = self._names[job]
            if outcome.result is None:
                self.failures[what] = str(outcome.error)
                say(f"  {what}: failed: {outcome.error}")
            else:
                self._cache.add(job, answer)
                self._longest_s = max(self._longest_s, _seconds(outcome.result))
                say(f"  {what}: {outcome.result.accuracy:.3f}, {_seconds(outcome.result):.0f} s")
            self._results[job] = outcome.result

    @property
    def left(self) -> int:
        """How many runs are missing, as far as one can tell."""
        return len({job for job in self._wanted() if not self._is_known(job)})

    def findings(self) -> Iterator[FullResult]:
        """What is known about each claim."""
        for claim in self._claims:
            ways = (*claim.ways, *claim.beside)
            rates = {str(way): arm.best for way in ways if (arm := self._swept(way))}
            finals = list(self._finals(claim, ways))
            made = {*chain.from_iterable(map(self._tried, ways)), *finals}
            results = [result for job in made if (result := self._result(job)) is not None]
            deciding = list(self._finals(claim, claim.ways))
            yield FullResult(
                claim,
                list(claim.judge(self._runs_of(claim))),
                rates=rates,
                minutes=sum(map(_seconds, results)) / 60,
                missing=sum(len(list(self._sweep(way))) for way in claim.ways)
                + sum(self._result(job) is None for job in deciding),
            )

    def panels(self) -> Iterator[list[Panel]]:
        """The charts of each claim."""
        for claim in self._claims:
            yield list(claim.panels(self._runs_of(claim)))

    # What comes next -----------------------------------------------------------------------------

    def _next_job(self) -> str | None:
        if time.monotonic() + self._longest_s > self._end_s:
            return None
        fresh = (job for job in self._wanted() if job not in self._begun)
        job = next((job for job in fresh if not self._is_known(job)), None)
        if job is not None:
            self._begun.add(job)
        return job

    def _wanted(self) -> Iterator[str]:
        """The runs that are known to be needed, in the order of their importance."""
        for number, seed in enumerate(self._extent.seeds):
            for claim in self._claims:
                if number == 0:
                    yield from chain.from_iterable(map(self._sweep, claim.ways))
                for size in claim.sizes.values():
                    yield from self._at_best(claim.ways, size, seed)
        for claim in self._claims:
            yield from chain.from_iterable(map(self._sweep, claim.beside))
            for seed in self._extent.seeds:
                for size in claim.sizes.values():
                    yield from self._at_best(claim.beside, size, seed)

    def _finals(self, claim: FullClaim, ways: Sequence[Way]) -> Iterator[str]:
        """The runs of a claim at rates that are known."""
        for size in claim.sizes.values():
            for seed in self._extent.seeds:
                yield from self._at_best(ways, size, seed)

    def _tried(self, way: Way) -> Iterator[str]:
        """The runs of the sweep of a way, so far."""
        arm = self._arms[way]
        return (self._job(way, rate, arm.seeds[0]) for rate in arm.accuracies)

    def _sweep(self, way: Way) -> Iterator[str]:
        """The runs that the sweep of a way needs next."""
        arm = self._arms[way]
        while tried := arm.next_runs():
            jobs = [self._job(way, *each) for each in tried]
            if not all(map(self._is_known, jobs)):
                yield from jobs
                return
            for (rate, _), job in zip(tried, jobs, strict=True):
                result = self._result(job)
                arm.add(rate, 0.0 if result is None else float(result.accuracy or 0.0))

    def _swept(self, way: Way) -> Arm | None:
        """The sweep of a way, if it is complete."""
        return None if any(True for _ in self._sweep(way)) else self._arms[way]

    def _at_best(self, ways: Sequence[Way], size: float, seed: int) -> Iterator[str]:
        """The runs of those ways whose best rate is known, at this share of it."""
        for way in ways:
            if (arm := self._swept(way)) is not None:
                yield self._job(way, size * arm.best, seed)

    # What is known -------------------------------------------------------------------------------

    def _job(self, way: Way, rate: float, seed: int) -> str:
        """The key of a run; each is made once."""
        name = f"{way}, lr {rate:g}, seed {seed}"
        if name not in self._jobs:
            job = self._jobs[name] = self._extent.trial(way, rate, seed).key()
            self._names[job] = name
        return self._jobs[name]

    def _is_known(self, job: str) -> bool:
        """Whether a run is made, or has failed."""
        if job not in self._results and job not in self._begun:
            cached = self._cache.find(job)
            if cached is None or cached.result is None:
                return False
            self._results[job] = cached.result
        return job in self._results

    def _result(self, job: str) -> Result | None:
        return self._results[job] if self._is_known(job) else None

    def _runs_of(self, claim: FullClaim) -> FullRuns:
        ways = (*claim.ways, *claim.beside)
        sizes = claim.sizes.values()
        results = {(way, size): self._results_of(way, size) for way in ways for size in sizes}
        return FullRuns(results, self._extent.epochs)

    def _results_of(self, way: Way, size: float) -> Results:
        """The results of a way at this share of its best rate, by seed."""
        results = {}
        for seed in self._extent.seeds:
            for job in self._at_best([way], size, seed):
                if (result := self._result(job)) is not None:
                    results[seed] = result
        return results


def _seconds(result: Result) -> float:
    """What a run took, on the wall's clock."""
    return result.startup_seconds + result.seconds
