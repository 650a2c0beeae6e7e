"""An interrupted and resumed run ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import json
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from safetensors.torch import save_file
from support.resuming import Interruptible, network, pairs, same_models, train
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import paceline as pl
from paceline.checkpoint.store import Store, seal
from paceline.checkpoint.weights import read_weights
from paceline.sim.cluster import Compute, Loading
from paceline.strategies import STRATEGIES
from paceline.strategies.base import SERVER, WORKER

FORMS = [
    *STRATEGIES,
    "gossip(mode=push)",
    "gossip(sync=true)",
    "easgd(sync=true)",
    "cyclic(max_accumulated=1, shards=2)",
    "downpour(push_interval=2, fetch_interval=3, server_optimizer=adagrad)",
    "ssp(bound=0)",
    "sasgd(interval=3)",
    "hierarchical(group_size=2, group_interval=1, interval=2)",
]
SAME = (
    "virtual_seconds",
    "steps",
    "samples",
    "bytes_sent",
    "wire_bytes",
    "wait_share",
    "metrics",
)
SAME += ("staleness_mean", "staleness_max", "staleness_counts", "consensus_distance", "lr")


def compare(body, tmp_path, at, **how):
    """Interrupt and resume a run, and compare it with one that was not interrupted."""
    how = {"workers": 3, "cluster": "mixed-lab", "seed": 4, "checkpoint_steps": 4, **how}
    train = Interruptible(*body)
    whole = train.run(tmp_path / "whole", **how)
    ends = train.ends
    for number, step in enumerate(at):
        assert train.run(tmp_path / "broken", step, **how, resume=number > 0) is None
    again = train.run(tmp_path / "broken", **how, resume=True)
    assert again.resumed_at is not None and again.resumed_at >= at[-1] - 8
    assert same_models(ends, train.ends)
    assert {k: getattr(again, k) for k in SAME} == {k: getattr(whole, k) for k in SAME}
    return again


@pytest.mark.parametrize("strategy", FORMS)
def test_every_method_resumes_bit_for_bit(strategy, tmp_path):
    compare((), tmp_path, [10, 17], strategy=strategy)


@pytest.mark.parametrize("cluster", ["one-server", "wan", "two-tier-256"])
def test_on_every_kind_of_link(cluster, tmp_path):
    compare((), tmp_path, [10], strategy="cyclic", cluster=cluster)


def test_with_noise_that_is_recorded_and_with_batches_that_are_loaded_ahead(tmp_path):
    compute = Compute(step_s=1e-3, trace=(1.0, 2.5, 1.2, 0.7))
    loading = Loading(batch_s=2e-3, prefetch=2)
    cluster = pl.Cluster(compute=compute, loading=loading, cores=1, ranks_per_node=2)
    compare((), tmp_path, [10], strategy="gossip", cluster=cluster)


@pytest.mark.parametrize("minutes", [1e-4, 2e-4])
@pytest.mark.parametrize("strategy", ["sasgd(interval=3)", "downpour", "ssp"])
def test_after_minutes_of_virtual_time(strategy, minutes, tmp_path):
    how = {"checkpoint_steps": None, "checkpoint_minutes": minutes, "strategy": strategy}
    train = Interruptible()
    train.run(tmp_path / "a", workers=3, cluster="mixed-lab", **how)
    ends = train.ends
    assert train.run(tmp_path / "b", 16, workers=3, cluster="mixed-lab", **how) is None
    again = train.run(tmp_path / "b", workers=3, cluster="mixed-lab", resume=True, **how)
    assert again.resumed_at is not None and same_models(ends, train.ends)


# Loops -------------------------------------------------------------------------------------------


def train_without_a_loader(worker):
    net = network()
    net, adam = worker.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    data = pairs()
    for step in range(24):
        adam.zero_grad()
        x, y = data[(5 * step) % 50 : (5 * step) % 50 + 8]
        F.cross_entropy(net(x + 0.1 * torch.randn_like(x)), y).backward()
        if step == train_without_a_loader.at and worker.rank == 0 and not worker.catching_up:
            raise ZeroDivisionError
        adam.step()
        worker.log(step_of_mine=step)
    worker.finish()
    train_without_a_loader.ends[worker.rank] = dict(net.state_dict())


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "layered"])
def test_a_loop_without_a_loader_repeats_its_steps_without_effect(strategy, tmp_path):
    train = train_without_a_loader
    how = {"workers": 2, "strategy": strategy, "checkpoint_steps": 5}
    train.at, train.ends = None, {}
    whole, ends = pl.simulate(train, out=tmp_path / "a", **how), train.ends
    train.at, train.ends = 17, {}
    with pytest.raises(pl.WorkerFailed, match="ZeroDivisionError"):
        pl.simulate(train, out=tmp_path / "b", **how)
    train.at = None
    again = pl.simulate(train, out=tmp_path / "b", **how, resume=True)
    assert again.resumed_at == 15 and same_models(ends, train.ends)
    assert again.metrics == whole.metrics


def train_with_accumulation(worker):
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    loader = worker.setup_dataloaders(DataLoader(pairs(), batch_size=2, shuffle=True))
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            F.cross_entropy(net(x), y).backward()
            if number % 2 == 1:
                sgd.step()
                sgd.zero_grad()
        worker.log(steps=worker.steps)


def train_with_two_loaders(worker):
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    one = worker.setup_dataloaders(DataLoader(pairs(), batch_size=3, shuffle=True))
    other = worker.setup_dataloaders(DataLoader(pairs(), batch_size=3, shuffle=True))
    test = worker.setup_dataloaders(DataLoader(pairs(), batch_size=30), data="static")
    for _ in range(4):
        for (x, y), (z, _) in zip(one, other, strict=False):
            sgd.zero_grad()
            F.cross_entropy(net(x + 0.1 * z), y).backward()
            sgd.step()
        net.eval()
        with torch.no_grad(), worker.answer():
            losses = [F.cross_entropy(net(x), y).item() for x, y in test]
        net.train()
        worker.log(loss=sum(losses) / len(losses))


class Numbers(IterableDataset):
    def __iter__(self):
        for number in range(40):
            yield torch.full((5,), number / 40), number % 2


def train_on_a_stream(worker):
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    for _ in range(4):
        for x, y in worker.setup_dataloaders(stream):
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()


stream = DataLoader(Numbers(), batch_size=2)


def train_with_a_loading_process(worker):
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    loader = DataLoader(pairs(), batch_size=3, shuffle=True, num_workers=1)
    batches = worker.setup_dataloaders(loader)
    for _ in range(3):
        for x, y in batches:
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()


def train_with_a_sampler(worker):
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    sampler = WeightedRandomSampler([1.0, 2.0] * 30, 42, generator=torch.Generator())
    loader = worker.setup_dataloaders(DataLoader(pairs(), batch_size=3, sampler=sampler))
    for _ in range(4):
        for x, y in loader:
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()


def train_with_previews(worker):
    """Preview its own loader and another one before each epoch."""
    net = network()
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    loader = worker.setup_dataloaders(DataLoader(pairs(), batch_size=3, shuffle=True))
    other = worker.setup_dataloaders(DataLoader(pairs(), batch_size=30, shuffle=True))
    for _ in range(4):
        if worker.rank == 0:
            next(iter(loader)), next(iter(other))
        for x, y in loader:
            sgd.zero_grad()
            F.cross_entropy(net(x), y).backward()
            sgd.step()
    for x, y in other:
        sgd.zero_grad()
        F.cross_entropy(net(x), y).backward()
        sgd.step()
    worker.log(samples=worker._session.stepper.samples)


LOOPS = [train_with_accumulation, train_with_two_loaders, train_on_a_stream, train_with_a_sampler]


@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
@pytest.mark.parametrize("body", LOOPS)
def test_every_kind_of_loop_resumes_bit_for_bit(body, strategy, tmp_path):
    compare((body,), tmp_path, [9], strategy=strategy, workers=2, checkpoint_steps=2)


@pytest.mark.parametrize("at", [5, 12, 25])
@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_with_previews_every_batch_is_still_taken_once(strategy, at, tmp_path):
    train = Interruptible(train_with_previews)
    how = {"workers": 2, "strategy": strategy, "checkpoint_steps": 2}
    whole = train.run(tmp_path / "whole", **how)
    assert train.run(tmp_path / "broken", at, **how) is None
    again = train.run(tmp_path / "broken", **how, resume=True)
    assert again.resumed_at is not None
    assert (again.steps, again.samples) == (whole.steps, whole.samples)


def train_and_log_behind_the_loop(worker):
    net = nn.Linear(5, 2)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    loader = worker.setup_dataloaders(DataLoader(pairs(), batch_size=15, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            sgd.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            sgd.step()
        worker.log(loss=loss)


@pytest.mark.parametrize("strategy", ["allreduce", "cyclic", "gossip"])
def test_a_checkpoint_at_the_end_of_an_epoch_has_what_the_loop_left_behind(strategy, tmp_path):
    """Each worker has two batches an epoch; after the second none is left."""
    train = Interruptible(train_and_log_behind_the_loop)
    how = {"workers": 2, "strategy": strategy, "checkpoint_steps": 2, "cluster": "ethernet-1g"}
    whole, ends = train.run(tmp_path, **how), train.ends
    again = train.run(tmp_path, **how, resume=True)
    assert again.resumed_at == whole.checkpoint in (2, 4)
    assert again.samples == whole.samples == 120 and same_models(ends, train.ends)


def test_prefetched_batches_are_not_lost(tmp_path):
    body = (train_with_a_loading_process,)
    compare(body, tmp_path, [9], strategy="gossip", workers=2, checkpoint_steps=3)


def test_one_worker_alone_resumes(tmp_path):
    compare((), tmp_path, [9], strategy="gossip", workers=1)


def test_a_queue_outside_of_a_loop_is_refused(tmp_path):
    def train(worker):
        net = network()
        net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
        loader = worker.setup_dataloaders(DataLoader(pairs(), batch_size=3))
        for x, y in list(loader):
            F.cross_entropy(net(x), y).backward()
            sgd.step()

    with pytest.raises(pl.UsageError, match="inside the loop over a loader"):
        pl.simulate(train, workers=1, strategy="gossip", out=tmp_path, checkpoint_steps=1)


def test_what_is_logged_while_catching_up_is_not_recorded_again(tmp_path):
    again = compare((), tmp_path, [18], strategy="allreduce", workers=2)
    epochs = [m["epoch"] for m in again.metrics if m["rank"] == 0 and "epoch" in m]
    assert epochs == [0, 1, 2, 3]
    assert json.loads((tmp_path / "broken" / "metrics.jsonl").read_text().splitlines()[0])


def test_workers_with_unequal_data_make_no_checkpoint_after_one_has_finished(tmp_path):
    def train(worker):
        net = network()
        net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
        x, y = pairs()[:4]
        for _ in range(6 + 6 * worker.rank):
            F.cross_entropy(net(x), y).backward()
            sgd.step()

    for strategy in ("allreduce", "gossip", "cyclic", "ssp"):
        run = pl.simulate(
            train, workers=2, strategy=strategy, out=tmp_path / strategy, checkpoint_steps=4
        )
        assert run.steps == 18 and run.checkpoint == 4


# What is taken up --------------------------------------------------------------------------------


def broken(tmp_path, **how):
    how = {"workers": 2, "strategy": "allreduce", "seed": 1, "checkpoint_steps": 4, **how}
    train = Interruptible()
    assert train.run(tmp_path, 18, **how) is None
    return train, how


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path):
    train, how = broken(tmp_path)
    path = tmp_path / "checkpoints" / "step-000000016" / "rank1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"step-000000016 cannot be used: rank1.*an earlier one"):
        again = train.run(tmp_path, **how, resume=True)
    assert again.resumed_at == 12 and again.checkpoint == 40
    assert (tmp_path / "checkpoints" / "step-000000016.unusable" / "manifest.json").is_file()


def change_version(folders):
    for folder in folders:
        path = folder / "manifest.json"
        path.write_text(json.dumps(seal({**json.loads(path.read_text()), "version": 1})))


def lengthen_metrics(folders):
    for folder in folders:
        with (folder / "metrics.json").open("a") as file:
            file.write(" ")


def swap(folders):
    one, other = folders
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


def remove_manifests(folders):
    for folder in folders:
        (folder / "manifest.json").unlink()


SPOILS = {
    change_version: r"version \(1\) must be 2: another Paceline wrote it",
    lengthen_metrics: r"metrics.json has \d+ bytes, but was written with \d+",
    swap: r"manifest.json belongs to step-0000000\d\d: the folder must have this name",
    remove_manifests: r"step-000000016 cannot be used: .*manifest.json",
}


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_resume_that_can_use_no_checkpoint_is_refused_and_removes_nothing(spoil, tmp_path):
    train, how = broken(tmp_path)
    spoil([tmp_path / "checkpoints" / f"step-{step:09d}" for step in (12, 16)])
    before = tree(tmp_path)
    with pytest.raises(pl.UsageError, match=SPOILS[spoil]) as caught:
        train.run(tmp_path, **how, resume=True)
    if spoil is not remove_manifests:
        assert "step-000000012 cannot be used" in str(caught.value)
    assert tree(tmp_path) == before


def test_a_flipped_bit_in_latest_costs_no_checkpoint(tmp_path):
    """Here ``latest`` names step 0, before all checkpoints."""
    train, how = broken(tmp_path)
    (tmp_path / "checkpoints" / "latest").write_text("step-000000000\n")
    with pytest.warns(UserWarning, match="latest names 'step-000000000', which does not exist"):
        assert train.run(tmp_path, **how, resume=True).resumed_at == 16


def test_an_incomplete_checkpoint_does_not_block_a_run(tmp_path):
    half = tmp_path / "checkpoints" / "step-000000004"
    half.mkdir(parents=True)
    (half / "rank0.safetensors").write_text("half")
    run = Interruptible().run(tmp_path, workers=2, resume=True)
    assert run.resumed_at is None and not half.exists()


@pytest.mark.filterwarnings("default")  # as users have it: the command shows its warnings
def test_the_command_refuses_to_resume_from_nothing_and_treats_latest_as_a_hint(paceline, tmp_path):
    how = ["sim", "-w", 2, "--model", "mlp", "--steps", 10, "--checkpoint-steps", 4, "--json"]
    paceline(*how, "--out", "whole")
    for spoil in SPOILS:
        checkpoints = shutil.copytree("whole", tmp_path / spoil.__name__) / "checkpoints"
        spoil([checkpoints / "step-000000004", checkpoints / "step-000000008"])
        before = tree(checkpoints)
        done = paceline(*how, "--out", spoil.__name__, "--resume", code=2).err
        assert "can be used (nothing was removed): checkpoint" in done
        assert "step-000000008 cannot be used: " in done
        assert tree(checkpoints) == before
    (tmp_path / "whole" / "checkpoints" / "latest").write_text("step-000000000\n")
    done = paceline(*how, "--out", "whole", "--resume")
    assert "latest names 'step-000000000', which does not exist" in done.err
    assert '"resumed_at": 8' in done.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 3}, r"workers \(3\) must be 2"),
        ({"seed": 2}, r"seed \(2\) must be 1"),
        ({"strategy": "sasgd"}, r"strategy \(SASGD\(.*\) must be AllReduce\(\)"),
        ({"arguments": {"epochs": 3}}, r"arguments \({'epochs': 3}\) must be {}"),
        ({"cluster": "wan"}, r"cluster \(.*wan.*\) must be .*ethernet-10g"),
    ],
    ids=["workers", "seed", "strategy", "arguments", "cluster"],
)
def test_another_run_is_refused(change, message, tmp_path):
    train, how = broken(tmp_path)
    with pytest.raises(pl.UsageError, match=f"{message}.*as in the checkpoint"):
        train.run(tmp_path, **{**how, **change}, resume=True)
    assert train.run(tmp_path, **how, resume=True).resumed_at == 16


def test_checkpoints_are_not_overwritten_by_mistake(tmp_path, monkeypatch):
    train, how = broken(tmp_path)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    for steps in (4, None):
        with pytest.raises(pl.UsageError, match="of an earlier run: resume it with --resume"):
            train.run(tmp_path, **{**how, "checkpoint_steps": steps})
        with pytest.raises(pl.UsageError, match="of an earlier run"):
            train.run(".", **{**how, "checkpoint_steps": steps})
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"checkpoint_steps": 0}, r"checkpoint_steps \(0\) must be at least 1"),
        ({"checkpoint_minutes": 0}, r"checkpoint_minutes \(0\) must be above 0"),
        ({"checkpoint_minutes": math.inf}, r"checkpoint_minutes \(inf\) must be finite"),
        ({"keep": 10**400}, r"keep \(a number of about 400 digits\) must be at most"),
        ({"keep": 0}, r"keep \(0\) must be at least 1"),
        ({"checkpoint_steps": 1, "out": None}, r"out \(None\) must be a folder"),
    ],
    ids=["steps", "minutes", "never", "keep all", "keep", "out"],
)
def test_bad_options_are_refused(how, message, tmp_path):
    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(Interruptible(), **{"out": tmp_path, **how})


def test_a_method_whose_servers_cannot_be_called_is_refused(tmp_path):
    class Deaf(pl.Strategy):
        def roles(self, workers):
            return (WORKER,) * workers + (SERVER,)

        def step(self, x, g):
            pass

    with pytest.raises(pl.UsageError, match=r"has roles beside workers, and is no RoleStrategy"):
        pl.simulate(Interruptible(), strategy=Deaf(), out=tmp_path, checkpoint_steps=1)


def test_a_full_disk_ends_no_run_but_is_reported(tmp_path, monkeypatch):
    def fail(self, step, rank, time_s, content):
        saved = write(self, step, rank, time_s, content)
        late = step >= 12 and rank == 1
        return saved if not late else type(saved)(rank, step, time_s, error="No space left")

    write = Store.save_rank
    monkeypatch.setattr(Store, "save_rank", fail)
    how = {"workers": 2, "strategy": "allreduce", "checkpoint_steps": 4}
    with pytest.warns(UserWarning, match=r"step 12 could not be saved .*: No space left") as caught:
        run = Interruptible().run(tmp_path, **how)
    assert len(caught) == 1 and run.steps == 80
    assert (run.checkpoint, run.checkpoint_error) == (8, "No space left")
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["latest", "step-000000004", "step-000000008"]


def test_a_disk_without_room_for_two_is_refused_before_the_first_step(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("paceline.training.checkpointing.shutil.disk_usage", lambda path: usage)
    with pytest.raises(pl.UsageError, match=r"checkpoints in .* need .* and 100 B are free"):
        Interruptible().run(tmp_path, workers=2, checkpoint_steps=4)


# By hand -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 10, 13])
@pytest.mark.parametrize("data", ["shard", "static"])
def test_a_worker_that_saves_in_the_middle_of_an_epoch_resumes_there(tmp_path, data, at):
    ends = {}

    def train(worker, load=False, save=False):
        net = network()
        net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5))
        schedule = torch.optim.lr_scheduler.StepLR(sgd, 5, gamma=0.5)
        worker.track(schedule=schedule)
        loader = DataLoader(pairs(), batch_size=3, shuffle=True)
        batches = worker.setup_dataloaders(loader, data=data)
        if load:
            worker.load(tmp_path)
        for _ in range(batches.epoch, 2):
            for x, y in batches:
                sgd.zero_grad()
                F.cross_entropy(net(x), y).backward()
                sgd.step()
                schedule.step()
                if save and worker.steps == at:
                    worker.save(tmp_path)
                    return
        ends[worker.rank] = {k: v.clone() for k, v in net.state_dict().items()}

    how = {"workers": 2, "strategy": "sasgd(interval=4)", "cluster": "ideal"}
    pl.simulate(train, **how)
    whole = dict(ends)
    pl.simulate(train, arguments={"save": True}, **how)
    pl.simulate(train, arguments={"load": True}, **how)
    assert same_models(whole, ends)


def test_only_what_has_a_state_can_be_tracked():
    def train(worker):
        worker.track(schedule=object())

    with pytest.raises(pl.UsageError, match=r"schedule \(object\) must have state_dict\(\)"):
        pl.simulate(train, workers=1)


# Weights -----------------------------------------------------------------------------------------


def test_the_weights_of_a_checkpoint_load_into_plain_pytorch(tmp_path):
    broken(tmp_path)
    folder = tmp_path / "checkpoints" / "step-000000016"
    net = network()
    before = net[0].weight.clone()
    net.load_state_dict(read_weights(folder))
    assert not torch.equal(net[0].weight, before)


def test_the_weights_of_a_checkpoint_without_the_first_rank_load_too(tmp_path):
    kill = pl.kill(rank=0).at(step=5)
    pl.simulate(
        train, workers=3, strategy="gossip", faults=[kill], out=tmp_path, checkpoint_steps=6
    )
    folder = tmp_path / "checkpoints" / (tmp_path / "checkpoints" / "latest").read_text().strip()
    assert not (folder / "rank0.safetensors").exists()
    network().load_state_dict(read_weights(folder))
    with (folder / "rank1.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    with pytest.raises(pl.UsageError, match="cannot be used"):
        read_weights(folder)


def loaded_from(path):
    ends = []

    def train(worker):
        net = network()
        net, _ = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        worker.load_weights(path)
        ends.append({k: v.clone() for k, v in net.state_dict().items()})

    pl.simulate(train, workers=1)
    return ends[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: net,
        nn.DataParallel,
        torch.compile,
        lambda net: torch.compile(nn.DataParallel(net)),
        lambda net: nn.DataParallel(torch.compile(net)),
    ],
    ids=["plain", "module", "compiled", "compiled-module", "module-compiled"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch.compile itself
def test_weights_of_wrapped_modules_load_back(wrap, tmp_path):
    net = network()
    with torch.no_grad():
        net[0].weight.fill_(7)
    save_file({k: v.clone() for k, v in wrap(net).state_dict().items()}, tmp_path / "w.safetensors")
    back, kept = loaded_from(tmp_path / "w.safetensors"), net.cpu().state_dict()  # from a GPU
    assert all(torch.equal(back[name], value) for name, value in kept.items())


def test_weights_that_do_not_fit_are_refused(tmp_path):
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(pl.UsageError, match=re.escape("must fit the model")):
        loaded_from(tmp_path / "w.safetensors")
    with pytest.raises(pl.UsageError, match="must be a safetensors file, or the folder"):
        loaded_from(tmp_path / "nothing.safetensors")


# After losses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "victim"),
    [
        ("gossip", 0),
        ("gossip(mode=push)", 1),
        ("adpsgd", 0),
        ("downpour", 1),
        ("easgd", 0),
        ("cyclic", 0),
        ("cyclic(shards=2)", 1),
    ],
)
def test_a_run_that_has_lost_a_worker_goes_on_saving_and_the_worker_joins_when_it_is_resumed(
    strategy, victim, tmp_path
):
    how = {"workers": 3, "cluster": "mixed-lab", "strategy": strategy, "checkpoint_steps": 4}
    how |= {"out": tmp_path, "seed": 4}
    first = pl.simulate(train, faults=[pl.kill(rank=victim).at(step=6)], **how)
    saved = Store(tmp_path / "checkpoints").newest()
    assert first.lost_workers == 1 and first.checkpoint == saved.step
    assert victim not in saved.ranks and {0, 1, 2} - {victim} <= set(saved.ranks)
    again = pl.simulate(train, resume=True, **how)
    assert again.resumed_at == saved.step
    assert (again.lost_workers, again.joined_workers) == (1, 1)  # the loss was before


@pytest.mark.parametrize("strategy", ["gossip", "cyclic"])
def test_a_restarted_worker_is_saved_with_the_others(strategy, tmp_path):
    how = {"workers": 3, "strategy": strategy, "checkpoint_steps": 2, "max_restarts": 1}
    how |= {"cluster": pl.Cluster(compute=Compute(step_s=0.3)), "out": tmp_path}
    run = pl.simulate(train, faults=[pl.kill(rank=0).at(step=2)], **how)
    assert (run.lost_workers, run.joined_workers) == (1, 1)
    assert {0, 1, 2} <= set(Store(tmp_path / "checkpoints").newest().ranks)
    again = pl.simulate(train, resume=True, **how)
    assert again.resumed_at == run.checkpoint
