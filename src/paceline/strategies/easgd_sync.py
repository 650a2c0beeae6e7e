"""Elastic averaging in lockstep: every worker has a copy of the center, and no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.strategies.elastic import Elastic
from paceline.strategies.toolbox.guard import norm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True)
class EASGDSync(Elastic):
    """EASGD that exchanges all at once: an all-reduce moves every copy of the center alike."""

    resumable = False
    state = ("center",)

    sync: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.center: Tensor | None = None

    def setup(self, x: Tensor) -> None:
        super().setup(x)
        self.center = x.clone()

    def join(self, x: Tensor) -> None:
        assert self.center is not None
        self.begin_anew()
        self.pending = 0
        x.copy_(self.center)

    def answer(self, x: Tensor) -> Tensor:
        return x if self.center is None else self.center

    def pull(self, x: Tensor) -> Tensor:
        return self._pull_together(x, 1)[0]

    def finish(self, x: Tensor) -> None:
        """Go on until all workers have come to their end."""
        self.leave_look_ahead(x)
        self.flush(x)
        while self._pull_together(x, 0)[1]:
            pass
        super().finish(x)

    def _pull_together(self, x: Tensor, weight: int) -> tuple[Tensor, int]:
        """This worker's pull, and how many workers pulled; without weight it does not."""
        assert self.center is not None
        e = (x - self.center) * self.moving_rate  # e = alpha (x_i - c)
        if weight and not self.guard.admits(norm(e), self.comm.rank, "pull"):
            e.zero_()
            self.begin_anew()
            self.replica.flat.x.copy_(self.center)
        pulls = e.clone()
        count = self.comm.all_reduce(pulls, weight).weight
        if count:
            self.center.add_(pulls)  # c <- c + sum_i e_i
        return e, count
