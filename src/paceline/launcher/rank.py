"""Train on one rank, in a real or a simulated process, and note where it failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import PacelineError, RunLost, ServingDone
from paceline.launcher.spec import Train
from paceline.training.session import Session
from paceline.training.worker import Worker


def run_rank(session: Session, train: Train, arguments: Mapping[str, Any]) -> None:
    """Train and finish; a serving rank ends in ``worker.setup``."""
    try:
        train(Worker(session), **arguments)
        session.finish()
    except ServingDone:
        pass
    except RunLost as end:
        note_origin(end.loss, session)
        raise end.loss from None
    except PacelineError as error:
        note_origin(error, session)
        raise


def note_origin(error: PacelineError, session: Session) -> None:
    """Note on which rank and when an error occurred."""
    error.add_note(f"on rank {session.rank} at {session.clock.now():.6f} s")
