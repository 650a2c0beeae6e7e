"""Programs for ranks: each runs on every transport, in real processes if it has them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from paceline.comm.base import Comm
from paceline.common.faults import freeze, kill
from paceline.errors import CommTimeout, MessageMismatch, PeerLost, PeersGone


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def pause(comm: Comm) -> None:
    """Let the other ranks run for a moment, in virtual and in real time."""
    comm.compute(0.001)
    time.sleep(0.001)


def die(transport: Any, how: str) -> None:
    """Kill or freeze this rank, as a fault would."""
    if hasattr(transport, "world"):
        fault = (kill if how == "kill" else freeze)(rank=transport.rank)
        transport.world.inject(fault)
        transport.step_begins(-1)
    else:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def who_is_here(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    alive = comm.alive()
    comm.barrier()
    return [comm.rank, comm.size, list(alive)]


def send_and_receive(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]
    received = []
    for dtype in dtypes:
        x = torch.arange(7).to(dtype).view(7, 1)
        if comm.rank == 0:
            comm.send(x, 1, tag=5)
        elif comm.rank == 1:
            y = comm.recv(x, 0, tag=5)
            received.append(bool((y == x).all()) and y.shape == x.shape and y.dtype == dtype)
    comm.barrier()
    return received


def order_and_tags(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 0 posts twice with tag 1, then sends with tag 2; rank 1 receives tag 2 first."""
    comm = Comm(transport)
    if comm.rank == 0:
        comm.post(vector(1), 1, tag=1)
        comm.post(vector(2), 1, tag=1)
        comm.send(vector(3), 1, tag=2)
        return None
    third = comm.recv(vector(0), 0, tag=2)
    first, second = comm.recv(vector(0), 0, tag=1), comm.recv(vector(0), 0, tag=1)
    return [third.item(), first.item(), second.item()]


def send_waits(transport: Any, channel: Any, argument: Any) -> Any:
    """A send is done when its message was received, not before."""
    comm = Comm(transport)
    if comm.rank == 0:
        sending = transport.start_send(vector(1), 1, 0)
        before = sending.done()
        comm.post(vector(0), 1, tag=9)  # only now may rank 1 receive it
        sending.wait()
        return [before, sending.done()]
    comm.recv(vector(0), 0, tag=9)
    return comm.recv(vector(0), 0).item()


def receive_from_all(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    if comm.rank:
        for number in range(3):
            comm.send(vector(comm.rank, number), 0)
        return None
    received = [comm.recv_any(vector(0, 0)) for _ in range(3 * (comm.size - 1))]
    return [[src, x.tolist()] for src, x in received]


def ring(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    x = vector(comm.rank)
    for _ in range(comm.size - 1):
        x = comm.exchange(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
    return x.item()


def post_and_poll(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    if comm.rank == 0:
        x = vector(1)
        posted = []
        for number in range(4):
            posted.append(comm.post(x.fill_(number), 1))
        x.fill_(99)
        comm.send(vector(0), 1, tag=1)
        comm.recv(vector(0), 1, tag=2)  # the mailbox is empty again
        posted.append(comm.post(x.fill_(7), 1))
        return posted
    empty = comm.poll(vector(0), tag=3)
    comm.recv(vector(0), 0, tag=1)
    polled = comm.poll(vector(0))
    while len(polled) < 2:
        pause(comm)
        polled += comm.poll(vector(0))
    comm.send(vector(0), 0, tag=2)
    last = comm.recv(vector(0), 0)
    return [empty, [[src, x.item()] for src, x in polled], last.item()]


def publish_and_peek(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 0 publishes constant vectors as fast as it can; the others read them."""
    comm = Comm(transport)
    numel, count = argument["numel"], argument["count"]
    if comm.rank == 0:
        comm.barrier()
        versions = [comm.publish(torch.full((numel,), float(n))) for n in range(1, count + 1)]
        comm.barrier()
        return versions == list(range(1, count + 1))
    unpublished = comm.peek(0)
    comm.barrier()
    last, torn, backwards, wrong, reads = 0, 0, 0, 0, 0
    while last < count:
        read = comm.peek(0, torch.empty(numel))
        if read is None:
            pause(comm)
            continue
        version, x = read
        torn += int((x != x[0]).any())
        wrong += int(x[0].item() != version)
        backwards += version < last
        last, reads = version, reads + 1
    comm.barrier()
    return [unpublished, torn, wrong, backwards, reads > 0]


def shelve_and_look(transport: Any, channel: Any, argument: Any) -> Any:
    """Each rank fills its shelves, one of them twice, beside its window; all look at the others."""
    comm = Comm(transport)
    before = [comm.shelved(peer, 0) for peer in range(comm.size) if peer != comm.rank]
    comm.barrier()
    for number in range(2):
        comm.shelve(vector(10 * comm.rank + number), 0)
    comm.shelve(torch.full((3,), comm.rank, dtype=torch.uint8), 1)
    comm.publish(vector(-1))
    comm.barrier()
    seen = []
    for peer in range(comm.size):
        if peer != comm.rank:
            one, other = comm.shelved(peer, 0), comm.shelved(peer, 1)
            assert one is not None and other is not None
            seen.append([one.item(), other.tolist()])
    comm.barrier()
    return [before, seen]


def reduce_all(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    x = torch.full((argument["numel"],), float(comm.rank + 1))
    count = comm.all_reduce(x)
    same = bool((x == x[0]).all()) if x.numel() else True
    return [count, x[0].item() if x.numel() else None, same]


def reduce_weighted(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    some = vector(comm.rank, 1)
    total = comm.all_reduce(some, weight=2 * comm.rank)  # rank 0 contributes nothing
    none = vector(comm.rank)
    nobody = comm.all_reduce(none, weight=0)
    return [total, some.tolist(), nobody, none.item()]


def reduce_in_rank_order(transport: Any, channel: Any, argument: Any) -> Any:
    """Reduce numbers whose sum depends on the order of addition."""
    comm = Comm(transport)
    generator = torch.Generator().manual_seed(comm.rank)
    own = torch.randn(argument["numel"], generator=generator) * 10.0 ** (comm.rank * 3)
    total = own.clone()
    comm.all_reduce(total)
    expected = None
    for rank in range(comm.size):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(argument["numel"], generator=generator) * 10.0 ** (rank * 3)
        expected = x if expected is None else expected + x
    return bool(torch.equal(total, expected))


def reduce_started(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    vectors = [torch.full((1000,), float(comm.rank + k)) for k in range(4)]
    works = [comm.start_all_reduce(x) for x in vectors]
    totals = [work.wait() for work in works]
    done = all(work.done() for work in works)
    once_more = vector(1)
    work = comm.start_all_reduce(once_more)
    while not work.done():
        pause(comm)
    return [totals, [x[0].item() for x in vectors], done, work.wait(), once_more.item()]


def broadcast_all(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    received = []
    for src in range(comm.size):
        x = torch.full((3, 2), float(comm.rank), dtype=torch.float64)
        comm.broadcast(x, src)
        received.append(bool((x == src).all()))
    return received


def groups(transport: Any, channel: Any, argument: Any) -> Any:
    """Even and odd ranks reduce separately at the same time; then all ranks together."""
    comm = Comm(transport)
    group = comm.group([rank for rank in range(comm.size) if rank % 2 == comm.rank % 2])
    x, alive = vector(comm.rank), list(group.alive())
    count = group.all_reduce(x)
    neighbor = (group.rank + 1) % group.size
    y = group.exchange(vector(comm.rank), neighbor, (group.rank - 1) % group.size)
    z = vector(1)
    comm.all_reduce(z)
    return [group.rank, group.size, alive, count, x.item(), y.item(), z.item()]


def mismatched_messages(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    if comm.rank == 0:
        comm.post(torch.zeros(3), 1)
        comm.post(torch.zeros(2, dtype=torch.float64), 1)
        comm.recv(vector(0), 1, tag=1)
        return None
    errors = []
    for _ in range(2):
        try:
            comm.recv(torch.zeros(2), 0)
        except MessageMismatch as error:
            errors.append(str(error))
    comm.send(vector(0), 0, tag=1)
    return errors


def mismatched_collective(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    try:
        comm.all_reduce(torch.zeros(2 + comm.rank))
    except MessageMismatch as error:
        channel.send({"kind": "refused", "why": str(error)})
        raise


def retire_one_by_one(transport: Any, channel: Any, argument: Any) -> Any:
    """All ranks see that a worker has retired; it is still a member."""
    comm = Comm(transport)
    before = sorted(comm.retired())
    comm.barrier()
    if comm.rank == 1:
        transport.retire()
    while 1 not in comm.retired():
        pause(comm)
    seen = [before, sorted(comm.retired()), sorted(comm.alive())]
    comm.barrier()
    return seen


def tickets(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    comm.barrier()
    drawn = [comm.ticket(0, 0) for _ in range(20)]
    comm.barrier()
    next_epoch = comm.ticket(0, 1)
    other_queue = comm.ticket(1, 0)
    comm.barrier()
    return [drawn, next_epoch, other_queue]


def server_and_leavers(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 0 serves until every other rank has left; their messages are not lost."""
    comm = Comm(transport)
    if comm.rank:
        comm.post(vector(comm.rank), 0)
        return None
    received = []
    try:
        while True:
            received.append(comm.recv_any(vector(0))[1].item())
    except PeersGone:
        pass
    posted = comm.post(vector(0), 1)
    window = comm.peek(1)
    try:
        comm.recv(vector(0), 1)
    except PeerLost as lost:
        return [sorted(received), posted, window, list(comm.alive()), list(lost.ranks), lost.reason]
    return None


def messages_and_losses(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 1 leaves, rank 2 dies or leaves, rank 3 stays until rank 0 says so; each posts first."""
    comm = Comm(transport)
    comm.barrier()
    if comm.rank == 3:
        comm.recv(vector(0), 0, tag=1)
    if comm.rank:
        comm.post(vector(comm.rank), 0)
        if comm.rank == 2 and argument["how"]:
            die(transport, argument["how"])
        return None
    heard: list[list[float | None]] = []
    try:
        while True:
            src, x = comm.recv_or_loss(vector(0))
            heard.append([src, None if x is None else x.item()])
            if [1, None] in heard and [2, None] in heard and comm.post(vector(0), 3, tag=1):
                channel.send({"kind": "heard", "heard": heard})
    except PeersGone:
        return heard


def time_passes(transport: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(transport)
    before = comm.now()
    comm.compute(0.5)
    return comm.now() - before


def lose_one(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 2 dies or freezes while the others wait for it in an operation."""
    comm = Comm(transport)
    comm.barrier()
    if comm.rank == 2:
        die(transport, argument["how"])
    try:
        if argument["op"] == "all_reduce":
            comm.all_reduce(vector(1))
        elif argument["op"] == "recv":
            comm.recv(vector(1), 2)
        elif argument["op"] == "send":
            comm.send(vector(1), 2)
        elif argument["op"] == "broadcast":
            comm.broadcast(vector(1), 2)
    except PeerLost as lost:
        alive = list(comm.alive())
        message = {"kind": "lost", "ranks": list(lost.ranks), "op": lost.op, "reason": lost.reason}
        channel.send({**message, "alive": alive})
        raise


def arrive_then_die(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 2 starts an all-reduce and dies: all ranks that get a sum get the same sum."""
    comm = Comm(transport)
    comm.barrier()
    x = vector(comm.rank + 1)
    work = comm.start_all_reduce(x)
    if comm.rank == 2:
        die(transport, "kill")
    try:
        count = work.wait()
        channel.send({"kind": "sum", "count": count, "x": x.item()})
        comm.all_reduce(x)
    except PeerLost as lost:
        channel.send({"kind": "lost", "ranks": list(lost.ranks)})
        raise


def wait_too_long(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 1 is alive and never sends; rank 0 times out, then lets it finish."""
    comm = Comm(transport)
    if comm.rank == 1:
        while not comm.poll(vector(0), tag=1):
            pause(comm)
        return None
    try:
        comm.recv(vector(0), 1)
    except CommTimeout as timeout:
        comm.post(vector(0), 1, tag=1)
        return [list(timeout.ranks), timeout.op, timeout.waited_s]
    return None


def be_busy(transport: Any, channel: Any, argument: Any) -> Any:
    """Rank 1 computes for three times ``dead_s`` without ever yielding the interpreter."""
    comm = Comm(transport)
    comm.barrier()
    if comm.rank == 1:
        comm.compute(argument["seconds"])
        end_s = time.monotonic() + (0 if hasattr(transport, "world") else argument["seconds"])
        while time.monotonic() < end_s:
            sum(range(1_000_000))
    x = vector(1)
    return [comm.all_reduce(x), x.item()]
