"""Train on one rank, in a real or a simulated process, and note where it failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from paceline.errors import PacelineError, PeerLost, RunLost, ServingDone
from paceline.launcher.spec import Train
from paceline.record.delivery import packed_model, packed_return
from paceline.training.session import Session
from paceline.training.worker import Worker


def run_rank(session: Session, train: Train, arguments: Mapping[str, Any]) -> Any:
    """Train and finish; return what ``train`` does. A serving rank ends in ``worker.setup``."""
    returned = None
    with noting_origin(session), suppress(ServingDone):
        returned = train(Worker(session), **arguments)
        session.finish()
    return returned


def delivered(session: Session, returned: Any, out: object) -> Iterator[tuple[str, bytes]]:
    """What a rank delivers when it has finished: what ``train`` returned, and the final model.

    The worker that leads delivers that, unless it was written to ``out``.
    """
    if returned is not None:
        yield packed_return(returned)
    if out is None and session.leads and session.model is not None:
        yield packed_model(session.model.state_dict())


@contextmanager
def noting_origin(session: Session) -> Iterator[None]:
    """Note on which rank and when an error occurred; of a lost run, raise its first loss."""
    try:
        yield
    except (RunLost, PeerLost) as end:
        loss = end.loss if isinstance(end, RunLost) else session.ports.first_loss(end)
        loss.add_note(_origin(session))
        raise loss from None
    except PacelineError as error:
        error.add_note(_origin(session))
        raise


def _origin(session: Session) -> str:
    return f"on rank {session.rank} at {session.clock.now():.6f} s"
