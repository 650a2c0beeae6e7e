"""Lightning's Trainer and Fabric on workers: data, validation, checkpoints, decisions, refusals."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
import torch
import trained
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader
from trained import new_module, quiet

import paceline as pl
from paceline.integrations.fabric import PacelineStrategy as FabricStrategy
from paceline.integrations.lightning import PacelineStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def simulated(train, strategy="gossip", workers=3, **options):
    """What ``train`` returned on each rank that came to its end, and the run's result."""
    returned = {}

    def act(worker):
        returned[worker.rank] = train(worker)

    return returned, pl.simulate(act, workers=workers, strategy=strategy, **options)


def fit(module=None, loaders=None, strategy=None, **options):
    """Fit a module; returns it and the trainer."""
    module = module or new_module(lightning)
    trainer = lightning.Trainer(
        **quiet() | {"max_epochs": 2} | options, strategy=strategy or PacelineStrategy()
    )
    trainer.fit(module, *([trained.loader()] if loaders is None else loaders))
    return module, trainer


# Data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "downpour", "sasgd(interval=3)"])
def test_each_sample_is_trained_on_once_an_epoch(strategy):
    seen = {}

    def note(self, batch, batch_idx):
        seen.setdefault(self.current_epoch, []).extend(batch[0].tolist())

    def train(worker):
        module = new_module(lightning, on_train_batch_start=note)
        fit(module, [DataLoader(Numbers(), batch_size=7, shuffle=True)], max_epochs=3)
        return module

    simulated(train, strategy, cluster="mixed-lab")
    assert {epoch: sorted(numbers) for epoch, numbers in seen.items()} == {
        epoch: list(range(100)) for epoch in range(3)
    }


class Numbers(torch.utils.data.Dataset):
    """Numbers, and what a module of this file takes for an image of them."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index, 0


@pytest.fixture(autouse=True)
def numbers_are_images(monkeypatch):
    """A net that takes numbers, too."""
    plain = trained.new_net

    def new_net():
        net = plain()
        net.register_forward_pre_hook(
            lambda _, args: args if args[0].dim() > 1 else (torch.ones(len(args[0]), 784),)
        )
        return net

    monkeypatch.setattr(trained, "new_net", new_net)


def test_the_last_batches_of_an_epoch_are_stepped_and_validated():
    """With 2 batches a step, a worker's odd last batch makes a step of its own."""
    validated = []

    def train(worker):
        module = new_module(
            lightning,
            validation_step=lambda self, batch: None,
            on_validation_end=lambda self: validated.append((worker.rank, self.current_epoch)),
        )
        _, trainer = fit(
            module,
            [trained.loader(), trained.loader(32)],
            accumulate_grad_batches=2,
            num_sanity_val_steps=0,
        )
        return trainer.global_step, len(module.losses), [epoch for epoch, _ in module.batches]

    returned, result = simulated(train, cluster="mixed-lab")
    for steps, _, epochs in returned.values():
        assert steps == sum(-(-epochs.count(epoch) // 2) for epoch in (0, 1))
    assert sum(count for _, count, _ in returned.values()) == 40
    assert result.steps == sum(steps for steps, _, _ in returned.values())
    assert sorted(validated) == [(rank, epoch) for rank in range(3) for epoch in (0, 1)]


def test_a_schedule_by_epochs_is_the_same_for_one_that_joins_late():
    def configure(self):
        optimizer = trained.new_optimizer(self)
        return [optimizer], [StepLR(optimizer, step_size=1, gamma=0.5)]

    def train(worker):
        module, trainer = fit(new_module(lightning, configure_optimizers=configure), max_epochs=4)
        return trainer.optimizers[0].param_groups[0]["lr"], [epoch for epoch, _ in module.batches]

    cluster = pl.Cluster(compute=pl.Cluster().compute.__class__(step_s=0.1))
    faults = [pl.join(rank=2).at(seconds=2.0)]
    returned, result = simulated(train, cluster=cluster, faults=faults)
    assert result.joined_workers == 1
    assert {rate for rate, _ in returned.values()} == {0.05 / 16}
    assert returned[2][1] and min(returned[2][1]) > 0, "it came after the first epoch"


# Validation, checkpoints, decisions --------------------------------------------------------------


def test_a_checkpoint_holds_the_answer_and_the_leader_alone_writes():
    """The answer of easgd is its center, which no worker's own model equals."""
    answers = {}

    def train(worker):
        def note(self):
            with worker.answer():
                answers[worker.rank] = [value.clone() for value in self.state_dict().values()]

        module = new_module(lightning, on_train_epoch_end=note)
        saver = ModelCheckpoint(dirpath="saved", save_weights_only=False)
        fit(module, callbacks=[saver], enable_checkpointing=True, logger=CSVLogger("logs"))
        return [value.clone() for value in module.state_dict().values()]

    returned, _ = simulated(train, "easgd(interval=2)")
    (path,) = Path("saved").iterdir()
    assert len(list(Path("logs").rglob("metrics.csv"))) <= 1
    saved = [*torch.load(path, weights_only=True)["state_dict"].values()]
    assert all(torch.equal(one, other) for one, other in zip(saved, answers[0], strict=True))
    assert set(returned) == {0, 1, 2}


def test_who_leads_is_global_zero_also_after_a_loss():
    seen = {}

    def note(self, *args):
        seen.setdefault(self.trainer.global_rank, []).append(self.trainer.is_global_zero)

    def train(worker):
        saver = ModelCheckpoint(dirpath="saved")
        fit(
            new_module(lightning, on_train_batch_start=note),
            callbacks=[saver],
            enable_checkpointing=True,
        )

    simulated(train, faults=[pl.kill(rank=0).at(step=3)])
    assert all(seen[0]) and not any(seen[2])
    assert seen[1][0] is False and seen[1][-1] is True
    assert len([*Path("saved").iterdir()]) == 1, "written by the worker that leads now"


@pytest.mark.parametrize("strategy", ["gossip", "allreduce"])
def test_a_validation_sees_all_data_with_the_answer(strategy):
    losses = {}

    def validate(self, batch):
        self.log("size", float(len(batch[0])), reduce_fx="sum", sync_dist=False)
        self.log("weight", self.net[1].weight.double().sum(), sync_dist=True)

    def train(worker):
        _, trainer = fit(
            new_module(lightning, validation_step=validate), [trained.loader(), trained.loader(96)]
        )
        losses[worker.rank] = trainer.callback_metrics["weight"].item()
        return trainer.callback_metrics["size"].item()

    returned, _ = simulated(train, strategy)
    assert set(returned.values()) == {96.0}
    assert strategy == "gossip" or len(set(losses.values())) == 1


@pytest.mark.parametrize("strategy", ["gossip", "allreduce"])
def test_early_stopping_ends_all_workers(strategy):
    """The metric of the worker that leads gets no better; all come to their end by that."""

    def validate(self, batch):
        self.log("val", 1.0)

    def train(worker):
        _, trainer = fit(
            new_module(lightning, validation_step=validate),
            [trained.loader(), trained.loader(32)],
            callbacks=[EarlyStopping("val", patience=1)],
            max_epochs=50,
        )
        return trainer.current_epoch

    returned, result = simulated(train, strategy)
    assert max(returned.values()) <= 4 and result.steps < 200
    if strategy == "allreduce":
        assert len(set(returned.values())) == 1


def test_workers_of_a_lockstep_method_exchange():
    def train(worker):
        fit(strategy=PacelineStrategy("allreduce"), max_epochs=1)
        return True

    def note(self):
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        got["mean"] = strategy.reduce(torch.tensor(float(rank)))
        got["rows"] = strategy.all_gather(torch.tensor([rank, 1])).tolist()
        got["text"] = strategy.broadcast({"from": rank}, src=2)
        got["any"] = strategy.reduce_boolean_decision(rank == 1, all=False)
        got["all"] = strategy.reduce_boolean_decision(rank == 1)
        self.log("mean", float(rank), sync_dist=True)
        self.log("most", float(rank), sync_dist=True, reduce_fx="max")

    got = {}

    def exchanging(worker):
        _, trainer = fit(new_module(lightning, on_train_epoch_end=note), max_epochs=1)
        return [trainer.callback_metrics[name].item() for name in ("mean", "most")]

    returned, _ = simulated(exchanging, "allreduce")
    assert list(returned.values()) == [[1.0, 2.0]] * 3
    assert got == {
        "mean": torch.tensor(1.0),
        "rows": [[0, 1], [1, 1], [2, 1]],
        "text": {"from": 2},
        "any": True,
        "all": False,
    }
    assert simulated(train, "allreduce")[0] == dict.fromkeys(range(3), True)


def test_the_strategy_is_registered_by_name():
    def train(worker):
        fit(strategy="paceline", max_epochs=1)
        fabric = lightning.Fabric(accelerator="cpu", strategy="paceline")
        return fabric.global_rank, fabric.world_size, fabric.is_global_zero

    returned, _ = simulated(train)
    assert returned == {rank: (rank, 3, rank == 0) for rank in range(3)}


# Refusals ----------------------------------------------------------------------------------------


def two_optimizers(self):
    return [trained.new_optimizer(self), trained.new_optimizer(self)]


def one_cycle(self):
    optimizer = trained.new_optimizer(self)
    steps = self.trainer.estimated_stepping_batches
    return [optimizer], [OneCycleLR(optimizer, 0.1, total_steps=steps)]


def log_everywhere(self, *args):
    self.log("mean", 1.0, sync_dist=True)


REFUSED = {
    r"configure_optimizers \(2 optimizers\) must return one": (
        {"configure_optimizers": two_optimizers, "automatic_optimization": False},
        {},
    ),
    "estimated_stepping_batches needs the number": ({"configure_optimizers": one_cycle}, {}),
    "sync_dist=True in training_step waits": ({"on_train_batch_end": log_everywhere}, {}),
    "train_dataloaders must be one loader": (
        {"train_dataloader": lambda self: [trained.loader(), trained.loader()]},
        {"loaders": []},
    ),
    "sync_batchnorm must not be given": ({}, {"sync_batchnorm": True}),
    "reload_dataloaders_every_n_epochs must not": ({}, {"reload_dataloaders_every_n_epochs": 1}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message):
    hooks, options = REFUSED[message]
    with pytest.raises(pl.UsageError, match=message):
        simulated(lambda worker: fit(new_module(lightning, **hooks), **options))


def test_a_lockstep_method_knows_its_steps():
    def train(worker):
        _, trainer = fit(new_module(lightning, configure_optimizers=one_cycle))
        return trainer.global_step

    returned, _ = simulated(train, "allreduce", workers=2)
    assert returned == {0: 20, 1: 20}


@pytest.mark.parametrize("make", [PacelineStrategy, FabricStrategy])
def test_it_needs_a_run_with_this_method_and_without_checkpoints(make, folder):
    with pytest.raises(pl.UsageError, match="there is no run yet"):
        make()
    with pytest.raises(pl.UsageError, match=r"strategy \(sasgd\) must be that of the run, gossip"):
        simulated(lambda worker: make("sasgd"))
    with pytest.raises(pl.UsageError, match=r"checkpoint_steps, .* must not be used"):
        simulated(lambda worker: make(), "allreduce", out=folder / "run", checkpoint_steps=5)


def test_fabric_saves_the_answer_and_refuses_to_wait():
    def train(worker):
        fabric = lightning.Fabric(accelerator="cpu", strategy=FabricStrategy())
        net = trained.new_net()
        net, optimizer = fabric.setup(net, trained.new_optimizer(net))
        for x, y in fabric.setup_dataloaders(trained.loader()):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.cross_entropy(net(x), y))
            optimizer.step()
        fabric.barrier()
        fabric.save("fabric.ckpt", {"net": net})
        if worker.leads:
            with worker.answer():
                answers.extend(value.clone() for value in net.state_dict().values())
        with pytest.raises(pl.UsageError, match=r"fabric.all_reduce waits for all workers"):
            fabric.all_reduce(torch.ones(1))

    answers = []
    simulated(train, "easgd(interval=2)")
    saved = torch.load("fabric.ckpt", weights_only=True)["net"]
    assert all(torch.equal(a, b) for a, b in zip(saved.values(), answers, strict=True))
