"""``paceline drill``: inject faults into real runs, and show a table of the outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from paceline.cli.screen import Screen
from paceline.common.options import check_device
from paceline.errors import UsageError
from paceline.lab.drill.conduct import CaseReport, conduct
from paceline.lab.drill.leftovers import Leftovers
from paceline.lab.drill.scenario import Scenario, find_scenario, load_scenarios
from paceline.strategies import STRATEGIES, make_strategy


def choose(
    cases: list[str],
    methods: list[str],
    full: bool,
    virtual: bool,
    device: str = "cpu",
    hosts: int = 1,
) -> list[tuple[str, Scenario, str]]:
    """The scenarios and methods to try, in order."""
    check_device(device)
    chosen = {name: find_scenario(name) for name in cases}
    for name, case in chosen.items():
        if virtual and not case.virtual:
            raise UsageError(f"case {name} cannot be simulated: leave out --sim")
        if case.on_hosts != (hosts > 1):
            raise UsageError(
                f"case {name} is for many hosts: --hosts 3"
                if case.on_hosts
                else f"case {name} is for one host: leave out --hosts"
            )
        if device != "cpu" and case.kind != "faults":
            raise UsageError(f"case {name} is for the CPU: leave out --device")
    if not cases:
        available = {name: case for name, case in load_scenarios().items() if full or not case.long}
        chosen = {
            name: case
            for name, case in available.items()
            if case.on_hosts == (hosts > 1)
            and (case.virtual or not virtual)
            and (case.kind == "faults" or device == "cpu")
        }
    return [
        (name, scenario, method)
        for name, scenario in chosen.items()
        for method in _methods(scenario, methods, full)
    ]


def _methods(scenario: Scenario, chosen: list[str], full: bool) -> Iterator[str]:
    if chosen:
        yield from chosen
    elif full and not scenario.only:
        yield from STRATEGIES
    elif full and scenario.kind == "faults":
        yield from dict.fromkeys([*scenario.methods, *_like(scenario)])
    else:
        yield from scenario.methods


def _like(scenario: Scenario) -> list[str]:
    """All methods of the same kind as the scenario's: synchronous or asynchronous."""
    kinds = {make_strategy(method).synchronous for method in scenario.methods}
    return [name for name in STRATEGIES if {make_strategy(name).synchronous} == kinds]


def drill(
    screen: Screen,
    trials: list[tuple[str, Scenario, str]],
    virtual: bool,
    seeds: int,
    device: str = "cpu",
    hosts: int = 1,
) -> None:
    """Run all trials, report each outcome as it comes, and show the table."""
    reports = []
    with nullcontext() if virtual else Leftovers() as leftovers:
        for case, scenario, method in trials:
            report = conduct(
                case,
                scenario,
                method,
                virtual=virtual,
                seeds=seeds,
                leftovers=leftovers,
                device=device,
                hosts=hosts,
            )
            reports.append(report)
            screen.say(f"{case}, {method}: {report.outcome} ({report.seconds:.0f} s)")
    screen.table(HEADINGS, [row(report) for report in reports])
    passed = sum(report.passed for report in reports)
    screen.emit({"rows": [f.to_json() for f in reports], "passed": passed})
    if any(report.failures for report in reports):
        raise SystemExit(1)


HEADINGS = ["case", "method", "noticed after", "longest gap", "throughput", "accuracy", "outcome"]


def row(report: CaseReport) -> tuple[str, ...]:
    """A report as a line of the table."""
    impact = report.impact
    accuracy = "" if report.accuracy is None else f"{report.accuracy:.3f}"
    if report.undisturbed is not None:
        accuracy += f" ({report.undisturbed[0]:.3f})"
    return (
        report.case,
        report.method,
        "" if impact.notice_s is None else f"{impact.notice_s:.2f} s",
        "" if impact.gap_s is None else f"{impact.gap_s:.2f} s",
        "" if impact.throughput is None else f"{impact.throughput:.2f}",
        accuracy,
        report.outcome,
    )
