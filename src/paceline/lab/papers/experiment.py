"""All runs of some claims, made together, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.lab.papers.claim import Claim, Finding, Runs, Scope
from paceline.lab.trials import Outcome, run_trials


def put_to_test(
    claims: Sequence[Claim],
    scope: Scope,
    *,
    folder: Path | None = None,
    processes: int | None = None,
    on_run: Callable[[int, int], None] = lambda done, planned: None,
) -> list[Finding]:
    """Make the runs of all claims, those that they share once, and judge each claim.

    Args:
        folder: keeps the outcome of each run; those that are there are not made again.
        on_run: called with how many runs are done, and how many there are to be.
    """
    plans = [claim.trials(scope) for claim in claims]
    trials = [trial for plan in plans for trial in plan.values()]
    done = 0

    def heard(place: int, outcome: Outcome) -> None:
        nonlocal done
        done += 1
        on_run(done, len(trials))

    outcomes = iter(run_trials(trials, folder=folder, processes=processes, on_done=heard))
    findings = []
    for claim, plan in zip(claims, plans, strict=True):
        runs = Runs({key: next(outcomes) for key in plan})
        findings.append(Finding(claim, list(claim.judge(scope, runs)), scope.rates.sha256))
    return findings
