"""Conduct a drill: a scenario with a method, in real processes or in the simulator."""

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

from paceline.comm.base import Limits
from paceline.common.faults import Fault, rank_of
from paceline.errors import PacelineError, WorkerFailed
from paceline.lab.drill.leftovers import Leftovers
from paceline.lab.drill.look import SETTLED_S, Look, look_at, worst
from paceline.lab.drill.saved import (
    end_by_signal,
    fill_disk,
    kill_all,
    kill_while_saving,
    plain_command,
    spoil,
    why_no_small_disk,
)
from paceline.lab.drill.scenario import Scenario
from paceline.lab.drill.task import train
from paceline.launcher.launch import launch
from paceline.launcher.simulate import simulate
from paceline.record.result import Result
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.strategies import make_strategy
from paceline.training.worker import Worker

ENOUGH_SEEDS, FIRST_OTHER_SEED = 5, 100
LEAST_DIFFERENCE = 0.01
"""What counts as no difference: ten of the thousand test images."""
CLUSTER = Cluster(
    name="drill",
    network=Link(latency_s=5e-5, bytes_per_s=125e6),
    compute=Compute(step_s=0.02, spread=0.05),
)
"""Workers as slow as real ones on few cores, so that the same times mean the same."""
END_S = 10.0
"""A run that has been told to end, or has failed, must be over within this time."""


@dataclass
class Finding:
    """What came of one scenario with one method.

    Attributes:
        case: the name of the scenario.
        method: with its options.
        world: ``real`` or ``simulated``.
        happened: in words.
        failures: what was not as it has to be; a case without any has passed.
        unreached: figures that are known not to be reached, each with the reason.
        not_tried: why it was not tried here at all.
        look: the figures.
        accuracy: of the run; None where it has none.
        undisturbed: the accuracy of undisturbed runs with other seeds: mean and deviation.
        seconds: that the case took.
    """

    case: str
    method: str
    world: str
    happened: str = ""
    failures: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    not_tried: str | None = None
    look: Look = field(default_factory=lambda: Look(None, None, None, None))
    accuracy: float | None = None
    undisturbed: tuple[float, float] | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it was tried, and all was as it has to be."""
        return not self.failures and self.not_tried is None

    @property
    def outcome(self) -> str:
        """What came of it, in words."""
        if self.not_tried is not None:
            return f"not tried: {self.not_tried}"
        return "; ".join(self.failures or ["passed", *self.unreached])

    def to_json(self) -> dict[str, Any]:
        """A row of ``--json``; a figure that was not measured is None."""
        figures = {name: value for name, value in asdict(self).items() if name != "look"}
        look = self.look
        return {
            **figures,
            "passed": self.passed,
            "noticed_s": look.notice_s,
            "gap_s": look.gap_s,
            "throughput": look.throughput,
            "fault_s": look.fault_s,
            "outcome": self.outcome,
        }


def conduct(
    case: str,
    scenario: Scenario,
    method: str,
    *,
    virtual: bool = False,
    seeds: int = 1,
    left: Leftovers | None = None,
) -> Finding:
    """Make it happen, and say what came of it, and what it ``left`` behind.

    Args:
        seeds: how many runs of each fault.
        left: looks after the processes; None where there are none.
    """
    began_s = time.monotonic()
    finding = Finding(case, method, "simulated" if virtual else "real")
    if scenario.kind == "faults":
        _faults(finding, scenario, virtual, seeds)
    else:
        _OTHERS[scenario.kind](finding, scenario, virtual)
    if left is not None:
        finding.failures += [f"left behind: {what}" for what in left.found()]
    finding.seconds = time.monotonic() - began_s
    return finding


# Faults ------------------------------------------------------------------------------------------


def _faults(finding: Finding, scenario: Scenario, virtual: bool, seeds: int) -> None:
    method = make_strategy(finding.method)
    faults, expect = _for(finding.method, scenario), scenario.expect
    victims = sorted({rank_of(fault) for fault in faults})
    stops = any(fault.kind == "freeze" for fault in faults)  # which is not a loss for a while
    limit_s = expect.longest_gap_s(method)
    settled_s = limit_s if stops and limit_s else SETTLED_S
    found: list[float] = []
    looks: list[Look] = []

    def disturb(seed: int) -> None:
        with TemporaryDirectory(prefix="paceline-drill-") as folder:
            result = _run(scenario, finding.method, faults, seed, virtual, Path(folder))
            looks.append(look_at(Path(folder), result.events, victims, settled_s))
        found.append(result.accuracy or 0.0)
        finding.happened = finding.happened or _in_words(result)
        succeeded = sum(event["event"] == "succeeded" for event in result.events)
        _same(finding, "lost workers", result.lost_workers, expect.lost)
        _same(finding, "workers that came", result.joined_workers, expect.joined)
        _same(finding, "successors", succeeded, expect.succeeded)
        _least(finding, "dropped updates", float(result.dropped_updates), expect.dropped)

    try:
        for seed in range(seeds):
            disturb(seed)
        if not _is_as_good(finding, scenario, found, virtual):
            for seed in range(seeds, ENOUGH_SEEDS):  # one run alone may be bad by chance
                disturb(seed)
            if not _is_as_good(finding, scenario, found, virtual):
                _miss(finding, scenario, "accuracy", _worse(finding))
    except PacelineError as error:
        finding.failures.append(f"the run ended: {str(error).splitlines()[0]}")
        return
    finding.look = worst(looks)
    _most(finding, "seconds to notice", finding.look.notice_s, expect.notice_s)
    _most(finding, "seconds without a step", finding.look.gap_s, limit_s)
    reached, least = finding.look.throughput, expect.throughput
    if not method.synchronous and reached is not None and least is not None and reached < least:
        told = f"{reached:.2f} of the throughput, less than {least}"
        _miss(finding, scenario, "throughput", told)


def _for(method: str, scenario: Scenario) -> list[Fault]:
    """The faults, those of ranks that this method does not have left out."""
    size = len(make_strategy(method).roles(scenario.workers))
    return [fault for fault in scenario.faults if rank_of(fault) < size]


def _run(
    scenario: Scenario,
    method: str,
    faults: Sequence[Fault],
    seed: int,
    virtual: bool,
    folder: Path | None = None,
) -> Result:
    lives = {str(rank): life for rank, life in scenario.lives.items()} if faults else {}
    how: dict[str, Any] = {
        "workers": scenario.workers,
        "strategy": method,
        "seed": seed,
        "limits": Limits(dead_s=scenario.dead_s),
        "faults": faults,
        "on_loss": "continue",
        "max_restarts": scenario.max_restarts,
        "arguments": {
            "epochs": scenario.epochs,
            "lives": lives,
            "poisoned": scenario.poisoned,
        },
        "out": folder,
    }
    return simulate(train, cluster=CLUSTER, **how) if virtual else launch(train, **how)


@cache
def _undisturbed(workers: int, epochs: int, method: str, virtual: bool, seeds: int) -> list[float]:
    """The accuracies of runs in which nothing happens, with other seeds."""
    calm = Scenario(about="", ids=(), workers=workers, epochs=epochs)
    others = range(FIRST_OTHER_SEED, FIRST_OTHER_SEED + seeds)
    return [_run(calm, method, [], seed, virtual).accuracy or 0.0 for seed in others]


def _is_as_good(
    finding: Finding, scenario: Scenario, found: Sequence[float], virtual: bool
) -> bool:
    """Whether accuracies are those of undisturbed runs, within three standard errors."""
    count = max(ENOUGH_SEEDS, len(found))
    others = _undisturbed(scenario.workers, scenario.epochs, finding.method, virtual, count)
    finding.accuracy = statistics.mean(found)
    finding.undisturbed = (statistics.mean(others), statistics.stdev(others))
    mean, deviation = finding.undisturbed
    spread = statistics.stdev(found) if len(found) > 1 else deviation
    error = math.sqrt(deviation**2 / len(others) + spread**2 / len(found))
    return finding.accuracy >= mean - max(3 * error, LEAST_DIFFERENCE)


def _miss(finding: Finding, scenario: Scenario, what: str, told: str) -> None:
    """Note that a figure is not reached: as a failure, unless it is known why."""
    reason = scenario.unreached.get(f"{finding.method} {what}")
    if reason is None:
        finding.failures.append(told)
    else:
        finding.unreached.append(f"but {told}: {reason}")


def _worse(finding: Finding) -> str:
    mean = finding.undisturbed[0] if finding.undisturbed else math.nan
    return f"accuracy {finding.accuracy:.3f}, undisturbed {mean:.3f}"


def _in_words(result: Result) -> str:
    if not result.events:
        return "nothing was noticed"
    parts = [
        f"rank {event['rank']} {event['event']} at {event['t']:.1f} s"
        for event in result.events[:6]
    ]
    more = len(result.events) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def _same(finding: Finding, what: str, found: int, expected: int | None) -> None:
    if expected is not None and found != expected:
        finding.failures.append(f"{found} {what}, not {expected}")


def _most(finding: Finding, what: str, found: float | None, limit: float | None) -> None:
    if limit is not None and found is not None and found > limit:
        finding.failures.append(f"{found:.2f} {what}, more than {limit}")


def _least(finding: Finding, what: str, found: float | None, limit: float | None) -> None:
    if limit is not None and found is not None and found < limit:
        finding.failures.append(f"{found:.2f} {what}, less than {limit}")


# The user's own error ----------------------------------------------------------------------------


def raise_on_rank_2(worker: Worker) -> None:
    """A training that fails on one rank after a while."""
    import torch

    net = torch.nn.Linear(2, 1)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(10**6):
        if worker.rank == 2 and step == 20:
            raise ValueError("a value that the user's code does not like")
        sgd.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        sgd.step()


def _exception(finding: Finding, scenario: Scenario, virtual: bool) -> None:
    how: dict[str, Any] = {"workers": scenario.workers, "strategy": finding.method}
    try:
        if virtual:
            simulate(raise_on_rank_2, **how)
        else:
            launch(raise_on_rank_2, **how)
    except WorkerFailed as error:
        finding.happened = str(error).splitlines()[0]
        if "a value that the user's code does not like" not in error.details or error.rank != 2:
            finding.failures.append("the user's traceback is not there")
    else:
        finding.failures.append("the run did not fail")


# The command itself ------------------------------------------------------------------------------


def _start(scenario: Scenario, method: str, folder: str) -> subprocess.Popen[str]:
    words = plain_command(method, Path(folder), scenario.workers, scenario.epochs)
    return subprocess.Popen(
        [*words, "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What runs in the background of a shell has it ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def _await_steps(folder: str, process: subprocess.Popen[str]) -> None:
    """Wait until a run has logged something."""
    metrics, end_s = Path(folder, "metrics.jsonl"), time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        if time.monotonic() > end_s:
            raise PacelineError("the run did not begin")
        time.sleep(0.02)


def _interrupted(
    finding: Finding, scenario: Scenario, act: Callable[[subprocess.Popen[str]], None]
) -> tuple[int, float]:
    """The exit code of a run that is ended from outside, and how long it took to be over."""
    with TemporaryDirectory(prefix="paceline-drill-") as folder:
        process = _start(replace(scenario, epochs=10**4), finding.method, folder)
        _await_steps(folder, process)
        told_s = time.monotonic()
        act(process)
        try:
            code = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            finding.failures.append("it was still there a minute later")
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        process.communicate()
        return code, time.monotonic() - told_s


def _interrupt(finding: Finding, scenario: Scenario, virtual: bool) -> None:
    """Ctrl-C, as a terminal sends it: to the whole group."""
    code, took_s = _interrupted(
        finding, scenario, lambda process: os.killpg(process.pid, signal.SIGINT)
    )
    finding.happened = f"exit code {code} after {took_s:.1f} s"
    _same(finding, "is the exit code", code, scenario.expect.exit_code)
    _most(finding, "seconds until it was over", took_s, END_S)


def _launcher(finding: Finding, scenario: Scenario, virtual: bool) -> None:
    """Kill -9 of the launcher: its ranks must not outlive it."""
    _, took_s = _interrupted(finding, scenario, lambda process: process.kill())
    finding.happened = "nothing of it was left"
    _most(finding, "seconds until it was over", took_s, END_S)


def _two_runs(finding: Finding, scenario: Scenario, virtual: bool) -> None:
    """Two runs at once: each comes to the end that it comes to alone."""
    with TemporaryDirectory(prefix="paceline-drill-") as folder:
        both = [_start(scenario, finding.method, f"{folder}/{name}") for name in ("one", "two")]
        told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in both]
    found = [float(result.get("accuracy") or 0.0) for result in told]
    finding.happened = "accuracies " + " and ".join(f"{accuracy:.3f}" for accuracy in found)
    if not _is_as_good(finding, scenario, found, virtual):
        finding.failures.append(_worse(finding))


def _saved(finding: Finding, scenario: Scenario, virtual: bool) -> None:
    """A drill of checkpoints."""
    if scenario.kind == "fill_disk" and (why := why_no_small_disk()):
        finding.not_tried = why
        return
    act = _SAVED[scenario.kind]
    finding.happened, found = act(finding.method, scenario.workers, scenario.epochs)
    finding.failures += found


_SAVED = {
    "kill_while_saving": kill_while_saving,
    "kill_all": kill_all,
    "spoil": spoil,
    "fill_disk": fill_disk,
    "end_by_signal": end_by_signal,
}


_OTHERS: dict[str, Callable[[Finding, Scenario, bool], None]] = {
    "exception": _exception,
    "interrupt": _interrupt,
    "launcher": _launcher,
    "two_runs": _two_runs,
    **dict.fromkeys(_SAVED, _saved),
}
