"""Runs on a real Ray cluster, whose nodes are hosts made of namespaces."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import RayCluster
from support.namespaces import need_hosts, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.may_skip]

OUT = "runs/ray"
SCRIPT = """
import sys

import paceline as pl

sys.path[:0] = {path!r}
from support import runs


def train(worker):
    runs.train_through_losses(worker, until_incarnation={until_incarnation})


if __name__ == "__main__":
    limits = pl.Limits(start_s={start_s})
    pl.launch(train, on="ray", workers={workers}, strategy="gossip", out={out!r}, limits=limits)
"""


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, each with room for two ranks, and a host that can become the third."""
    need_hosts()
    with RayCluster(2, 2, spare=1) as cluster:
        yield cluster


@pytest.fixture
def script(tmp_path):
    """A script that trains on Ray when it is started."""

    def write(workers=2, until_incarnation=0, start_s=300):
        facts = {"workers": workers, "until_incarnation": until_incarnation, "start_s": start_s}
        facts["out"] = OUT
        path = [str(Path(__file__).parents[1])]
        (tmp_path / "train.py").write_text(SCRIPT.format(path=path, **facts))

    return write


def start(cluster, folder, *command):
    """Start a driver on the head; its Python is this one."""
    return cluster.popen(0, sys.executable, *command, cwd=folder, stdout=subprocess.PIPE)


def begin(cluster, folder, *command):
    """Start a driver, and wait until its run trains."""
    run, metrics = start(cluster, folder, *command), folder / OUT / "metrics.jsonl"
    wait_until(lambda: run.poll() is not None or (metrics.exists() and metrics.read_text()), 120)
    assert run.poll() is None, run.communicate()[0]
    return run


def happened(folder, event):
    events = json.loads((folder / OUT / "result.json").read_text())["events"]
    return [each["rank"] for each in events if each["event"] == event]


def test_a_worker_of_a_lost_node_comes_back_on_another(cluster, script, tmp_path):
    script(until_incarnation=2)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "ray.md").read_text()
    (line,) = re.findall(r"^paceline run .* --on ray .*$", page, re.M)
    run = begin(cluster, tmp_path, "-m", *shlex.split(line.replace("-w 8", "-w 2")))
    cluster.kill(1)
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    assert happened(tmp_path, "lost") == happened(tmp_path, "joined") == [1]


def test_a_run_that_is_too_large_waits_for_a_node_to_be_added(cluster, script, tmp_path):
    script(workers=3)
    run = start(cluster, tmp_path, "train.py")
    said = run.stdout.readline()
    assert "waiting for Ray to place 3 ranks, with 1 CPU each; it has" in said
    cluster.add(2)
    printed, _ = run.communicate()
    assert run.returncode == 0, printed
    assert happened(tmp_path, "lost") == []


def test_a_run_for_which_there_is_no_room_ends(cluster, script, tmp_path):
    script(workers=9, start_s=5)
    run = start(cluster, tmp_path, "train.py")
    printed, _ = run.communicate()
    assert run.returncode == 1, printed
    assert re.search(r"Ray has placed \d of 9 ranks after \d+ s; it has no room", printed)


def test_without_a_cluster_the_message_says_how_to_start_one(cluster, script, tmp_path):
    script()
    line = ["env", "-u", "RAY_ADDRESS", f"RAY_TMPDIR={tmp_path}"]
    run = subprocess.run(
        [*line, sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "UsageError: on (ray) needs a Ray cluster: type ray start --head" in run.stderr
