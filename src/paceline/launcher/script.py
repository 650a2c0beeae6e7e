"""The worker of a plain script, and the end of its run: where the script says so, or where it ends.

``worker = pl.init()`` is a plain call. The run that it joins is a context manager all the same. It
is left without an error at ``worker.finish()``, or when the script has come to its end; otherwise
with the error that ended the script.
"""

from __future__ import annotations

import atexit
import dis
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ServingDone, UsageError
from paceline.training.optimizer import PacedOptimizer
from paceline.training.session import Session
from paceline.training.worker import Worker

M = TypeVar("M", bound=nn.Module)


class ScriptWorker(Worker):
    """The worker of a script: as a context manager, or until :meth:`finish` or the script's end.

    Args:
        session: of this rank.
        run: is left when the run ends.
        watches: whether the end of the script is the end of the run, too.
    """

    def __init__(
        self, session: Session, run: AbstractContextManager[Any], *, watches: bool
    ) -> None:
        super().__init__(session)
        self._end = ScriptEnd(run)
        if watches:
            self._end.watch()

    @classmethod
    def of(cls, worker: Worker) -> Self:
        """The worker of a run that something else ends."""
        run = _finishing(worker)
        run.__enter__()
        return cls(worker._session, run, watches=False)

    def __enter__(self) -> Self:
        self._end.unwatch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.leave(error)

    def setup(self, model: M, optimizer: Optimizer) -> tuple[M, PacedOptimizer]:
        """As :meth:`Worker.setup`; a rank that is no worker ends its process here."""
        try:
            return super().setup(model, optimizer)
        except ServingDone as done:
            if self._end.watches:
                self._end.leave(done)
            raise

    def reduce(self, value: float | Tensor, op: Literal["mean", "sum"] = "mean") -> Any:
        """As :meth:`Worker.reduce`; refused when this process has left the run."""
        if self._end.has_left:
            raise UsageError(
                "worker.reduce must be called before worker.finish(): this process has left the run"
            )
        return super().reduce(value, op)

    def finish(self) -> None:
        """As :meth:`Worker.finish`; without a ``with`` statement, this is the end of the run."""
        super().finish()
        if self._end.watches:
            self._end.leave()


@contextmanager
def _finishing(worker: Worker) -> Iterator[None]:
    """Inside, a worker trains; then it finishes."""
    yield
    worker.finish()


class ScriptEnd:
    """Leaves a run when the script ends, in whatever way, unless it was left before.

    An error and an exit code have an effect as inside of a ``with`` statement.

    Args:
        run: what is left.

    Attributes:
        watches: whether the end of the script is the end of the run.
    """

    def __init__(self, run: AbstractContextManager[Any]) -> None:
        self._run: AbstractContextManager[Any] | None = run
        self._process, self._script = os.getpid(), _script_frame()
        self._asked: list[Any] = []
        self._former = sys.excepthook, sys.exit
        self._own = self._on_error, self._on_exit
        self.watches = False

    def watch(self) -> None:
        """Have the end of the script be the end of the run."""
        sys.excepthook, sys.exit = self._own
        atexit.register(self._at_exit)
        self.watches = True

    def unwatch(self) -> None:
        """Have the end of the script no longer be the end of the run."""
        self.watches = False
        atexit.unregister(self._at_exit)
        if sys.excepthook is self._own[0]:
            sys.excepthook = self._former[0]
        if sys.exit is self._own[1]:
            sys.exit = self._former[1]

    @property
    def has_left(self) -> bool:
        """Whether the run was left."""
        return self._run is None

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run, as a ``with`` statement does; idempotent."""
        self.unwatch()
        run, self._run = self._run, None
        if run is None:
            return
        if error is None:
            run.__exit__(None, None, None)
        else:
            run.__exit__(type(error), error, error.__traceback__)

    def _on_error(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """In place of ``sys.excepthook``: no code of the script has caught an error."""
        if os.getpid() == self._process:
            try:
                self.leave(error)
            except SystemExit:
                raise
            except BaseException as other:
                kind, error, traceback = type(other), other, other.__traceback__
        self._former[0](kind, error, traceback)

    def _on_exit(self, code: Any = None) -> NoReturn:
        """In place of ``sys.exit``: nothing else tells, at the exit, what its code is."""
        self._asked.append(code)
        self._former[1](code)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:  # a child of the script, which has no part in the run
            return
        given_up = self._why_given_up()
        try:
            self.leave(given_up)
        except SystemExit as end:
            _exit(end.code)
        except BaseException as error:
            self._former[0](type(error), error, error.__traceback__)
            _exit(1)
        if isinstance(given_up, UsageError):
            print(f"paceline: {given_up}", file=sys.stderr)
            _exit(given_up.exit_code)

    def _why_given_up(self) -> BaseException | None:
        """The error that has ended the script; None if it has come to its end."""
        if self._script is None or _is_at(self._script, "RETURN"):
            return None
        uncaught: BaseException | None = getattr(sys, "last_value", None)
        if uncaught is not None:  # and the hook of another has hidden it from ours
            return uncaught
        if self._asked:
            return SystemExit(self._asked[-1]) if self._asked[-1] not in (None, 0) else None
        if _is_at(self._script, "RAISE"):  # raise SystemExit(main())
            return None
        return UsageError(
            "the script has raised SystemExit, whose code is not known here, and its run is given"
            " up: call worker.finish() before, or sys.exit instead"
        )


def _script_frame() -> FrameType | None:
    """The frame of the script's own code, if that is what called us."""
    script, found = vars(sys.modules["__main__"]), None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found = frame if frame.f_globals is script else found
        frame = frame.f_back
    return found


def _is_at(frame: FrameType, kind: str) -> bool:
    """Whether the last instruction of a frame is of a kind: a frame that has ended returned there,
    or an exception left it there."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(kind)


def _exit(code: Any) -> NoReturn:
    """Exit with a code, which nothing else can change while the interpreter exits."""
    code = code if code is None or isinstance(code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)
