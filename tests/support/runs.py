"""Trainings for real processes, and functions that inspect processes from outside."""

from __future__ import annotations

import ctypes
import itertools
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.strategies.allreduce import AllReduce
from paceline.training import agreement

# Trainings ---------------------------------------------------------------------------------------


def new_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def train(worker: pl.Worker, samples: int = 77, epochs: int = 2) -> None:
    """Train with momentum and dropout; with 77 samples four workers have a short last batch."""
    data = torch.Generator().manual_seed(5)
    x, y = torch.randn(samples, 6, generator=data), torch.randint(3, (samples,), generator=data)
    net = new_net()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.2, momentum=0.9))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    batches = worker.setup_dataloaders(loader)
    for _ in range(epochs):
        for inputs, targets in batches:
            sgd.zero_grad()
            loss = cross_entropy(net(inputs), targets)
            loss.backward()
            sgd.step()
            worker.log(loss=loss)


def fill_disk_under(path: Path) -> None:
    """Replace an open file of this process by a full disk: later writes to it fail."""
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(fd) == str(path.resolve()):
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, int(fd.name))
                os.close(full)


def train_on_full_disk(worker: pl.Worker, out: str) -> None:
    """Train while the disk is full for the traces of all ranks."""
    for path in Path(out).glob("trace*.jsonl"):
        fill_disk_under(path)
    train(worker)


def train_where_model_cannot_be(worker: pl.Worker, out: str) -> None:
    """Train while a folder has the name of the model's file."""
    (Path(out) / "model.safetensors" / "in the way").mkdir(parents=True, exist_ok=True)
    train(worker)


def train_through_losses(
    worker: pl.Worker,
    samples: int = 240,
    epochs: int = 2,
    until_incarnation: int = 0,
    victim: int = 1,
    until_lost: bool = False,
    pids: str | None = None,
    stop_until_lost: bool = False,
    thaws: bool = False,
) -> None:
    """Log which samples each worker took, while the rank ``victim`` is lost.

    With ``until_lost``, every worker waits at its fourth step until the victim is lost; with
    ``until_incarnation``, training goes on until the victim is a member in that incarnation. With a
    folder for ``pids``, rank 0 kills the victim at its own fourth step, or stops it until the
    others have left it behind; with ``thaws``, rank 0 only continues the victim once it is lost.
    """
    if pids is not None:
        Path(pids, str(worker.rank)).write_text(str(os.getpid()))
    net = new_net()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01, momentum=0.9))
    data = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 6, generator=data)
    loader = DataLoader(TensorDataset(torch.arange(samples), x), batch_size=4, shuffle=True)
    batches = worker.setup_dataloaders(loader)
    epoch = steps = 0

    def lost() -> frozenset[int]:
        return worker._session.all_ranks.members.view().lost

    while epoch < epochs or (
        until_incarnation and not has_joined(worker._session.all_ranks, victim, until_incarnation)
    ):
        for numbers, inputs in batches:
            sgd.zero_grad()
            net(inputs).square().mean().backward()
            sgd.step()
            worker.log(epoch=batches.epoch - 1, taken=" ".join(map(str, numbers.tolist())))
            steps += 1
            while until_lost and steps == 4 and victim not in lost():
                time.sleep(0.001)  # the epoch must last until then
            if pids is not None and worker.rank == 0:
                pid = int(Path(pids, str(victim)).read_text())
                if steps == 4 and not thaws:
                    os.kill(pid, signal.SIGSTOP if stop_until_lost else signal.SIGKILL)
                    while stop_until_lost and victim not in lost():
                        time.sleep(0.001)
                if (thaws or stop_until_lost) and victim in lost():
                    with suppress(ProcessLookupError):  # the launcher may have ended it
                        os.kill(pid, signal.SIGCONT)
        epoch += 1
    worker.finish()
    answer = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    worker.log(answer=answer.cpu().numpy().tobytes().hex())


def train_with_looks(worker: pl.Worker) -> None:
    """Rank 0 previews batches before each epoch; all log which samples they took."""
    net = new_net()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
    data = TensorDataset(torch.arange(44), torch.ones(44, 6))
    batches = worker.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    for epoch in range(2):
        if worker.rank == 0:
            for number, _ in enumerate(batches):
                if number == 1:
                    break
        worker.comm.barrier()  # otherwise rank 1 may take a whole epoch before the preview
        for numbers, inputs in batches:
            sgd.zero_grad()
            net(inputs).square().mean().backward()
            sgd.step()
            worker.log(epoch=epoch, taken=" ".join(map(str, numbers.tolist())))


def has_joined(comm: pl.Comm, rank: int, incarnation: int) -> bool:
    """Whether ``rank`` is, or was, a member in this incarnation; not while it is joining."""
    return comm.members.incarnation(rank) >= incarnation and (
        rank in comm.members.alive() or rank in comm.members.view().departed
    )


def train_by_environment(transport: Any, channel: Any, argument: dict[str, Any]) -> None:
    """Run a script with ``init`` under a launcher that sets only the standard variables."""
    os.environ |= {
        "RANK": str(transport.rank),
        "WORLD_SIZE": str(transport.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(argument["port"]),
        "TORCHELASTIC_USE_AGENT_STORE": str(argument["agent"]),
    }
    with pl.init(seed=argument["seed"], rank_order=True, out=argument["out"]) as worker:
        train(worker)


def train_by_variables(transport: Any, channel: Any, argument: dict[str, Any]) -> list[int]:
    """Run a script with ``init`` under a launcher that sets only these variables."""
    for name, text in argument["variables"].items():
        os.environ[name] = text.format(rank=transport.rank, job=argument["job"])
    with pl.init(seed=argument["seed"], rank_order=True, out=argument["out"]) as worker:
        train(worker)
    return [worker.rank, worker.size]


def by_environment(transport: Any, argument: dict[str, Any]) -> None:
    """Set the environment of a rank of another launcher; the ranks rendezvous at ``port``."""
    os.environ |= {
        "RANK": str(transport.rank),
        "WORLD_SIZE": str(transport.size),
        "MASTER_PORT": str(argument["port"]),
    }


def serve_one_worker(transport: Any, channel: Any, argument: dict[str, Any]) -> list[Any]:
    """Run one method after the other in two processes of a launcher: a worker and its server."""
    ends: list[Any] = []
    for number, strategy in enumerate(argument["strategies"]):
        by_environment(transport, {"port": argument["ports"][number]})
        out = os.path.join(argument["out"], str(number))
        try:
            with pl.init(strategy=strategy, seed=argument["seed"], out=out) as worker:
                train(worker)
            ends.append([worker.steps, worker._session.recorder.meter.bytes_sent])
        except SystemExit as end:
            ends.append(f"ended with {end.code}")
    return ends


def differ_by_environment(transport: Any, channel: Any, argument: dict[str, Any]) -> None:
    """Set up a rank whose seed or version may differ from those of the others."""
    by_environment(transport, argument)
    agreement.__version__ = argument["version"]
    with pl.init(seed=argument["seed"]) as worker:
        set_up(worker)


def unpickled_by_environment(transport: Any, channel: Any, argument: dict[str, Any]) -> None:
    """A whole run under another launcher, with pickle forbidden."""
    by_environment(transport, argument)
    forbid_pickle()
    with pl.init(strategy=argument["strategy"]) as worker:
        train(worker)


def stop_at_step(worker: pl.Worker, step: int) -> None:
    """Reduce a number, log the command line's arguments, and train until rank 1 stops all."""
    net = new_net()
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
    worker.log(mean=worker.reduce(worker.rank), arguments=" ".join(sys.argv[1:]))
    loader = worker.setup_dataloaders(DataLoader(torch.ones(4000, 6), batch_size=2))
    while not worker.stopping:
        for x in loader:
            sgd.zero_grad()
            net(x).square().mean().backward()
            sgd.step()
            if worker.rank == 1 and worker.steps == step:
                worker.stop_all()


def train_unpickled(worker: pl.Worker) -> None:
    forbid_pickle()
    train(worker)


def forbid_pickle() -> None:
    """Make every function that writes or reads a pickle raise an error in this process."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something is pickled")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        setattr(pickle, name, refuse)
        setattr(pickle, f"_{name}", refuse)


def sockets_by_environment(transport: Any, channel: Any, argument: dict[str, Any]) -> list[Any]:
    by_environment(transport, argument)
    metrics: list[Any] = []
    with pl.init(on_metric=metrics.append) as worker:
        log_sockets(worker)
    return metrics


def free_port() -> int:
    """A free port on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def train_with_wrong_clock(worker: pl.Worker) -> None:
    """Train while the wall clock jumps an hour ahead and an hour back."""
    right, shifts = time.time, itertools.cycle([3600.0, -3600.0])
    time.time = lambda: right() + next(shifts)  # for this process
    train(worker)


def step(net: nn.Module, sgd: Any) -> None:
    sgd.zero_grad()
    net(torch.ones(1, 2, device=next(net.parameters()).device)).sum().backward()
    sgd.step()


def set_up(worker: pl.Worker) -> tuple[nn.Module, Any]:
    net = nn.Linear(2, 1)
    return worker.setup(net, SGD(net.parameters(), lr=0.1))


def raise_on_one(worker: pl.Worker, rank: int) -> None:
    net, sgd = set_up(worker)
    for number in range(8):
        step(net, sgd)
        if worker.rank == rank and number == 3:
            raise KeyError(f"no such thing in step {number}")


def stop_the_fork_server(worker: pl.Worker, how: str) -> None:
    """Rank 0 stops the fork server; then all ranks raise, or rank 0 is killed."""
    net, sgd = set_up(worker)
    step(net, sgd)
    if worker.rank == 0:
        worker.log(fork_server=os.getppid())
        os.kill(os.getppid(), signal.SIGSTOP)
    step(net, sgd)
    if how == "raise":
        raise KeyError("no such thing")
    if how == "kill" and worker.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def train_until_told(worker: pl.Worker, folder: str) -> None:
    """Train until a file ``over`` exists; write the pid into the folder after the first step."""
    over, announced = Path(folder, "over"), False
    net, sgd = set_up(worker)
    values = torch.randn(256, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(values[:, :2], values[:, 2:])
    batches = worker.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=True))
    while not worker.stopping:
        for inputs, targets in batches:
            sgd.zero_grad()
            (0.1 * (net(inputs) - targets)).square().mean().backward()
            sgd.step()
            if not announced:
                announced = Path(folder, f"{worker.rank}.pid").write_text(str(os.getpid())) > 0
            if over.exists():
                worker.stop_all()


def await_pids(folder: Path, workers: int) -> list[int]:
    """The pids of the workers of :func:`train_until_told`, once all have written them."""
    paths = [folder / f"{rank}.pid" for rank in range(workers)]
    while not all(path.exists() and path.read_text() for path in paths):
        time.sleep(0.001)
    return [int(path.read_text()) for path in paths]


def look_at(worker: pl.Worker, path: str) -> None:
    Path(path).exists()


def log_surroundings(worker: pl.Worker) -> None:
    worker.log(threads=torch.get_num_threads(), told=os.environ.get("PACELINE_TEST_WORD"))


def log_long_texts_between_signals(worker: pl.Worker, lengths: list[int], raises: bool) -> None:
    """Log long texts while alarms interrupt the process; their handler may end the training."""

    def ring(number: int, frame: Any) -> None:
        if raises and len(logged) > 1:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            raise TimeoutError(f"{worker.rank} has logged {len(logged)}" + "!" * 100_000)

    logged: list[int] = []
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    for length in lengths:
        logged.append(length)
        worker.log(text="x" * length)
    signal.setitimer(signal.ITIMER_REAL, 0)


def log_sockets(worker: pl.Worker) -> None:
    """Log, during a run, this rank's TCP sockets and the addresses at which all ranks listen."""
    net, sgd = set_up(worker)
    step(net, sgd)
    worker.comm.barrier()
    everyone = children_of(os.getppid())
    listening = [a for pid in everyone for state, a in tcp_sockets(pid) if state == LISTEN]
    own = [address for _, address in tcp_sockets(os.getpid())]
    worker.log(ranks=len(everyone), own=" ".join(own), listening=" ".join(listening))
    worker.comm.barrier()
    step(net, sgd)


def leave_in_turn(transport: Any, channel: Any, argument: dict[str, Any]) -> bool:
    """Each rank leaves after those before it; then waits until all have left, up to 60 s."""
    while any(rank in transport.members.alive() for rank in range(transport.rank)):
        time.sleep(0.001)
    transport.close()
    folder = Path(argument["folder"])
    (folder / str(transport.rank)).touch()
    deadline_s = time.monotonic() + 60
    while len(list(folder.iterdir())) < transport.size and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return time.monotonic() < deadline_s


# Faults ------------------------------------------------------------------------------------------


def lose(how: str) -> None:
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def train_until_lost(worker: pl.Worker, rank: int, how: str, when: str = "step") -> None:
    """Train while a rank is lost: at the ``start``, in a ``step``, at the ``end`` or ``after``."""
    worker.log(pid=os.getpid())
    if (worker.rank, when) == (rank, "start"):
        lose(how)
    net, sgd = set_up(worker)
    for number in range(9):
        if (worker.rank, when, number) == (rank, "step", 6):
            lose(how)
        step(net, sgd)
    if (worker.rank, when) == (rank, "end"):
        lose(how)
    worker.finish()
    if (worker.rank, when) == (rank, "after"):
        lose(how)


@dataclass(kw_only=True)
class DiesInSetup(AllReduce):
    """Rank 1 dies in ``worker.setup``, after the parameters were copied."""

    def setup(self, x: torch.Tensor) -> None:
        super().setup(x)
        if self.comm.rank == 1:
            lose("kill")


def be_busy(worker: pl.Worker, seconds: float) -> None:
    """Three ranks are busy in three ways for some seconds; rank 3 waits for them."""
    net, sgd = set_up(worker)
    step(net, sgd)
    if worker.rank == 0:
        time.sleep(seconds)
    elif worker.rank == 1:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # one call that holds the interpreter's lock
    elif worker.rank == 2:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            sum(range(100_000))
    step(net, sgd)


def stop_and_go_on(worker: pl.Worker, seconds: float) -> None:
    """Rank 1 stops itself; rank 0 continues it after some seconds, while rank 2 waits for both."""
    net, sgd = set_up(worker)
    pids = torch.zeros(worker.size, dtype=torch.int64)
    pids[worker.rank] = os.getpid()
    worker.comm.all_reduce(pids)
    if worker.rank == 1:
        lose("stop")
    elif worker.rank == 0:
        while state_of(int(pids[1])) != "T":
            os.sched_yield()
        time.sleep(seconds)
        os.kill(int(pids[1]), signal.SIGCONT)
    step(net, sgd)


def wait_forever(worker: pl.Worker) -> None:
    """Rank 0 holds the interpreter's lock, rank 1 sleeps, and the others wait for them."""
    net, sgd = set_up(worker)
    worker.log(pid=os.getpid(), fork_server=os.getppid())
    if worker.rank == 0:
        ctypes.PyDLL(None).pause()
    elif worker.rank == 1:
        signal.pause()
    step(net, sgd)


# Other Pythons -----------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """The environment for another Python that can import the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


# Inspecting processes ----------------------------------------------------------------------------

LISTEN = "0A"


def state_of(pid: int) -> str | None:
    """The state of a process as one letter, as in ps; None if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def happened(result: pl.Result, event: str) -> list[int]:
    """The ranks to which an event happened."""
    return [e["rank"] for e in result.events if e["event"] == event]


def answers(result: pl.Result) -> dict[int, Any]:
    """The answer of each worker of :func:`train_through_losses` that finished."""
    return {m["rank"]: m["answer"] for m in result.metrics if "answer" in m}


def check_that_others_continue(launch: Callable[..., pl.Result], strategy: str) -> None:
    """Of three workers, the second is killed; the others end with the same answer."""
    how: dict[str, Any] = {"on_loss": "continue", "arguments": {"until_lost": True}}
    if strategy == "allreduce":  # whose workers wait for the victim inside a step
        how["arguments"] = {}
    result = launch(strategy, pl.kill(rank=1).at(step=3), **how)
    assert happened(result, "lost") == [1]
    assert set(answers(result)) == {0, 2}
    assert len(set(answers(result).values())) == 1


def check_that_a_server_has_a_successor(
    launch: Callable[..., pl.Result], strategy: str, folder: Path
) -> None:
    """The first rank behind three workers is killed; its successor finds what it left."""
    how = {"victim": 3, "until_incarnation": 2, "pids": str(folder)}
    result = launch(strategy, arguments=how, on_loss="continue")
    assert happened(result, "succeeded") == [3] and result.lost_workers == 0
    assert set(answers(result)) == {0, 1, 2}


def check_that_a_lost_worker_is_restarted(launch: Callable[..., pl.Result], strategy: str) -> None:
    """The last of three workers is killed, and started again."""
    how = {"max_restarts": 1, "arguments": {"victim": 2, "until_incarnation": 2}}
    result = launch(strategy, pl.kill(rank=2).at(step=3), **how)
    assert happened(result, "restarted") == happened(result, "joined") == [2]
    assert set(answers(result)) == {0, 1, 2}


def children_of(pid: int) -> list[int]:
    """The children of a process, including zombies."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in lists for child in children.read_text().split()]


def fork_servers() -> list[int]:
    """The fork servers of this process."""
    return [
        pid
        for pid in children_of(os.getpid())
        if b"paceline.launcher.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def ranks_left() -> list[int]:
    """The ranks of this process's runs that still exist."""
    return [rank for fork_server in fork_servers() for rank in children_of(fork_server)]


def tcp_sockets(pid: int) -> list[tuple[str, str]]:
    """State and local address of each TCP socket that a process holds."""
    open_files = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            open_files.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    sockets = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if f"socket:[{rest[5]}]" in open_files:
                sockets.append((state, _address(local.split(":")[0])))
    return sockets


def _address(text: str) -> str:
    """Parse an address of /proc/net: words of four bytes, each in the machine's byte order."""
    words = bytes.fromhex(text)
    packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def wait_for_ends(pidfds: list[int], timeout_s: float) -> bool:
    """Whether all of these processes end in time."""
    end_s = time.monotonic() + timeout_s
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            return False
    return True
