"""What can go wrong, as one tree.

.. code-block:: text

    PacelineError
    ├── UsageError (also a ValueError)   something the user gave: name, value, rule     exit code 2
    │   └── NotLaunched                  what a launcher's variables say is not enough  exit code 2
    ├── CommError                        an exchange between ranks failed
    │   ├── PeerLost                     a peer died, stopped or has left               exit code 3
    │   ├── CommTimeout                  a peer lives, but the wait outlasted its limit exit code 3
    │   └── MessageMismatch              a message does not fit what was expected       exit code 1
    ├── Interrupted                      signal number n told the run to end            128 + n
    ├── NotSaved                         the model could not be written                 exit code 1
    ├── WorkerFailed                     the user's code raised on a rank               exit code 1
    ├── Untrained                        batches were drawn, and no step was made       exit code 1
    └── Deadlock                         every rank of a simulation waits               exit code 1

``PeersGone`` is not an error: it ends the loop of a rank that serves. Nor is ``LeftBehind``: a rank
that was stopped for too long begins anew.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from signal import Signals
from types import TracebackType


class PacelineError(Exception):
    """Base of every error that Paceline raises."""

    exit_code = 1


class UsageError(PacelineError, ValueError):
    """Something that the user gave is not right; the message has name, value and rule."""

    exit_code = 2


class NotLaunched(UsageError):
    """The variables of a launcher do not say where this process belongs."""


class CommError(PacelineError):
    """An exchange between ranks failed."""


class PeerLost(CommError):
    """A peer died, stopped for longer than ``dead_s``, or left while it was still needed."""

    exit_code = 3

    def __init__(self, ranks: int | Sequence[int], op: str, reason: str, waited_s: float) -> None:
        self.ranks = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        self.op, self.reason, self.waited_s = op, reason, waited_s
        super().__init__(f"lost {name_ranks(self.ranks)} in {op} after {waited_s:.2f} s: {reason}")

    @property
    def rank(self) -> int:
        """The lost rank, or the first of several."""
        return self.ranks[0]


class CommTimeout(CommError):
    """A peer is alive, but did not do its part within ``progress_limit_s``."""

    exit_code = 3

    def __init__(self, ranks: int | Sequence[int], op: str, waited_s: float) -> None:
        self.ranks = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        self.op, self.waited_s = op, waited_s
        who = name_ranks(self.ranks)
        super().__init__(
            f"waited {waited_s:.0f} s in {op} for {who}, alive but not there"
            " (the limit is that of pl.Limits(progress_limit_s=...))"
        )

    @property
    def rank(self) -> int:
        """The rank that was waited for, or the first of several."""
        return self.ranks[0]


class MessageMismatch(CommError):
    """A message has another size or dtype than the receiver asked for."""


class Interrupted(PacelineError):
    """A signal has told the run to end; it can be resumed from its last checkpoint."""

    def __init__(self, number: int, what: str) -> None:
        self.exit_code = 128 + number
        super().__init__(f"ended by {Signals(number).name}; {what}")


class NotSaved(PacelineError):
    """The model that a run has ended with could not be written to its folder."""

    def __init__(self, out: object, reason: str) -> None:
        super().__init__(f"the model could not be saved in {out}: {reason}")


class WorkerFailed(PacelineError):
    """The user's code raised on a rank; ``details`` is that rank's own traceback."""

    def __init__(self, rank: int, summary: str, details: str = "") -> None:
        self.rank, self.summary, self.details = rank, summary, details
        super().__init__(f"rank {rank}: {summary}" + (f"\n\n{details}" if details else ""))

    @classmethod
    def of(cls, rank: int, error: BaseException) -> WorkerFailed:
        """The failure of ``rank`` by ``error``."""
        return cls(rank, summary_of(error), user_traceback(error))


class Untrained(PacelineError):
    """The workers drew batches to train with, and none of them made a step."""


class Deadlock(PacelineError):
    """Every rank of a simulation waits for another; the message names what for."""


class LeftBehind(Exception):
    """The others have gone on without this rank, which was stopped for too long: it must rejoin."""


class Outlived(BaseException):
    """Ends a rank that was stopped for too long, and that the others do not take back."""


class RunLost(BaseException):
    """Ends a rank of a run that ends with its first ``loss``, whatever the rank is about to do.

    No method may go on after it; where the rank ends, it becomes the loss.
    """

    def __init__(self, loss: PeerLost) -> None:
        self.loss = loss
        super().__init__(str(loss))


class ServingDone(BaseException):
    """Ends a rank that has nothing left to do: it has served, or has come when all was over."""


class PeersGone(Exception):
    """Every peer that could still send has left: the end of a serving rank's loop."""


def summary_of(error: BaseException) -> str:
    """An error in one line.

    >>> summary_of(KeyError("lr")), summary_of(ZeroDivisionError())
    ("KeyError: 'lr'", 'ZeroDivisionError')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's own code on, without the frames that lead to it.

    The whole one, where there is no code of the user's in it.
    """
    frames = error.__traceback__
    while frames is not None and _leads_to_user(frames):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _leads_to_user(frame: TracebackType) -> bool:
    """Whether a frame is our own, or belongs to the machinery that imports a script."""
    module = str(frame.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in ("paceline", "importlib", "runpy")


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence.

    >>> name_ranks([2]), name_ranks([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def unknown(kind: str, name: str, available: Iterable[str]) -> UsageError:
    """Say that a name is not known, the nearest one that is, and all the others.

    >>> print(unknown("strategy", "sagd", ["allreduce", "sasgd"]))
    no strategy "sagd"; did you mean "sasgd"? available: allreduce, sasgd
    """
    names = sorted(available)
    by_lower = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f'; did you mean "{by_lower[near[0]]}"?' if near else ";"
    return UsageError(f'no {kind} "{name}"{hint} available: {", ".join(names) or "none"}')
