"""``paceline compare``: compare strategies, numbers of workers, clusters and seeds."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paceline.cli.screen import Screen, number, seconds, size
from paceline.cli.task import Task
from paceline.cli.train import Job, default_transport
from paceline.common.files import write_private
from paceline.common.options import at_least, at_most, field_types
from paceline.common.seeds import check_seed
from paceline.errors import PacelineError, UsageError, unknown
from paceline.launcher.capacity import check_real_workers, check_virtual_workers
from paceline.record.folder import claim
from paceline.sim.models import stands_for_note
from paceline.strategies import STRATEGIES, make_strategy
from paceline.strategies.base import Strategy

if TYPE_CHECKING:
    from paceline.lab.trials import Trial, TrialOutcome
    from paceline.record.result import Result
    from paceline.sim.cluster import Cluster

TARGET = 0.8
"""With the built-in task, a comparison measures the time to this accuracy."""
MOST_SEEDS = 10_000
TRIALS = "trials"
"""The folder of outcomes inside the comparison's folder."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run of a comparison."""

    spec: str
    strategy: Strategy
    workers: int
    cluster: Cluster | None
    seed: int

    def __str__(self) -> str:
        where = f", {self.cluster.name}" if self.cluster else ""
        return f"{self.spec}, {self.workers} workers{where}, seed {self.seed}"


class AllRunsFailed(PacelineError):
    """Every run of a comparison failed; the error and exit code are those of the first."""

    def __init__(self, outcome: TrialOutcome) -> None:
        super().__init__(outcome.error)
        self.exit_code = outcome.exit_code


@dataclass(kw_only=True)
class Comparison:
    """The runs of a comparison: simulated ones on all cores, real ones one after the other."""

    task: Task
    strategies: dict[str, Strategy]
    workers: list[int]
    clusters: list[Cluster]
    target: float | None
    seeds: list[int]
    out: Path
    transport: str | None = None
    device: str = "cpu"
    rows: list[Row] = field(default_factory=list)

    def run(self, screen: Screen) -> None:
        """Make the runs that are not in the folder yet, and write the report of all."""
        from paceline.report.page import load_template, write_report

        load_template()  # fail now, before the runs, if the report's template is missing
        cases = [*self._cases()]
        with claim(self.out):
            outcomes = (self._simulate if self.clusters else self._run)(screen, cases)
            if all(outcome.result is None for outcome in outcomes):
                raise AllRunsFailed(outcomes[0])
            self.rows = [self._row(*pair) for pair in zip(cases, outcomes, strict=True)]
            self.report = write_report([self.out])

    def _cases(self) -> Iterator[Case]:
        clusters: Sequence[Cluster | None] = self.clusters or [None]
        methods = self.strategies.items()
        for cluster, workers, method, seed in product(clusters, self.workers, methods, self.seeds):
            yield Case(*method, workers, cluster, seed)

    # Making the runs -----------------------------------------------------------------------------

    def _simulate(self, screen: Screen, cases: Sequence[Case]) -> list[TrialOutcome]:
        """Simulate all cases on all cores; those with many workers first, they take longest."""
        from paceline.lab.trials import OutcomeCache, run_trials

        trials, folder = [self._trial(case) for case in cases], self.out / TRIALS
        cache, configs = OutcomeCache(folder), [trial.key() for trial in trials]
        found = sum(cache.find(config) is not None for config in configs)
        self._write_plan(cases, [cache.path(config) for config in configs])
        order = sorted(range(len(cases)), key=lambda index: -cases[index].workers)
        what = f"{len(cases)} simulations, {found} already in {self.out}"
        with screen.tally(len(cases), what) as report:
            outcomes = run_trials(
                [trials[index] for index in order],
                folder=folder,
                on_done=lambda index, outcome: report(self._line(cases[order[index]], outcome)),
            )
        by_index = dict(zip(order, outcomes, strict=True))
        return [by_index[index] for index in range(len(cases))]

    def _trial(self, case: Case) -> Trial:
        from paceline.lab.trials import Trial

        assert case.cluster is not None
        return Trial(
            strategy=case.strategy,
            workers=case.workers,
            cluster=case.cluster,
            seed=case.seed,
            arguments=self.task.arguments,
            train=self.task.reference,
        )

    def _run(self, screen: Screen, cases: Sequence[Case]) -> list[TrialOutcome]:
        """Run the cases in real processes, one at a time: each gets the whole machine."""
        from paceline.lab.trials import OutcomeCache, TrialOutcome

        cache, configs = (
            OutcomeCache(self.out / TRIALS),
            [self._real_config(case) for case in cases],
        )
        known = [cache.find(config) for config in configs]
        self._write_plan(cases, [cache.path(config) for config in configs])
        found = len(known) - known.count(None)
        screen.say(f"{len(cases)} runs, {found} already in {self.out}")
        outcomes = []
        for index, case in enumerate(cases):
            outcome = known[index]
            if outcome is None:
                screen.say(f"[{index + 1}/{len(cases)}] {case}")
                result = self._launch(screen, case, self.out / f"{index + 1:02d}")
                outcome = TrialOutcome(result=result)
                cache.add(configs[index], json.dumps(asdict(outcome)))
            outcomes.append(outcome)
        return outcomes

    def _launch(self, screen: Screen, case: Case, out: Path) -> Result:
        job = Job(task=self.task, strategy=case.strategy, seed=case.seed, out=out)
        result = job.run(screen, case.workers, self.transport, self.device)
        assert result is not None, "a comparison starts its own processes"
        return result

    def _real_config(self, case: Case) -> str:
        """The configuration that identifies a real run."""
        from paceline.strategies.packing import pack_strategy

        config = {
            "train": self.task.reference,
            "strategy": pack_strategy(case.strategy),
            "workers": case.workers,
            "world": self.transport or default_transport(),
            "device": self.device,
            "seed": case.seed,
            "arguments": self.task.arguments,
        }
        return json.dumps(config, sort_keys=True)

    def _write_plan(self, cases: Sequence[Case], paths: Sequence[Path | None]) -> None:
        """Write the list of runs, for the report."""
        from paceline.report.material import COMPARISON

        runs = [
            {
                "strategy": case.spec,
                "workers": case.workers,
                "seed": case.seed,
                "file": f"{TRIALS}/{path.name}",
            }
            for case, path in zip(cases, paths, strict=True)
            if path is not None
        ]
        plan = {
            "task": self.task.name,
            "target": self.target,
            "command": shlex.join(["paceline", *sys.argv[1:]]),
            "made_at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "runs": runs,
        }
        write_private(self.out / COMPARISON, json.dumps(plan, indent=1) + "\n")

    # Showing the outcome -------------------------------------------------------------------------

    def _line(self, case: Case, outcome: TrialOutcome) -> str:
        """One line about a run that has ended."""
        result = outcome.result
        if result is None:
            return f"{case}: {(outcome.error or '').splitlines()[0]}"
        line = f"{case}: accuracy {number(result.accuracy)}"
        if self.target is None:
            return line
        at_s = result.seconds_to(self.target)
        return f"{line}, {self.target:g} " + (f"after {seconds(at_s)}" if at_s else "never")

    def _row(self, case: Case, outcome: TrialOutcome) -> Row:
        from paceline.record.result import Result

        result, target = outcome.result, self.target
        reached = None if result is None or target is None else result.first_with(target)
        keys = [f.name for f in fields(Result) if f.repr]
        return {
            **(dict.fromkeys(keys) if result is None else result.to_json()),
            "strategy": case.spec,
            "workers": case.workers,
            "cluster": case.cluster.name if case.cluster else None,
            "seed": case.seed,
            "target": target,
            "seconds_to_target": reached["t"] - result.first_step_s if result and reached else None,
            "bytes_to_target": reached.get("all_bytes") if reached else None,
            "error": outcome.error,
        }

    def show(self, screen: Screen) -> None:
        """Show the table and the verdicts."""
        columns = ["strategy", "workers", "accuracy"]
        if self.target is not None:
            columns += [f"time to {self.target:g}", f"sent to {self.target:g}"]
        columns += ["virtual time" if self.clusters else "time", "waiting", "sent"]
        if len(self.clusters) > 1:
            columns.insert(1, "cluster")
        groups = self._groups()
        cells, brief = ([self._cells(rows, ranges) for rows in groups] for ranges in (True, False))
        screen.table(columns, cells, brief)
        if self.clusters and self.clusters[0].stands_for is not None:
            screen.show(f"Note: {stands_for_note(self.clusters[0].stands_for.model)}.")
        if len(self.seeds) > 1:
            screen.say(f"Means over {len(self.seeds)} seeds (and their ranges, if they fit).\n")
        for sentence in self._sentences():
            screen.say(screen.wrap(sentence) + "\n")
        screen.say(f"Report: {self.report}")

    def _groups(self) -> list[list[Row]]:
        """The rows, grouped so that those of a group differ only in their seed."""
        groups: dict[Any, list[Row]] = {}
        for row in self.rows:
            groups.setdefault((row["cluster"], row["workers"], row["strategy"]), []).append(row)
        return [*groups.values()]

    def _cells(self, rows: Sequence[Row], ranges: bool) -> list[str]:
        accuracy = mean_of(rows, "accuracy", number, ranges=ranges)
        cells = [rows[0]["strategy"], str(rows[0]["workers"]), accuracy]
        if self.target is not None:
            to_target = mean_of(rows, "seconds_to_target", seconds, "never", ranges=ranges)
            cells.append(to_target)
            cells.append(_mean(rows, "bytes_to_target", size))
        whole = "virtual_seconds" if self.clusters else "seconds"
        cells += [_mean(rows, whole, seconds), _mean(rows, "wait_share", "{:.0%}".format)]
        cells.append(_mean(rows, "bytes_sent", size))
        if len(self.clusters) > 1:
            cells.insert(1, rows[0]["cluster"])
        return cells

    def _sentences(self) -> Iterator[str]:
        """The verdict on each setting, as in the report."""
        from paceline.report.material import read_material
        from paceline.report.verdict import verdict

        material = read_material([self.out])
        for setting in material.settings:
            outcome = verdict(material, setting)
            sure = f" {outcome.sure.capitalize()}: {outcome.why}" if outcome.sure else ""
            yield f"{setting}: {' '.join(outcome.sentences)}{sure}"


def mean_of(
    rows: Sequence[Row],
    key: str,
    show: Callable[[Any], str],
    missing: str = "-",
    *,
    ranges: bool = True,
) -> str:
    """The mean over seeds and its range; also how many seeds have a value, if not all do."""
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return missing
    text, low, high = _mean(rows, key, show), show(min(values)), show(max(values))
    if ranges and low != high:
        text += f" ({low} to {high})"
    return text if len(values) == len(rows) else f"{text}, {len(values)} of {len(rows)}"


def _mean(rows: Sequence[Row], key: str, show: Callable[[Any], str]) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return show(fmean(values)) if values else "-"


# Parsing options ---------------------------------------------------------------------------------


def split_specs(texts: Sequence[str]) -> list[str]:
    """Specifications that were repeated, or separated by commas outside of parentheses.

    >>> split_specs(["allreduce,sasgd(interval=8, warmup=2)", "sasgd"])
    ['allreduce', 'sasgd(interval=8, warmup=2)', 'sasgd']
    """
    parts = [part for text in texts for part in re.split(r",(?![^(]*\))", text)]
    return [part.strip() for part in parts if part.strip()]


def strategies_of(specs: Sequence[str], settings: dict[str, Any]) -> dict[str, Strategy]:
    """Strategies by specification; each setting applies to the strategies that have it."""
    chosen: dict[str, Strategy] = {}
    used: set[str] = set()
    available: set[str] = set()
    for spec in split_specs(specs) or list(STRATEGIES):
        names = field_types(type(make_strategy(spec)))
        own = {name: value for name, value in settings.items() if name in names}
        chosen[spec] = make_strategy(spec, own)
        used |= set(own)
        available |= set(names)
    for name in settings:
        if name not in used:
            raise unknown("option", name, available)
    return chosen


def workers_of(
    texts: Sequence[str], strategies: Mapping[str, Strategy], *, virtual: bool
) -> list[int]:
    """Numbers of workers; refuses more than this machine can run, servers included."""
    check = check_virtual_workers if virtual else check_real_workers
    counts = [_integer("workers", text) for text in split_specs(texts)]
    for count, strategy in product(counts, strategies.values()):
        check(count, strategy)
    return counts


def seeds_of(text: str | None, first: int) -> list[int]:
    """Seeds from ``3`` (so many, starting at ``first``) or ``0,1,5`` (exactly these).

    >>> seeds_of(None, 7), seeds_of("3", 7), seeds_of("0,1,5", 0)
    ([7], [7, 8, 9], [0, 1, 5])
    """
    if text is None:
        return [first]
    if "," not in text:
        count = _integer("seeds", text)
        at_least("seeds", count, 1)
        at_most("seeds", count, MOST_SEEDS)
        check_seed(first + count - 1)
        return [*range(first, first + count)]
    if first:
        raise UsageError(f"seed ({first}) must not be given together with a list of seeds ({text})")
    seeds = [*dict.fromkeys(_integer("seeds", part) for part in split_specs([text]))]
    for seed in seeds:
        check_seed(seed)
    return seeds


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} ({text}) must be a whole number") from None
