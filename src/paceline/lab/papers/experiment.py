"""Run the experiments of several claims together, and judge them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.lab.papers.claim import Claim, ClaimResult, Runs, Scope
from paceline.lab.trials import TrialOutcome, run_trials


def run_claims(
    claims: Sequence[Claim],
    scope: Scope,
    *,
    folder: Path | None = None,
    processes: int | None = None,
    on_run: Callable[[int, int], None] = lambda done, planned: None,
) -> list[ClaimResult]:
    """Run the trials of all claims, shared ones once, and judge each claim.

    Args:
        claims: the claims to test.
        scope: quick or full, its seed and its rates.
        folder: where outcomes are cached; a trial whose outcome is there is not run again.
        processes: how many trials run at a time; by default one per core.
        on_run: called with the number of finished runs and the number planned.
    """
    plans = [claim.trials(scope) for claim in claims]
    trials = [trial for plan in plans for trial in plan.values()]
    done = 0

    def on_done(index: int, outcome: TrialOutcome) -> None:
        nonlocal done
        done += 1
        on_run(done, len(trials))

    outcomes = iter(run_trials(trials, folder=folder, processes=processes, on_done=on_done))
    results = []
    for claim, plan in zip(claims, plans, strict=True):
        runs = Runs({key: next(outcomes) for key in plan})
        results.append(ClaimResult(claim, list(claim.judge(scope, runs))))
    return results
