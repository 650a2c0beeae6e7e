"""The result of a run, combined from the summaries of all ranks."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Self

from paceline.errors import NotSaved, UsageError
from paceline.record.delivery import Delivery
from paceline.record.folder import RunFolder, write_result
from paceline.record.history import Row, totals_at
from paceline.record.loggers import open_loggers
from paceline.record.loggers.feed import Feed

if TYPE_CHECKING:
    from torch import Tensor

Metric = dict[str, Any]
OnMetric = Callable[[Metric], None]
WorkerSeconds = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The final numbers of one rank."""

    rank: int
    steps: int
    samples: int
    bytes_sent: int
    first_step_s: float
    last_step_s: float
    first_wall_s: float
    last_wall_s: float
    wait_s: float
    consensus: float | None
    samples_per_s: float | None = None
    stale_count: int = 0
    stale_total: int = 0
    stale_max: int = 0
    io_s: float = 0.0
    lr: float | None = None
    batch_size: int = 0
    epoch_samples: int | None = None
    dropped: int = 0
    set_aside: bool = False
    batches_lost: int = 0
    model_error: str | None = None
    stale_ages: list[tuple[int, int]] = field(default_factory=list)
    history: list[Row] = field(default_factory=list)

    def numbers(self) -> list[float]:
        """The numeric fields as a list of floats; None becomes NaN."""
        values = [getattr(self, name) for name in _NUMBERS]
        return [math.nan if value is None else float(value) for value in values]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Summary:
        """The summary that :meth:`numbers` returned as floats."""
        known: list[Any] = [None if math.isnan(number) else number for number in numbers]
        return cls(**dict(zip(_NUMBERS, known, strict=True)))

    @property
    def wait_share(self) -> float:
        """The share of waiting in the time from the first step to the last."""
        span_s = self.last_step_s - self.first_step_s
        return self.wait_s / span_s if span_s > 0 else 0.0

    @property
    def seconds(self) -> WorkerSeconds:
        """How the time from the first step to the last was spent."""
        span_s = self.last_step_s - self.first_step_s
        compute_s = max(0.0, span_s - self.wait_s - self.io_s)
        return {"compute": compute_s, "wait": self.wait_s, "io": self.io_s}


_NOT_NUMERIC = ("model_error", "stale_ages", "history")
_NUMBERS = [f.name for f in fields(Summary) if f.name not in _NOT_NUMERIC]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a run.

    Attributes:
        steps: optimizer steps, summed over workers; ``samples`` likewise.
        loss: the last value logged under this name; ``accuracy`` likewise.
        seconds: from the first step to the last, on the wall's clock.
        startup_seconds: from the start of the run to the first step.
        samples_per_s: of all workers together after their first steps, on the run's own clock.
        virtual_seconds: the simulated time; None for a real run.
        bytes_sent: payload that strategies handed to Comm, summed over ranks.
        wire_bytes: bytes that this put on the simulated links; None for a real run.
        wait_share: waiting / (waiting + compute + loading), mean over workers.
        staleness_mean: 0 for synchronous methods, None if the method has none.
        consensus_distance: the distance between the workers' models just before the end.
        trace_hash: fingerprint of a simulated run; None for a real one.
        as_model: the model whose sizes and times the simulation used; None: its own.
        metrics: every record of ``worker.log``, in order; ``all_samples`` and ``all_bytes`` are
            the totals of all steps that all ranks had completed by then.
        out: the run's folder, if it has one.
        first_step_s: when the first step began, on the clock that metrics carry as ``t``.
        worker_seconds: for each worker by rank, its time from its first step to its last, divided
            into ``wait`` (for others), ``io`` (loading data) and ``compute`` (the remainder).
        staleness_counts: how often an update of each staleness was applied, as ``[age, count]``.
        lr: the workers' initial learning rate; ``batch_size`` is that of one worker.
        epoch_samples: the samples of an epoch; None if unknown.
        events: what happened to ranks and when: ``lost``, ``restarted``, ``joined``, ``rejoined``
            (after it was left behind), ``outlived`` (left behind when the others had finished),
            ``succeeded`` (a successor replaced a server), ``dropped`` (an update that was not
            finite, or exploded), ``large``, ``set_aside`` (the sender of such updates).
        lost_batches: batches that lost workers had drawn and nobody trained on again, because the
            others were in a later epoch or had finished.
        dropped_updates: the number of ``dropped`` events on all ranks; see ``docs/guards.md``.
        diverged: whether every worker that finished had been set aside.
        checkpoint: the step of the last checkpoint; ``checkpoint_error`` is why the last one that
            was due could not be written. ``resumed_at`` is the step that the run resumed from.
        model_error: why the final model could not be written; None if it was.
        batched: with ``batched="auto"`` or ``"on"``, the ``share`` of gradients that were computed
            together with others, how many at a time in the ``mean``, and ``why_not``.
    """

    _delivery: ClassVar[Delivery | None] = None

    strategy: str
    workers: int
    seed: int
    steps: int
    samples: int
    loss: float | None
    accuracy: float | None
    seconds: float
    startup_seconds: float
    virtual_seconds: float | None = None
    samples_per_s: float | None = None
    bytes_sent: int
    wire_bytes: int | None = None
    wait_share: float
    staleness_mean: float | None
    staleness_max: float | None
    consensus_distance: float | None
    trace_hash: str | None = None
    lost_workers: int
    joined_workers: int
    lost_batches: int = 0
    dropped_updates: int = 0
    diverged: bool = False
    out: str | None
    metrics: list[Metric] = field(repr=False)
    first_step_s: float = field(repr=False)
    as_model: str | None = None
    worker_seconds: list[WorkerSeconds] = field(repr=False, default_factory=list)
    staleness_counts: list[list[int]] = field(repr=False, default_factory=list)
    lr: float | None = field(repr=False, default=None)
    batch_size: int | None = field(repr=False, default=None)
    epoch_samples: int | None = field(repr=False, default=None)
    events: list[Metric] = field(repr=False, default_factory=list)
    checkpoint: int | None = None
    checkpoint_error: str | None = None
    resumed_at: int | None = None
    model_error: str | None = None
    batched: Mapping[str, Any] | None = None

    def with_delivery(self, delivery: Delivery) -> Self:
        """This result, with what its ranks have delivered."""
        object.__setattr__(self, "_delivery", delivery)
        return self

    @cached_property
    def model(self) -> dict[str, Tensor]:
        """The state dict of the final model: the method's answer, on the CPU.

        With ``out`` it is read from there when it is first asked for. Without, the worker that
        leads sends it when it has finished, and the result holds it: as much memory as the model,
        and in real processes about a second for 200 MB. Of a result that was read from a file, it
        is not known.
        """
        if self._delivery is None:
            raise UsageError("result.model is that of a run of this process")
        return self._delivery.model()

    @cached_property
    def returned(self) -> list[Any]:
        """What ``train`` returned on each worker, by rank: plain values and tensors, on the CPU.

        None for a worker that was lost, or returned something else; then there is a warning.
        """
        if self._delivery is None:
            return [None] * self.workers
        if (unfit := self._delivery.unfit()) is not None:
            warnings.warn(
                f"train returned what processes do not pass on ({unfit}): return numbers, texts,"
                " lists, dicts and tensors; result.model is the model",
                stacklevel=3,
            )
        return self._delivery.returned()

    def first_with(self, accuracy: float) -> Metric | None:
        """The first record with at least this accuracy."""
        return next((m for m in self.metrics if (m.get("accuracy") or 0.0) >= accuracy), None)

    def seconds_to(self, accuracy: float) -> float | None:
        """The time from the first step to the first record with at least this accuracy."""
        record = self.first_with(accuracy)
        return None if record is None else record["t"] - self.first_step_s

    def bytes_to(self, accuracy: float) -> int | None:
        """What all ranks had sent by the first record with at least this accuracy."""
        return (self.first_with(accuracy) or {}).get("all_bytes")

    def evaluation_gaps(self) -> list[float]:
        """The times between two records with an accuracy."""
        times = [m["t"] for m in self.metrics if m.get("accuracy") is not None]
        return [later - earlier for earlier, later in pairwise(times) if later > earlier]

    def frame(self) -> Any:
        """The metrics as a frame of pandas or, where that is not installed, of polars.

        A row for each record of ``worker.log``; what a record lacks is empty.
        """
        with suppress(ImportError):
            from pandas import DataFrame

            return DataFrame(self.metrics)
        try:
            from polars import from_dicts
        except ImportError:
            raise UsageError(
                "result.frame() needs pandas or polars: pip install pandas; result.metrics is the"
                " same as a list"
            ) from None
        return from_dicts(self.metrics, infer_schema_length=None, strict=False)

    def to_json(self) -> dict[str, Any]:
        """The fields that ``--json`` prints: those with ``repr=True``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.repr}

    def to_record(self) -> dict[str, Any]:
        """All fields, as ``result.json`` has them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def print_event(record: Metric) -> None:
    """Print an event that the user should know of before the run ends."""
    if record["event"] == "set_aside":
        message = f"paceline: rank {record['sender']} is set aside: {record['why']}"
        print(message, file=sys.stderr, flush=True)
    elif record["event"] == "one_by_one":
        print(f"paceline: gradients one at a time: {record['why']}", file=sys.stderr, flush=True)


_LOSSES = {"lost", "rejoined", "outlived"}
"""The events of a worker that was lost; one that was left behind was lost, too."""


class RunRecorder:
    """Records metrics and events during a run, and makes its result in the end.

    Args:
        out: the run's folder, if it has one.
        on_metric: called with each record of ``worker.log``.
        on_progress: called with each report of a worker's progress.
        log: the names of loggers.
    """

    def __init__(
        self,
        out: str | PathLike[str] | None,
        on_metric: OnMetric | None,
        on_progress: OnMetric | None = None,
        log: Sequence[str] = (),
    ) -> None:
        self.folder = None if out is None else RunFolder(out)
        self._log, self._feeds = log, list[Feed]()
        self.metrics: list[Metric] = []
        self.events: list[Metric] = []
        self._on_metric, self._on_progress = on_metric, on_progress

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration of the run, and begin to feed its loggers."""
        if self.folder is not None:
            self.folder.write_config(config)
        folder = None if self.folder is None else self.folder.path
        self._feeds = open_loggers(self._log, config, folder)
        for record in self.metrics:
            self._feed("metric", record)
        for event in self.events:
            self._feed("event", event)

    def no_trace(self, reason: str | None = None) -> None:
        """Have no trace: none is wanted, or a rank's disk failed for ``reason``."""
        if self.folder is not None:
            self.folder.no_trace(reason)

    def metric(self, record: Metric) -> None:
        """Add a record of ``worker.log``."""
        self.metrics.append(record)
        if self.folder is not None:
            self.folder.metric(record)
        self._feed("metric", record)
        if self._on_metric is not None:
            self._on_metric(record)

    def restore(self, metrics: Sequence[Metric], events: Sequence[Metric]) -> None:
        """Start with the metrics and events of the checkpoint that the run resumes from."""
        for event in events:
            self._add_event(event)
        for record in metrics:
            self.metrics.append(record)
            if self.folder is not None:
                self.folder.metric(record)

    def event(self, record: Metric) -> None:
        """Add an event: a rank was lost, joined late, rejoined, ..."""
        self._add_event(record)
        self._feed("event", record)
        print_event(record)

    def progress(self, record: Metric) -> None:
        """Note how far a worker is, for those who watch the run."""
        if self.folder is not None:
            self.folder.progress.note(record)
        if self._on_progress is not None:
            self._on_progress(record)

    def _add_event(self, record: Metric) -> None:
        self.events.append(record)
        if self.folder is not None:
            self.folder.event(record)

    def _feed(self, kind: str, record: Metric) -> None:
        for feed in self._feeds:
            feed.put(kind, record)

    def close(self, ranks: int = 0) -> None:
        """Close the files and loggers; merge the traces of ``ranks`` processes into one."""
        if self.folder is not None:
            self.folder.close()
            if ranks:
                self.folder.merge_traces(ranks)
        for feed in self._feeds:
            feed.close()

    def result(
        self,
        strategy: str,
        summaries: Sequence[Summary],
        *,
        workers: int,
        began_s: float,
        synchronous: bool,
        **facts: Any,
    ) -> Result:
        """Combine the summaries of all ranks and other ``facts`` of a run that ``began_s``."""
        own = sorted((s for s in summaries if s.rank < workers), key=lambda s: s.rank)
        last = max(own, key=lambda s: s.last_step_s, default=None)
        consensus = [s.consensus for s in own if s.consensus is not None]
        rates = [s.samples_per_s for s in own if s.samples_per_s is not None]
        told = [e for e in self.events if e["event"] in {"joined", *_LOSSES}]
        happened = [(e["event"], e["rank"]) for e in told if e["rank"] < workers]
        facts.setdefault("out", None if self.folder is None else str(self.folder.path))
        result = Result(
            strategy=strategy,
            workers=workers,
            steps=round(sum(summary.steps for summary in own)),
            samples=round(sum(summary.samples for summary in own)),
            loss=self._last("loss"),
            accuracy=self._last("accuracy"),
            seconds=max((s.last_wall_s - s.first_wall_s for s in own), default=0.0),
            startup_seconds=max(0.0, own[0].first_wall_s - began_s) if own else 0.0,
            samples_per_s=sum(rates) if rates else None,
            bytes_sent=round(sum(summary.bytes_sent for summary in summaries)),
            lost_workers=len({rank for event, rank in happened if event in _LOSSES}),
            joined_workers=sum(event in ("joined", "rejoined") for event, _ in happened),
            lost_batches=round(last.batches_lost) if last is not None else 0,
            dropped_updates=round(sum(summary.dropped for summary in summaries)),
            diverged=bool(own) and all(summary.set_aside for summary in own),
            wait_share=sum(s.wait_share for s in own) / len(own) if own else 0.0,
            consensus_distance=consensus[0] if consensus else None,
            metrics=[_with_totals(record, summaries) for record in self.metrics],
            first_step_s=min((summary.first_step_s for summary in own), default=0.0),
            worker_seconds=[summary.seconds for summary in own],
            lr=own[0].lr if own else None,
            batch_size=round(own[0].batch_size) if own else None,
            epoch_samples=own[0].epoch_samples if own else None,
            events=sorted(self.events, key=lambda event: event["t"]),
            model_error=next((s.model_error for s in summaries if s.model_error), None),
            **_staleness(summaries, own, 0 if synchronous else None),
            **facts,
        )
        if self.folder is not None:
            write_result(self.folder.path, result.to_record())
        if result.model_error is not None:
            warnings.warn(str(NotSaved(result.out, result.model_error)), stacklevel=2)
        return result

    def _last(self, name: str) -> Any:
        values = [record[name] for record in self.metrics if name in record]
        return values[-1] if values else None


def _staleness(
    summaries: Sequence[Summary], workers: Sequence[Summary], none: int | None
) -> dict[str, Any]:
    """The staleness of the updates that workers applied; ``none`` if there were none."""
    counted = sum(summary.stale_count for summary in workers)
    ages: Counter[int] = Counter()
    for summary in summaries:
        ages.update(dict(summary.stale_ages))
    return {
        "staleness_mean": sum(s.stale_total for s in workers) / counted if counted else none,
        "staleness_max": max(s.stale_max for s in workers) if counted else none,
        "staleness_counts": [[age, count] for age, count in sorted(ages.items())],
    }


def _with_totals(record: Metric, summaries: Sequence[Summary]) -> Metric:
    """A record with the totals of all ranks at its time, if they kept a history."""
    histories = [summary.history for summary in summaries]
    if not any(histories):
        return record
    samples, nbytes = totals_at(record["t"], histories)
    return {**record, "all_samples": samples, "all_bytes": nbytes}
