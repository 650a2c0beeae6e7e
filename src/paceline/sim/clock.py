"""The virtual clock, and the time that it charges for computing."""

from __future__ import annotations

from paceline.comm.ports import Clock
from paceline.sim.rank import SimulatedRank


class SimulatedClock(Clock):
    """The clock of one rank.

    Attributes:
        charged_s: the total that :meth:`charge` has charged.
    """

    def __init__(self, own: SimulatedRank) -> None:
        self._own, self._world = own, own.world
        self.charged_s = 0.0

    def now(self) -> float:
        own = self._own  # as own.now_s(), in one call: it is asked a dozen times a step
        lag = own.baton.ranks[own.rank].lag
        return (own.calendar.now_s if lag is None else lag.since_s) + own.owed_s

    def charge(self, seconds: float) -> None:
        self.charged_s += seconds
        self._own.compute(seconds)

    def charge_gather(self, nbytes: int) -> None:
        self._own.charge(self._world.handling.gather, nbytes)

    def charge_update(self, nbytes: int) -> None:
        self._own.compute(self._world.network.update_s(nbytes))

    def mark_as_server(self) -> None:
        self._own.works = False

    def set_model_size(self, nbytes: int, tensors: int) -> float:
        return self._world.network.set_model_size(nbytes, tensors)

    def begin_step(self, step: int) -> None:
        own, world = self._own, self._world
        if world.has_step_faults:
            own.pass_time()
            for fault in world.faults_at(own.rank, step):
                world.inject(fault)
        own.baton.check(own.rank)
        own.baton.stay_frozen(own.rank)

    def switch_in(self) -> None:
        self._own.baton.check(self._own.rank)
        self._world.generators.switch_to(self._own.rank)
