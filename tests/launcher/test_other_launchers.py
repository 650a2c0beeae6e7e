"""Ranks that torchrun starts on two hosts, over the transport hosts: the commands of the page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import runs
from support.namespaces import need_hosts
from support.worlds import on_hosts

import paceline as pl
from paceline.lab.network.hosts import HostNetwork

ROOT = Path(__file__).resolve().parents[2]
pytestmark = on_hosts

SCRIPT = """
import os
import signal
import sys

import paceline as pl

sys.path[:0] = {path!r}
from support import runs

with pl.init(strategy="gossip", transport="hosts") as worker:
    worker.comm.barrier()  # all have come: nobody starts a rank again that was lost before
    if worker.rank == {victim}:
        os.kill(os.getpid(), signal.SIGKILL)
    runs.train(worker)
print("rank", worker.rank, "has ended", flush=True)
"""


def page_commands():
    text = (ROOT / "docs" / "how-to" / "launchers.md").read_text()
    return re.findall(r"^torchrun --nnodes .*$", text, re.M)


def start_on(network, host, command, folder, victim):
    """Start the page's command on a host that stands for one of the page."""
    (folder / "train.py").write_text(SCRIPT.format(path=[str(ROOT / "tests")], victim=victim))
    line = shlex.split(command.replace("10.0.0.1", network.address(0)))
    return network.popen(
        host,
        [sys.executable, "-m", "torch.distributed.run", *line[1:]],
        cwd=folder,
        env=runs.environment(PACELINE_TOKEN="ab" * 32, TMPDIR=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.may_skip
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [-1, 3])
def test_torchrun_on_two_hosts_trains_also_without_a_lost_rank(victim, tmp_path):
    need_hosts()
    with HostNetwork(2) as network:
        nodes = [
            start_on(network, host, command, tmp_path, victim)
            for host, command in enumerate(page_commands())
        ]
        printed = [nodes[1].communicate()[0]]
        # torchrun waits for the other node at its end, up to 300 s: the ranks have ended before.
        while not {"rank 0 has ended", "rank 1 has ended"} <= {*printed[-1].splitlines()}:
            line = nodes[0].stdout.readline()
            assert line, printed
            printed[-1] += line
    nodes[0].stdout.close()
    assert ("the run went on without ranks 2, 3" in printed[-1]) == (victim == 3)
    assert nodes[1].returncode == (victim == 3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"transport": "shared_memory"}, r"transport \(shared_memory\) must be one of distrib"),
        ({"token_file": "run.token"}, r"token_file \(run.token\) must not be given without hosts"),
        ({"transport": "hosts", "rank_order": True}, "rank_order must not be given with transport"),
    ],
)
def test_options_that_do_not_fit_are_refused(how, message):
    with pytest.raises(pl.UsageError, match=message), pl.init(**how):
        pass


def test_a_run_without_a_token_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(runs.free_port()))
    with (
        pytest.raises(pl.UsageError, match=r"token_file \(run.token\) must be a file"),
        pl.init(transport="hosts"),
    ):
        pass
    assert os.listdir(tmp_path) == []
