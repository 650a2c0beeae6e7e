"""What a rank's own core does for messages takes virtual time, and a share of the cores."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.comm import Comm
from paceline.comm.limits import Limits
from paceline.sim.cluster import Cluster, Handling, Link
from paceline.sim.world import World

NBYTES = 4000


def work(seconds, call_s=0.0):
    return Link(latency_s=call_s, bytes_per_s=NBYTES / seconds)


HANDLING = Handling(
    post=work(1.0), take=work(2.0, 0.5), publish=work(4.0), peek=work(8.0), reduce=work(16.0)
)


def run(body, size=2, **cluster):
    """The virtual time at which each rank was done."""
    place = Cluster(**{"handling": HANDLING, **cluster})
    world = World(place, size, seed=0, limits=Limits(), faults=[])
    ends = {}

    def on_rank(transport):
        comm = Comm(transport)
        body(comm, torch.zeros(NBYTES // 4))
        ends[comm.rank] = comm.clock.now()

    world.run(on_rank)
    return [ends[rank] for rank in sorted(ends)]


def send(comm, x):
    if comm.rank == 0:
        comm.board.post(x, 1)
    else:
        comm.receive(x, 0)


def rendezvous(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.receive(x, 0)


def look(comm, x):
    comm.board.publish(x)
    comm.barrier()
    if comm.rank == 0:
        comm.board.peek(1)
    comm.barrier()  # stay to be looked at


def reduce(comm, x):
    comm.all_reduce(x)


def ask_a_server(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.clock.mark_as_server()
        comm.receive(x, 0)


def measure_only(comm, x):
    comm.group(metered=False).all_reduce(x)
    comm.group(metered=False).board.peek(1 - comm.rank)


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        (send, [1.0, 3.5]),
        (rendezvous, [1.0, 3.5]),
        (look, [12.0, 12.0]),
        (reduce, [16.0, 16.0]),
        (ask_a_server, [1.0, 1.0]),
        (measure_only, [0.0, 0.0]),
    ],
)
def test_each_operation_costs_its_work(body, ends):
    assert run(body) == pytest.approx(ends)
    assert run(body, handling=Handling()) == [0.0, 0.0]


def test_work_comes_on_top_of_the_way():
    assert run(send, network=Link(latency_s=10.0)) == pytest.approx([1.0, 13.5])


def test_ranks_share_the_cores_for_it():
    assert run(reduce, size=4, ranks_per_node=0, cores=4) == pytest.approx([16.0] * 4)
    assert run(reduce, size=4, ranks_per_node=0, cores=2) == pytest.approx([32.0] * 4)
    assert run(send, ranks_per_node=0, cores=1) == pytest.approx([1.0, 3.5]), "one at a time"
