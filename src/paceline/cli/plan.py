"""``paceline plan``: which method, how many workers and which interval, for a task on a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from paceline.cli.compare import split_specs, workers_of
from paceline.cli.screen import Screen, seconds
from paceline.cli.task import Task
from paceline.common.options import above, at_most
from paceline.errors import PacelineError, UsageError
from paceline.lab.stats import LEVEL, Spread
from paceline.strategies import make_strategy

if TYPE_CHECKING:
    from paceline.lab.plan.check import Check
    from paceline.lab.plan.estimate import Candidate, Estimate, Goal
    from paceline.lab.plan.search import Search
    from paceline.sim.cluster import Cluster

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SHOWN = 8
"""How many rows the table has; --json has all."""
MIN_SEEDS = 3


def goal_of(target: float, price: float | None, mtbf: str | None) -> Goal:
    """What the plan is for; refuses a price or a time that is wrong."""
    from paceline.lab.plan.estimate import Goal

    above("target", target, 0)
    at_most("target", target, 1)
    if price is not None:
        above("price", price, 0)
    return Goal(target=target, price=price, mtbf_s=None if mtbf is None else duration_s(mtbf))


def duration_s(text: str) -> float:
    """The seconds of a time such as 30s, 45m, 12h or 7d.

    >>> duration_s("90s"), duration_s("1.5h")
    (90.0, 5400.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None or float(found[1]) == 0:
        raise UsageError(f"mtbf ({text}) must be a time such as 30s, 45m, 12h or 7d")
    return float(found[1]) * UNITS_S[found[2]]


def candidates_of(specs: Sequence[str], workers: Sequence[str]) -> list[Candidate]:
    """Every method with every number of workers; refuses what this machine cannot simulate."""
    from paceline.lab.plan.estimate import Candidate
    from paceline.lab.plan.search import default_specs

    methods = {spec: make_strategy(spec) for spec in split_specs(specs) or default_specs()}
    counts = workers_of(workers, methods, virtual=True)
    return [Candidate(*method, count) for count in counts for method in methods.items()]


def show_plan(
    screen: Screen,
    task: Task,
    cluster: Cluster,
    goal: Goal,
    candidates: Sequence[Candidate],
    seeds: Sequence[int],
    checked: bool,
) -> None:
    """Simulate the candidates, show the best ones, and say which to take."""
    from paceline.lab.plan.search import Search

    if checked and goal.mtbf_s is not None:
        raise UsageError("--check must not be used with --mtbf: nothing fails in its real runs")
    search = Search(goal, cluster, task.reference, task.arguments, seeds)
    estimates = _simulate(screen, search, candidates)
    if estimates[0].seconds is None:
        raise PacelineError(_why_nothing(estimates, goal))
    _show_table(screen, estimates, goal)
    for sentence in _advice(estimates, goal):
        screen.show(screen.wrap(sentence))
    checks = _check(screen, search, estimates) if checked else []
    screen.emit(_outcome(estimates, goal, cluster, checks))


def _simulate(screen: Screen, search: Search, candidates: Sequence[Candidate]) -> list[Estimate]:
    ways, more = len(candidates), len(search.seeds) - 1
    what = f"{ways} ways to train, on {search.cluster.name}"
    screen.say(f"{what}; {more} more seeds for those near the best" if more else what)
    target = search.goal.target

    def done(candidate: Candidate, outcome: Any) -> None:
        at_s = None if outcome.result is None else outcome.result.seconds_to(target)
        failed = (outcome.error or "never").splitlines()[0]
        screen.say(f"  {candidate}: {f'{target:g} after {seconds(at_s)}' if at_s else failed}")

    return search.run(candidates, done)


def _why_nothing(estimates: Sequence[Estimate], goal: Goal) -> str:
    """Why no candidate can be recommended: the first error, or the best accuracy of all."""
    results = [result for estimate in estimates for result in estimate.results]
    if not results:
        return next(o.error for e in estimates for o in e.outcomes.values() if o.error)
    best = max((m.get("accuracy") or 0.0 for r in results for m in r.metrics), default=0.0)
    if best == 0.0:
        return "the script logs no accuracy: call worker.log(accuracy=...) with that of the answer"
    return f"no way reached accuracy {goal.target:g} in every run: the best was {best:.3f}"


# The table and the advice ------------------------------------------------------------------------


def _show_table(screen: Screen, estimates: Sequence[Estimate], goal: Goal) -> None:
    columns = ["method", "workers", f"time to {goal.target:g}", "cost", "goodput", "seeds"]
    shown = [e for e in estimates if e.seconds is not None][:SHOWN]
    rows, brief = ([_cells(e, ranges) for e in shown] for ranges in (True, False))
    if goal.price is None:
        columns.remove("cost")
        for row in (*rows, *brief):
            del row[3]
    screen.table(columns, rows, brief)
    slower = sum(e.seconds is not None for e in estimates) - len(shown)
    never = sum(e.seconds is None for e in estimates)
    more = [f"{slower} slower ways are not shown"] * (slower > 0)
    more += [f"{never} did not reach {goal.target:g} in every run"] * (never > 0)
    if more:
        screen.show(f"{'; '.join(more)}.")


def _cells(estimate: Estimate, ranges: bool) -> list[str]:
    goodput = estimate.goodput
    return [
        estimate.candidate.spec,
        str(estimate.candidate.workers),
        _text(estimate.seconds, seconds, ranges),
        _text(estimate.cost, "{:.2g}".format, ranges),
        "-" if goodput is None else f"{goodput:.0%}",
        str(len(estimate.outcomes)),
    ]


def _text(found: Spread | None, show: Callable[[float], str], ranges: bool) -> str:
    if found is None:
        return "-"
    interval = f" ({show(max(0.0, found.low))} to {show(found.high)})"
    return show(found.mean) + (interval if ranges and found.seeds > 1 else "")


def _advice(estimates: Sequence[Estimate], goal: Goal) -> Iterator[str]:
    """Which candidate to take, and how sure that is."""
    first, second = estimates[0], next((e for e in estimates[1:] if e.always), None)
    assert first.seconds is not None
    after = f"{goal.target:g} after {seconds(first.seconds.mean)}"
    cost = "" if first.cost is None else f", for {first.cost.mean:.2g}"
    yield f"Take {first.candidate}: {after}{cost}."
    if second is not None:
        yield _how_sure(first, second)
    cheapest = min(
        (e for e in estimates if e.cost is not None),
        key=lambda e: e.cost.mean if e.cost else 0.0,
        default=first,
    )
    if cheapest is not first and cheapest.cost is not None and cheapest.seconds is not None:
        yield (
            f"Cheapest: {cheapest.candidate}, for {cheapest.cost.mean:.2g}, after"
            f" {seconds(cheapest.seconds.mean)}."
        )


def _how_sure(first: Estimate, second: Estimate) -> str:
    from paceline.lab.plan.search import lead

    margin = lead(first, second)
    if margin.seeds < 2:
        return "Not sure: one seed says nothing of the spread. Add --seeds 5."
    interval = (
        f"over {margin.seeds} seeds it was {margin.low:.2f} to {margin.high:.2f} times as fast as"
        f" {second.candidate} ({LEVEL} interval)"
    )
    if margin.low <= 1:
        return f"Not sure: the two are too close to tell, {interval}."
    gaps = [gap for result in first.results for gap in result.evaluation_gaps()]
    apart_s = mean(second.times.values()) - mean(first.times.values())
    if gaps and apart_s < median(gaps):
        return (
            f"Not sure: {interval}, but accuracy was measured every {seconds(median(gaps))}, and"
            " the two are closer than that."
        )
    if margin.seeds < MIN_SEEDS:
        return f"Not sure: {interval}, and it takes at least {MIN_SEEDS} seeds to be sure."
    return f"Sure: {interval}."


# Real runs ---------------------------------------------------------------------------------------


def _check(screen: Screen, search: Search, estimates: Sequence[Estimate]) -> list[Check]:
    from paceline.lab.plan import check as c

    chosen = c.to_check(estimates)
    screen.say(f"{len(chosen)} ways in real processes here, {len(search.seeds)} times each")

    def on_run(run: Check) -> None:
        screen.say(f"  {run.candidate}: {seconds(run.measured[-1])}")

    checks = c.check(chosen, search.train, search.arguments, search.seeds, on_run)
    screen.table(
        ["run", "predicted", "measured", "error", "spread", "within"],
        [
            (
                str(each.candidate),
                seconds(each.predicted),
                seconds(each.median),
                f"{each.error:+.0%}",
                f"{each.spread:.0%}",
                "yes" if each.within else "no",
            )
            for each in checks
        ],
    )
    right = "right" if c.order_is_right(checks) else "wrong"
    screen.show(f"The predicted order was {right}, as far as the spread of the runs can tell.")
    return checks


def _outcome(
    estimates: Sequence[Estimate], goal: Goal, cluster: Cluster, checks: Sequence[Check]
) -> dict[str, Any]:
    first = estimates[0]
    return {
        "cluster": cluster.name,
        "target": goal.target,
        "price": goal.price,
        "mtbf_seconds": goal.mtbf_s,
        "take": {"strategy": first.candidate.spec, "workers": first.candidate.workers},
        "rows": [estimate.to_json() for estimate in estimates],
        "checks": [each.to_json() for each in checks],
    }
