"""Hosts made of namespaces, on one machine.

Each host has a network, processes, a name and shared memory of its own, and the files of this
machine. Host ``i`` has the addresses 10.77.0.(i + 1) and fd77::(i + 1), and the name ``host<i>``,
which all of them resolve to the first. Their cables end in a namespace of its own, in bridges or,
where packets take time, in a switch in user space (:mod:`paceline.lab.network.switch`). Nothing in
there can reach, or be reached from, the rest of the machine.

Processes hold all of it, none by a name: a host is its first process (its *init*), which ends when
this process ends, however it ends. The kernel then ends all other processes of the host, and
removes what they used. Making hosts needs root, or a kernel that lets users make namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.common.options import above, at_least
from paceline.errors import PacelineError, UsageError
from paceline.lab.network.process import PopenOnHost, only_child

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
"""The commands that make hosts, and the package of each."""
MOST_HOSTS = 250
BURST_S, LEAST_BURST = 1e-3, 1 << 15
"""How much an idle cable lets pass at once: what it carries in BURST_S, at least LEAST_BURST."""
QUEUE_S = 0.05
"""A packet that would wait longer than this for its turn on a cable is dropped."""
MTU, FRAME_BYTES, HEADER_BYTES = 1500, 14, 52
"""The largest IP packet, the Ethernet header that is counted with it, and the IP and TCP headers
(with time stamps) inside it."""
_NOWHERE = "02:00:00:00:00:01"
"""The address of no network card: frames to it are dropped by all who see them."""

_INIT = """
set -e
mount -t tmpfs tmpfs /dev/shm
hostname "$1"
mount -t tmpfs tmpfs /mnt
printf '%s\\n' "$2" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""
"""The first process of a host: it ends with its standard input, and leaves no zombie."""


def payload_rate(rate_mbit: float) -> float:
    """The payload that TCP gets through a cable of this rate, bytes per second.

    >>> round(payload_rate(100) / 12.5e6, 3)
    0.956
    """
    return rate_mbit * 1e6 / 8 * (MTU - HEADER_BYTES) / (MTU + FRAME_BYTES)


def why_no_hosts() -> str | None:
    """Why no host can be made here; None if a trial succeeds."""
    try:
        with HostNetwork(1, rate_mbit=100):
            return None
    except UsageError as error:
        return str(error)


@dataclass
class _Host:
    """A host that runs: the process that waits for its init, and the init."""

    holder: subprocess.Popen[str]
    init: int
    group: int | None = 0
    processes: list[PopenOnHost] = field(default_factory=list)


class HostNetwork:
    """Hosts that are joined by a network, as a context manager.

    Args:
        hosts: how many.
        rate_mbit: the rate of each host's cable, in each direction; None for no limit.
        delay_ms: how long a packet takes from host to host, besides what the rate makes of it.
    """

    def __init__(
        self, hosts: int, *, rate_mbit: float | None = None, delay_ms: float = 0.0
    ) -> None:
        at_least("hosts", hosts, 1)
        if hosts > MOST_HOSTS:
            raise UsageError(f"hosts ({hosts}) must be at most {MOST_HOSTS}")
        if rate_mbit is not None:
            above("rate_mbit", rate_mbit, 0)
        at_least("delay_ms", delay_ms, 0)
        self.size, self.rate_mbit, self.delay_ms = hosts, rate_mbit, delay_ms
        self._hosts: dict[int, _Host] = {}
        self._hub: subprocess.Popen[str] | None = None
        self._switch: subprocess.Popen[str] | None = None
        self._user: list[str] = []

    def __enter__(self) -> HostNetwork:
        _check_tools()
        try:
            self._start_hub()
            for host in range(self.size):
                self.start_host(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts with all of their processes, and the network."""
        for host in list(self._hosts):
            self._end(self._hosts.pop(host))
        for process in (self._switch, self._hub):
            if process is not None:
                process.kill()
                process.communicate()
        self._switch = self._hub = None

    # Names -----------------------------------------------------------------------------------

    @staticmethod
    def address(host: int, version: int = 4) -> str:
        """The address at which the others reach a host.

        >>> HostNetwork.address(0), HostNetwork.address(1, version=6)
        ('10.77.0.1', 'fd77::2')
        """
        return f"10.77.0.{host + 1}" if version == 4 else f"fd77::{host + 1:x}"

    @staticmethod
    def name(host: int) -> str:
        """The name of a host, which all hosts resolve to its first address."""
        return f"host{host}"

    @property
    def alive(self) -> tuple[int, ...]:
        """The hosts that run."""
        return tuple(sorted(self._hosts))

    # Processes -------------------------------------------------------------------------------

    def popen(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> PopenOnHost:
        """Start a command on a host; ``options`` are those of :class:`subprocess.Popen`."""
        line = [*self._enter(self._hosts[host].init, "--net", "--pid", "--mount", "--uts", "--ipc")]
        line += ["sh", "-c", 'cd "$0" && exec "$@"', str(Path(cwd or ".").resolve()), *argv]
        process = PopenOnHost(line, env=env, **options)
        self._hosts[host].processes.append(process)
        return process

    def run(self, host: int, *command: str) -> str:
        """Run a command on a host, and return what it wrote."""
        with self.popen(
            host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                output, errors = process.communicate()
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise PacelineError(f"{' '.join(command)}: {errors.strip()}")
        return str(output)

    def pids(self, host: int) -> list[int]:
        """The processes of a host but its init, as this process sees them."""
        init = self._hosts[host].init
        space = os.stat(f"/proc/{init}/ns/pid").st_ino
        return [pid for pid in _pids() if pid != init and _pid_space(pid) == space]

    def start_host(self, host: int) -> None:
        """Start a host that does not run: all do at first, but those that were killed do not."""
        if host in self._hosts or not 0 <= host < self.size:
            raise UsageError(f"host ({host}) must be one of {self.size} that does not run")
        names = [f"{self.address(other)} {self.name(other)}" for other in range(self.size)]
        text = "\n".join(["127.0.0.1 localhost", "::1 localhost", *names])
        line = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child"]
        line += ["--mount-proc", "sh", "-c", _INIT, "init", self.name(host), text]
        holder = _hold([*self._enter(self._hub_pid), *line])
        self._hosts[host] = _Host(holder, only_child(holder))
        self._connect(host)

    def kill_host(self, host: int) -> None:
        """End all processes of a host at once; nobody in the network hears of it."""
        self.cut(host)
        ended = self._hosts.pop(host)
        if self._switch is not None:
            self._tell_switch(f"leave {host}")
        self._end(ended)
        with suppress(UsageError):  # the kernel removes it with the host, at once or later
            self._ip(self._hub_pid, f"link delete port{host}")

    @staticmethod
    def _end(host: _Host) -> None:
        os.kill(host.init, signal.SIGKILL)
        host.holder.communicate()  # the kernel has ended all others before
        for process in host.processes:
            process.wait()

    # Faults ----------------------------------------------------------------------------------

    def cut(self, host: int) -> None:
        """Take a host off the network. Its own interface stays up, as at a failure far away."""
        self._place(host, None)

    def mend(self, host: int) -> None:
        """Undo :meth:`cut`."""
        self._place(host, 0)

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """Let hosts reach those of their own group only; a host of no group is alone."""
        of = {host: number for number, group in enumerate(groups) for host in group}
        if len(of) != sum(map(len, groups)) or not set(of) <= set(range(self.size)):
            raise UsageError(f"groups ({groups}) must name each of {self.size} hosts at most once")
        for host in self._hosts:
            self._place(host, of.get(host))

    def drop(self, source: int, target: int) -> None:
        """Lose all packets from ``source`` to ``target``; those that come back still arrive."""
        for version in (4, 6):
            entry = f"{self.address(target, version)} lladdr {_NOWHERE} dev eth0 nud permanent"
            self._ip(self._hosts[source].init, f"neighbor replace {entry}")

    def heal(self) -> None:
        """Undo :meth:`cut`, :meth:`partition` and :meth:`drop`."""
        for host, running in self._hosts.items():
            self._place(host, 0)
            self._ip(running.init, "neighbor flush dev eth0 nud permanent")

    # The network -----------------------------------------------------------------------------

    @property
    def _hub_pid(self) -> int:
        assert self._hub is not None
        return self._hub.pid

    def _start_hub(self) -> None:
        """Hold the network's namespace: of root, or of a user who is root in there."""
        line, errors = ["sh", "-c", "echo ready; exec cat > /dev/null"], []
        for self._user in ([], ["--user", "--preserve-credentials"]):
            rights = ["--user", "--map-root-user"] if self._user else []
            try:
                hub = _hold(["unshare", *rights, "--net", *line])
                break
            except UsageError as error:
                errors.append(str(error))
        else:
            raise UsageError(
                "hosts on one machine need root, or a kernel that lets users make namespaces:"
                f" {errors[-1]}"
            )
        self._hub = hub
        if self.delay_ms:
            self._start_switch()
        else:
            for group in range(self.size):
                bridge = f"hub{group}"
                self._ip(hub.pid, f"link add {bridge} type bridge mcast_snooping 0")
                self._ip(hub.pid, f"link set {bridge} addrgenmode none up")

    def _start_switch(self) -> None:
        rate = "none" if self.rate_mbit is None else str(self.rate_mbit)
        line = [*self._enter(self._hub_pid, "--net"), sys.executable]
        line += ["-m", "paceline.lab.network.switch", rate, str(self.delay_ms / 1e3), str(QUEUE_S)]
        self._switch = _hold(line)

    def _tell_switch(self, line: str) -> None:
        """Have the switch do something, and wait until it has."""
        assert self._switch is not None
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.write(line + "\n")
        self._switch.stdin.flush()
        if self._switch.stdout.readline() != "done\n":
            raise PacelineError(f"the switch has ended: {self._switch.communicate()[1].strip()}")

    def _connect(self, host: int) -> None:
        """Give a host its cable, with a rate in each direction."""
        init, port = self._hosts[host].init, f"port{host}"
        # As a machine that starts again, it has the card that the others know.
        card = f"eth0 address 02:00:00:00:77:{host:02x}"
        self._ip(self._hub_pid, f"link add {port} type veth peer name {card} netns {init}")
        self._ip(self._hub_pid, f"link set {port} addrgenmode none up")
        self._ip(init, "link set lo up")
        self._ip(init, f"link set eth0 addrgenmode none mtu {MTU} up")
        self._ip(init, f"address add {self.address(host)}/24 dev eth0")
        self._ip(init, f"address add {self.address(host, 6)}/64 dev eth0 nodad")
        if self.rate_mbit is not None:
            # A packet of the sender must fit into the burst: else the kernel takes it apart, and
            # the switch has ten times as many to pass on.
            self._ip(init, f"link set eth0 gso_max_size {self.burst_bytes // 2}")
            self._limit(init, "eth0")
        if self._switch is not None:
            self._tell_switch(f"join {host}")
        elif self.rate_mbit is not None:
            self._limit(self._hub_pid, port)
        self._place(host, 0)

    @property
    def burst_bytes(self) -> int:
        """How many bytes an idle cable lets pass at once."""
        return max(LEAST_BURST, round(BURST_S * (self.rate_mbit or 0) * 1e6 / 8))

    def _limit(self, pid: int, device: str) -> None:
        rate = f"rate {self.rate_mbit}mbit burst {self.burst_bytes} latency {QUEUE_S * 1e3:.0f}ms"
        self._inside(pid, f"tc qdisc add dev {device} root tbf {rate}".split())

    def _place(self, host: int, group: int | None) -> None:
        """Have a host's cable end where those of its group end, or nowhere."""
        if self._switch is not None:
            self._tell_switch(f"place {host} {'nowhere' if group is None else group}")
        else:
            end = "nomaster" if group is None else f"master hub{group}"
            self._ip(self._hub_pid, f"link set port{host} {end}")

    def _ip(self, pid: int, arguments: str) -> None:
        self._inside(pid, ["ip", *arguments.split()])

    def _inside(self, pid: int, command: list[str]) -> None:
        """Run a command in the network of a process, with the files of this one."""
        line = [*self._enter(pid, "--net"), *command]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"no network of hosts: {' '.join(command)}: {done.stderr.strip()}")

    def _enter(self, pid: int, *spaces: str) -> list[str]:
        """The beginning of a command that runs in namespaces of a process."""
        if not spaces and not self._user:
            return []
        return ["nsenter", "--target", str(pid), *self._user, *spaces]


def _check_tools() -> None:
    if sys.platform != "linux":
        raise UsageError(f"hosts on one machine need Linux, and this is {sys.platform}")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise UsageError(f'hosts on one machine need the command "{tool}": install {package}')


def _hold(line: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that ends with its standard input; wait until it says that it is ready."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise UsageError(f"no hosts can be made: {process.communicate()[1].strip()}")
    return process


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _pid_space(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:  # it has ended, or belongs to somebody else
        return None
