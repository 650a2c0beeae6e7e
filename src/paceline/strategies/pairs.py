"""What methods share whose workers exchange models in pairs, without a center.

Every worker publishes its model after each step. Peers read it there, and so does a worker that is
asked for the answer: the mean over the workers that are alive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from paceline.comm.ports import Lost
from paceline.common.seeds import stream
from paceline.errors import PeersGone
from paceline.strategies.base import Strategy
from paceline.strategies.toolbox.guard import ABSURD, distance, is_sound, norm, norms
from paceline.strategies.toolbox.topology import Topology, neighbours

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.comm import Comm


class Note(NamedTuple):
    """What goes with a model: when it was written, and after how many steps of its worker."""

    time_s: float
    steps: int

    @property
    def header(self) -> bytes:
        """The note as the header of a message."""
        return _NOTE.pack(*self)

    @classmethod
    def of(cls, header: bytes) -> Note:
        """The note in the header of a message."""
        return cls(*_NOTE.unpack(header))


_NOTE = Struct("<dq")


@dataclass(kw_only=True)
class PairStrategy(Strategy):
    """A method without a center; subclasses say how two workers exchange their models."""

    resumable = False
    uses_gradient = False
    state: ClassVar[tuple[str, ...]] = ("steps",)

    topology: Topology = "complete"

    def __post_init__(self) -> None:
        self.steps = 0

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self.show(x)
        self.starters().barrier()  # from here on all have something to read

    def join(self, x: Tensor) -> None:
        stopped = self.comm.members.view().stopped  # whose models are old, but better than none
        for peer in sorted(self.live_workers(), key=lambda peer: peer in stopped):
            if peer == self.comm.rank:
                continue
            seen = self.comm.board.peek(peer, x)
            if seen is not None and is_sound(seen.x):
                x.copy_(seen.x)
                self.show(x)
                return
        raise PeersGone  # nobody is left whose model it could take

    def rejoin(self, x: Tensor) -> None:
        """As one that comes late; where nobody has gone on meanwhile, with the model it has."""
        try:
            super().rejoin(x)
        except PeersGone:
            if self.comm.members.view().departed:
                raise
            self.show(x)

    def answer(self, x: Tensor) -> Tensor:
        """The mean of those alive, each as it last published; of this one, as it is."""
        look, models = self.comm.group(metered=False).board, [x]
        for peer in self._running():
            if peer != self.comm.rank and (seen := look.peek(peer, x)) is not None:
                models.append(seen.x)
        first, *others = [model for model in models if is_sound(model)] or [x]
        mean = first.clone()
        average(mean, others)
        return mean

    def partners(self) -> Sequence[int]:
        """The workers to exchange with now, this one included: not those that are stopped.

        Nor those that have come to the end of their data: they answer nobody, and their models
        grow old.
        """
        running, finished = self._running(), self.comm.members.finished() - {self.comm.rank}
        return [rank for rank in running if rank not in finished] if finished else running

    def _running(self) -> Sequence[int]:
        """The live workers, less those that are stopped; this one is always among them."""
        live, stopped = self.live_workers(), self.comm.members.view().stopped - {self.comm.rank}
        return [rank for rank in live if rank not in stopped] if stopped else live

    def receive(self, peer: int, like: Tensor, tag: int) -> Tensor | None:
        """Wait for a message of a peer; None if it was lost, and the run goes on without it."""
        got = self.comm.receive(like, peer, tag)
        if not isinstance(got, Lost):
            return got.x
        if not self.comm.elastic:
            raise got.error
        return None

    def take_mean(self, x: Tensor, trained: bool) -> None:
        """At the end: the mean of all that have trained at all, and are not set aside.

        A worker whose model is broken, and that found nobody to mend it with, is set aside now.
        """
        if self.comm.rank not in self.guard.aside and not is_sound(x):
            why = "its model is not finite at its end, or absurdly large"
            self.guard.set_aside(self.comm.rank, "model", why)
        counts = trained and self.comm.rank not in self.guard.aside

        def mean(workers: Comm) -> None:
            if workers.size == 1:
                x.copy_(self.answer(x))
            else:  # when a worker is lost on the way, ``x`` is as it was
                workers.all_reduce(x, int(counts), lambda count: 1 / count)

        self.among_live(mean)

    def trusts(self, peer: int, move: Tensor | None, model: Tensor, x: Tensor) -> bool:
        """Whether the ``move`` to or from a peer's ``model`` may be made; None: the way to it.

        When it is this worker's own model that is broken, that of the peer takes its place.
        """
        if move is None and x.is_cuda:
            move = model - x  # there, both norms arrive together
        size, own = norms(move, x) if move is not None else (distance(model, x), norm(x))
        if size <= _rounding(x, own) and peer not in self.guard.aside:
            return True  # as good as equal, which tells nothing of what moves are usual
        if size < ABSURD or is_sound(x):
            return self.guard.admits(size, peer, "model")
        self.guard.admits(size, self.comm.rank, "model")
        if is_sound(model):
            self.replica.forget_moments()
            x.copy_(model)
        return False

    # Models in messages --------------------------------------------------------------------------

    def show(self, x: Tensor) -> None:
        """Let others read this model."""
        self.comm.board.publish(x, self.note())

    def note(self) -> bytes:
        """The header of a message with this worker's model."""
        return Note(self.comm.clock.now(), self.steps).header


# Peers -------------------------------------------------------------------------------------------


def pick(topology: Topology, peers: Sequence[int], seed: int, rank: int, step: int) -> int | None:
    """The peer that ``rank`` picks at this step; the same whoever asks.

    ``peers`` are in order, and hold ``rank``. In a complete graph it draws from all others without
    a list of them: there may be thousands.
    """
    place, complete = bisect_left(peers, rank), topology == "complete"
    places = range(len(peers) - 1) if complete else neighbours(topology, place, len(peers))
    if not places:
        return None
    drawn = places[int(stream(seed, "peer", rank, step).integers(len(places)))]
    return peers[drawn + (complete and drawn >= place)]


class Picks(NamedTuple):
    """Whom each of some peers picks at a step, and who picked it."""

    of: dict[int, list[int]]
    who_picked: dict[int, list[int]]


@lru_cache(maxsize=8)
def all_picks(topology: Topology, peers: tuple[int, ...], seed: int, step: int) -> Picks:
    """The draws of all ``peers``; those of one process share them."""
    picks = Picks({}, {})
    for rank in peers:
        peer = pick(topology, peers, seed, rank, step)
        if peer is not None:
            picks.of[rank] = [peer]
            picks.who_picked.setdefault(peer, []).append(rank)
    return picks


def _rounding(x: Tensor, size: float) -> float:
    """How far models of this norm are apart, at most, that differ by rounding alone."""
    import torch

    return 16 * torch.finfo(x.dtype).eps * size


def average(x: Tensor, models: Sequence[Tensor]) -> None:
    """Make ``x`` the mean of itself and ``models``."""
    for model in models:
        x.add_(model)
    if models:
        x.div_(1 + len(models))
