"""A registrar and ranks on simulated hosts, and the faults that strike them."""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.comm.hosts.journal import Journal
from paceline.comm.hosts.registrar import Order, Registrar
from paceline.comm.hosts.registrar_process import HostProcesses, RegistrarProcess
from paceline.comm.hosts.wire import BEAT_S
from paceline.comm.standing import GONE, LOST, Standing
from paceline.errors import CommTimeout, summary_of
from paceline.lab.faulttest.hosts.laws import Laws
from paceline.lab.faulttest.hosts.network import (
    Frames,
    Network,
    StageConnection,
    StageListener,
    StageWire,
)
from paceline.lab.faulttest.hosts.program import REGISTRAR, Program, ServerProgram, WorkerProgram
from paceline.lab.faulttest.hosts.schedule import HostsFault, HostsSchedule
from paceline.lab.faulttest.hosts.stage import HostProcess, Stage
from paceline.lab.faulttest.watched import Violation

LONGEST_S = 300.0
"""A run that lasts longer than this hangs."""
_TOLERANCE_S = 0.35
"""By how much less than ``dead_s`` a rank may have been silent: three looks of the registrar."""


_TURNS = 8
"""A second run takes time: it is made for one seed in this many."""
_NOTICE_S = 1.5
"""How much later than ``dead_s`` the registrar may notice that a rank is lost."""


class HostsOutcome(NamedTuple):
    """The outcome of a run.

    Attributes:
        sites: how often each event happened.
        violation: the first law that it broke, if any.
        trace_hash: a digest of what happened, and when.
    """

    sites: Counter[str]
    violation: Violation | None
    trace_hash: str


class RankProcess(HostProcess):
    """A process of a rank; ``replaced`` once another process was started for the rank."""

    program: Program

    def __init__(self, stage: Stage, host: int, pid: int, rank: int) -> None:
        super().__init__(stage, host, pid)
        self.rank, self.replaced = rank, False


class WatchedRegistrar(Registrar):
    """A registrar that shows what it does; see :class:`Registrar`."""

    on_strike: Callable[[int, int, Standing], None]
    on_order: Callable[[int, int, str], None]

    def _strike(self, rank: int, standing: Standing, reason: str) -> None:
        self.on_strike(rank, self.roll[rank].incarnation, standing)
        super()._strike(rank, standing, reason)

    def _do(self, rank: int, incarnation: int, order: Order) -> Any:
        value = super()._do(rank, incarnation, order)
        self.on_order(rank, incarnation, str(order[0]))
        return value

    def held(self, rank: int) -> list[tuple[int, int, int]]:
        """The batches that a rank has in hand."""
        return sorted(self._batches.in_hand[rank])

    def batches(self) -> tuple[int, Iterable[int]]:
        """How many batches were given out, and those that were taken back."""
        given = self._batches.queues.get(0, [0, 0])[1]
        return given, [number for _, _, number in self._batches.returned]


class WatchedJournal(Journal):
    """A journal whose process may be killed before and after it has saved a state."""

    def __init__(self, fd: int, process: HostProcess) -> None:
        super().__init__(fd)
        self._process = process

    def write(self, state: dict[str, Any]) -> None:
        self._process.act()
        super().write(state)
        self._process.act()


class HostsWorld(HostProcesses):
    """One run.

    Attributes:
        laws: what must hold.
        processes: the last process of each rank.
    """

    def __init__(self, schedule: HostsSchedule) -> None:
        self.schedule = schedule
        self.stage = Stage(schedule.seed)
        self.laws = Laws(schedule.workers, lambda: self.stage.now_s)
        self.network = Network(self.stage, schedule.latency_s, schedule.room, schedule.dead_s)
        self.processes: dict[int, RankProcess] = {}
        self._all: list[RankProcess] = []
        self._pids = iter(range(100, 10**6))
        self._starting: list[int] = []
        self._over = False
        self._armed: list[tuple[int, HostsFault]] = []
        self._acts: Counter[int] = Counter()
        self._listener: StageListener | None = None
        self._journal = Journal.create()
        # In the time for which the registrar has run.
        self._ran_before_s = self._resumed_s = 0.0
        self._heard_s = [0.0] * schedule.size

    # Running -------------------------------------------------------------------------------------

    def run(self) -> HostsOutcome:
        """Run until all ranks have ended."""
        self._start_registrar()
        for rank in range(self.schedule.size):
            if rank not in self.schedule.late:
                self._start_in(0.2 * self.stage.random.random(), rank)
        for host in range(self.schedule.hosts if self.schedule.agents else 0):
            if host != self.schedule.host_of(-1):
                HostAgent(self, host)
        self.stage.call_in(0.01, self._await_start)
        self.stage.call_in(LONGEST_S, self._give_up)
        violation: Violation | None = None
        try:
            self.stage.run()
            self.laws.ended(*self.registrar.batches())
        except Violation as found:
            violation = found
        except CommTimeout as error:
            violation = Violation("liveness", str(error))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{summary_of(error)} ({Path(where.filename).name}:{where.lineno})"
            violation = Violation("no error", text)
        finally:
            os.close(self._journal)
        self.laws.sites["connection broken"] += self.network.broken
        return HostsOutcome(self.laws.sites, violation, self.laws.trace_hash)

    def _give_up(self) -> None:
        left = [process.rank for process in self._all if process.alive]
        self.stage.abort(Violation("liveness", f"after {LONGEST_S} s ranks {left} still run"))

    @property
    def works(self) -> bool:
        """Whether a worker runs, or will."""
        running = [process.rank for process in self._all if process.alive]
        return any(rank < self.schedule.workers for rank in [*running, *self._starting])

    # Ranks ---------------------------------------------------------------------------------------

    def _start_in(self, seconds: float, rank: int, host: int | None = None) -> None:
        """Start a process for a rank after so long."""
        self._starting.append(rank)
        self.stage.call_in(seconds, partial(self._start, rank, host))

    def _start(self, rank: int, host: int | None) -> None:
        self._starting.remove(rank)
        if (before := self.processes.get(rank)) is not None:
            before.replaced = True
        where = self.schedule.host_of(rank) if host is None else host
        process = RankProcess(self.stage, where, next(self._pids), rank)
        process.on_act = lambda acts: self._count_act(rank, process)
        self.processes[rank] = process
        self._all.append(process)
        kind = WorkerProgram if rank < self.schedule.workers else ServerProgram
        process.program = kind(self, process)
        process.start(partial(self._run, process))

    def _run(self, process: RankProcess) -> None:
        process.program.run()
        process.exit()
        self._end(process)

    def _end(self, process: HostProcess) -> None:
        """The host cleans up after a process; the last one ends the run."""
        self.network.end(process)
        if not any(each.alive for each in self._all) and not self._starting:
            self._over = True
            self._registrar_process.kill()

    # What the registrar's host knows of its processes --------------------------------------------

    def has_died(self, rank: int) -> bool:
        return not self._process(rank).alive

    def is_stopped(self, rank: int) -> bool:
        return self._process(rank).stopped

    def _process(self, rank: int) -> RankProcess:
        pid = self.registrar.roll[rank].pid
        return next(process for process in self._all if process.pid == pid)

    # The registrar -------------------------------------------------------------------------------

    def _start_registrar(self) -> None:
        """Start the registrar, or another process for it, at the same address."""
        if self._over:
            return
        process = HostProcess(self.stage, self.schedule.host_of(-1), next(self._pids))
        process.on_act = lambda acts: self._count_act(-1, process)
        self._registrar_process = process
        if self._listener is None:
            self._listener = StageListener(self.network, process, REGISTRAR)
            self._listener.on_arrival = self._note_arrival
            self.network.listeners[REGISTRAR] = self._listener
        self._listener.process = process
        self._listener.waiting.clear()
        wire = StageWire(self.network, process)
        wire.hear(self._listener)
        schedule = self.schedule
        arguments = schedule.size, schedule.workers, schedule.late, schedule.dead_s
        self.registrar = registrar = WatchedRegistrar(*arguments)
        registrar.on_strike, registrar.on_order = self._note_strike, self._note_order
        journal = WatchedJournal(self._journal, process)
        running = RegistrarProcess(registrar, wire, self._listener, journal, self)
        self._resumed_s = self.stage.now_s
        process.start(running.run)

    def _ran_s(self) -> float:
        """For how long the registrar has run, neither dead nor stopped."""
        process = self._registrar_process
        runs = process.alive and not process.stopped
        return self._ran_before_s + (self.stage.now_s - self._resumed_s if runs else 0.0)

    def _note_arrival(self, frames: Frames) -> None:
        """Note of whom the registrar could hear."""
        message = json.loads(bytes(frames[-1]))
        roll, heard = self.registrar.roll, [*message.get("states", {}).items()]
        ranks = [
            int(rank)
            for rank, (pid, state) in heard
            if state == "running" and pid == roll[int(rank)].pid
        ]
        if "beat" in message and message["incarnation"] == roll[message["beat"]].incarnation:
            ranks.append(message["beat"])
        for rank in ranks:
            self._heard_s[rank] = self._ran_s()

    def _note_strike(self, rank: int, incarnation: int, standing: Standing) -> None:
        self.laws.note((rank, incarnation), f"is struck off: {standing.name}")
        if standing is Standing.STOPPED:
            silent_s = self._ran_s() - self._heard_s[rank]
            self.laws.check(
                silent_s > self.schedule.dead_s - _TOLERANCE_S,
                "nobody is lost in vain",
                f"rank {rank} was struck off after {silent_s:.2f} s of silence",
            )
        if standing is Standing.DIED:
            self.laws.check(
                not self._process(rank).alive,
                "nobody is lost in vain",
                f"rank {rank} was struck off as dead, and lives",
            )
        if standing is Standing.LEFT:
            held = self.registrar.held(rank)
            self.laws.check(not held, "batches", f"rank {rank} leaves, and never got {held}")
        if standing in LOST:
            self.laws.lose((rank, incarnation))
            self.laws.sites[f"struck off: {standing.name.lower()}"] += 1

    def _note_order(self, rank: int, incarnation: int, name: str) -> None:
        self.laws.note((rank, incarnation), f"orders {name}")
        last = self.laws.entered[rank]
        self.laws.check(
            name == "enter" or incarnation >= last,
            "fence",
            f"{name} of incarnation {incarnation} of rank {rank} was done after {last} had entered",
        )

    # Faults --------------------------------------------------------------------------------------

    def _await_start(self) -> None:
        """Faults begin when all ranks have started."""
        starters = [r for r in range(self.schedule.size) if r not in self.schedule.late]
        if any(self.registrar.roll[rank].standing is not Standing.HERE for rank in starters):
            self.stage.call_in(0.01, self._await_start)
            return
        for fault in self.schedule.faults:
            if fault.kind == "join":
                self._starting.append(fault.rank)
            self.stage.call_in(fault.at_s, partial(self._arm, fault))

    def _arm(self, fault: HostsFault) -> None:
        if fault.at_act is None:
            self._strike(fault)
        else:
            self._armed.append((self._acts[fault.rank] + fault.at_act, fault))

    def _count_act(self, rank: int, process: HostProcess) -> None:
        """Count an act of a process; the faults that wait for it strike."""
        if process is not self._present(rank):
            return
        self._acts[rank] += 1
        for act, fault in [*self._armed]:
            if fault.rank == rank and self._acts[rank] > act:
                self._armed.remove((act, fault))
                self._strike(fault)

    def _present(self, rank: int) -> HostProcess | None:
        return self._registrar_process if rank < 0 else self.processes.get(rank)

    def _strike(self, fault: HostsFault) -> None:
        self.laws.note((fault.rank, 0), f"fault: {fault}")
        if fault.kind == "join":
            self._start(fault.rank, None)
            return
        process = self._present(fault.rank)
        if process is None or not process.alive or process.stopped or self._over:
            return
        self.laws.sites[("registrar " if fault.rank < 0 else "") + fault.kind] += 1
        if fault.kind == "kill":
            self._kill(fault, process)
        elif fault.kind == "stop":
            self._stop(fault, process)
        elif fault.kind == "cut":
            self._cut(fault, process)
        else:
            self._drop(fault, process)

    def _kill(self, fault: HostsFault, process: HostProcess) -> None:
        if isinstance(process, RankProcess):
            process.program.killed()
            act = partial(self._check_noticed, process, self._ran_s(), self._registrar_process)
            self.stage.call_in(self.schedule.dead_s + _NOTICE_S, act)
            if fault.again_s is not None:
                self._start_in(fault.again_s, fault.rank)
        else:
            self._ran_before_s = self._ran_s()
            self.stage.call_in(fault.again_s or 0.0, self._start_registrar)
        process.kill()
        self._end(process)

    def _check_noticed(self, process: RankProcess, ran_s: float, registrar: HostProcess) -> None:
        """A rank whose process was killed is struck off in time, if the registrar runs."""
        entry = self.registrar.roll[process.rank]
        waited_s = self._ran_s() - ran_s
        others = [each for each in self._all if each.alive and each.rank < self.schedule.workers]
        heard = any(not each.stopped and not self._is_cut_off(each) for each in others)
        undisturbed = waited_s >= self.schedule.dead_s + _NOTICE_S - 1e-6 and heard
        if registrar is self._registrar_process and undisturbed:
            self.laws.check(
                entry.pid != process.pid or entry.standing in GONE,
                "a loss is noticed",
                f"rank {process.rank} was killed {waited_s:.1f} s ago",
            )

    def _is_cut_off(self, process: HostProcess) -> bool:
        return not self.network.is_up(process.host, self.schedule.host_of(-1))

    def _stop(self, fault: HostsFault, process: HostProcess) -> None:
        if fault.rank < 0:
            self._ran_before_s = self._ran_s()
        process.stop()
        self.stage.call_in(fault.for_s, partial(self._resume, fault, process))
        self._replace(fault, process)

    def _resume(self, fault: HostsFault, process: HostProcess) -> None:
        if not process.alive:
            return
        if fault.rank < 0:
            self._resumed_s = self.stage.now_s
        process.resume()
        if fault.for_s > self.schedule.dead_s:
            self.network.break_some(process)

    def _replace(self, fault: HostsFault, process: HostProcess) -> None:
        """Start another process for a rank, on another host, while its own still exists."""
        if fault.again_s is not None and fault.rank >= 0:
            self._start_in(fault.again_s, fault.rank, (process.host + 1) % self.schedule.hosts)

    def _cut(self, fault: HostsFault, process: HostProcess) -> None:
        others = range(self.schedule.hosts)
        if fault.peer is not None:
            others = range(self.schedule.host_of(fault.peer), self.schedule.host_of(fault.peer) + 1)
        cuts = [frozenset((process.host, other)) for other in others if other != process.host]
        self.network.cuts += cuts
        self.stage.call_in(fault.for_s, partial(self._mend, cuts))
        self._replace(fault, process)

    def _mend(self, cuts: list[frozenset[int]]) -> None:
        for cut in cuts:
            self.network.cuts.remove(cut)

    def _drop(self, fault: HostsFault, process: HostProcess) -> None:
        peers = [*range(-1, self.schedule.size)] if fault.peer is None else [fault.peer]
        for peer in peers:
            other = self._present(peer)
            if other is not None and other is not process:
                self.network.break_between(process, other)


class HostAgent:
    """Tells the registrar from time to time how the ranks on its host are."""

    def __init__(self, world: HostsWorld, host: int) -> None:
        self._world, self._host = world, host
        process = HostProcess(world.stage, host, 10**6 + host)
        self._connection = StageConnection(world.network, process, REGISTRAR)
        self._look()

    def _look(self) -> None:
        here = [each for each in self._world.processes.values() if each.host == self._host]
        states = {
            process.rank: (process.pid, "stopped" if process.stopped else "running")
            if process.alive
            else (process.pid, "died")
            for process in here
        }
        self._connection.put(json.dumps({"host": f"host{self._host}", "states": states}).encode())
        self._connection.waiting.clear()
        self._world.stage.call_in(BEAT_S / 2, self._look)


def examine_hosts(schedule: HostsSchedule) -> HostsOutcome:
    """Run a schedule, and for some seeds run it again: a run is a function of its seed."""
    outcome = HostsWorld(schedule).run()
    if schedule.seed % _TURNS == 0 and outcome.violation is None:
        outcome.sites["run again"] += 1
        again = HostsWorld(schedule).run().trace_hash
        if again != outcome.trace_hash:
            text = f"{again} and {outcome.trace_hash}"
            outcome = outcome._replace(violation=Violation("same seed, same run", text))
    return outcome
