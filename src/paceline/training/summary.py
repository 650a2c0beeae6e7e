"""The final numbers of one worker, for the result of the run."""

from __future__ import annotations

import time
from typing import Any

from paceline.record.result import Summary
from paceline.training.session import Session
from paceline.training.stepper import Mark


def summary_of(session: Session, model_error: str | None = None) -> Summary:
    """The summary of a rank that has finished; ``model_error``: why it could not save the model."""
    stepper, meter = session.stepper, session.recorder.meter
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
        dropped=session.strategy.guard.dropped.total() if stepper else 0,
        set_aside=session.set_aside,
        batches_lost=session.ports.queue.lost_batches() + session.unseen_batches,
        model_error=model_error,
        **_staleness_of(session),
    )


def _rate_of(session: Session) -> float | None:
    """Samples per second on the run's clock, without the first step, which warms up."""
    warm, last = (session.stepper.warm, session.stepper.last) if session.stepper else (None, None)
    if warm is None or last is None or last.time_s <= warm.time_s:
        return None
    return (last.samples - warm.samples) / (last.time_s - warm.time_s)


def _staleness_of(session: Session) -> dict[str, Any]:
    if session.stepper is None or session.stepper.alone:
        return {}
    stale = session.strategy.stale
    numbers = {"stale_count": stale.count, "stale_total": stale.total, "stale_max": stale.maximum}
    return {**numbers, "stale_ages": sorted(stale.ages.items())}
