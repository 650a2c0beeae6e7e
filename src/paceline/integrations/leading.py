"""What Lightning's two strategies share: the worker, and the one that leads as global rank 0."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.errors import UsageError
from paceline.integrations.exchange import Exchange, worker_of_run
from paceline.training.worker import Worker, current_worker


class LeadingRank:
    """The number 0 on the worker that leads, now; another one elsewhere.

    Lightning keeps one rank for a process. Simulated workers are threads of one process, and who
    leads changes when that worker is lost, so this looks it up each time. Outside of a run it is
    the rank that was there before.

    Args:
        former: the rank outside of a run.
    """

    def __init__(self, former: int) -> None:
        self._former = former

    def __index__(self) -> int:
        worker = current_worker()
        if worker is None:
            return self._former
        return 0 if worker.leads else worker.rank or worker.size

    __int__ = __index__

    def __eq__(self, other: object) -> bool:
        return int(self) == other

    def __gt__(self, other: int) -> bool:
        return int(self) > other

    def __lt__(self, other: int) -> bool:
        return int(self) < other

    def __hash__(self) -> int:
        return hash(int(self))

    def __str__(self) -> str:
        return str(int(self))


def let_leader_be_zero() -> None:
    """Have Lightning log and save on the worker that leads."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    function: Any = rank_zero_only
    if not isinstance(getattr(function, "rank", None), LeadingRank):
        function.rank = LeadingRank(getattr(function, "rank", None) or 0)


class OnWorker:
    """A strategy of Lightning on the worker of this process; comes before Lightning's own class.

    Attributes:
        worker: that this trains on.
    """

    worker: Worker

    def __init__(self, method: str | None = None) -> None:
        self.worker = worker_of_run(method)
        super().__init__(device=self.worker.device)  # type: ignore[call-arg]  # of Lightning's class
        self.world_size, self.global_rank = self.worker.size, self.worker.rank
        self._exchange = Exchange(self.worker)
        let_leader_be_zero()

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker leads."""
        return self.worker.leads

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers of a lockstep method; those of others go on."""
        self._exchange.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What worker ``src`` has, on all workers of a lockstep method."""
        return self._exchange.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all workers of a lockstep method."""
        if sync_grads:
            raise UsageError("sync_grads (True) must be False: gradients stay on their worker")
        return self._exchange.gather(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """One decision of all workers; where they do not wait, see ``Exchange.decide``."""
        return self._exchange.decide(decision, all)
