"""Workers that come to a synchronous method in mid-run, and those that are lost there."""

from __future__ import annotations

import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.checkpoint.store import Store, open_checkpoint
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.training.division import part_of
from tests.support import growing
from tests.support.growing import EPOCHS, SAMPLES, finals, plain_training, seen, steps, train

CLUSTER = Cluster(network=Link(latency_s=1e-3), compute=Compute(step_s=1.0))
ONCE = Counter(range(SAMPLES))
COMING_AND_GOING = {
    "one joins": [pl.join(rank=2).at(seconds=4.5)],
    "two join at once": [pl.join(rank=1).at(seconds=4.5), pl.join(rank=2).at(seconds=4.5)],
    "two join in turn": [pl.join(rank=1).at(seconds=2.5), pl.join(rank=2).at(seconds=9.5)],
    "the first comes again": [pl.kill(rank=0).at(seconds=3.5), pl.join(rank=0).at(seconds=9.5)],
    "one comes again at once": [pl.kill(rank=1).at(seconds=3.5), pl.join(rank=1).at(seconds=3.6)],
    "one is lost": [pl.kill(rank=1).at(seconds=3.5)],
    "one joins, one is lost": [pl.join(rank=2).at(seconds=3.4), pl.kill(rank=1).at(seconds=3.5)],
    "a newcomer is lost": [pl.join(rank=2).at(seconds=3.4), pl.kill(rank=2).at(seconds=5.5)],
}


def simulate(strategy="allreduce", faults=(), workers=3, **how):
    how = {"cluster": CLUSTER, "on_loss": "continue", "faults": faults, **how}
    return pl.simulate(train, workers=workers, strategy=strategy, **how)


@pytest.mark.parametrize("faults", COMING_AND_GOING.values(), ids=COMING_AND_GOING)
def test_every_step_is_that_of_one_optimizer_on_the_samples_of_all_members(faults):
    run = simulate(faults=faults)
    assert seen(run) == dict.fromkeys(range(EPOCHS), ONCE)
    ends, joins = finals(run), sum(fault.kind == "join" for fault in faults)
    assert all(torch.equal(end, next(iter(ends.values()))) for end in ends.values())
    assert run.joined_workers == joins
    torch.testing.assert_close(next(iter(ends.values())), plain_training(run), rtol=0, atol=1e-13)


def test_a_newcomer_has_the_rates_and_the_momentum_of_the_others():
    run = simulate(faults=COMING_AND_GOING["one joins"])
    rates = {}
    for m in run.metrics:
        if "lr" in m:
            rates.setdefault(m["step"], set()).add(m["lr"])
    assert all(len(of_step) == 1 for of_step in rates.values())
    assert len({rate for of_step in rates.values() for rate in of_step}) == EPOCHS


@pytest.mark.parametrize(
    "strategy",
    [
        "sasgd(interval=3)",
        "sasgd(interval=2, momentum=average)",
        "diloco(interval=3)",
        "hierarchical(group_size=2, group_interval=1, interval=2)",
        "easgd(sync=true, interval=2)",
        "gossip(sync=true)",
    ],
)
@pytest.mark.parametrize("case", ["one joins", "two join at once", "the first comes again"])
def test_every_synchronous_method_takes_workers_in(strategy, case):
    faults = COMING_AND_GOING[case]
    run = simulate(strategy, faults)
    ends = finals(run)
    assert len(ends) == 3
    assert all(torch.equal(end, next(iter(ends.values()))) for end in ends.values())
    assert run.joined_workers == sum(fault.kind == "join" for fault in faults)
    if case != "the first comes again":  # what a lost worker did since it synchronized is repeated
        assert seen(run) == dict.fromkeys(range(EPOCHS), ONCE)


def test_a_newcomer_of_elastic_averaging_begins_at_the_center():
    run = simulate("easgd(sync=true, interval=1, alpha=0)", COMING_AND_GOING["one joins"])
    end = next(iter(finals(run).values()))
    assert end.tolist() == [0.5] * 4, "a center that nobody moves stays where it began"


def test_a_worker_that_comes_after_the_end_changes_nothing():
    plain = simulate(workers=2)
    faults = [pl.join(rank=2).at(seconds=plain.virtual_seconds - 0.5)]
    run = simulate(faults=faults)
    assert run.joined_workers == 0
    assert torch.equal(finals(run)[0], finals(plain)[0])


def test_batches_that_loader_processes_have_prefetched_are_divided_anew():
    faults = COMING_AND_GOING["the first comes again"]
    run = simulate(faults=faults, arguments={"processes": 1})
    assert seen(run) == dict.fromkeys(range(EPOCHS), ONCE)
    torch.testing.assert_close(finals(run)[0], plain_training(run), rtol=0, atol=1e-13)


def test_a_method_that_cannot_take_workers_in_says_so_before_it_starts():
    for how in ({"faults": [pl.join(rank=1).at(seconds=1)]}, {"max_restarts": 1}):
        with pytest.raises(pl.UsageError, match=r"layered cannot take|no worker can join"):
            simulate("layered", **how)
    with pytest.raises(pl.UsageError, match="only with on_loss"):
        simulate(faults=[pl.join(rank=1).at(seconds=1)], on_loss=None)


# Checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        "sasgd(interval=3)",
        "hierarchical(group_size=2, group_interval=1, interval=2)",
        "easgd(sync=true, interval=2)",
        "layered(group_size=2)",
    ],
)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_run_that_lost_a_worker_is_saved_and_resumed_exactly(strategy, victim, tmp_path):
    workers = 4 if strategy.startswith("layered") else 3
    how = {"workers": workers, "checkpoint_steps": 4, "keep": 99, "out": tmp_path}
    first = simulate(strategy, [pl.kill(rank=victim).at(seconds=2.5)], **how)
    folders = [path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    found = sorted(map(open_checkpoint, folders), key=lambda checkpoint: checkpoint.step)
    saved = [checkpoint for checkpoint in found if victim not in checkpoint.ranks]
    assert len(saved) > 3, "there are checkpoints after the loss"
    for later in saved[1:]:
        shutil.rmtree(later.path)
    (tmp_path / "checkpoints" / "latest").write_text(saved[0].path.name)
    again = simulate(strategy, resume=True, **{**how, "on_loss": "stop"})
    assert again.resumed_at == saved[0].step
    ends, others = finals(again), finals(first)
    assert ends.keys() == others.keys() == {*range(workers)} - {victim}
    assert all(torch.equal(end, others[rank]) for rank, end in ends.items())


def test_workers_that_a_checkpoint_lacks_come_when_a_run_that_goes_on_is_resumed(tmp_path):
    how = {"checkpoint_steps": 4, "out": tmp_path}
    first = simulate(faults=[pl.kill(rank=1).at(seconds=2.5)], **how)
    assert first.lost_workers == 1 and len(finals(first)) == 2
    again = simulate(resume=True, **how, arguments={})
    assert again.joined_workers == 1


def test_a_worker_that_was_taken_in_is_in_the_next_checkpoint(tmp_path):
    how = {"checkpoint_steps": 4, "out": tmp_path, "keep": 99}
    first = simulate(faults=COMING_AND_GOING["the first comes again"], **how)
    newest = Store(tmp_path / "checkpoints").newest()
    assert {*newest.ranks} == {0, 1, 2}
    again = simulate(resume=True, **how)
    assert all(torch.equal(finals(again)[rank], end) for rank, end in finals(first).items())


# The global batch --------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", COMING_AND_GOING.values(), ids=COMING_AND_GOING)
def test_a_global_batch_stays_the_same_while_workers_come_and_go(faults):
    run = simulate(faults=faults, global_batch=16)
    for epoch, times in seen(run).items():
        assert times == ONCE, epoch
    sizes = [sum(map(len, parts.values())) for parts in steps(run).values()]
    assert {*sizes} <= {16, *(s for s in sizes if s < 16)}
    lost = sum(fault.kind == "kill" for fault in faults)
    assert sum(size != 16 for size in sizes) <= 2 * lost
    for parts in steps(run).values():
        shares = [len(part) for part in parts.values()]
        assert max(shares) - min(shares) <= 1
    torch.testing.assert_close(
        next(iter(finals(run).values())), plain_training(run), rtol=0, atol=1e-13
    )


def test_with_a_global_batch_many_workers_train_as_one_does():
    alone = simulate(workers=1, global_batch=16)
    for workers, faults in ((2, ()), (3, ()), (3, COMING_AND_GOING["two join in turn"])):
        run = simulate(faults=faults, workers=workers, global_batch=16)
        torch.testing.assert_close(finals(run)[0], finals(alone)[0], rtol=0, atol=1e-13)


@given(size=st.integers(1, 500), workers=st.integers(1, 40))
def test_shares_of_a_global_batch_differ_by_at_most_one_sample(size, workers):
    batch = np.arange(size)
    parts = [part_of(batch, workers, index) for index in range(workers)]
    assert np.concatenate(parts).tolist() == batch.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_global_batch_that_cannot_be_is_refused():
    with pytest.raises(pl.UsageError, match=r"global_batch \(2\) must be at least workers \(3\)"):
        simulate(global_batch=2)
    with pytest.raises(pl.UsageError, match=r"must not be used with gossip: it is asynchronous"):
        pl.simulate(train, strategy="gossip", global_batch=16)
    with pytest.raises(pl.UsageError, match=r"must not be used with layered"):
        simulate("layered", global_batch=16)

    def fixed(worker):
        net = growing.network()
        worker.setup(net, growing.optimizer_of(net))
        worker.setup_dataloaders(DataLoader(TensorDataset(torch.arange(9))), data="static")

    with pytest.raises(pl.UsageError, match=r"global_batch \(8\) needs data that workers divide"):
        pl.simulate(fixed, workers=2, global_batch=8)
