"""Programs for ranks: each is run in every world, in real processes where there are any."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from paceline.comm.comm import Comm
from paceline.comm.ports import SHELF, Lost
from paceline.common.faults import freeze, kill
from paceline.common.reference import find
from paceline.errors import CommTimeout, MessageMismatch, PeerLost, PeersGone

KEPT = os.environ.get("PACELINE_TEST_DEVICE", "host")
"""The device whose memory a keeper holds."""


def run_on_device(ports: Any, channel: Any, argument: Any) -> Any:
    """Run a program whose tensors are made on the device of the test."""
    program = find(argument.pop("program"))
    if KEPT != "host":
        torch.set_default_device(KEPT)
        Comm(ports).all_reduce(torch.ones(2))  # the first use of a GPU takes seconds
    return program(ports, channel, argument)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def pause(comm: Comm) -> None:
    """Let the others go on for a moment, on the clock of this world."""
    comm.clock.charge(0.001)
    time.sleep(0.001)


def die(ports: Any, how: str) -> None:
    """Kill or freeze this rank, as a fault would."""
    if hasattr(ports, "world"):
        fault = (kill if how == "kill" else freeze)(rank=ports.rank)
        ports.world.inject(fault)
        ports.clock.begin_step(-1)
    else:
        if hasattr(ports, "link"):  # what it sent last may still be on its way
            ports.link.flush()
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def who_is_here(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    alive = comm.members.alive()
    comm.barrier()
    return [comm.rank, comm.size, list(alive)]


def send_and_receive(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64]
    got = []
    for dtype in dtypes:
        x = torch.arange(7).to(dtype).view(7, 1)
        if comm.rank == 0:
            comm.send(x, 1, tag=5)
        elif comm.rank == 1:
            y = comm.receive(x, 0, tag=5).x
            got.append(bool((y == x).all()) and y.shape == x.shape and y.dtype == dtype)
    comm.barrier()
    return got


def order_and_tags(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 0 posts twice with tag 1, then sends with tag 2; rank 1 receives tag 2 first."""
    comm = Comm(ports)
    if comm.rank == 0:
        comm.board.post(vector(1), 1, tag=1)
        comm.board.post(vector(2), 1, tag=1)
        comm.send(vector(3), 1, tag=2)
        return None
    third = comm.receive(vector(0), 0, tag=2).x
    first, second = comm.receive(vector(0), 0, tag=1).x, comm.receive(vector(0), 0, tag=1).x
    return [third.item(), first.item(), second.item()]


def send_waits(ports: Any, channel: Any, argument: Any) -> Any:
    """A send returns when its message was taken, not before: rank 1 notes when it took it."""
    comm = Comm(ports)
    if comm.rank == 0:
        sending = ports.mail.start_send(vector(1), 1, 0, b"")
        comm.board.post(vector(0), 1, tag=9)  # only now may rank 1 take it
        sending.wait()
        return comm.clock.now()
    comm.receive(vector(0), 0, tag=9)
    pause(comm)
    before_s = comm.clock.now()
    comm.receive(vector(0), 0)
    return before_s


def receive_from_all(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    if comm.rank:
        for number in range(3):
            comm.send(vector(comm.rank, number), 0)
        return None
    got = []
    while len(got) < 3 * (comm.size - 1):
        message = comm.receive_any(vector(0, 0))
        if not isinstance(message, Lost):
            got.append([message.src, message.x.tolist()])
    return got


def headers(ports: Any, channel: Any, argument: Any) -> Any:
    """A header travels beside its vector, also beside an empty one, and in a window."""
    comm = Comm(ports)
    x, empty = vector(1, 2, 3), vector()
    if comm.rank == 0:
        comm.board.publish(x, header=b"window")
        comm.board.post(x, 1, header=b"posted!")
        comm.board.post(empty, 1, tag=1, header=b"no vector")
        comm.send(x, 1, tag=2, header=b"sent")
        comm.barrier()
        return None
    got = [comm.receive(x, 0), comm.receive(empty, 0, tag=1), comm.receive(x, 0, tag=2)]
    seen = comm.board.peek(0, x)
    comm.barrier()
    return [[m.header.decode(), m.x.tolist()] for m in (*got, seen)]


def ring(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    x = vector(comm.rank)
    for _ in range(comm.size - 1):
        x = comm.exchange(x, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
    return x.item()


def post_and_poll(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    if comm.rank == 0:
        x = vector(1)
        posted = []
        for number in range(4):
            posted.append(comm.board.post(x.fill_(number), 1))
        x.fill_(99)
        comm.send(vector(0), 1, tag=1)
        comm.receive(vector(0), 1, tag=2)  # the mailbox is empty again
        posted.append(comm.board.post(x.fill_(7), 1))
        return posted
    empty = comm.board.poll(vector(0), tag=3)
    comm.receive(vector(0), 0, tag=1)
    taken = comm.board.poll(vector(0))
    while len(taken) < 2:
        pause(comm)
        taken += comm.board.poll(vector(0))
    comm.send(vector(0), 0, tag=2)
    last = comm.receive(vector(0), 0).x
    return [empty, [[m.src, m.x.item()] for m in taken], last.item()]


def publish_and_peek(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 0 publishes constant vectors as fast as it can; the others read them."""
    comm = Comm(ports)
    numel, count = argument["numel"], argument["count"]
    if comm.rank == 0:
        comm.barrier()
        versions = [comm.board.publish(torch.full((numel,), float(n))) for n in range(1, count + 1)]
        comm.barrier()
        return versions == list(range(1, count + 1))
    unpublished = comm.board.peek(0)
    comm.barrier()
    last, torn, backwards, wrong, reads = 0, 0, 0, 0, 0
    while last < count:
        seen = comm.board.peek(0, torch.empty(numel))
        if seen is None:
            pause(comm)
            continue
        version, x, _ = seen
        torn += int((x != x[0]).any())
        wrong += int(x[0].item() != version)
        backwards += version < last
        last, reads = version, reads + 1
    comm.barrier()
    return [unpublished, torn, wrong, backwards, reads > 0]


def shelve_and_look(ports: Any, channel: Any, argument: Any) -> Any:
    """Each rank fills its shelves, one of them twice, beside its window; all look at the others."""
    comm = Comm(ports)
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    before = [comm.board.peek(peer, window=SHELF, gone=True) for peer in others]
    comm.barrier()
    for number in range(2):
        comm.board.publish(vector(10 * comm.rank + number), window=SHELF)
    comm.board.publish(torch.full((3,), comm.rank, dtype=torch.uint8), window=SHELF + 1)
    comm.board.publish(vector(-1))
    comm.barrier()
    shelves = (SHELF, SHELF + 1)
    seen = [
        [comm.board.peek(peer, window=shelf, gone=True).x.tolist() for shelf in shelves]
        for peer in others
    ]
    comm.barrier()
    return [before, seen]


def reduce_all(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    x = torch.full((argument["numel"],), float(comm.rank + 1))
    count = comm.all_reduce(x).weight
    same = bool((x == x[0]).all()) if x.numel() else True
    return [count, x[0].item() if x.numel() else None, same]


def reduce_weighted(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    some = vector(comm.rank, 1)
    total = comm.all_reduce(some, weight=2 * comm.rank).weight  # rank 0 contributes nothing
    none = vector(comm.rank)
    nobody = comm.all_reduce(none, weight=0).weight
    return [total, some.tolist(), nobody, none.item()]


def reduce_flags(ports: Any, channel: Any, argument: Any) -> Any:
    """Flags of all ranks are or-ed, also of those whose weight is 0; the weights stay apart."""
    comm = Comm(ports)
    raised = comm.all_reduce(vector(1), weight=comm.rank, flags=1 << comm.rank)
    nobody = comm.all_reduce(vector(1))
    return [list(raised), list(nobody)]


def reduce_in_rank_order(ports: Any, channel: Any, argument: Any) -> Any:
    """Reduce numbers whose sum depends on the order of addition."""
    comm = Comm(ports)
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


def broadcast_all(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    got = []
    for src in range(comm.size):
        x = torch.full((3, 2), float(comm.rank), dtype=torch.float64)
        comm.broadcast(x, src)
        got.append(bool((x == src).all()))
    return got


def groups(ports: Any, channel: Any, argument: Any) -> Any:
    """Even and odd ranks reduce separately at the same time; then all ranks together."""
    comm = Comm(ports)
    group = comm.group([rank for rank in range(comm.size) if rank % 2 == comm.rank % 2])
    x, alive = vector(comm.rank), list(group.members.alive())
    count = group.all_reduce(x).weight
    neighbor = (group.rank + 1) % group.size
    y = group.exchange(vector(comm.rank), neighbor, (group.rank - 1) % group.size)
    z = vector(1)
    comm.all_reduce(z)
    return [group.rank, group.size, alive, count, x.item(), y.item(), z.item()]


def mismatched_messages(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    if comm.rank == 0:
        comm.board.post(torch.zeros(3), 1)
        comm.board.post(torch.zeros(2, dtype=torch.float64), 1)
        comm.receive(vector(0), 1, tag=1)
        return None
    errors = []
    for _ in range(2):
        try:
            comm.receive(torch.zeros(2), 0)
        except MessageMismatch as error:
            errors.append(str(error))
    comm.send(vector(0), 0, tag=1)
    return errors


def mismatched_collective(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    try:
        comm.all_reduce(torch.zeros(2 + comm.rank))
    except MessageMismatch as error:
        channel.send({"kind": "refused", "why": str(error)})
        raise


def retire_one_by_one(ports: Any, channel: Any, argument: Any) -> Any:
    """All ranks see that a worker has come to the end of its data; it is still a member."""
    comm = Comm(ports)
    before = sorted(comm.members.finished())
    comm.barrier()
    if comm.rank == 1:
        ports.queue.mark_finished()
    while 1 not in comm.members.finished():
        pause(comm)
    seen = [before, sorted(comm.members.finished()), sorted(comm.members.alive())]
    comm.barrier()
    return seen


def tickets(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    comm.barrier()
    drawn = [comm.ports.queue.draw(0, 0) for _ in range(20)]
    comm.barrier()
    next_epoch = comm.ports.queue.draw(0, 1)
    other_queue = comm.ports.queue.draw(1, 0)
    comm.barrier()
    return [drawn, next_epoch, other_queue]


def server_and_leavers(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 0 serves until every other rank has left; their messages are not lost."""
    comm = Comm(ports)
    if comm.rank:
        comm.board.post(vector(comm.rank), 0)
        return None
    got = []
    try:
        while True:
            message = comm.receive_any(vector(0))
            if not isinstance(message, Lost):
                got.append(message.x.item())
    except PeersGone:
        pass
    silent = comm.board.post(vector(0), 1)
    unseen = comm.board.peek(1)
    try:
        _ = comm.receive(vector(0), 1).x
    except PeerLost as lost:
        alive = list(comm.members.alive())
        return [sorted(got), silent, unseen, alive, list(lost.ranks), lost.reason]
    return None


def messages_and_losses(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 1 leaves, rank 2 dies or leaves, rank 3 stays until told; each posts before it goes."""
    comm = Comm(ports)
    comm.barrier()
    if comm.rank == 3:
        comm.receive(vector(0), 0, tag=1)
    if comm.rank:
        comm.board.post(vector(comm.rank), 0)
        if comm.rank == 2 and argument["how"]:
            die(ports, argument["how"])
        return None
    heard: list[list[float | None]] = []
    try:
        while True:
            got = comm.receive_any(vector(0))
            heard.append([got.src, None if isinstance(got, Lost) else got.x.item()])
            if [1, None] in heard and [2, None] in heard and comm.board.post(vector(0), 3, tag=1):
                channel.send({"kind": "heard", "heard": heard})
    except PeersGone:
        return heard


def time_passes(ports: Any, channel: Any, argument: Any) -> Any:
    comm = Comm(ports)
    before = comm.clock.now()
    comm.clock.charge(60.0)
    return comm.clock.now() - before


def lose_one(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 2 dies or freezes; the others wait for it in one operation or another."""
    comm = Comm(ports)
    comm.barrier()
    if comm.rank == 2:
        die(ports, argument["how"])
    try:
        if argument["op"] == "all_reduce":
            comm.all_reduce(vector(1))
        elif argument["op"] == "receive":
            _ = comm.receive(vector(1), 2).x
        elif argument["op"] == "send":
            comm.send(vector(1), 2)
        elif argument["op"] == "broadcast":
            comm.broadcast(vector(1), 2)
    except PeerLost as lost:
        alive = list(comm.members.alive())
        told = {"kind": "lost", "ranks": list(lost.ranks), "op": lost.op, "reason": lost.reason}
        channel.send({**told, "alive": alive})
        raise


def arrive_then_die(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 2 arrives at an all-reduce and dies there; the others come when it is gone."""
    comm = Comm(ports)
    comm.barrier()
    x = vector(comm.rank + 1)
    if comm.rank == 2:
        if hasattr(ports, "world"):
            ports.world.calendar.call(0.1, lambda: ports.world.inject(kill(rank=2)))
        else:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while comm.rank != 2 and 2 in comm.members.alive():
        pause(comm)
    try:
        comm.all_reduce(x)
    except PeerLost as lost:
        channel.send({"kind": "lost", "ranks": list(lost.ranks), "x": x.item()})
        raise


def wait_too_long(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 1 is alive and never comes; rank 0 gives up, then lets it go."""
    comm = Comm(ports)
    if comm.rank == 1:
        while not comm.board.poll(vector(0), tag=1):
            pause(comm)
        return None
    try:
        comm.receive(vector(0), 1)
    except CommTimeout as timeout:
        comm.board.post(vector(0), 1, tag=1)
        return [list(timeout.ranks), timeout.op, timeout.waited_s]
    return None


def be_busy(ports: Any, channel: Any, argument: Any) -> Any:
    """Rank 1 computes for three times ``dead_s`` without ever yielding the interpreter."""
    comm = Comm(ports)
    comm.barrier()
    if comm.rank == 1:
        comm.clock.charge(argument["seconds"])
        end_s = time.monotonic() + (0 if hasattr(ports, "world") else argument["seconds"])
        while time.monotonic() < end_s:
            sum(range(1_000_000))
    x = vector(1)
    return [comm.all_reduce(x).weight, x.item()]
