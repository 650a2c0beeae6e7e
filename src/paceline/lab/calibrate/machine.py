"""Measure a script on this machine, and describe both as a cluster file."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from paceline.common.reference import Reference, find
from paceline.lab.calibrate.fit import Line, Variation, fit_line, fit_variation, relative_error
from paceline.lab.calibrate.messages import ROUND_TRIP, OperationTime, run_link, run_messages
from paceline.lab.calibrate.steps import WORK_KINDS, StepTimes, Timed, run_steps
from paceline.lab.tasks.recipe import batch_of
from paceline.launcher.many_hosts import ManyHosts
from paceline.record.folder import provenance
from paceline.sim.cluster import (
    Cluster,
    CollectiveCosts,
    Compute,
    Handling,
    Link,
    Loading,
    Serving,
)

SMALL_BYTES = 4 << 10
MOST_RANKS = 4
LEAST_WAIT_S = 1e-6
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is calibrated: a training function, its arguments and the transport.

    With ``hosts``, also the link to another host, which joins.
    """

    name: str
    train: Reference
    arguments: Mapping[str, Any] = field(default_factory=dict)
    transport: str = "shared_memory"
    seed: int = 0
    hosts: ManyHosts | None = None
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a calibration may take.

    Args:
        rounds: how often everything is measured.
        steps: the steps of each process, for each batch size and round.
        limit_s: the time limit of these steps.
        repeats: how often each operation is timed, for each size and round.
    """

    rounds: int = 3
    steps: int = 60
    limit_s: float = 2.0
    repeats: int = 6


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The results of a calibration.

    Attributes:
        subject: what was calibrated.
        cores: how many cores the processes may use.
        nbytes: the size of the model.
        batches: the batch sizes of the timed steps.
        sizes: the sizes of the timed messages, in bytes.
        gradient: the time of a step by samples: from its batch to its end, no communication.
        loading: the time from a step to the next batch, by samples.
        variation: how single steps vary around their mean.
        crowding: a step's own time when four ranks share the cores, over that of ``gradient``.
        link: the time of a message in which no core works on it, by bytes.
        network: the same between this host and another; None if only this one was measured.
        work: the processor time of a rank in each kind of work, by bytes.
        serve: the processor time of a server for a request, by bytes.
        queued: the share of the time in which other work had the cores.
    """

    subject: Subject
    cores: int
    nbytes: int
    batches: list[int]
    sizes: list[int]
    gradient: Line
    loading: Line
    variation: Variation
    crowding: float
    link: Line
    work: dict[str, Line]
    serve: Line
    queued: float
    network: Line | None = None

    def cluster(self, name: str = "calibrated") -> Cluster:
        """The cluster that describes this machine."""
        varies = self.variation
        kinds: dict[str, Any] = {varies.kind: varies.trace or varies.value}
        kinds.pop("none", None)
        link, many = _link(self.link), self.network is not None
        return Cluster(
            name=name,
            about=f"{self.subject.name} on this machine, over {self.subject.transport}",
            ranks_per_node=self.cores if many else 0,
            cores=self.cores,
            registrar=0 if many else None,
            network=link if self.network is None else _link(self.network),
            inside=link,
            compute=Compute(step_s=self.gradient.start, sample_s=self.gradient.slope, **kinds),
            loading=Loading(batch_s=self.loading.start, sample_s=self.loading.slope),
            collectives=CollectiveCosts(algorithm="ring"),
            serving=Serving(bytes_per_s=1 / self.serve.slope),
            handling=Handling(**{kind: _link(line) for kind, line in self.work.items()}),
        )

    def fits(self) -> list[dict[str, Any]]:
        """Each fit in numbers: its start, its slope by unit, and its error."""
        lines = {
            "gradient": (self.gradient, "sample"),
            "loading": (self.loading, "sample"),
            "link": (self.link, "byte"),
            **({"network": (self.network, "byte")} if self.network is not None else {}),
            **{kind: (line, "byte") for kind, line in self.work.items()},
            "serve": (self.serve, "byte"),
        }
        fits = [
            {"what": kind, "start_s": line.start, f"{unit}_s": line.slope, "error": line.error}
            for kind, (line, unit) in lines.items()
        ]
        varies = self.variation
        shape = {"what": "variation", "kind": varies.kind, "value": varies.value}
        return [*fits, {**shape, "error": varies.error}]


def _link(line: Line) -> Link:
    return Link(latency_s=line.start, bytes_per_s=1 / line.slope if line.slope > 0 else math.inf)


def calibrate(subject: Subject, effort: Effort, say: Say = lambda text: None) -> Calibration:
    """Measure ``subject`` on this machine, in several rounds."""
    cores = usable_cores()
    workers = max(2, cores) if subject.device == "cpu" else 2
    most = max(MOST_RANKS, workers)
    with one_thread_a_rank():
        network = None
        if subject.hosts is not None:
            network = _fit_link(run_link(subject.hosts, effort.rounds * effort.repeats))
        batches = batch_sizes(subject, cores)
        runs: list[StepTimes] = []
        crowded: list[StepTimes] = []
        messages: list[OperationTime] = []
        for number in range(1, effort.rounds + 1):
            say(f"round {number} of {effort.rounds}: steps with communication, then messages")
            runs += [_steps(subject, effort, batch, workers) for batch in batches]
            crowded.append(_steps(subject, effort, batches[0], most))
            nbytes = runs[0].nbytes
            sizes = message_sizes(nbytes)
            for size in sizes:
                messages += run_messages(
                    size,
                    transport=subject.transport,
                    repeats=effort.repeats,
                    device=subject.device,
                )
    return Calibration(
        subject=subject,
        cores=cores,
        nbytes=nbytes,
        batches=sorted({_full_batch(run.gradients) for run in runs}),
        sizes=sizes,
        gradient=fit_means([run.gradients for run in runs]),
        loading=fit_means([run.loading for run in runs]),
        variation=fit_variation(_factors(runs)),
        crowding=_crowding(runs, crowded),
        link=_fit_link(messages),
        network=network,
        work={kind: fit_work(kind, [*runs, *crowded], messages) for kind in WORK_KINDS},
        serve=fit_work("serve", runs, []),
        queued=_other_work(statistics.mean(run.queued for run in runs), min(1.0, cores / workers)),
    )


def _other_work(queued: float, own: float) -> float:
    """The share of other work, if each rank could have ``own`` of a core at most."""
    return max(0.0, 1 - (1 - queued) / own)


def _steps(subject: Subject, effort: Effort, batch: int | None, ranks: int) -> StepTimes:
    arguments = dict(subject.arguments)
    if batch is not None:
        arguments["batch_size"] = batch
    return run_steps(
        subject.train,
        arguments,
        workers=ranks,
        transport=subject.transport,
        steps=effort.steps,
        limit_s=effort.limit_s,
        seed=subject.seed,
        device=subject.device,
    )


# Fits --------------------------------------------------------------------------------------------


def fit_means(runs: Sequence[Sequence[Timed]]) -> Line:
    """Fit the time by samples, from the mean of each run and the median over runs of a size."""
    means: dict[int, list[float]] = {}
    for run in runs:
        full = _full_batch(run)
        times = [timed.seconds for timed in run if timed.samples == full]
        if times:
            means.setdefault(full, []).append(statistics.mean(times))
    if not means:
        return Line(0.0, 0.0, 0.0)
    return fit_line(list(means), [statistics.median(each) for each in means.values()])


def _full_batch(run: Sequence[Timed]) -> int:
    """The size of a full batch in a run."""
    return max((timed.samples for timed in run), default=0)


def _crowding(runs: Sequence[StepTimes], crowded: Sequence[StepTimes]) -> float:
    """A step's own time when ranks share the cores, over that when each has its own."""
    full = _full_batch(crowded[0].gradients)
    alike = [run for run in runs if _full_batch(run.gradients) == full]
    groups = ([run.gradients for run in group] for group in (alike, crowded))
    uncrowded_s, crowded_s = (fit_means(gradients).start for gradients in groups)
    return crowded_s / uncrowded_s


def _factors(runs: Sequence[StepTimes]) -> list[float]:
    """The time of each step on a full batch, over the mean of its run."""
    factors: list[float] = []
    for run in runs:
        full = _full_batch(run.gradients)
        times = [timed.seconds for timed in run.gradients if timed.samples == full]
        mean = statistics.mean(times)
        factors += [seconds / mean for seconds in times]
    return factors


def _fit_link(messages: Sequence[OperationTime]) -> Line:
    """Fit the waiting time of half a round trip."""
    waits: dict[int, list[float]] = {}
    for message in messages:
        if message.operation == ROUND_TRIP:
            waits.setdefault(message.nbytes, []).append(message.wait_s / 2)
    medians = [max(LEAST_WAIT_S, statistics.median(each)) for each in waits.values()]
    return fit_line(list(waits), medians)


def fit_work(kind: str, runs: Sequence[StepTimes], messages: Sequence[OperationTime]) -> Line:
    """Fit the processor time of a kind of work, by bytes.

    The time of a small vector is that of an operation alone; the time of the whole model is that
    between two gradients. The error is that of single runs against their median.
    """
    nbytes, times = runs[0].nbytes, [run.work[kind] for run in runs]
    whole_s = statistics.median(times)
    error = relative_error([whole_s] * len(times), times)
    operation, share = (ROUND_TRIP, 0.5) if kind in ("post", "take") else (kind, 1.0)
    small = [m for m in messages if m.operation == operation and m.nbytes < nbytes]
    if not small:
        return Line(0.0, whole_s / nbytes, error)
    least = min(m.nbytes for m in small)
    call_s = share * statistics.median(m.work_s for m in small if m.nbytes == least)
    slope = max(0.0, whole_s - call_s) / (nbytes - least)
    return Line(whole_s - slope * nbytes, slope, error)


# What to measure ---------------------------------------------------------------------------------


def usable_cores() -> int:
    """How many cores this process may use, by its affinity and its container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        share = int(quota) // int(period) if quota != "max" else 0
    except (OSError, ValueError):
        share = 0
    return max(1, min(allowed or 1, share or allowed or 1))


@contextmanager
def one_thread_a_rank() -> Iterator[None]:
    """Ranks that are started in this context use one thread each, however few they are."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def batch_sizes(subject: Subject, cores: int) -> list[int | None]:
    """A full batch, half and a quarter, if ``train`` takes ``batch_size``; else [None]."""
    parameters = signature(find(subject.train)).parameters
    if "batch_size" not in parameters:
        return [None]
    batch_size = subject.arguments.get("batch_size", parameters["batch_size"].default)
    largest = batch_size if isinstance(batch_size, int) else batch_of(cores)
    return [*dict.fromkeys(max(1, largest // part) for part in (1, 2, 4))]


def message_sizes(nbytes: int) -> list[int]:
    """The sizes of a small message and of the whole model, multiples of 4 bytes."""
    model_bytes = max(4, nbytes // 4 * 4)
    return sorted({min(SMALL_BYTES, model_bytes), model_bytes})


# The file ----------------------------------------------------------------------------------------


def to_toml(calibration: Calibration) -> str:
    """The cluster file; comments say how it was measured."""
    cluster, subject = calibration.cluster(), calibration.subject
    versions, crowding = provenance()["versions"], calibration.crowding
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    batches, sizes = (
        ", ".join(map(str, each)) for each in (calibration.batches, calibration.sizes)
    )
    lines = [
        f"# Measured by paceline calibrate on {time.strftime('%Y-%m-%d %H:%M:%S %z')}.",
        f"# {subject.name} {dict(subject.arguments)}: {calibration.nbytes} bytes of parameters.",
        f"# Transport {subject.transport}, one thread a rank, device {subject.device}.",
        f"# Versions: {software}.",
        f"# Batches of {batches} samples; messages of {sizes} bytes; 2 to 4 ranks.",
        f"# With {MOST_RANKS} ranks a step's own time was {crowding:.2f} of the one here.",
        f"# Other work had the cores for {calibration.queued:.0%} of the time; it is left out.",
        "# Errors are relative, root mean squares: of lines over sizes, of work over runs.",
        "",
        f"about = {json.dumps(cluster.about)}",
        *_nodes(cluster),
        "",
        *(
            _table("network", cluster.network, calibration.network.error)
            if calibration.network
            else []
        ),
        *_table("inside", cluster.inside, calibration.link.error),
        "[compute]                    # a whole step without communication",
        f"step_s = {cluster.compute.step_s!r}",
        f"sample_s = {cluster.compute.sample_s!r}     # error {calibration.gradient.error:.1%}",
        *_variation(calibration.variation),
        "",
        "[loading]                    # from a step to the next batch",
        f"batch_s = {cluster.loading.batch_s!r}",
        f"sample_s = {cluster.loading.sample_s!r}     # error {calibration.loading.error:.1%}",
        "",
        "[collectives]",
        'algorithm = "ring"',
        "",
        "[serving]                    # all that a server does for a request",
        f"bytes_per_s = {cluster.serving.bytes_per_s!r}     # error {calibration.serve.error:.1%}",
        "",
    ]
    for kind, line in calibration.work.items():
        lines += _table(f"handling.{kind}", getattr(cluster.handling, kind), line.error)
    return "\n".join(lines).rstrip() + "\n"


def _nodes(cluster: Cluster) -> list[str]:
    if cluster.registrar is None:
        return ["ranks_per_node = 0           # all on this machine", f"cores = {cluster.cores}"]
    return [
        f"ranks_per_node = {cluster.ranks_per_node}           # one for each core of a host",
        f"cores = {cluster.cores}",
        f"registrar = {cluster.registrar}                # on the first host",
    ]


def _table(name: str, link: Link, error: float) -> list[str]:
    head = f"[{name}]"
    return [
        f"{head:<28} # error {error:.1%}",
        f"latency_s = {link.latency_s!r}",
        *([f"bytes_per_s = {link.bytes_per_s!r}"] if math.isfinite(link.bytes_per_s) else []),
        "",
    ]


def _variation(varies: Variation) -> list[str]:
    if varies.kind == "none":
        return ["# no variation: single steps are within 0.5 % of their mean"]
    if varies.kind == "trace":
        factors = ", ".join(f"{factor:.4g}" for factor in varies.trace)
        return [
            "# no simple distribution fits: steps as they came, over their mean",
            f"trace = [{factors}]",
        ]
    return [f"{varies.kind} = {varies.value!r}     # error {varies.error:.1%} of the mean"]
