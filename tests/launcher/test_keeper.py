"""Runs whose ranks leave vectors in memory that a keeper holds, as on a GPU.

The memory is the host's in place of a device's; PACELINE_TEST_DEVICE=cuda:0 runs these, and all
other tests that launch ranks, on a GPU.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from support import runs
from support.worlds import KEPT, on_shared_memory

import paceline as pl
from paceline.errors import PacelineError
from paceline.launcher.spec import LaunchSpec

WORKERS = 3

pytestmark = on_shared_memory


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    monkeypatch.setattr(LaunchSpec, "shared_device", KEPT)


def launch(strategy, *faults, **how):
    train = runs.train_through_losses
    return pl.launch(train, workers=WORKERS, strategy=strategy, faults=faults, **how)


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=4)", "layered"])
def test_a_synchronous_method_ends_with_the_same_bits_as_in_the_arena(
    strategy, tmp_path, monkeypatch
):
    launch(strategy, out=tmp_path / "kept")
    monkeypatch.setattr(LaunchSpec, "shared_device", None)
    launch(strategy, out=tmp_path / "arena")
    kept, arena = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "arena"))
    for name, tensor in arena.items():
        assert torch.equal(kept[name], tensor)


@pytest.mark.parametrize("strategy", ["gossip", "downpour", "cyclic", "adpsgd", "allreduce"])
def test_the_others_continue_when_a_worker_dies(strategy):
    runs.check_that_others_continue(launch, strategy)


@pytest.mark.parametrize("strategy", ["downpour(shards=2)", "cyclic", "layered"])
def test_a_server_that_dies_has_a_successor_that_finds_what_it_left(strategy, tmp_path):
    runs.check_that_a_server_has_a_successor(launch, strategy, tmp_path)


def test_a_lost_worker_is_restarted():
    runs.check_that_a_lost_worker_is_restarted(launch, "gossip")


def end_the_keeper(worker, number):
    """Rank 0 sends a signal to the keeper, which the fork server has started before all ranks."""
    net, sgd = runs.set_up(worker)
    if worker.rank == 0:
        os.kill(min(runs.children_of(os.getppid())), number)
    while True:
        runs.step(net, sgd)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "stopped")]
)
def test_the_loss_of_the_keeper_ends_the_run_and_names_it(number, reason):
    how = {"arguments": {"number": int(number)}, "limits": pl.Limits(dead_s=0.3)}
    with pytest.raises(PacelineError, match=f"the keeper.* is lost: .*{reason}") as caught:
        pl.launch(end_the_keeper, workers=2, strategy="gossip", **how)
    assert caught.value.exit_code == 3


def test_where_no_memory_can_be_shared_ranks_use_that_of_the_host(monkeypatch, capfd):
    monkeypatch.setattr(LaunchSpec, "shared_device", "cuda:99")
    result = launch("gossip")
    assert set(runs.answers(result)) == {0, 1, 2}
    said = capfd.readouterr().err
    assert said.count("ranks communicate through the host's memory") == 1
