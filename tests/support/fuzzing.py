"""Readers of untrusted input, and inputs that are garbage or almost valid."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from paceline.checkpoint.states import load_state, pack_state
from paceline.checkpoint.store import MANIFEST, METRICS, open_checkpoint, seal
from paceline.comm.limits import Limits
from paceline.comm.shared.layout import SLOT_WORDS, WINDOW_WORDS
from paceline.comm.shared.memory import RANGE_BYTES, Arena
from paceline.comm.shared.world import SharedPorts
from paceline.common.faults import KINDS, parse_fault
from paceline.errors import MessageMismatch, UsageError
from paceline.lab.faulttest.schedule import Schedule
from paceline.record.trace import outline, read
from paceline.sim.cluster import read_cluster, read_faults

FOLDER = Path(tempfile.gettempdir()) / f"paceline-fuzzing-{os.getpid()}"


class Target(NamedTuple):
    """A generator of inputs and their reader; the reader may refuse an input, but not crash."""

    make: Callable[[Random], Any]
    read: Callable[[Any], None]


# Inputs ------------------------------------------------------------------------------------------

CLUSTER = """\
about = "x"
ranks_per_node = 1
cores = 2
[network]
latency_s = 5e-5
bytes_per_s = 125e6
[compute]
sample_s = 3e-4
spread = 0.1
factors = [1.0, 2.0]
slow = {3 = 2.0}
[loading]
prefetch = 2
[collectives]
algorithm = "two-level"
calls = 0
[handling.post]
latency_s = 2e-5
[[faults]]
kind = "kill"
rank = 3
at_s = 10.0
"""
SCRIPT = '[[faults]]\nkind = "slow"\nrank = 1\nfactor = 2\nfor_s = 1.0\n'
TRACE = """\
{"t": 0.5, "rank": 0, "event": "post", "peer": 1, "bytes": 8, "tag": 1}
{"t": 0.75, "rank": 1, "event": "step", "peer": null, "bytes": 0, "step": 3, "wait_s": 0.1}
"""
SCHEDULE = '{"strategy": "gossip", "workers": 3, "faults": ["kill(rank=1).at(step=2)"]}'
ODD = ["0", "-1", "1e309", "nan", "-inf", "9" * 30, "true", "[[]]", '""', "None", "{}", "\x00", "é"]


def number(random: Random) -> str:
    return random.choice([*ODD, str(random.getrandbits(64)), str(random.uniform(-10, 10))])


def spoil(text: str | bytes) -> Callable[[Random], bytes]:
    """A generator of ``text`` with a few pieces cut out, doubled, or replaced by garbage."""

    def make(random: Random) -> bytes:
        data = bytearray(text.encode() if isinstance(text, str) else text)
        for _ in range(random.randrange(5)):
            start = random.randrange(len(data) + 1)
            piece = data[start : start + random.randrange(13)]
            doubled, garbage = piece * 2, random.randbytes(random.randrange(9))
            new = random.choice([b"", doubled, garbage, number(random).encode()])
            data[start : start + len(piece)] = new
        return random.randbytes(random.randrange(200)) if random.random() < 0.1 else bytes(data)

    return make


def sentence(random: Random) -> str:
    if random.random() < 0.4:
        return spoil("freeze(rank=1, for_s=3).at(seconds=2)")(random).decode(errors="replace")
    kind = random.choice([*KINDS, "explode"])
    name = random.choice(["rank", "peer", "node", "for_s", "factor", "at_s", "x"])
    verb, when = random.choice(["at", "on"]), random.choice(["seconds", "step", "rank"])
    return f"{kind}({name}={number(random)}).{verb}({when}={number(random)})"


def frame(random: Random) -> list[tuple[int, int]]:
    """Words to write into a frame, with their indices: random, small, or near a memory bound."""
    edges = [n * RANGE_BYTES for n in (1, 2, 3)]
    words = [
        random.getrandbits(64) - (1 << 63),
        random.randrange(-2, 10),
        random.choice(edges) + random.randrange(-64, 65),
    ]
    return [(random.randrange(9), random.choice(words)) for _ in range(random.randrange(6))]


STATE = pack_state({"x": torch.arange(6.0), "lives": {0: 1}, "mail": [(1, "a", None)]})
MANIFEST_TEXT = json.dumps(
    seal(
        {
            "version": 1,
            "step": 7,
            "time_s": 0.5,
            "ranks": [0],
            "config": {"workers": 1},
            "files": {
                name: {"bytes": 2, "blake2b": "00"} for name in (METRICS, "rank0.safetensors")
            },
        }
    )
)


def state(random: Random) -> bytes:
    """The file of a rank, damaged anywhere, or in its header with the length kept right."""
    if random.random() < 0.5:
        return spoil(STATE)(random)
    end = 8 + int.from_bytes(STATE[:8], "little")
    header = spoil(STATE[8:end])(random)
    return len(header).to_bytes(8, "little") + header + STATE[end:]


def manifest(random: Random) -> bytes:
    """A damaged manifest; in half of the cases sealed again, so that its hash is right."""
    data = spoil(MANIFEST_TEXT)(random)
    if random.random() < 0.5:
        return data
    content = json.loads(MANIFEST_TEXT)
    part = random.choice([content, content["files"], content["files"][METRICS]])
    name = random.choice([*part, "../outside", "rank1.safetensors"])
    part[name] = random.choice([-1, 10**12, 1e400, None, True, "x", [], {}, {"bytes": []}])
    return json.dumps(seal(content)).encode()


# Readers -----------------------------------------------------------------------------------------


def _file(name: str, data: bytes) -> Path:
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / name
    path.write_bytes(data)
    return path


def read_a_cluster(data: bytes) -> None:
    with suppress(UsageError):
        read_cluster(_file("cluster.toml", data))


def read_a_script(data: bytes) -> None:
    with suppress(UsageError):
        read_faults(_file("faults.toml", data))


def read_a_fault(text: str) -> None:
    with suppress(UsageError):
        parse_fault(text)


def read_a_schedule(data: bytes) -> None:
    with suppress(UsageError):
        Schedule.parse(data.decode(errors="replace"))


def read_a_trace(data: bytes) -> None:
    path = _file("trace.jsonl", data)
    for reader in (read, lambda path: outline(path, "step")):
        with suppress(UsageError):
            for record in reader(path):
                assert isinstance(record["event"], str)


def read_a_state(data: bytes) -> None:
    path = _file("rank0.safetensors", data)
    with suppress(UsageError):
        assert isinstance(load_state(path.parent, "rank0"), dict)


def read_a_manifest(data: bytes) -> None:
    folder = FOLDER / "step-000000007"
    folder.mkdir(parents=True, exist_ok=True)
    for name in (METRICS, "rank0.safetensors"):
        (folder / name).write_bytes(b"{}")
    (folder / MANIFEST).write_bytes(data)
    with suppress(UsageError):
        open_checkpoint(folder)


class Mailbox:
    """Two ranks of one process: the second writes words to shared memory, the first reads them."""

    _made: Mailbox | None = None

    def __init__(self) -> None:
        fd = Arena.create(2)
        self.reader, self.writer = (SharedPorts(fd, rank, 2, Limits()) for rank in (0, 1))
        self.like = torch.arange(3.0)
        self.writer.mail.publish(self.like, b"header")
        self.writer.mail.post(self.like, 0, 1, b"header")
        layout, words = self.writer.shared.layout, self.writer.shared.words
        self.slot, self.window = layout.slot(1, 0, 0), layout.window(1)
        self.receipt = layout.receipt(1, 0, 0)
        self.message = words.read(self.slot, SLOT_WORDS)
        self.shown = words.read(self.window, WINDOW_WORDS)

    @classmethod
    def get(cls) -> Mailbox:
        """The only mailbox of this process: each takes a part of the address space."""
        cls._made = cls._made or cls()
        return cls._made


def read_a_message(words_of: list[tuple[int, int]]) -> None:
    box = Mailbox.get()
    words = list(box.message)
    for index, word in words_of:
        words[index % SLOT_WORDS] = word
    box.reader.shared.words.write(box.slot, tuple(words))
    box.reader.shared.words[box.receipt] = 0
    with suppress(MessageMismatch):
        taken = box.reader.mail.try_receive(box.like, (1,), 1)
        assert taken is None or (taken.src == 1 and taken.x.shape == box.like.shape)


def read_a_window(words_of: list[tuple[int, int]]) -> None:
    box = Mailbox.get()
    words = list(box.shown)
    for index, word in words_of:
        words[index] = word
    box.reader.shared.words.write(box.window, tuple(words))
    for like in (box.like, None):
        with suppress(MessageMismatch):
            seen = box.reader.mail.peek(1, like)
            assert seen is None or like is None or seen.x.shape == like.shape


TARGETS = {
    "cluster": Target(spoil(CLUSTER), read_a_cluster),
    "fault script": Target(spoil(SCRIPT), read_a_script),
    "fault": Target(sentence, read_a_fault),
    "schedule": Target(spoil(SCHEDULE), read_a_schedule),
    "trace": Target(spoil(TRACE), read_a_trace),
    "state": Target(state, read_a_state),
    "manifest": Target(manifest, read_a_manifest),
    "mailbox": Target(frame, read_a_message),
    "window": Target(frame, read_a_window),
}
