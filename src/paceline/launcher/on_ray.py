"""Ray as what starts the agents of a run: it chooses their nodes, and does nothing more.

Each rank has an actor of its own, with one CPU and, on a GPU, one GPU: so Ray can place each of
them where there is room. The actor runs an agent that takes one rank. When a node is lost, Ray is
asked for as many actors as ranks are to be started again. Membership, messages and fencing are
Paceline's own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.comm.limits import Limits
from paceline.errors import PacelineError, UsageError
from paceline.launcher.agents import Agents
from paceline.launcher.many_hosts import ManyHosts
from paceline.launcher.rank_process import Message

MOST_FAILURES = 5
"""So many agents may end before they have joined; then Ray is not asked for another."""
RAY_NOTICES_S = 60.0
"""So long after the last sign of a node, Ray itself knows whether it is lost."""
_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RayHosts(ManyHosts):
    """The nodes of a Ray cluster, of which this process is a driver.

    Args:
        run_token: of the run; Ray carries it to the actors.
        gpus: how many GPUs each rank needs.
        connected: whether this run has connected to Ray, and so disconnects from it.
    """

    run_token: bytes
    gpus: int
    connected: bool
    slots_here: ClassVar[int | None] = 0

    @property
    def how_to_join(self) -> str:
        """What is printed while the agents start."""
        import ray

        ranks, gpus = self.count - 1, f" and {self.gpus} GPU" if self.gpus else ""
        total = ray.cluster_resources()
        has = [f"{total.get(what, 0):.0f} {what}s" for what in ("CPU", "GPU")[: 1 + self.gpus]]
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        return (
            f"paceline: waiting for Ray to place {ranks} ranks, with 1 CPU{gpus} each;"
            f" it has {' and '.join(has)} on {nodes} node{'s' if nodes != 1 else ''}"
        )

    def token(self) -> bytes:
        return self.run_token

    @contextmanager
    def agents(self, limits: Limits) -> Iterator[Agents]:
        from paceline.comm.hosts.secret import Secret

        with self.listener() as listener:
            secret = Secret(self.run_token, encrypted=not self.is_loopback)
            where = self.address, listener.getsockname()[1]
            agents = RayAgents(listener.fileno(), secret, limits, self, where)
            try:
                yield agents
            finally:
                agents.release()


def connect(ranks: int, gpus: int) -> RayHosts:
    """Connect to the Ray cluster of this host, or the one that ``RAY_ADDRESS`` names."""
    from paceline.comm.hosts.secret import new_token

    try:
        import ray
    except ImportError:
        raise UsageError('on (ray) needs Ray: pip install "paceline[ray]"') from None
    connected = not ray.is_initialized()
    if connected:
        in_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address="auto", logging_level=logging.ERROR)
        except ConnectionError as error:
            raise UsageError(
                f"on (ray) needs a Ray cluster: type ray start --head, or set RAY_ADDRESS: {error}"
            ) from None
        if in_main:
            signal.signal(signal.SIGTERM, before)  # the launcher handles it, not Ray
    address = ray.util.get_node_ip_address()
    return RayHosts(
        ranks + 1, address, 0, None, run_token=new_token(), gpus=gpus, connected=connected
    )


class RayAgents(Agents):
    """The agents in Ray's actors.

    Args:
        listener: the descriptor of the socket at which the launcher listens.
        secret: of the run.
        limits: how long to wait.
        cluster: the Ray cluster.
        where: the address and port at which agents join.
    """

    def __init__(
        self, listener: int, secret: Any, limits: Limits, cluster: RayHosts, where: tuple[str, int]
    ) -> None:
        super().__init__(listener, secret, limits)
        self._cluster, self._where = cluster, where
        self._actors: dict[int, Any] = {}
        self._runs: dict[Any, int] = {}
        self._asked = self._failures = 0
        self._avoided: set[str] = set()

    def await_hosts(self, count: int, how_to_join: str) -> None:
        """Have Ray place so many agents, and wait until they have joined."""
        print(how_to_join, file=sys.stderr, flush=True)
        began_s = time.monotonic()
        while (missing := count - sum(not host.is_silent for host in self.hosts)) > 0:
            self.want(missing)
            waited_s = time.monotonic() - began_s
            if self._failures >= MOST_FAILURES:
                raise _error(f"{self._failures} agents that Ray started have ended at once")
            if waited_s > self.limits.start_s:
                placed = f"Ray has placed {count - missing} of {count} ranks"
                raise _error(f"{placed} after {waited_s:.0f} s; it has no room for the others")
            time.sleep(_LOOK_S)

    def want(self, count: int) -> None:
        """Ask Ray for as many agents as ranks wait for a host, beyond those it has yet to start."""
        if failure := self._take_ended():
            self._failures += 1
            text = f"paceline: an agent that Ray started has ended: {failure}"
            print(text, file=sys.stderr, flush=True)
        self._avoid_lost_nodes()
        coming = len(self._coming())
        if count > coming and self._failures < MOST_FAILURES:
            self._ask_for(count - coming)

    def _coming(self) -> set[int]:
        """The actors that have been asked for, and whose agents have not joined yet."""
        return {*self._runs.values()} - {host.hello["actor"] for host in self.hosts}

    def _avoid_lost_nodes(self) -> None:
        """Ask for no actors on nodes that are lost: Ray may not know it, and place them there."""
        avoided = {
            h.hello["node"] for h in self.hosts if h.is_silent and h.silent_s < RAY_NOTICES_S
        }
        if avoided != self._avoided:
            self._avoided = avoided
            for number in self._coming():
                self._forget(number)

    def _forget(self, number: int) -> None:
        """Take back that an actor was asked for."""
        import ray

        ray.kill(self._actors.pop(number))
        self._runs = {run: other for run, other in self._runs.items() if other != number}

    def _ask_for(self, count: int) -> None:
        import ray

        options: dict[str, Any] = {
            "num_cpus": 1,
            "num_gpus": self._cluster.gpus,
            "scheduling_strategy": "SPREAD",
        }
        if self._avoided:
            nodes = ",".join(sorted(self._avoided))
            options["label_selector"] = {"ray.io/node-id": f"!in({nodes})"}
        for _ in range(count):
            self._asked += 1
            actor = ray.remote(AgentActor).options(**options).remote()
            run = actor.run.remote(*self._where, self._cluster.token(), os.getcwd(), self._asked)
            self._actors[self._asked], self._runs[run] = actor, self._asked

    def _take_ended(self) -> str | None:
        """Forget the actors that have ended; why one of them did, if its agent never joined."""
        import ray

        joined = {host.hello["actor"] for host in self.hosts}
        reason = None
        for run in [run for run in self._runs if ray.wait([run], timeout=0)[0]]:
            number = self._runs.pop(run)
            if number not in joined:
                del self._actors[number]
                reason = _how_ended(run)
        return reason

    def release(self) -> None:
        """Give all that is left back to Ray."""
        import ray

        for actor in self._actors.values():
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        if self._cluster.connected:
            ray.shutdown()


class AgentActor:
    """The actor in which an agent runs; Ray makes it on a node that has room."""

    def run(self, host: str, port: int, token: bytes, folder: str, number: int) -> int:
        """Work for the launcher that listens there, until the run is over.

        Args:
            host, port: where it listens.
            token: of the run.
            folder: in which the launcher was started; ranks are started there if it exists here.
            number: by which the launcher knows this actor.
        """
        import ray

        from paceline.launcher.agent import join

        if os.path.isdir(folder):
            os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = "1"  # an actor has one CPU
        node = ray.get_runtime_context().get_node_id()
        about: Message = {"slots": 1, "actor": number, "node": node}
        return join(ManyHosts(1, host, port, None), token, None, about)


def _how_ended(run: Any) -> str:
    """How the agent of an actor has ended."""
    import ray

    try:
        return f"it ended with exit code {ray.get(run)}"
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[-1]


def _error(text: str) -> PacelineError:
    error = PacelineError(text)
    error.exit_code = 3
    return error
