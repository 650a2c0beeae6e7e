"""Training over links that are really slow, between hosts made of namespaces."""

from __future__ import annotations

import socket
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from slow_training import DDP, OTHERS, Job, joined, run_job, run_on, simulate_job
from support.namespaces import need_hosts

from paceline.errors import PacelineError
from paceline.lab.network.hosts import HostNetwork, payload_rate
from paceline.lab.tasks.fashion import make_model
from paceline.sim.cluster import Cluster, Link

pytestmark = [pytest.mark.may_skip]
RATE_MBIT = 100
STEPS, WORKERS = 4, 4
MODEL_BYTES = 4 * sum(p.numel() for p in make_model("mlp").parameters())


@pytest.fixture(autouse=True)
def hosts_can_be_made():
    need_hosts()


@pytest.mark.transport("hosts")
@pytest.mark.parametrize("way", ["allreduce", "downpour"])
def test_a_method_trains_over_slow_links(way):
    job = Job(way=way, workers=WORKERS, steps=STEPS, evaluates=False)
    with HostNetwork(WORKERS, rate_mbit=RATE_MBIT) as network:
        measured = run_job(network, job)
        burst_bytes = network.burst_bytes
    assert measured.steps == WORKERS * STEPS
    bytes_per_s = payload_rate(RATE_MBIT)
    ideal = simulate_job(Cluster(network=Link(bytes_per_s=bytes_per_s)), job)
    assert measured.bytes_sent == ideal.bytes_sent
    # Not metered: the consensus distance at the end, and the server's final model, which worker 0
    # has on its own host.
    beside = 3 / 4 if way == "downpour" else 1
    unmetered = 2 * (WORKERS - 1) + (WORKERS - 1 if way == "downpour" else 0)
    # Each version of the server's model is copied to its holder, on another host.
    copied = WORKERS * STEPS if way == "downpour" else 0
    payload = beside * ideal.wire_bytes + (unmetered + copied) * MODEL_BYTES
    assert payload < measured.wire_bytes < 1.25 * payload  # headers, and messages of a few bytes
    # An all-reduce sends 2 (p - 1) / p of a model each way; a push and its reply, two in sequence.
    least = {"allreduce": 2 * (WORKERS - 1) / WORKERS, "downpour": 2}[way] * STEPS * MODEL_BYTES
    bursts = {"allreduce": 1, "downpour": 2 * STEPS}[way] * burst_bytes
    assert measured.seconds >= (least - bursts) / bytes_per_s


@pytest.mark.parametrize("way", OTHERS)
def test_what_paceline_is_compared_with_trains_in_the_same_loop(way):
    if find_spec(OTHERS[way]) is None:
        pytest.skip(f"not tried: no module {OTHERS[way]}")
    job = Job(way=way, workers=2, steps=20)
    with HostNetwork(2, rate_mbit=RATE_MBIT) as network:
        outcome = run_job(network, job)
    assert outcome.steps == 2 * 20
    assert outcome.wire_bytes > MODEL_BYTES
    first, last = outcome.evaluations
    assert 0 < first.seconds < last.seconds and last.loss < 2.0


def test_communicators_are_on_the_hosts_of_their_groups():
    beside = Job(way="layered(group_size=1)", workers=4).host_of_ranks
    assert beside == [0, 1, 2, 3, 0, 1, 2, 3]
    assert Job(way="layered(group_size=2)", workers=4, hosts=2).host_of_ranks == [0, 0, 1, 1, 0, 1]
    assert Job(way=DDP, workers=4).host_of_ranks == [0, 1, 2, 3]


def fail_on_rank_1(argument):
    """The other rank would wait for this one for a long time."""
    with joined("hosts", "allreduce") as worker:
        if worker.rank == 1:
            raise ValueError("on purpose")
        worker.comm.barrier()


def test_a_rank_that_fails_ends_the_run(capfd):
    with (
        HostNetwork(2) as network,
        pytest.raises(PacelineError, match=r"a rank of {} failed: exit codes \[.*\]"),
    ):
        run_on(network, [0, 1], fail_on_rank_1, {})
    assert "on purpose" in capfd.readouterr().err


# Over gloo ---------------------------------------------------------------------------------------


def post_vectors(argument):
    """Rank 0 posts a vector, and another before it finishes; rank 1 polls for one, waits for one.

    Returns the addresses at which the rank listens; on rank 1 also whether the first poll returned
    nothing, and whether both vectors arrived.
    """
    x, small = torch.arange(1 << 18, dtype=torch.float32), torch.zeros(1)
    with joined("distributed", "allreduce") as worker:
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
    """The addresses at which any process of this host listens."""
    lines = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
    lines += Path("/proc/thread-self/net/tcp6").read_text().splitlines()[1:]
    collected = [line.split()[1].partition(":")[0] for line in lines if line.split()[3] == "0A"]
    return [
        socket.inet_ntoa(struct.pack("=I", int(a, 16))) if len(a) == 8 else a for a in collected
    ]


@pytest.fixture(scope="module")
def posted_vectors():
    need_hosts()
    with HostNetwork(2, rate_mbit=20) as network:
        yield run_on(network, [0, 1], post_vectors, {})


@pytest.mark.transport("distributed")
def test_ranks_listen_at_the_address_of_their_own_host_only(posted_vectors):
    for rank, (listening, *_) in enumerate(posted_vectors):
        assert listening and set(listening) == {HostNetwork.address(rank)}


@pytest.mark.transport("distributed")
def test_a_poll_does_not_wait_for_a_message_in_flight(posted_vectors):
    _, (_, first_was_empty, (arrived, _)) = posted_vectors
    assert first_was_empty and arrived  # a million bytes take longer than their announcement


@pytest.mark.transport("distributed")
def test_a_post_of_a_finished_rank_arrives_however_long_it_takes(posted_vectors):
    _, (_, _, (_, arrived)) = posted_vectors
    assert arrived
