"""What keeps a bad update out of what ranks share.

Whoever is about to hand on an update, or to take one in, looks at one number, its norm. One that is
not finite is dropped, and so is one that is far larger than those before it. A sender of several
such in a row is set aside: its updates count for nothing from then on, and the run goes on.

In a row, and not in all: in a long run a bad batch comes now and then, and to drop it is all that
is needed, while a sender that is broken sends nothing else.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WARN, DROP = 1e2, 1e4
"""How many times the median of the last norms an update is told of, and is dropped at."""
ABSURD = 1e18
"""A norm that is dropped whatever came before."""
KNOWN, REMEMBERED = 8, 65
"""How many norms it takes to judge another by, and how many of the last ones are remembered."""
GLANCE = 4096
"""How many numbers of each gradient a worker looks at that does not share it."""
PIECE = 1 << 22
"""How many numbers of two vectors are compared at a time."""
IN_A_ROW = 3
"""After so many updates dropped one after the other, their sender is set aside."""


def norm(*vectors: Tensor) -> float:
    """The norm of vectors that are taken for one; finite unless it, or a number in them, is not.

    >>> import torch
    >>> norm(torch.tensor([3.0, 4.0])), norm(torch.full((4,), 2e30)) > 1e30
    (5.0, True)
    >>> norm(torch.tensor([1.0, math.nan])), norm(torch.tensor([1.0, -math.inf]))
    (nan, inf)
    """
    import torch

    if not vectors:
        return 0.0
    kind = vectors[0].dtype if vectors[0].dtype.itemsize >= 4 else torch.float32
    size = _norm(vectors, kind)
    if not math.isfinite(size) and kind is torch.float32:  # or its square is too large for that
        size = _norm(vectors, torch.float64)
    return size


def norms(*vectors: Tensor) -> list[float]:
    """The norm of each vector. On a GPU, they arrive together: the worker waits only once.

    >>> import torch
    >>> norms(torch.tensor([3.0, 4.0]), torch.tensor([2.0]))
    [5.0, 2.0]
    """
    import torch

    if not vectors[0].is_cuda:
        return [norm(vector) for vector in vectors]
    sizes = [torch.linalg.vector_norm(vector, dtype=torch.float64) for vector in vectors]
    return torch.stack(sizes).tolist()


def distance(one: Tensor, other: Tensor) -> float:
    """The norm of the difference of two vectors; of large ones, without a third.

    >>> import torch
    >>> distance(torch.tensor([1.0, 5.0]), torch.tensor([4.0, 1.0]))
    5.0
    """
    if one.is_cuda or one.numel() <= PIECE:
        return norm(one - other)
    pairs = zip(one.split(PIECE), other.split(PIECE), strict=True)
    return math.hypot(*(norm(a - b) for a, b in pairs))


def _norm(vectors: Sequence[Tensor], kind: Any) -> float:
    import torch

    squares = [_square(vector, kind) for vector in vectors]
    return math.sqrt(float(squares[0] if len(squares) == 1 else torch.stack(squares).sum()))


def _square(vector: Tensor, kind: Any) -> Tensor:
    import torch

    if vector.dtype is kind and vector.is_contiguous():  # the fastest way there is
        flat = vector.view(-1)
        return torch.dot(flat, flat)
    size: Tensor = torch.linalg.vector_norm(vector, dtype=kind)
    return size.square()


def glance(vectors: Iterable[Tensor]) -> float:
    """The norm of the first numbers of each vector: what is bad shows there, as a rule.

    For gradients that go no further than the worker's own model, which is judged as a whole before
    it is handed on. To read all of each gradient takes a few hundredths of a step.
    """
    return norm(*(vector.reshape(-1)[:GLANCE] for vector in vectors))


def is_sound(vector: Tensor) -> bool:
    """Whether a vector is one that a model may be: finite, and not absurdly large."""
    return norm(vector) < ABSURD


class Guard:
    """What one rank knows of the updates that it has seen.

    Args:
        rank: this rank.
        tell: called with what goes into the run's record.

    Attributes:
        dropped: how many updates of each sender were dropped here.
        aside: the senders that are set aside; this rank itself may be among them.
    """

    def __init__(self, rank: int, tell: Callable[..., None] = lambda event, **facts: None) -> None:
        self.rank, self._tell = rank, tell
        self.dropped: Counter[int] = Counter()
        self.aside: set[int] = set()
        self._usual: dict[str, Usual] = {}
        self._in_a_row: dict[tuple[int, str], int] = {}
        self._told: set[int] = set()

    def admits(
        self, size: float, sender: int, what: str, blamed: Callable[[], bool] = lambda: True
    ) -> bool:
        """Whether to accept an update of this norm; earlier ones of its kind, ``what``, tell.

        Once a sender is set aside, its updates are still counted, but not told one by one. An
        update that it is not ``blamed`` for does not bring it closer to that.
        """
        if sender in self.aside:
            self.dropped[sender] += 1
            return False
        usual = self._usual.get(what) or self._usual.setdefault(what, Usual())
        reason = usual.why_not(size)
        if reason is not None:
            self.dropped[sender] += 1
            told = size if math.isfinite(size) else None
            self._tell("dropped", sender=sender, what=what, reason=reason, norm=told)
        else:
            if usual.known and size > WARN * usual.median and sender not in self._told:
                self._told.add(sender)
                self._tell("large", sender=sender, what=what, norm=size, usual=usual.median)
            usual.remember(size)
        self._note(sender, what, dropped=reason is not None and blamed())
        return reason is None

    def limit(self, what: str) -> float:
        """The largest norm that an update of this kind may have now."""
        usual = self._usual.get(what)
        return ABSURD if usual is None else usual.limit

    def hear(self, judge: int, dropped: bool) -> None:
        """Hear from another rank whether it has dropped this one's update."""
        if self.rank not in self.aside:
            self._note(self.rank, f"judged by rank {judge}", dropped)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {
            "dropped": dict(self.dropped),
            "aside": sorted(self.aside),
            "usual": {what: usual.norms for what, usual in self._usual.items()},
            "in_a_row": [(*key, count) for key, count in self._in_a_row.items()],
            "told": sorted(self._told),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` gave."""
        self.dropped, self.aside = Counter(state["dropped"]), set(state["aside"])
        self._usual = {what: Usual(norms) for what, norms in state["usual"].items()}
        self._in_a_row = {(sender, what): count for sender, what, count in state["in_a_row"]}
        self._told = set(state["told"])

    def _note(self, sender: int, what: str, dropped: bool) -> None:
        before = self._in_a_row.pop((sender, what), 0)
        if dropped:
            self._in_a_row[sender, what] = before + 1
        if dropped and before + 1 == IN_A_ROW:
            why = f"{IN_A_ROW} of its updates in a row were dropped ({what})"
            self.set_aside(sender, what, why)

    def set_aside(self, sender: int, what: str, why: str) -> None:
        """Let nothing of a sender count any more, and say why."""
        self.aside.add(sender)
        self._tell("set_aside", sender=sender, what=what, why=why)


class Usual:
    """The norms of the last updates of one kind."""

    def __init__(self, norms: Iterable[float] = ()) -> None:
        self._last = deque(norms)
        self._sorted = sorted(self._last)

    @property
    def norms(self) -> list[float]:
        """The norms, the oldest first."""
        return [*self._last]

    @property
    def known(self) -> bool:
        """Whether there are enough of them to judge another by; zeros tell nothing."""
        return len(self._last) >= KNOWN and self.median > 0

    @property
    def median(self) -> float:
        """That of the norms; 0 while there are none."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0

    @property
    def limit(self) -> float:
        """The largest norm that is not bad."""
        return min(ABSURD, DROP * self.median) if self.known else ABSURD

    def why_not(self, size: float) -> str | None:
        """Why an update of this norm is bad; None when it is not."""
        if not math.isfinite(size):
            return "not finite"
        if size > self.limit:
            return f"exploding: the usual norm is {self.median:.3g}"
        return None

    def remember(self, size: float) -> None:
        """Add the norm of an update that was taken in; forget the oldest."""
        self._last.append(size)
        insort(self._sorted, size)
        if len(self._last) > REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]
