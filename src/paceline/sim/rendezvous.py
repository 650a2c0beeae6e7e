"""Rendezvous in the simulated world, and the state of a rank in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from paceline.comm.ports import PUBLISHED, SAVED, Call, Published, Rendezvous
from paceline.sim.inbox import Letter
from paceline.sim.mail import SimulatedMail
from paceline.sim.members import SimulatedMembers
from paceline.sim.rank import SimulatedRank

_OP = "a rendezvous"


class SimulatedRendezvous(Rendezvous):
    """The rendezvous of one rank."""

    def __init__(self, own: SimulatedRank, members: SimulatedMembers, mail: SimulatedMail) -> None:
        self._own, self._world, self._rank = own, own.world, own.rank
        self._members, self._mail = members, mail

    def call(self, known: int, step: int, stop: bool, over: int) -> None:
        world, alive = self._world, self._world.alive()
        if world.call.number != known:
            return
        everyone = range(world.size)
        called = tuple(self._members.incarnation(r) if r in alive else 0 for r in everyone)
        world.call = Call(world.call.number + 1, step, stop, called)
        world.given_up = max(world.given_up, over)
        world.wake_awaiting()

    def last_call(self) -> Call:
        return self._world.call

    def meet(self, number: int, members: Sequence[int], incarnations: Sequence[int]) -> bool:
        """Wait for ``members``; then all continue at the same time, in rank order."""
        self._own.check()
        world = self._world
        if world.given_up >= number:
            return False
        arrived = world.present_at.setdefault(number, set())
        arrived.add(self._rank)
        if arrived.issuperset(members):
            for rank in sorted(arrived):
                world.end_wait(rank)
            self._own.wait(_OP, members, lambda: None, patient=True)
            return True
        while not arrived.issuperset(members):
            gone = any(
                rank in world.departed or self._members.incarnation(rank) != incarnation
                for rank, incarnation in enumerate(incarnations)
                if incarnation
            )
            if gone or world.rendezvous_over or world.given_up >= number:
                world.given_up = max(world.given_up, number)
                world.wake_awaiting()
                return False
            self._own.wait_for_members(_OP, members, patient=True)
        return world.given_up < number

    def snapshot(self, without: Sequence[int] | None) -> dict[str, Any]:
        world, letters = self._world, self._world.inboxes[self._rank].all()
        state: dict[str, Any] = {
            "inbox": [(m.src, m.tag, m.x.clone(), m.header.hex(), m.arrived_s) for m in letters],
            "window": _plain(world.windows.get((self._rank, PUBLISHED))),
            "kept": _plain(world.windows.get((self._rank, SAVED))),
            "in_hand": sorted(world.batches.in_hand[self._rank]),
            "costs": world.costs[self._rank].state(),
        }
        if without is not None:
            state |= {"network": world.network.state(), **world.batches.state(without)}
            state["call"] = tuple(world.call[:2])
            state["cores"] = [cores.state() for cores in world.baton.cores()]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        world, rank, now_s = self._world, self._rank, self._own.calendar.now_s
        for src, tag, x, header, at_s in state["inbox"]:
            arrived_s = at_s if at_s < math.inf else now_s  # the link may be up now
            letter = Letter(src, tag, x, bytes.fromhex(header), True, arrived_s)
            world.inboxes[rank].add(letter)
            if arrived_s > now_s:
                world.later(arrived_s, partial(self._mail.wake_receiver, letter, rank))
        for name, window in (("window", PUBLISHED), ("kept", SAVED)):
            if state[name] is not None:
                version, x, header = state[name]
                world.windows[rank, window] = Published(version, x, bytes.fromhex(header))
        world.batches.in_hand[rank] = set(state["in_hand"])
        world.costs[rank].load_state(state["costs"])
        if "queues" in state:
            world.network.load_state(state["network"])
            world.batches.load_state(state)
            number, step = state["call"]
            world.call = Call(number, step, incarnations=(0,) * world.size)
            for cores, saved in zip(world.baton.cores(), state["cores"], strict=True):
                cores.load_state(saved)


def _plain(seen: Published | None) -> tuple[int, Tensor, str] | None:
    return None if seen is None else (seen.version, seen.x, seen.header.hex())
