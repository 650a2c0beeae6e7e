"""The final numbers of one worker, for the result of the run."""

from __future__ import annotations

import time
from typing import Any

from paceline.record.result import Summary
from paceline.training.session import Session
from paceline.training.stepper import Mark


def summary_of(session: Session) -> Summary:
    """The summary of a rank that has finished."""
    stepper, meter = session.stepper, session.meter
    now = Mark(session.clock.now(), time.monotonic(), 0.0)
    first, last = (stepper.first or now, stepper.last or now) if stepper else (now, now)
    return Summary(
        rank=session.rank,
        steps=stepper.steps if stepper else 0,
        samples=stepper.samples if stepper else 0,
        bytes_sent=meter.bytes_sent,
        first_step_s=first.time_s,
        last_step_s=last.time_s,
        first_wall_s=first.wall_s,
        last_wall_s=last.wall_s,
        wait_s=last.wait_s - first.wait_s,
        consensus=session.consensus,
        io_s=last.io_s - first.io_s,
        lr=stepper.lr if stepper else None,
        batch_size=stepper.batch_size if stepper else 0,
        epoch_samples=session.epoch_samples,
        history=stepper.history.rows if stepper else [],
        samples_per_s=_rate_of(session),
        dropped=_dropped_by(session),
        set_aside=session.set_aside,
        batches_lost=session.ports.queue.lost_batches() + session.unseen_batches,
        **_staleness_of(session),
    )


def _rate_of(session: Session) -> float | None:
    """Samples per second on the run's clock, without the first step, which warms up."""
    stepper = session.stepper
    if (
        stepper is None
        or stepper.warm is None
        or stepper.last is None
        or stepper.last == stepper.warm
    ):
        return None
    span_s = stepper.last.time_s - stepper.warm.time_s
    return (stepper.last.samples - stepper.warm.samples) / span_s if span_s > 0 else None


def _dropped_by(session: Session) -> int:
    """How many updates this rank dropped, of its own and of others."""
    return 0 if session.stepper is None else session.strategy.guard.dropped.total()


def _staleness_of(session: Session) -> dict[str, Any]:
    if session.stepper is None or session.stepper.alone:
        return {}
    stale = session.strategy.stale
    return {
        "stale_count": stale.count,
        "stale_total": stale.total,
        "stale_max": stale.maximum,
        "stale_ages": sorted(stale.ages.items()),
    }
