"""What can go wrong, as one tree.

.. code-block:: text

    PacelineError
    ├── UsageError (also a ValueError)   something the user gave: name, value, rule     exit code 2
    │   └── NotLaunched                  a launcher's variables are missing or wrong    exit code 2
    ├── CommError                        an exchange between ranks failed
    │   ├── PeerLost                     a peer died, was stopped, or departed          exit code 3
    │   ├── CommTimeout                  a peer is alive, but too slow                  exit code 3
    │   └── MessageMismatch              a message has the wrong size or dtype          exit code 1
    ├── Interrupted                      signal number n ended the run                  128 + n
    ├── NotSaved                         the model could not be written                 exit code 1
    ├── WorkerFailed                     the user's code raised on a rank               exit code 1
    ├── Untrained                        workers drew batches but made no step          exit code 1
    └── Deadlock                         every rank of a simulation is waiting          exit code 1

Two exceptions are not errors. ``PeersGone`` ends the loop of a serving rank. ``LeftBehind`` makes a
rank that was stopped for too long rejoin.
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
    """The user gave something that is wrong; the message has its name, its value and the rule."""

    exit_code = 2


class NotLaunched(UsageError):
    """The environment variables of a launcher do not give this process a rank."""


class CommError(PacelineError):
    """An exchange between ranks failed."""


class PeerLost(CommError):
    """A peer died, was stopped for longer than ``dead_s``, or departed while it was needed."""

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
    """A peer is alive, but did not do its part within ``progress_limit_s``; or ``whom`` did not."""

    exit_code = 3

    def __init__(
        self, ranks: int | Sequence[int], op: str, waited_s: float, whom: str | None = None
    ) -> None:
        self.ranks = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        self.op, self.waited_s = op, waited_s
        who = whom or name_ranks(self.ranks)
        super().__init__(
            f"waited {waited_s:.0f} s in {op} for {who}, alive but not taking part"
            " (to wait longer, raise pl.Limits(progress_limit_s=...))"
        )

    @property
    def rank(self) -> int:
        """The rank that was waited for, or the first of several."""
        return self.ranks[0]


class MessageMismatch(CommError):
    """The size or dtype of a message is not what the receiver asked for."""


class Interrupted(PacelineError):
    """A signal ended the run; it can be resumed from its last checkpoint."""

    def __init__(self, number: int, what: str) -> None:
        self.exit_code = 128 + number
        super().__init__(f"ended by {Signals(number).name}; {what}")


class NotSaved(PacelineError):
    """The final model of a run could not be written to its folder."""

    def __init__(self, out: object, reason: str) -> None:
        super().__init__(f"the model could not be saved in {out}: {reason}")


class WorkerFailed(PacelineError):
    """The user's code raised on a rank; ``details`` is the traceback from that rank."""

    def __init__(self, rank: int, summary: str, details: str = "") -> None:
        self.rank, self.summary, self.details = rank, summary, details
        super().__init__(f"rank {rank}: {summary}" + (f"\n\n{details}" if details else ""))

    @classmethod
    def of(cls, rank: int, error: BaseException) -> WorkerFailed:
        """Wrap the ``error`` that ended ``rank``."""
        return cls(rank, summary_of(error), user_traceback(error))


class Untrained(PacelineError):
    """The workers drew batches, but none of them made an optimizer step."""


class Deadlock(PacelineError):
    """Every rank of a simulation is waiting; the message says what each one waits for."""


class LeftBehind(Exception):
    """The others declared this rank lost while it was stopped: it must rejoin."""


class Outlived(BaseException):
    """Ends a rank that was left behind and cannot rejoin."""


class RunLost(BaseException):
    """Ends a rank when the run must end with its first ``loss``.

    It is a ``BaseException``, so that no method can handle it as an ordinary ``PeerLost`` and
    continue. Where the rank's process ends, the ``loss`` itself is raised.
    """

    def __init__(self, loss: PeerLost) -> None:
        self.loss = loss
        super().__init__(str(loss))


class ServingDone(BaseException):
    """Ends a rank that has nothing left to do: it has served, or it joined after the end."""


class PeersGone(Exception):
    """Every peer that could send a request has departed: the serving loop ends."""


def summary_of(error: BaseException) -> str:
    """An error in one line.

    >>> summary_of(KeyError("lr")), summary_of(ZeroDivisionError())
    ("KeyError: 'lr'", 'ZeroDivisionError')
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def user_traceback(error: BaseException) -> str:
    """The traceback, without the frames of Paceline that lead to the user's code.

    If no frame is in the user's code, the whole traceback.
    """
    frame = error.__traceback__
    while frame is not None and _leads_to_user(frame):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__))


def _leads_to_user(frame: TracebackType) -> bool:
    """Whether a frame belongs to Paceline, or to the modules that import a script."""
    module = str(frame.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in ("paceline", "importlib", "runpy")


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence.

    >>> name_ranks([2]), name_ranks([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def unknown(kind: str, name: str, available: Iterable[str]) -> UsageError:
    """The error for an unknown name; it suggests the closest match and lists all known names.

    >>> print(unknown("strategy", "sagd", ["allreduce", "sasgd"]))
    no strategy "sagd"; did you mean "sasgd"? available: allreduce, sasgd
    """
    names = sorted(available)
    by_lower = {known.lower(): known for known in names}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f'; did you mean "{by_lower[matches[0]]}"?' if matches else ";"
    return UsageError(f'no {kind} "{name}"{hint} available: {", ".join(names) or "none"}')
