"""Send garbage to every listener of a run over hosts, while it trains.

    python benchmarks/fuzz_hosts.py [--frames 100000] [--seed 0]

A launcher, an agent and two workers train on the loopback. The script finds every socket at which
one of them listens, prints its process and its address, and sends it as many frames of each sort:
bytes that are no ZeroMQ, frames of one who does not have the token, and random or almost right
frames of one who has it. The run must go on without a loss, end with exit code 0, and have answered
nobody without the token. The exit code is 1 if it did not.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
import zmq

import paceline as pl
from paceline.comm.hosts.secret import Secret

HERE, LOOPBACK = Path(__file__).resolve(), "127.0.0.1"
AGENTS = 1
LISTENING = "0A"
ROUND = 200
"""So many frames go over one connection."""


def train(worker: pl.Worker, folder: str) -> None:
    """Train until there is a file named ``enough``."""
    net = torch.nn.Linear(6, 3)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    while not Path(folder, "enough").exists():
        sgd.zero_grad()
        net(torch.ones(4, 6)).sum().backward()
        sgd.step()
        Path(folder, f"rank{worker.rank}").touch()


def main() -> int:
    """Run the script; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=100_000, help="how many for each listener")
    parser.add_argument("--seed", type=int, default=0, help="of the garbage")
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch is not None:
        return launch(Path(options.launch))
    with TemporaryDirectory(prefix="paceline-fuzz-") as folder:
        return fuzz(Path(folder), options.frames, Random(options.seed))


def launch(folder: Path) -> int:
    """Be the launcher of the run."""
    how = {"transport": "hosts", "hosts": AGENTS + 1, "token_file": folder / "token"}
    listen, arguments = (folder / "address").read_text(), {"folder": str(folder)}
    result = pl.launch(
        train, workers=AGENTS + 1, strategy="gossip", listen=listen, arguments=arguments, **how
    )
    print(f"lost workers: {result.lost_workers}")
    return 1 if result.lost_workers else 0


def fuzz(folder: Path, frames: int, random: Random) -> int:
    """Start a run, send garbage to all its listeners, and see how it ends."""
    token = secrets.token_bytes(32)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text(token.hex())
    with closing(socket.create_server((LOOPBACK, 0))) as free:
        address = f"{LOOPBACK}:{free.getsockname()[1]}"
    (folder / "address").write_text(address)
    join = ["-m", "paceline", "run", str(HERE), "--join", address]
    lines = [[str(HERE), "--launch", str(folder)]]
    lines += [[*join, "--token-file", str(folder / "token")]] * AGENTS
    processes = [subprocess.Popen([sys.executable, *line]) for line in lines]
    try:
        while not all((folder / f"rank{rank}").exists() for rank in range(AGENTS + 1)):
            if any(process.poll() is not None for process in processes):
                return 1
            time.sleep(0.05)
        answered = 0
        for name, port in sorted(listeners([process.pid for process in processes])):
            print(f"{name:<16} {LOOPBACK}:{port}", flush=True)
            answered += send_garbage(port, frames, token, random)
        (folder / "enough").touch()
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(f"exit codes {codes}; answers to those without the token: {answered}")
    return 1 if any(codes) or answered else 0


def listeners(parents: list[int]) -> Iterator[tuple[str, int]]:
    """The sockets at which these processes and their descendants listen; all at the loopback."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    family = [*parents]
    for pid in family:
        family += children.get(pid, [])
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                addresses[fields[9]] = fields[1].split(":")
    found: dict[int, str] = {}
    for pid in family:  # the launcher comes first, and holds the registrar's socket, too
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if pid in parents:
            name = "agent" if parents.index(pid) else "launcher"
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
            except FileNotFoundError:  # closed since
                continue
            if inode in addresses:
                host, port = addresses[inode]
                if bytes.fromhex(host)[::-1] != socket.inet_aton(LOOPBACK):
                    raise SystemExit(f"{name} listens beyond the loopback: {host}:{port}")
                found[int(port, 16)] = name
    return ((name, port) for port, name in found.items())


# Garbage -----------------------------------------------------------------------------------------


def send_garbage(port: int, frames: int, token: bytes, random: Random) -> int:
    """Send all sorts of garbage to a port; return how often one without the token was answered."""
    for _ in range(max(1, frames // ROUND)):
        send_bytes(port, random)
    stranger, member = Secret(secrets.token_bytes(32), False), Secret(token, False)
    answers = 0
    for sent in range(0, frames, ROUND):
        answers += send_frames(port, stranger, min(ROUND, frames - sent), random)
        send_frames(port, member, min(ROUND, frames - sent), random)
    return answers


def send_bytes(port: int, random: Random) -> None:
    """Send bytes that are no ZeroMQ, or only at first."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((LOOPBACK, port)) as connection:
        try:
            connection.sendall(random.choice([b"", greeting, greeting[:12]]))
            connection.sendall(random.randbytes(random.randrange(1, 5000)))
        except ConnectionError:
            return


def send_frames(port: int, secret: Secret, count: int, random: Random) -> int:
    """Send so many messages; return how many answers came."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        secret.show(peer)
        peer.sndtimeo, peer.linger, peer.sndhwm = 20, 500, count
        peer.connect(f"tcp://{LOOPBACK}:{port}")
        answers = 0
        for _ in range(count):
            try:
                peer.send_multipart(random.choice(SORTS)(random), zmq.NOBLOCK)
            except zmq.ZMQError:
                break
        while peer.poll(0):
            peer.recv_multipart()
            answers += 1
        return answers


def any_bytes(random: Random) -> list[bytes]:
    """Frames of random bytes."""
    lengths = [random.choice([0, 1, 17, 30, 300]) for _ in range(random.randint(1, 4))]
    return [random.randbytes(length) for length in lengths]


def any_part(random: Random) -> list[bytes]:
    """A part of a message between ranks, with numbers that are nearly right."""
    small = [random.choice([0, 1, 2, 3, 2**31]) for _ in range(3)]
    large = [random.choice([0, 1, 2, 3, 64, 2**40, 2**64 - 1]) for _ in range(2)]
    head = struct.pack("<BBIIIQQ", random.choice([1, 1, 2]), random.randrange(16), *small, *large)
    return [head + random.randbytes(random.randrange(40)), random.randbytes(random.randrange(99))]


def any_line(random: Random) -> list[bytes]:
    """A part of a message between launcher and agent."""
    numbers = [random.choice([0, 1, 2, 2**40]) for _ in range(2)]
    head = struct.pack("<BQQ", random.randrange(8), *numbers)
    return [head, *any_json(random)]


def any_json(random: Random) -> list[bytes]:
    """JSON that is nearly a message to the registrar, the launcher or an agent."""
    values = [None, -1, 99, 1e400, "", "x", [], {}, [[]], {"a": 1}, True]
    names = ["order", "client", "rank", "incarnation", "number", "done", "states", "host"]
    names += ["hello", "said", "times", "without_launcher", "version"]
    if random.random() < 0.02:
        return [b"[" * 20000]
    chosen = random.sample(names, random.randint(0, len(names)))
    return [json.dumps({name: random.choice(values) for name in chosen}).encode()]


SORTS: list[Callable[[Random], list[bytes]]] = [any_bytes, any_part, any_line, any_json]


if __name__ == "__main__":
    sys.exit(main())
