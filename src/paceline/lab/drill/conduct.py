"""Run a scenario of the drill with a method, in real processes or in the simulator."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.comm.limits import Limits
from paceline.common.faults import Fault, rank_of
from paceline.errors import PacelineError, WorkerFailed
from paceline.lab.drill.checkpoints import (
    EVERY,
    differ,
    end_by_signal,
    fill_disk,
    kill_all,
    kill_while_saving,
    plain_command,
    spoil,
    why_no_small_disk,
)
from paceline.lab.drill.impact import SETTLED_S, FaultImpact, measure_impact, worst
from paceline.lab.drill.leftovers import Leftovers
from paceline.lab.drill.over_hosts import WORKERS_PER_HOST, HostsRun
from paceline.lab.drill.scenario import Scenario
from paceline.lab.drill.task import train
from paceline.lab.network.hosts import HostNetwork
from paceline.launcher.launch import launch
from paceline.launcher.simulate import simulate
from paceline.record.result import Result
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.strategies import make_strategy
from paceline.training.worker import Worker

ENOUGH_SEEDS, FIRST_OTHER_SEED = 5, 100
LEAST_DIFFERENCE = 0.01
"""A smaller difference in accuracy does not count: ten of the thousand test images."""
CLUSTER = Cluster(
    name="drill",
    network=Link(latency_s=5e-5, bytes_per_s=125e6),
    compute=Compute(step_s=0.02, spread=0.05),
)
"""Workers as slow as real ones on few cores, so that the times in a scenario fit both."""
END_S = 10.0
"""A run that was interrupted, or has failed, must end within this time."""


@dataclass
class CaseReport:
    """The result of one scenario with one method.

    Attributes:
        case: the name of the scenario.
        method: the method, with its options.
        world: ``real`` or ``simulated``.
        device: of the ranks.
        hosts: how many there are.
        happened: the events, in words.
        failures: what differs from the expectations; a case without failures has passed.
        unreached: figures that are known to be missed, each with the reason.
        not_tried: why the case cannot run on this machine; None if it can.
        impact: the impact of the faults.
        accuracy: the accuracy of the run; None if it has none.
        undisturbed: the mean and deviation of the accuracy of undisturbed runs.
        seconds: how long the case took.
    """

    case: str
    method: str
    world: str
    device: str = "cpu"
    hosts: int = 1
    happened: str = ""
    failures: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    not_tried: str | None = None
    impact: FaultImpact = field(default_factory=lambda: FaultImpact(None, None, None, None))
    accuracy: float | None = None
    undisturbed: tuple[float, float] | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the case was run, and met all expectations."""
        return not self.failures and self.not_tried is None

    @property
    def outcome(self) -> str:
        """The outcome, in words."""
        if self.not_tried is not None:
            return f"not tried: {self.not_tried}"
        return "; ".join(self.failures or ["passed", *self.unreached])

    def to_json(self) -> dict[str, Any]:
        """A row of ``--json``; a figure that was not measured is None."""
        fields = {name: value for name, value in asdict(self).items() if name != "impact"}
        impact = self.impact
        return {
            **fields,
            "passed": self.passed,
            "noticed_s": impact.notice_s,
            "gap_s": impact.gap_s,
            "throughput": impact.throughput,
            "fault_s": impact.fault_s,
            "outcome": self.outcome,
        }


def conduct(
    case: str,
    scenario: Scenario,
    method: str,
    *,
    virtual: bool = False,
    seeds: int = 1,
    leftovers: Leftovers | None = None,
    device: str = "cpu",
    hosts: int = 1,
) -> CaseReport:
    """Run a scenario, and report its impact, its failures and its leftovers.

    Args:
        case: the name of the scenario.
        scenario: the scenario.
        method: the method to train with.
        virtual: whether to run it in the simulator.
        seeds: how many runs of each fault.
        leftovers: finds what the processes leave behind; None in the simulator.
        device: of the ranks, for a scenario of faults.
        hosts: how many, for a scenario over many hosts.
    """
    began_s = time.monotonic()
    report = CaseReport(case, method, "simulated" if virtual else "real", device, hosts)
    if scenario.on_hosts:
        scenario = replace(scenario, workers=WORKERS_PER_HOST * hosts)
    if scenario.kind in ("faults", "hosts"):
        _faults(report, scenario, virtual, seeds)
    else:
        _OTHER_KINDS[scenario.kind](report, scenario, virtual)
    if leftovers is not None:
        report.failures += [f"leftover: {thing}" for thing in leftovers.remaining()]
    report.seconds = time.monotonic() - began_s
    return report


# Faults ------------------------------------------------------------------------------------------


def _faults(report: CaseReport, scenario: Scenario, virtual: bool, seeds: int) -> None:
    method, expect = make_strategy(report.method), scenario.expect
    limit_s = expect.longest_gap_s(method)
    accuracies: list[float] = []
    impacts: list[FaultImpact] = []

    def disturb(seed: int) -> None:
        with TemporaryDirectory(prefix="paceline-drill-") as folder:
            result, impact = (_strike if scenario.on_hosts else _inject)(
                report, scenario, seed, virtual, Path(folder)
            )
        impacts.append(impact)
        accuracies.append(result.accuracy or 0.0)
        report.happened = report.happened or _events_text(result)
        succeeded = sum(event["event"] == "succeeded" for event in result.events)
        _expect_equal(report, "lost workers", result.lost_workers, expect.lost)
        _expect_equal(report, "workers that joined", result.joined_workers, expect.joined)
        _expect_equal(report, "successors", succeeded, expect.succeeded)
        _expect_at_least(report, "dropped updates", float(result.dropped_updates), expect.dropped)

    try:
        for seed in range(seeds):
            disturb(seed)
        if not _is_as_good(report, scenario, accuracies, virtual):
            for seed in range(seeds, ENOUGH_SEEDS):  # a single run may be bad by chance
                disturb(seed)
            if not _is_as_good(report, scenario, accuracies, virtual):
                _miss(report, scenario, "accuracy", _accuracy_text(report))
    except PacelineError as error:
        report.failures.append(f"the run ended: {str(error).splitlines()[0]}")
        return
    report.impact = worst(impacts)
    _expect_at_most(report, "seconds to notice", report.impact.notice_s, expect.notice_s)
    _expect_at_most(report, "seconds without a step", report.impact.gap_s, limit_s)
    reached, least = report.impact.throughput, expect.throughput
    if method.synchronous or least is None:
        return
    if reached is None:
        report.unreached.append("but its throughput was not measured: the run ended too soon")
    elif reached < least:
        text = f"{reached:.2f} of the throughput, less than {least}"
        _miss(report, scenario, "throughput", text)


def _inject(
    report: CaseReport, scenario: Scenario, seed: int, virtual: bool, folder: Path
) -> tuple[Result, FaultImpact]:
    """Make one run with the scenario's faults in it."""
    faults = _faults_for(report.method, scenario)
    victims = sorted({rank_of(fault) for fault in faults})
    stops = any(fault.kind == "freeze" for fault in faults)
    result = _run(scenario, report, faults, seed, virtual, folder)
    settled_s = _settled_s(report, scenario, stops)
    return result, measure_impact(folder, result.events, victims, settled_s)


def _settled_s(report: CaseReport, scenario: Scenario, lasting: bool) -> float:
    """How long after a fault its throughput counts again.

    What is stopped or cut off is lost only after dead_s, the longest gap.
    """
    limit_s = scenario.expect.longest_gap_s(make_strategy(report.method))
    return limit_s if lasting and limit_s else SETTLED_S


def _strike(
    report: CaseReport, scenario: Scenario, seed: int, virtual: bool, folder: Path
) -> tuple[Result, FaultImpact]:
    """Make one run over many hosts, and strike it from outside."""
    rate_mbit, delay_ms = scenario.rate_mbit, scenario.delay_ms
    with HostNetwork(report.hosts, rate_mbit=rate_mbit, delay_ms=delay_ms) as network:
        run = HostsRun(network, scenario, report.method, seed, folder)
        run.run()
    report.failures += run.failures()
    result = run.result()
    if result is None:
        raise PacelineError(run.last_words(0))
    settled_s = _settled_s(report, scenario, lasting=True)
    return result, measure_impact(run.out, result.events, run.victims, settled_s, run.struck_s)


def _faults_for(method: str, scenario: Scenario) -> list[Fault]:
    """The faults of the ranks that this method has."""
    size = len(make_strategy(method).roles(scenario.workers))
    return [fault for fault in scenario.faults if rank_of(fault) < size]


def _run(
    scenario: Scenario,
    report: CaseReport,
    faults: Sequence[Fault],
    seed: int,
    virtual: bool,
    folder: Path | None = None,
) -> Result:
    incarnations = {str(rank): number for rank, number in scenario.incarnations.items()}
    options: dict[str, Any] = {
        "workers": scenario.workers,
        "strategy": report.method,
        "seed": seed,
        "limits": Limits(dead_s=scenario.dead_s),
        "faults": faults,
        "on_loss": "continue",
        "max_restarts": scenario.max_restarts,
        "arguments": {
            "epochs": scenario.epochs,
            "incarnations": incarnations if faults else {},
            "poisoned": scenario.poisoned,
        },
        "out": folder,
    }
    if virtual:
        return simulate(train, cluster=CLUSTER, **options)
    transport = "hosts" if report.hosts > 1 else "shared_memory"
    return launch(train, device=report.device, transport=transport, **options)


@cache
def _undisturbed(
    workers: int, epochs: int, method: str, virtual: bool, seeds: int, device: str, hosts: int
) -> list[float]:
    """The accuracies of runs without faults, with other seeds."""
    calm = Scenario(about="", ids=(), workers=workers, epochs=epochs)
    report = CaseReport("undisturbed", method, "", device, hosts)
    others = range(FIRST_OTHER_SEED, FIRST_OTHER_SEED + seeds)
    return [_run(calm, report, [], seed, virtual).accuracy or 0.0 for seed in others]


def _is_as_good(
    report: CaseReport, scenario: Scenario, accuracies: Sequence[float], virtual: bool
) -> bool:
    """Whether the mean accuracy is within three standard errors of undisturbed runs, or above."""
    count = max(ENOUGH_SEEDS, len(accuracies))
    workers, epochs, device = scenario.workers, scenario.epochs, report.device
    others = _undisturbed(workers, epochs, report.method, virtual, count, device, report.hosts)
    report.accuracy = statistics.mean(accuracies)
    report.undisturbed = (statistics.mean(others), statistics.stdev(others))
    mean, deviation = report.undisturbed
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else deviation
    error = math.sqrt(deviation**2 / len(others) + spread**2 / len(accuracies))
    return report.accuracy >= mean - max(3 * error, LEAST_DIFFERENCE)


def _miss(report: CaseReport, scenario: Scenario, figure: str, text: str) -> None:
    """Note that a figure is missed: as a failure, unless the scenario gives a reason."""
    reason = scenario.unreached.get(f"{report.method} {figure}")
    if reason is None:
        report.failures.append(text)
    else:
        report.unreached.append(f"but {text}: {reason}")


def _accuracy_text(report: CaseReport) -> str:
    mean = report.undisturbed[0] if report.undisturbed else math.nan
    return f"accuracy {report.accuracy:.3f}, undisturbed {mean:.3f}"


def _events_text(result: Result) -> str:
    if not result.events:
        return "nothing was noticed"
    parts = [
        f"rank {event['rank']} {event['event']} at {event['t']:.1f} s"
        for event in result.events[:6]
    ]
    more = len(result.events) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _expect_equal(report: CaseReport, quantity: str, actual: int, expected: int | None) -> None:
    if expected is not None and actual != expected:
        report.failures.append(f"{actual} {quantity}, not {expected}")


def _expect_at_most(
    report: CaseReport, quantity: str, actual: float | None, limit: float | None
) -> None:
    if limit is not None and actual is not None and actual > limit:
        report.failures.append(f"{actual:.2f} {quantity}, more than {limit}")


def _expect_at_least(
    report: CaseReport, quantity: str, actual: float | None, limit: float | None
) -> None:
    if limit is not None and actual is not None and actual < limit:
        report.failures.append(f"{actual:.2f} {quantity}, less than {limit}")


# An error in the user's code ---------------------------------------------------------------------


def raise_on_rank_2(worker: Worker) -> None:
    """A training that fails on rank 2 after 20 steps."""
    import torch

    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(10**6):
        if worker.rank == 2 and step == 20:
            raise ValueError("a value that the user's code does not like")
        sgd.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        sgd.step()


def _exception(report: CaseReport, scenario: Scenario, virtual: bool) -> None:
    start: Callable[..., Result] = simulate if virtual else launch
    try:
        start(raise_on_rank_2, workers=scenario.workers, strategy=report.method)
    except WorkerFailed as error:
        report.happened = str(error).splitlines()[0]
        if "a value that the user's code does not like" not in error.details or error.rank != 2:
            report.failures.append("the user's traceback is missing")
    else:
        report.failures.append("the run did not fail")


# The command itself ------------------------------------------------------------------------------


def _start(scenario: Scenario, method: str, folder: str) -> subprocess.Popen[str]:
    line = plain_command(method, Path(folder), scenario.workers, scenario.epochs)
    return subprocess.Popen(
        [*line, "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts its background jobs with SIGINT ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def _await_steps(folder: str, process: subprocess.Popen[str]) -> None:
    """Wait until a run has logged its first metrics."""
    metrics, end_s = Path(folder, "metrics.jsonl"), time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        if time.monotonic() > end_s:
            raise PacelineError("the run did not begin")
        time.sleep(0.02)


def _end_from_outside(
    report: CaseReport, scenario: Scenario, act: Callable[[subprocess.Popen[str]], None]
) -> tuple[int, float]:
    """Start a run and end it by ``act``; return its exit code, and how long it took to end."""
    with TemporaryDirectory(prefix="paceline-drill-") as folder:
        process = _start(replace(scenario, epochs=10**4), report.method, folder)
        _await_steps(folder, process)
        acted_s = time.monotonic()
        act(process)
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            report.failures.append("it was still running a minute later")
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        process.communicate()
        return code, time.monotonic() - acted_s


def _interrupt(report: CaseReport, scenario: Scenario, virtual: bool) -> None:
    """Press Ctrl-C: a terminal sends SIGINT to the whole process group."""
    code, took_s = _end_from_outside(
        report, scenario, lambda process: os.killpg(process.pid, signal.SIGINT)
    )
    report.happened = f"exit code {code} after {took_s:.1f} s"
    _expect_equal(report, "is the exit code", code, scenario.expect.exit_code)
    _expect_at_most(report, "seconds until it was over", took_s, END_S)


def _launcher(report: CaseReport, scenario: Scenario, virtual: bool) -> None:
    """Kill the launcher: its ranks must not outlive it."""
    _, took_s = _end_from_outside(report, scenario, lambda process: process.kill())
    report.happened = "nothing of it was left"
    _expect_at_most(report, "seconds until it was over", took_s, END_S)


def _two_runs(report: CaseReport, scenario: Scenario, virtual: bool) -> None:
    """Make two runs at once: each must be as accurate as alone."""
    with TemporaryDirectory(prefix="paceline-drill-") as folder:
        both = [_start(scenario, report.method, f"{folder}/{name}") for name in ("one", "two")]
        results = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
    accuracies = [float(result.get("accuracy") or 0.0) for result in results]
    report.happened = "accuracies " + " and ".join(f"{accuracy:.3f}" for accuracy in accuracies)
    if not _is_as_good(report, scenario, accuracies, virtual):
        report.failures.append(_accuracy_text(report))


def _resume_hosts(report: CaseReport, scenario: Scenario, virtual: bool) -> None:
    """Strike a run over many hosts so that it ends, and resume it: the model is the same."""
    method = make_strategy(report.method)
    more = {"checkpoint_steps": EVERY, "resume": True}
    with TemporaryDirectory(prefix="paceline-drill-") as name:
        with HostNetwork(report.hosts) as network:
            calm = HostsRun(
                network, replace(scenario, strikes=()), report.method, 0, Path(name, "calm"), **more
            )
            calm.run()
        with HostNetwork(report.hosts) as network:
            run = HostsRun(network, scenario, report.method, 0, Path(name, "struck"), **more)
            run.run()
            report.failures += run.failures()
            for host in set(range(report.hosts)) - set(network.alive):
                network.start_host(host)
            again = HostsRun(network, calm.scenario, report.method, 0, Path(name, "struck"), **more)
            again.run()
        report.failures += again.failures()
        result = again.result()
        report.happened = f"ended {max(run.ended_s.values(), default=0.0):.1f} s later"
        if result is None or not result.resumed_at:
            report.failures.append(f"it was not resumed: {again.last_words(0)}")
            return
        report.happened += f", resumed at step {result.resumed_at}"
        accuracies = [result.accuracy or 0.0]
        if not method.synchronous and not _is_as_good(report, scenario, accuracies, virtual):
            report.failures.append(_accuracy_text(report))
        elif method.synchronous and differ(again.out, calm.out):
            report.failures.append("it ended with other parameters than an undisturbed run")
    _expect_at_most(
        report,
        "seconds until it was over",
        max(run.ended_s.values(), default=None),
        scenario.expect.notice_s,
    )


def _checkpoints(report: CaseReport, scenario: Scenario, virtual: bool) -> None:
    """Run a drill of checkpoints."""
    if scenario.kind == "fill_disk" and (why := why_no_small_disk()):
        report.not_tried = why
        return
    run_drill = _CHECKPOINT_DRILLS[scenario.kind]
    report.happened, failures = run_drill(report.method, scenario.workers, scenario.epochs)
    report.failures += failures


_CHECKPOINT_DRILLS = {
    "kill_while_saving": kill_while_saving,
    "kill_all": kill_all,
    "spoil": spoil,
    "fill_disk": fill_disk,
    "end_by_signal": end_by_signal,
}


_OTHER_KINDS: dict[str, Callable[[CaseReport, Scenario, bool], None]] = {
    "exception": _exception,
    "interrupt": _interrupt,
    "launcher": _launcher,
    "two_runs": _two_runs,
    "resume_hosts": _resume_hosts,
    **dict.fromkeys(_CHECKPOINT_DRILLS, _checkpoints),
}
