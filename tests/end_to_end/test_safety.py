"""What a run never does: read pickles, listen to other hosts, trust the wall clock."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import runs
from support.namespaces import need_hosts
from support.worlds import on_both, on_distributed, on_shared_memory, run_program

import paceline as pl
from paceline.comm.limits import Limits
from paceline.comm.shared.memory import RANGE_BYTES, Arena
from paceline.comm.shared.places import MAX_HEADER_BYTES
from paceline.comm.shared.world import SharedPorts
from paceline.common.reference import refer_to
from paceline.errors import MessageMismatch, UsageError
from paceline.lab.network.hosts import HostNetwork
from paceline.launcher.supervisor import run_ranks

SOURCES = sorted(Path(pl.__file__).parent.rglob("*.py"))

# No pickle ---------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("strategy", ["sasgd(interval=4)", "downpour", "gossip"])
def test_a_run_works_where_nothing_can_be_pickled(world, strategy):
    """Without loader processes, for which torch itself uses pickle."""
    result = pl.launch(runs.train_unpickled, workers=2, strategy=strategy, transport=world)
    assert result.samples == 2 * 77


@on_distributed
def test_ranks_train_under_a_launcher_where_nothing_can_be_pickled():
    argument = {"port": runs.free_port(), "strategy": "sasgd(interval=4)"}
    run_ranks(refer_to(runs.unpickled_by_environment), [argument] * 2)


# No listener -------------------------------------------------------------------------------------


@on_distributed
def test_a_run_of_another_launcher_listens_only_on_the_loopback():
    argument = {"port": runs.free_port()}
    assert_loopback(run_ranks(refer_to(runs.sockets_by_environment), [argument] * 2))


def assert_loopback(ranks: list[list[dict[str, object]]]) -> None:
    for [record] in ranks:
        listening = str(record["listening"]).split()
        assert record["ranks"] == 2 and len(listening) >= 2
        assert set(listening) <= {"127.0.0.1", "::1"}


FAR = """
import json, socket
import paceline as pl
from support import runs
from paceline.launcher.supervisor import run_ranks
from paceline.common.reference import refer_to

if __name__ == "__main__":
    host = socket.gethostbyname(socket.gethostname())
    shared = pl.launch(runs.log_sockets, workers=2)
    gloo = pl.launch(runs.log_sockets, workers=2, transport="distributed")
    argument = {"port": runs.free_port()}
    launched = run_ranks(refer_to(runs.sockets_by_environment), [argument] * 2)
    found = {"shared": shared.metrics, "gloo": gloo.metrics, "launched": launched}
    print(json.dumps({"host": host, **found}))
"""


@pytest.mark.may_skip
@on_distributed
def test_no_rank_listens_on_another_address_of_the_host(tmp_path, monkeypatch):
    """On a host with a network card, whose address belongs to the host's name."""
    need_hosts()
    for name, value in runs.environment().items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "far.py"
    script.write_text(FAR)
    with HostNetwork(1) as network:
        wrote = network.run(0, sys.executable, str(script))
    output = json.loads(wrote.splitlines()[-1])
    assert output["host"] == HostNetwork.address(0)
    assert [(r["own"], r["listening"]) for r in output["shared"]] == [("", "")] * 2
    assert_loopback([[record] for record in output["gloo"]])
    assert_loopback(output["launched"])


# Clocks ------------------------------------------------------------------------------------------


DATED = ["record/loggers/base.py", "record/loggers/to_tensorboard.py", "watch/run.py"]
DATED += ["watch/terminal.py"]
"""What writes or shows a date, or the age of a file."""


def test_only_what_shows_a_date_asks_for_it():
    root = Path(pl.__file__).parent
    asks = [path for path in SOURCES if "paceline.common.date" in path.read_text()]
    assert [str(path.relative_to(root)) for path in asks] == DATED


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.stem != "date"], ids=lambda path: path.stem
)
def test_no_duration_uses_the_wall_clock(path):
    wall = {"time", "time_ns", "now", "utcnow", "today", "localtime", "gmtime"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            asks = node.value.id in ("time", "datetime", "date") and node.attr in wall
            assert not asks, f"{path.name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            assert not wall & {alias.name for alias in node.names}, path.name


@on_both
def test_a_clock_that_jumps_by_an_hour_changes_nothing(world):
    limits = Limits(dead_s=2.0, progress_limit_s=30.0)
    result = pl.launch(runs.train_with_wrong_clock, workers=2, transport=world, limits=limits)
    assert result.samples == 2 * 77 and result.lost_workers == 0
    assert 0 < result.seconds < 600


# Little of everything ----------------------------------------------------------------------------

SPARE = """
import resource
import paceline as pl
from support import runs

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    for transport in ("shared_memory", "distributed"):
        result = pl.launch(runs.train, workers=4, strategy="downpour", transport=transport)
        print(result.samples)
"""


@on_distributed
def test_a_run_needs_few_files_one_core_and_no_temporary_folder(tmp_path):
    script = tmp_path / "spare.py"
    script.write_text(SPARE)
    ended = subprocess.run(
        ["taskset", "-c", "0", sys.executable, str(script)],
        env=runs.environment(OMP_NUM_THREADS="1", TMPDIR="/proc/none"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(2 * 77)] * 2


# Messages that nobody has sent ------------------------------------------------------------------


@pytest.fixture
def two_ranks():
    """Two ranks of shared memory in this process; the second may write anything."""
    fd = Arena.create(2)
    yield [SharedPorts(fd, rank, 2, Limits()) for rank in range(2)]
    os.close(fd)


WORD = st.one_of(st.integers(-8, 64), st.integers(-(2**63), 2**63 - 1))


@on_shared_memory
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=1000)
@given(
    code=st.one_of(st.just(0), WORD),
    numel=st.one_of(st.just(3), WORD),
    offset=st.one_of(st.integers(2 * RANGE_BYTES - 64, 2 * RANGE_BYTES + 64), WORD),
    header_offset=WORD,
    header=st.one_of(st.just(0), WORD),
)
def test_garbage_in_a_mailbox_is_refused_and_the_next_message_arrives(
    two_ranks, code, numel, offset, header_offset, header
):
    reader, writer = two_ranks
    like, both = torch.zeros(3), (1 << 20) + 1
    words, index = writer.shared.words, reader.shared.layout.slot(1, 0, 0)
    words.write(index + 1, (0, code, numel, offset, header_offset, header, both))
    words.announce(index, words[index] + 1)
    own = 2 * RANGE_BYTES <= offset <= 3 * RANGE_BYTES - 12 - header
    fits = (code, numel) == (0, 3) and own and 0 <= header <= MAX_HEADER_BYTES
    try:
        message = reader.mail.try_receive(like, (1,), 0)
        assert fits and message.x.shape == like.shape and len(message.header) == header
    except MessageMismatch:
        assert not fits
    writer.shared.sequence = max(writer.shared.sequence, words[index])
    assert writer.mail.post(torch.ones(3), 0, 0, b"")
    assert reader.mail.try_receive(like, (1,), 0).x.tolist() == [1.0] * 3


# One process for each rank -----------------------------------------------------------------------


def claim_another(ports, channel, argument):
    """Rank 1 tries to be rank 0 as well, while rank 0 is alive."""
    word = torch.zeros(1)
    if ports.rank == 0:
        ports.mail.receive(word, (1,), 0, "the end")
        return "here"
    try:
        SharedPorts(ports.shared.fd, 0, ports.size, Limits())
    except UsageError as error:
        refused = str(error)
    else:
        refused = ""
    alive = ports.members.alive()
    ports.mail.start_send(word, 0, 0, b"").wait()
    return [refused, alive]


@on_shared_memory
def test_a_second_process_cannot_take_a_live_rank():
    outcome = run_program("shared_memory", claim_another, 2)
    assert outcome.values[0] == "here"
    refused, alive = outcome.values[1]
    assert refused.startswith("rank (0) is taken: process ") and alive == [0, 1]


# Data --------------------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_a_data_set_smaller_than_the_number_of_workers_is_taken_once(world, strategy):
    how = {"workers": 4, "strategy": strategy, "transport": world}
    result = pl.launch(runs.train, arguments={"samples": 2, "epochs": 3}, **how)
    assert result.samples == 3 * 2
