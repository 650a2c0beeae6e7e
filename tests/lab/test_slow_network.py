"""Ranks in network namespaces, on links that are really slow; needs root."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from namespaces import SlowNetwork, enter, payload_rate, why_not
from slow_training import Job, joined, run_in, run_job, simulate_job

from paceline.errors import PacelineError, UsageError
from paceline.lab.tasks.fashion import make_model
from paceline.sim.cluster import Cluster, Link

_reason = why_not()
pytestmark = [
    pytest.mark.may_skip,
    pytest.mark.skipif(_reason is not None, reason=str(_reason)),
]

BITS_PER_S = 100e6
STEPS, WORKERS = 4, 4
MODEL_BYTES = 4 * sum(p.numel() for p in make_model("mlp").parameters())


def namespaces_in_use() -> set[str]:
    """The network namespaces of all processes."""
    collected = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            collected.add(os.readlink(link))
        except OSError:
            continue
    return collected


def send_all(network: SlowNetwork, nbytes: int) -> float:
    """Send from rank 0 to rank 1; return the seconds until the last byte arrived."""
    ready, took = threading.Event(), []

    def receive() -> None:
        enter(network.path(1))
        with socket.create_server((network.address(1), 7000)) as server:
            ready.set()
            with server.accept()[0] as connection:
                left = nbytes
                while left:
                    left -= len(connection.recv(1 << 16))
                took.append(time.monotonic())

    def send() -> None:
        enter(network.path(0))
        with socket.create_connection((network.address(1), 7000)) as connection:
            took.append(time.monotonic())
            connection.sendall(bytes(nbytes))

    threads = [threading.Thread(target=receive), threading.Thread(target=send)]
    threads[0].start()
    assert ready.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    return took[1] - took[0]


@pytest.mark.parametrize("bits_per_s", [20e6, 200e6])
def test_a_link_is_not_faster_than_its_rate(bits_per_s):
    nbytes = 1_000_000
    with SlowNetwork(2, bits_per_s) as network:
        seconds = send_all(network, nbytes)
        sent, received = network.bytes_sent(), network.bytes_received()
    assert seconds >= (nbytes - network.burst_bytes) * 8 / bits_per_s
    assert nbytes < sent[0] < 1.1 * nbytes  # headers, and nothing else
    assert nbytes < received[1] <= sent[0] + 1000
    assert sent[1] < 0.1 * nbytes


def test_namespaces_are_isolated_and_leave_nothing_behind():
    links, names = os.listdir("/sys/class/net"), sorted(Path("/run").glob("netns/*"))
    here = os.readlink("/proc/self/ns/net")
    with SlowNetwork(2, BITS_PER_S) as network:
        made = {f"net:[{os.stat(network.path(host)).st_ino}]" for host in range(2)}
        assert here not in made
        assert os.listdir("/sys/class/net") == links
        assert "default" not in network.run(0, "ip", "route")
        assert set(network.run(0, "tc", "qdisc").split()) >= {"eth0", "tbf"}
        path = network.path(0)
    assert not Path(path).exists()
    assert os.readlink("/proc/self/ns/net") == here
    assert os.listdir("/sys/class/net") == links
    assert sorted(Path("/run").glob("netns/*")) == names
    assert not made & namespaces_in_use()


_OWNER = """
import os, sys
from namespaces import SlowNetwork
with SlowNetwork(2, 100e6) as network:
    print(network.path(0), flush=True)
    sys.stdin.read()
"""


def test_a_killed_owner_leaves_no_link_behind():
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    namespace = os.open(owner.stdout.readline().strip(), os.O_RDONLY)
    try:
        assert "eth0" in interfaces_in(namespace)
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate()
        deadline_s = time.monotonic() + 60
        while "eth0" in interfaces_in(namespace) and time.monotonic() < deadline_s:
            pass
        assert interfaces_in(namespace) == {
            "lo"
        }  # the other end of its link is gone, with the bridge
    finally:
        os.close(namespace)


def interfaces_in(file: int) -> set[str]:
    """The network interfaces in the namespace of an open file."""
    collected: list[set[str]] = []

    def list_interfaces() -> None:
        enter(f"/proc/self/fd/{file}")
        collected.append({name for _, name in socket.if_nameindex()})

    thread = threading.Thread(target=list_interfaces)
    thread.start()
    thread.join()
    return collected[0]


def test_an_impossible_network_is_refused():
    with pytest.raises(UsageError, match=r"bits_per_s \(0\) must be above 0"):
        SlowNetwork(2, 0)
    with pytest.raises(UsageError, match=r"size \(0\) must be at least 1"):
        SlowNetwork(0, 1e6)
    with SlowNetwork(1, 1e6) as network, pytest.raises(PacelineError, match="ip link show nobody"):
        network.run(0, "ip", "link", "show", "nobody")


@pytest.mark.transport("distributed")
@pytest.mark.parametrize("way", ["allreduce", "downpour"])
def test_a_method_trains_over_slow_links(way, record_property):
    job = Job(way=way, workers=WORKERS, steps=STEPS, evaluates=False)
    with SlowNetwork(job.ranks, BITS_PER_S) as network:
        measured = run_job(network, job)
    assert measured.steps == WORKERS * STEPS
    bytes_per_s = payload_rate(BITS_PER_S)
    ideal = simulate_job(Cluster(network=Link(bytes_per_s=bytes_per_s)), job)
    assert measured.bytes_sent == ideal.bytes_sent
    # Not metered: the consensus distance at the end, and the server's final model.
    unmetered = 2 * (WORKERS - 1) + (WORKERS if way == "downpour" else 0)
    payload = ideal.wire_bytes + unmetered * MODEL_BYTES
    assert payload < measured.wire_bytes < 1.15 * payload  # headers, and messages of a few bytes
    # An all-reduce sends 2 (p - 1) / p of a model each way; a push and its reply, two in sequence.
    least = {"allreduce": 2 * (WORKERS - 1) / WORKERS, "downpour": 2}[way] * STEPS * MODEL_BYTES
    bursts = {"allreduce": 1, "downpour": 2 * STEPS}[way] * network.burst_bytes
    assert measured.seconds >= (least - bursts) / bytes_per_s
    prediction = f"{ideal.seconds:.3f} s by the rate alone, measured {measured.seconds:.3f} s"
    record_property("prediction", prediction)
    print(f"{way}: {prediction}")


def post_vectors(transport, channel, argument):
    """Rank 0 posts a vector, and another before it finishes; rank 1 polls for one, waits for one.

    Returns the addresses at which the rank listens; on rank 1 also whether the first poll returned
    nothing, and whether both vectors arrived.
    """
    x, small = torch.arange(1 << 18, dtype=torch.float32), torch.zeros(1)
    with joined(transport, argument, "allreduce") as worker:
        comm, listening = worker.comm, addresses_listened_at()
        if comm.rank == 0:
            comm.board.post(x, 1, tag=5)
            comm.send(small, 1, tag=6)
            comm.receive(small, 1, tag=6)
            comm.board.post(x, 1, tag=7)
            return [listening]
        comm.receive(small, 0, tag=6)  # the first vector has been announced by now
        first = polled = comm.board.poll(x, tag=5)
        while not polled:
            polled = comm.board.poll(x, tag=5)
        comm.send(small, 0, tag=6)
        both = [polled[0][1], comm.receive(x, 0, tag=7).x]
        return [listening, not first, [bool((got == x).all()) for got in both]]


def addresses_listened_at() -> list[str]:
    """The addresses at which any process of this namespace listens."""
    lines = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
    lines += Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]
    collected = [line.split()[1].partition(":")[0] for line in lines if line.split()[3] == "0A"]
    return [
        socket.inet_ntoa(struct.pack("=I", int(a, 16))) if len(a) == 8 else a for a in collected
    ]


@pytest.fixture(scope="module")
def posted_vectors():
    with SlowNetwork(2, 20e6) as network:
        yield network, run_in(network, 2, post_vectors, {})


@pytest.mark.transport("distributed")
def test_ranks_listen_at_the_address_of_their_own_namespace_only(posted_vectors):
    network, reports = posted_vectors
    for rank, (listening, *_) in enumerate(reports):
        assert listening and set(listening) == {network.address(rank)}


@pytest.mark.transport("distributed")
def test_a_poll_does_not_wait_for_a_message_in_flight(posted_vectors):
    _, (_, (_, first_was_empty, (arrived, _))) = posted_vectors
    assert first_was_empty and arrived  # a million bytes take longer than their announcement


@pytest.mark.transport("distributed")
def test_a_post_of_a_finished_rank_arrives_however_long_it_takes(posted_vectors):
    _, (_, (_, _, (_, arrived))) = posted_vectors
    assert arrived
