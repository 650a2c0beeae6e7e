"""Hosts made of namespaces: really made, as root or by a user who may."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.namespaces import need_hosts, wait_until

from paceline.errors import UsageError
from paceline.lab.network.hosts import HostNetwork

pytestmark = pytest.mark.may_skip
DELAYS_MS = [0.0, 20.0]


@pytest.fixture(autouse=True)
def hosts_can_be_made():
    need_hosts()


# Talking to each other ---------------------------------------------------------------------------

TALKER = """
import socket, sys, threading
heard = socket.create_server(("::", 7000), family=socket.AF_INET6, dualstack_ipv6=True)
datagrams = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
datagrams.bind(("::", 7000))
def hear():
    while True:
        print(datagrams.recv(1000).decode(), flush=True)
threading.Thread(target=hear, daemon=True).start()
print("up", flush=True)
for line in sys.stdin:
    host, text = line.split(maxsplit=1)
    address = host if ":" in host else "::ffff:" + host
    datagrams.sendto(text.strip().encode(), (address, 7000))
"""


class Talkers:
    """A process on each host that sends and hears datagrams; these come in order, or are lost."""

    def __init__(self, network, stack):
        self.network = network
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        line = [sys.executable, "-c", TALKER]
        self.processes = [network.popen(host, line, **pipes) for host in range(network.size)]
        for process in self.processes:
            stack.callback(process.stdout.close)
            stack.callback(process.stdin.close)
            assert process.stdout.readline() == "up\n"

    def say(self, source, target, text, version=4):
        address = self.network.address(target, version)
        self.processes[source].stdin.write(f"{address} {text}\n")
        self.processes[source].stdin.flush()

    def heard(self, host):
        return self.processes[host].stdout.readline().strip()

    def meet(self):
        """Let all know where all are: until then, a packet waits in the kernel."""
        hosts = range(self.network.size)
        for source, target in [(a, b) for a in hosts for b in hosts if a != b]:
            for version in (4, 6):
                self.say(source, target, "hello", version)
                assert self.heard(target) == "hello"


@pytest.fixture(params=DELAYS_MS, ids=["bridge", "switch"])
def talking(request):
    with ExitStack() as stack:
        network = stack.enter_context(HostNetwork(3, rate_mbit=100, delay_ms=request.param))
        talkers = Talkers(network, stack)
        talkers.meet()
        yield network, talkers


def test_a_host_that_is_cut_off_hears_nothing_until_it_is_mended(talking):
    network, talkers = talking
    network.cut(1)
    talkers.say(0, 1, "lost")
    talkers.say(1, 0, "lost")
    talkers.say(0, 2, "to another")
    assert talkers.heard(2) == "to another"
    assert network.run(1, "cat", "/sys/class/net/eth0/carrier") == "1\n"
    network.mend(1)
    talkers.say(0, 1, "after")
    talkers.say(1, 0, "after")
    assert [talkers.heard(0), talkers.heard(1)] == ["after", "after"]


def test_a_partition_lets_hosts_reach_their_own_group(talking):
    network, talkers = talking
    network.partition([[0, 2], [1]])
    talkers.say(0, 1, "lost")
    talkers.say(1, 2, "lost", version=6)
    talkers.say(0, 2, "within")
    assert talkers.heard(2) == "within"
    network.heal()
    talkers.say(0, 1, "after")
    talkers.say(1, 2, "after")
    assert [talkers.heard(1), talkers.heard(2)] == ["after", "after"]


@pytest.mark.parametrize("groups", [[[0, 1], [1]], [[0], [3]]])
def test_a_partition_of_other_hosts_is_refused(groups):
    with pytest.raises(UsageError, match="must name each of 3 hosts at most once"):
        HostNetwork(3).partition(groups)


@pytest.mark.parametrize("version", [4, 6])
def test_packets_can_be_lost_in_one_direction(talking, version):
    network, talkers = talking
    network.drop(0, 1)
    talkers.say(0, 1, "lost", version)
    talkers.say(1, 0, "the other way", version)
    assert talkers.heard(0) == "the other way"
    network.heal()
    talkers.say(0, 1, "after", version)
    assert talkers.heard(1) == "after"


def test_a_host_that_is_killed_says_no_goodbye_and_can_start_again(talking):
    network, talkers = talking
    connect = "import socket, sys; s = socket.create_connection(('host1', 7000)); print('up', "
    line = [sys.executable, "-c", connect + "flush=True); sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with network.popen(0, line, **pipes) as client:
        assert client.stdout.readline() == "up\n"
        more = network.popen(1, ["sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"])
        wait_until(lambda: len(network.pids(1)) == 4)
        pids = network.pids(1)
        network.kill_host(1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert talkers.processes[1].returncode == more.returncode == -signal.SIGKILL
        assert network.alive == (0, 2)
        states = [row.split()[3] for row in network.run(0, "cat", "/proc/net/tcp").splitlines()]
        assert "01" in states, "the client's connection is established still"
        network.start_host(1)
        assert network.pids(1) == []
        assert "10.77.0.2" in network.run(1, "ip", "address")
        client.kill()


# A host ------------------------------------------------------------------------------------------


def test_a_host_has_processes_a_name_and_shared_memory_of_its_own(tmp_path):
    (tmp_path / "shared").write_text("files are shared")
    with HostNetwork(2) as network:
        assert network.run(1, "hostname") == "host1\n"
        assert len(network.run(0, "sh", "-c", "ls -d /proc/[0-9]*").splitlines()) < 5
        network.run(0, "touch", "/dev/shm/mine")
        assert network.run(1, "ls", "/dev/shm") == ""
        assert not Path("/dev/shm/mine").exists()
        assert network.run(0, "getent", "hosts", "host1").split()[-1] == "host1"
        assert network.run(0, "cat", str(tmp_path / "shared")) == "files are shared"
        assert network.run(0, "pwd").strip() == str(Path.cwd())
        assert "default" not in network.run(0, "ip", "route")


def test_signals_reach_the_process_and_its_end_comes_back():
    with HostNetwork(1) as network:
        process = network.popen(0, ["sleep", "1000"])
        wait_until(lambda: "sleep" in Path(f"/proc/{process.inner_pid}/cmdline").read_text())
        assert network.pids(0) == [process.inner_pid]
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(process.inner_pid) == "T")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: state(process.inner_pid) == "S")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(process.inner_pid) == "T")
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert network.popen(0, ["sh", "-c", "exit 7"]).wait() == 7


def test_a_process_that_nobody_waits_for_leaves_no_zombie():
    with HostNetwork(1) as network:
        network.run(0, "sh", "-c", "setsid sh -c 'sleep 0.1' > /dev/null 2>&1 &")
        wait_until(lambda: network.pids(0) == [])


def state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# The cable ---------------------------------------------------------------------------------------

RECEIVER = """
import socket, time
with socket.create_server(("", 7000)) as server:
    print("up", flush=True)
    connection, _ = server.accept()
    total = 0
    while part := connection.recv(1 << 20):
        total += len(part)
    print(total, time.monotonic(), flush=True)
"""
SENDER = """
import socket, sys, time
connection = socket.create_connection(("host1", 7000))
print(time.monotonic())
connection.sendall(bytes(int(sys.argv[1])))
"""


@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_a_cable_is_not_faster_than_its_rate(delay_ms):
    nbytes, rate_mbit = 1_000_000, 20
    with HostNetwork(2, rate_mbit=rate_mbit, delay_ms=delay_ms) as network:
        receiver = network.popen(
            1, [sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True
        )
        with receiver:
            assert receiver.stdout.readline() == "up\n"
            began_s = float(network.run(0, sys.executable, "-c", SENDER, str(nbytes)))
            total, ended_s = receiver.stdout.readline().split()
    assert int(total) == nbytes
    least_s = (nbytes - network.burst_bytes) * 8 / (rate_mbit * 1e6) + delay_ms / 1e3
    assert float(ended_s) - began_s >= least_s


# What remains ------------------------------------------------------------------------------------

OWNER = """
import json, os, sys
from paceline.lab.network.hosts import HostNetwork
with HostNetwork(2, rate_mbit=100, delay_ms=float(sys.argv[1])) as network:
    for host in range(2):
        network.popen(host, ["sh", "-c", "echo up; exec sleep 1000"], stdout=sys.stdout)
    sys.stdin.readline()
    inits = [host.init for host in network._hosts.values()]
    spaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in [*inits, network._hub_pid]]
    print(json.dumps(spaces), os.getuid(), bool(network._user), flush=True)
    sys.stdin.read()
"""


def spaces_in_use():
    """The network namespaces of all processes."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


def start_owner(*before, delay_ms=0.0):
    line = [*before, sys.executable, "-c", OWNER, str(delay_ms)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    owner = subprocess.Popen(line, **pipes)
    assert [owner.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    owner.stdin.write("\n")
    owner.stdin.flush()
    spaces, _user, as_user = owner.stdout.readline().rsplit(maxsplit=2)
    return owner, set(json.loads(spaces)), as_user == "True"


@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_an_owner_that_is_killed_leaves_nothing(delay_ms):
    with ExitStack() as stack:
        owner, spaces, _ = start_owner(delay_ms=delay_ms)
        stack.enter_context(owner)
        assert len(spaces) == 3 and spaces <= spaces_in_use()
        owner.kill()
        wait_until(lambda: not spaces & spaces_in_use())


def test_an_end_leaves_nothing():
    before = spaces_in_use()
    with HostNetwork(2, delay_ms=5) as network:
        network.popen(0, ["sleep", "1000"])
        spaces = {os.readlink(f"/proc/{network._hosts[i].init}/ns/net") for i in (0, 1)}
        assert spaces <= spaces_in_use() - before
    assert not spaces & spaces_in_use()


def test_a_process_without_rights_makes_hosts_in_a_namespace_of_users():
    """Root gives up the rights that matter; without root, the other tests show it."""
    drop = ("setpriv", "--bounding-set", "-sys_admin,-net_admin,-net_raw")
    owner, spaces, as_user = start_owner(*(drop if os.getuid() == 0 else ()), delay_ms=20.0)
    with owner:
        assert as_user and len(spaces) == 3
        owner.stdin.close()
    assert owner.returncode == 0


# Refusals ----------------------------------------------------------------------------------------


def test_a_command_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match='need the command "ip": install iproute2'):
        HostNetwork(1).__enter__()


def test_a_kernel_that_refuses_is_told_of(monkeypatch, tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"need root, or a kernel .*: not permitted"):
        HostNetwork(1).__enter__()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"hosts": 0}, r"hosts \(0\) must be at least 1"),
        ({"hosts": 251}, r"hosts \(251\) must be at most 250"),
        ({"hosts": 1, "rate_mbit": 0}, r"rate_mbit \(0\) must be above 0"),
        ({"hosts": 1, "delay_ms": -1}, r"delay_ms \(-1\) must be at least 0"),
    ],
)
def test_bad_networks_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        HostNetwork(**options)
