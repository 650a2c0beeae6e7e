"""Start real ranks through a fork server, and supervise them until they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.comm.limits import Limits
from paceline.comm.liveness import Watch
from paceline.comm.membership import MOST_SUCCESSORS, MembershipPolicy
from paceline.common.faults import Fault, rank_of
from paceline.common.options import one_of
from paceline.common.reference import Reference
from paceline.errors import CommTimeout, PacelineError, PeerLost, UsageError, WorkerFailed
from paceline.launcher.control_socket import ControlSocket
from paceline.launcher.fork_client import ForkServer, readable
from paceline.launcher.many_hosts import ManyHosts, split
from paceline.launcher.places import RankHost, ThisHost
from paceline.launcher.rank_process import Message, refuse_in_rank
from paceline.launcher.signals import Stop
from paceline.launcher.transports import TRANSPORTS, Opening

if TYPE_CHECKING:
    from paceline.launcher.agents import Agents

GRACE_S = 1.5
"""How long ranks have to end by themselves after one has failed, and again to obey SIGTERM."""
NOTICE_S = 0.5
"""After a failure: how long the other ranks have to notice that a rank is stopped."""

OnMessage = Callable[[int, Message], None]


@dataclass
class Rank:
    """What the launcher knows about one rank.

    Attributes:
        number: the rank.
        place: where its current process is; None before it has one.
        code: the exit code of that process.
        value, returned, error: what it returned, or how it failed.
        reason, signalled: why and whether the supervisor ended it.
        entered: whether its current process has joined the others; ``seen``: whether any has.
        starts: how many processes it has had.
    """

    number: int
    place: RankHost | None = None
    code: int | None = None
    value: Any = None
    returned: bool = False
    error: Message | None = None
    reason: str | None = None
    signalled: bool = False
    entered: bool = False
    seen: bool = False
    starts: int = 0

    def begin(self, place: RankHost) -> None:
        """Note that a process was started for this rank."""
        self.place, self.code, self.reason = place, None, None
        self.entered, self.starts = False, self.starts + 1

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.place is not None and self.code is None

    def end(self, number: int) -> None:
        """End this rank with a signal, because the run is over."""
        self.signalled = self.signalled or self.running
        self.send_signal(number)

    def send_signal(self, number: int) -> None:
        """Send a signal to this rank, if it runs."""
        if self.place is not None and self.code is None:
            self.place.send_signal(self.number, number)

    def messages(self) -> Iterator[Message]:
        """The messages that it has sent so far, without waiting."""
        return iter(()) if self.place is None else self.place.messages(self.number)

    def is_stopped(self) -> bool:
        """Whether its process is stopped now."""
        return self.place is not None and self.place.is_stopped(self.number)

    def why_stopped(self) -> str | None:
        """Why it counts as lost, though its process exists."""
        return None if self.place is None else self.place.why_stopped(self.number)

    def goes_on(self) -> bool:
        """Whether its process runs, and is not stopped."""
        return self.place is not None and self.place.goes_on(self.number)

    def new_code(self) -> int | None:
        """The exit code of its process, if that has just ended."""
        return None if self.place is None else self.place.code_of(self.number)

    @property
    def failed(self) -> bool:
        """Whether this rank raised an error, or ended without returning."""
        return self.error is not None or (self.code is not None and not self.returned)


@dataclass
class Helper:
    """A process beside the ranks.

    Attributes:
        role: ``keeper`` or ``registrar``.
        fds: the descriptors that it inherits.
        process: its current process, under a number that no rank has.
    """

    role: str
    fds: Sequence[int]
    process: Rank


def run_ranks(
    program: Reference,
    arguments: Sequence[Mapping[str, Any]],
    *,
    transport: str = "shared_memory",
    limits: Limits | None = None,
    on_message: OnMessage = lambda rank, message: None,
    policy: MembershipPolicy | None = None,
    faults: Sequence[Fault] = (),
    away: Sequence[int] = (),
    folder: Path | None = None,
    stop: Stop | None = None,
    start_s: float = 0.0,
    device: str | None = None,
    hosts: ManyHosts | None = None,
    homes: Sequence[int] | None = None,
) -> list[Any]:
    """Run ``program(ports, channel, argument)`` in a process for each argument.

    Returns what each of them returned, in rank order. When one raises, all are ended and its error
    is raised here. When one is lost, the run ends too, unless ``policy`` lets it continue; then the
    lost rank's value is None. ``faults`` are injected into the processes. Ranks that are ``away``
    are not started at first. In ``folder`` is the socket that accepts requests to add a worker and
    to stop. The run's clock starts at ``start_s``. A keeper holds memory of ``device``, if one is
    given, through which ranks on that device communicate. With ``hosts``, ranks are on this host
    and on others, whose agents join first; ``homes`` are those of :func:`~.many_hosts.split`.
    """
    size, limits = len(arguments), limits or Limits()
    policy = policy or MembershipPolicy(True, size, "stop", 0)
    refuse_in_rank()
    one_of("transport", transport, TRANSPORTS)
    with (
        ForkServer.borrow() as fork_server,
        TRANSPORTS[transport].open(size, hosts) as opening,
        nullcontext() if hosts is None else hosts.agents(limits) as agents,
    ):
        common = {
            **_common_config(program, size, transport, hosts, limits, start_s),
            "late": [*(rank_of(fault) for fault in faults if fault.kind == "join"), *away],
            "elastic": policy.goes_on,
            "workers": policy.workers,
            "device": device,
            **opening.config,
        }
        supervisor = Supervisor(
            fork_server, common, arguments, opening, limits, on_message, policy, stop or Stop(False)
        )
        code = 1
        try:
            if hosts is not None and agents is not None:
                supervisor.follow(agents, hosts, homes or range(size))
            supervisor.start_all(faults, folder)
            supervisor.supervise()
            supervisor.raise_failure()
            code = 0
        except PacelineError as error:
            code = error.exit_code
            raise
        finally:
            supervisor.end()
            if agents is not None:
                agents.end(code)
    return [rank.value for rank in supervisor.ranks]


def _common_config(
    program: Reference,
    size: int,
    transport: str,
    hosts: ManyHosts | None,
    limits: Limits,
    start_s: float,
) -> Message:
    """What the process of every rank needs to know to begin."""
    together = size if hosts is None else -(-size // hosts.count)
    return {
        "transport": transport,
        "size": size,
        "program": program,
        "limits": asdict(limits),
        "started_s": time.monotonic() - start_s,
        "threads": threads_per_rank(together),
        "together": together,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
    }


def threads_per_rank(size: int) -> int:
    """This machine's cores divided by the ranks; ``OMP_NUM_THREADS`` overrides."""
    if setting := os.environ.get("OMP_NUM_THREADS"):
        return max(1, int(setting)) if setting.isdigit() else 1
    return max(1, len(os.sched_getaffinity(0)) // size) if hasattr(os, "sched_getaffinity") else 1


class Supervisor:
    """Starts, watches and ends the ranks of one run."""

    def __init__(
        self,
        fork_server: ForkServer,
        common: Message,
        arguments: Sequence[Mapping[str, Any]],
        opening: Opening,
        limits: Limits,
        on_message: OnMessage,
        policy: MembershipPolicy,
        stop: Stop,
    ) -> None:
        self.ranks = [Rank(number) for number in range(len(arguments))]
        self._workers = self.ranks[: policy.workers]
        self._here = ThisHost(fork_server, opening.fd, limits, self._some_continue)
        self._stop = stop
        self._common, self._arguments = common, arguments
        self._on_message, self._policy, self._limits = on_message, policy, limits
        self._pause: Watch | None = None
        self._control: ControlSocket | None = None
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._unready: set[int] = set()
        self._to_start: list[Rank] = []
        self._without_host: list[Rank] = []
        self._agents: Agents | None = None
        self._first_hosts = self._workers_each = 0
        self._planned: dict[int, RankHost] = {}
        self._helpers: list[Helper] = []
        if common["device"] is not None:
            self._helpers.append(Helper("keeper", [opening.fd], Rank(-1)))
        if (role := TRANSPORTS[common["transport"]].helper) is not None:
            self._helpers.append(Helper(role, opening.helper_fds, Rank(-2)))

    # Starting ------------------------------------------------------------------------------------

    def follow(self, agents: Agents, hosts: ManyHosts, homes: Sequence[int]) -> None:
        """Wait for the agents of the other hosts, and have ranks there, too."""
        agents.await_hosts(hosts.count - 1, hosts.how_to_join)
        self._agents, self._here.slots = agents, hosts.slots_here
        places = self._places()
        self._first_hosts = len(agents.hosts)
        self._workers_each = hosts.workers_each or self._common["together"]
        shares = split(homes, self._policy.workers, len(places), hosts.workers_each)
        for rank, index in zip(self.ranks, shares, strict=True):
            if index is not None:
                self._planned[rank.number] = places[index]

    def _places(self) -> list[RankHost]:
        """The hosts on which ranks may be, in the order in which ranks are shared out."""
        hosts = [] if self._agents is None else self._agents.hosts
        here = [] if self._here.slots == 0 else [self._here]
        return [*here, *sorted(hosts, key=lambda host: host.name)]

    def _place_for(self, rank: Rank) -> RankHost | None:
        """Where to start a rank; None while all hosts are lost or full.

        It is first started where that was planned. Later it goes to the host that has the fewest
        ranks, and stays where it was if others have as few. A server or communicator goes to a
        full host, too, because all workers wait for it.
        """
        busy = Counter(id(other.place) for other in self.ranks if other.running)
        free = [
            place
            for place in self._places()
            if not place.is_silent and (place.slots is None or busy[id(place)] < place.slots)
        ]
        if not free and rank not in self._workers:
            free = [place for place in self._places() if not place.is_silent]
        planned = self._planned.get(rank.number) if rank.place is None else None
        if planned in free:
            return planned
        return min(free, key=lambda p: (busy[id(p)], p is not rank.place), default=None)

    def start_all(self, faults: Sequence[Fault], folder: Path | None) -> None:
        """Start all ranks except late joiners, and schedule the faults.

        Accept requests through a socket in ``folder``.
        """
        for fault in faults:
            if fault.at_step is None:
                self._later(fault.at_s or 0.0, partial(self._inject, fault))
        for helper in self._helpers:
            self._start_helper(helper)
        for rank in self.ranks:
            if rank.number not in self._common["late"]:
                self._unready.add(rank.number)
                self._start(rank)
        if folder is not None:
            with suppress(OSError):  # a file system without sockets
                self._control = ControlSocket(folder)

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Handle a request."""
        match request.get("ask"):
            case "join":
                return self._add_worker()
            case "stop":
                return self._stop.ask()
        return {"error": "the only requests are to join and to stop"}

    def _add_worker(self) -> Mapping[str, Any]:
        """Start a new process for a worker that was lost."""
        if not self._policy.accepts_joiners:
            return {"error": "its method cannot take workers in during a run"}
        lost = self._lost_workers()
        if not lost:
            return {"error": f"all {self._policy.workers} workers are running"}
        self._to_start.append(lost[0])
        return {"rank": lost[0].number}

    def _lost_workers(self) -> list[Rank]:
        """The lost workers that nobody is about to start again."""
        lost = [w for w in self._workers if not w.running and not w.returned and not w.error]
        return [worker for worker in lost if not self._will_start(worker)]

    def _will_start(self, rank: Rank) -> bool:
        """Whether a rank is about to be started, maybe as soon as there is a host for it."""
        return rank in self._to_start or rank in self._without_host

    def _use_new_hosts(self) -> None:
        """Start lost workers again, as many as hosts take that have joined, or are back."""
        self._to_start += self._lost_workers()[: self._offered()]

    def _offered(self) -> int:
        """How many more workers the hosts take that have joined in mid-run, or have come back."""
        if self._agents is None or not self._policy.accepts_joiners:
            return 0
        first, hosts = self._first_hosts, self._agents.hosts
        joined = [h for n, h in enumerate(hosts) if (n >= first or h.was_lost) and not h.is_silent]
        room = sum(self._workers_each if h.slots is None else h.slots for h in joined)
        there = sum(rank.running and rank.place in joined for rank in self.ranks)
        return max(0, room - there - len(self._to_start) - len(self._without_host))

    def _find_hosts(self) -> None:
        """Start the ranks that wait for a host, if there is one now; ask for hosts if not."""
        waiting, self._without_host = self._without_host, []
        for rank in waiting:
            self._start(rank)
        if self._agents is not None:
            self._agents.want(len(self._without_host))

    def _start_pending(self) -> None:
        """Start late and lost ranks, but not before the initial ranks have completed their setup.

        The setup contains collectives of the initial ranks, in which a late joiner takes no part.
        Initial ranks that are stopped do not count.
        """
        if any(not self.ranks[number].is_stopped() for number in self._unready):
            return
        if not any(worker.running or worker.returned for worker in self._workers):
            return  # nobody is left of whom they could get their state
        waiting, self._to_start = self._to_start, []
        for rank in waiting:
            self._start(rank)

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` so many seconds after the start of the run."""
        self._due.append((self._common["started_s"] + seconds, act))

    def _start(self, rank: Rank) -> None:
        """Start a rank, now or as soon as there is a host for it."""
        place = self._place_for(rank)
        if place is None:
            self._without_host.append(rank)
            return
        config = {**self._common, "role": "rank", "rank": rank.number, "seen": rank.seen}
        config["start"] = rank.starts
        config["argument"] = dict(self._arguments[rank.number])
        place.start(rank.number, config)
        rank.begin(place)
        if rank.seen:
            self._report("restarted", rank)

    def _start_helper(self, helper: Helper) -> None:
        config = {**self._common, "role": helper.role}
        self._here.start_helper(helper.process.number, config, helper.fds)
        helper.process.begin(self._here)

    def _inject(self, fault: Fault) -> None:
        rank = self.ranks[rank_of(fault)]
        if fault.kind == "join":
            self._to_start.append(rank)
        elif fault.kind == "kill":
            rank.send_signal(signal.SIGKILL)
        elif fault.kind == "freeze":
            self._report("stopped", rank)
            rank.send_signal(signal.SIGSTOP)
            if fault.for_s is not None:
                self._later(
                    (fault.at_s or 0.0) + fault.for_s, partial(rank.send_signal, signal.SIGCONT)
                )

    # Watching ------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Handle messages until every rank has ended; after a failure end all ranks soon."""
        failed_s: float | None = None
        while any(rank.running for rank in self.ranks):
            self._receive_all()
            self._check_helpers()
            self._stop.act(self.ranks)
            now_s = time.monotonic()
            for due_s, act in [due for due in self._due if due[0] <= now_s]:
                self._due.remove((due_s, act))
                act()
            if failed_s is None:
                self._use_new_hosts()
                self._find_hosts()
            if failed_s is None and self._to_start:
                self._start_pending()
            if failed_s is None and any(self._is_failure(rank) for rank in self.ranks):
                failed_s = now_s
            if failed_s is not None:
                self._due.clear()
                self._end_all(now_s - failed_s)
            elif self._policy.goes_on and any(worker.returned for worker in self._workers):
                self._end_rest()
            else:
                self._wait_for_stopped()
        self._check_helpers()

    def _receive_all(self) -> None:
        door = [] if self._control is None else [self._control.fileno()]
        wake = [] if self._agents is None else [self._agents.wake]
        ready = readable([*door, *wake, *self._here.fds()])
        self._here.receive(ready)
        if self._agents is not None and self._agents.wake in ready:
            os.eventfd_read(self._agents.wake)
        if self._control is not None and self._control.fileno() in ready:
            self._control.answer(self._answer)
        for rank in self.ranks:
            self._receive(rank)
            if rank.running and (code := rank.new_code()) is not None:
                self._receive(rank)
                rank.code = code
                self._has_ended(rank)
            elif rank.running and not self._may_return(rank):
                self._end_if_stopped(rank)

    def _check_helpers(self) -> None:
        """Start a lost registrar again; end the run if the keeper is lost, and all it held."""
        for helper in self._helpers:
            process = helper.process
            if not process.running:
                continue
            process.code, reason = process.new_code(), process.why_stopped()
            if process.code is not None:
                reason = _how_ended(process.code)
            if reason is None:
                continue
            if helper.role == "registrar" and process.starts <= MOST_SUCCESSORS:
                process.send_signal(signal.SIGKILL)
                self._start_helper(helper)
                continue
            what = f"holds the ranks' memory on {self._common['device']}"
            if helper.role == "registrar":
                what = "knows the members of the run"
            error = PacelineError(f"the {helper.role}, which {what}, is lost: {reason}")
            error.exit_code = 3
            raise error

    def _receive(self, rank: Rank) -> None:
        """Handle all messages that a rank has sent so far, without waiting."""
        for message in rank.messages():
            self._handle(rank, message)

    def _handle(self, rank: Rank, message: Message) -> None:
        match message["kind"]:
            case "value":
                rank.value, rank.returned = message["value"], True
            case "error":
                rank.error = message
            case "thaw":  # a rank that stops itself asks to be continued later
                seconds = time.monotonic() - self._common["started_s"] + message["for_s"]
                self._later(seconds, partial(rank.send_signal, signal.SIGCONT))
            case "entered":
                rank.entered = rank.seen = True
            case "ready":
                self._unready.discard(rank.number)
            case _:
                self._on_message(rank.number, message)

    def _may_return(self, rank: Rank) -> bool:
        """Whether ``rank`` may rejoin after it was left behind.

        One whose host is lost may not, if it can be started again on another.
        """
        may_rejoin = self._policy.goes_on and self._policy.may_rejoin(rank.number)
        if rank.place is not None and rank.place.is_silent:
            restart = self._policy.can_restart(rank.number) or (may_rejoin and self._offered() > 0)
            return may_rejoin and not restart and rank.entered
        return may_rejoin and rank.entered

    def _end_if_stopped(self, rank: Rank) -> None:
        if reason := rank.why_stopped():
            rank.reason = reason
            if self._policy.goes_on:  # the others continue, and it may have a successor
                rank.send_signal(signal.SIGKILL)
            else:
                rank.end(signal.SIGKILL)

    def _has_ended(self, rank: Rank) -> None:
        """Report a loss that the run survives, and restart the rank if the policy allows it."""
        if rank.returned or rank.error is not None or not self._policy.goes_on or rank.signalled:
            self._unready.discard(rank.number)
            return
        if not rank.entered and rank.starts <= MOST_SUCCESSORS:  # the others have not seen it yet
            self._start(rank)
            return
        self._unready.discard(rank.number)
        self._report("lost", rank, reason=rank.reason or _how_ended(rank.code))
        others = any(other.returned or other.running for other in self._workers)
        if others and self._policy.restarts(rank.number):
            self._to_start.append(rank)

    def _report(self, event: str, rank: Rank, **facts: Any) -> None:
        t = time.monotonic() - self._common["started_s"]
        record = {"t": t, "event": event, "rank": rank.number, **facts}
        self._on_message(rank.number, {"kind": "event", "record": record})

    def _is_failure(self, rank: Rank) -> bool:
        """Whether the failure of ``rank`` ends the run."""
        if not self._policy.goes_on or rank.error is not None:
            return rank.failed
        workers = self._workers
        if rank not in workers:  # workers cannot continue without a server or communicator
            needed = any(worker.running for worker in workers) and not self._will_start(rank)
        else:
            late = rank.number in self._common["late"]
            needed = not rank.seen and not late and not self._will_start(rank)
        return rank.failed and (needed or not any(w.returned or w.running for w in workers))

    def _some_continue(self) -> bool:
        """Whether any worker runs and is not stopped, or has returned."""
        return any(worker.returned or worker.goes_on() for worker in self._workers)

    def _wait_for_stopped(self) -> None:
        """While all workers are stopped, none is lost: wait as long as for a busy one."""
        if self._some_continue():
            self._pause = None
            return
        stopped = [worker.number for worker in self._workers if worker.running]
        if stopped:
            op = "a run whose workers are all stopped"
            self._pause = self._pause or Watch(op, self._limits)
            self._pause.check_limits(stopped)

    def _end_rest(self) -> None:
        """If only stopped ranks remain, end them: there are no members left to rejoin."""
        left = [rank for rank in self.ranks if rank.running]
        if all(rank.why_stopped() for rank in left):
            self._due.clear()
            for rank in left:
                self._report("lost", rank, reason=rank.why_stopped())
                rank.end(signal.SIGKILL)

    def _end_all(self, since_s: float) -> None:
        """After a failure: kill stopped ranks, which cannot end; end the others after a while."""
        for rank in self.ranks:
            if since_s > NOTICE_S and rank.running and rank.is_stopped():
                rank.end(signal.SIGKILL)
            elif since_s > GRACE_S:
                rank.end(signal.SIGTERM if since_s < 2 * GRACE_S else signal.SIGKILL)

    # Ending --------------------------------------------------------------------------------------

    def end(self) -> None:
        """End all processes, whatever happened."""
        if self._control is not None:
            self._control.close()
        processes = [*self.ranks, *(helper.process for helper in self._helpers)]
        for rank in processes:
            rank.signalled = rank.signalled or rank.running
        for rank in processes:
            if rank.place is not self._here:
                rank.send_signal(signal.SIGKILL)
        here = [rank for rank in processes if rank.place is self._here and rank.running]
        codes = self._here.end([rank.number for rank in here])
        for rank in processes:
            rank.code = codes.get(rank.number, rank.code)

    def raise_failure(self) -> None:
        """Raise the error that ended the run, if one did.

        That is a rank's own error, else the loss of a dead rank, else a timeout.
        """
        if not any(self._is_failure(rank) for rank in self.ranks):
            return
        errors = [{**rank.error, "rank": rank.number} for rank in self.ranks if rank.error]
        errors.sort(key=itemgetter("time_s"))
        for error in errors:
            if error["usage"]:
                raise UsageError(error["message"])
            if "ranks" not in error:
                raise WorkerFailed(error["rank"], error["summary"], error["traceback"])
        dead = [rank for rank in self.ranks if rank.failed and not rank.error]
        dead = [rank for rank in dead if rank.reason or not rank.signalled]
        if dead:
            seen = next((w for w in errors if w["ranks"] and w["type"] == "PeerLost"), None)
            op, waited_s = (seen["op"], seen["waited_s"]) if seen else ("the run", 0.0)
            stopped = seen["reason"] if seen and seen["reason"] != "it died" else ""
            reason = dead[0].reason or stopped or _how_ended(dead[0].code)
            raise PeerLost([rank.number for rank in dead], op, reason, waited_s)
        for error in errors:
            if error["type"] == "PeerLost":
                raise PeerLost(error["ranks"], error["op"], error["reason"], error["waited_s"])
            raise CommTimeout(error["ranks"], error["op"], error["waited_s"])


def _how_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"
