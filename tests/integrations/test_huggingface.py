"""Hugging Face's Trainer and Accelerate on workers: data, schedule, checkpoints, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import trained
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, TrainerCallback

import paceline as pl
from paceline.integrations.accelerate import Accelerator
from paceline.integrations.huggingface import Trainer
from paceline.sim.cluster import Compute

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


class Counted(trained.Tokens):
    """Notes which samples are read to train on."""

    def __init__(self, count, seen):
        super().__init__(count)
        self.seen = seen

    def __getitem__(self, index):
        self.seen.append(index)
        return super().__getitem__(index)


def train_bert(data=None, callbacks=(), **arguments):
    trainer = trained.noting_losses(Trainer)(
        trained.new_bert(),
        trained.bert_arguments("out", **arguments),
        train_dataset=data or trained.Tokens(96),
        eval_dataset=trained.Tokens(32),
        callbacks=[*callbacks],
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("strategy", ["gossip", "allreduce"])
def test_each_sample_is_trained_on_once_an_epoch(strategy):
    seen = []
    data = Counted(100, seen)
    returned, result = simulated(
        lambda worker: train_bert(data, per_device_train_batch_size=7).state.global_step,
        strategy,
        cluster="mixed-lab",
    )
    assert sorted(seen) == sorted([*range(100)] * 2)
    assert sum(returned.values()) == result.steps


def test_the_schedule_ends_with_the_data_however_fast_a_worker_is():
    def train(worker):
        trainer = train_bert(per_device_train_batch_size=4, num_train_epochs=4)
        return trainer.lr_scheduler.get_last_lr()[0], trainer.state.global_step

    returned, _ = simulated(train, cluster="mixed-lab")
    assert len({steps for _, steps in returned.values()}) > 1
    assert max(rate for rate, _ in returned.values()) < 0.1 * 5e-3


def test_max_steps_are_those_of_each_worker():
    returned, _ = simulated(lambda worker: train_bert(max_steps=5).state.global_step)
    assert set(returned.values()) == {5}


def test_one_that_joins_late_begins_with_the_epoch_that_is_under_way():
    cluster = pl.Cluster(compute=Compute(step_s=0.1))
    returned, result = simulated(
        lambda worker: len(train_bert(num_train_epochs=6, per_device_train_batch_size=8).losses),
        cluster=cluster,
        faults=[pl.join(rank=2).at(seconds=1.0)],
    )
    assert result.joined_workers == 1 and returned[2] > 0
    assert sum(returned.values()) == 6 * 12


def test_the_worker_that_leads_saves_the_answer():
    """Each number is saved by itself; here all parameters lie in one vector."""
    answers, led = {}, {}

    class Note(TrainerCallback):
        def __init__(self, worker):
            self.worker = worker

        def on_epoch_end(self, args, state, control, model=None, **kwargs):
            led[self.worker.rank] = state.is_world_process_zero
            with self.worker.answer():
                answers[self.worker.rank] = {
                    name: value.clone() for name, value in model.state_dict().items()
                }

    def train(worker):
        train_bert(callbacks=[Note(worker)], save_strategy="epoch", num_train_epochs=1)

    simulated(train, "easgd(interval=2)")
    (path,) = Path("out").glob("checkpoint-*")
    saved = load_file(path / "model.safetensors")
    assert led == {0: True, 1: False, 2: False}
    assert set(saved) == set(answers[0])
    assert all(torch.equal(value, answers[0][name]) for name, value in saved.items())
    assert json.loads((path / "trainer_state.json").read_text())["global_step"] > 0


@pytest.mark.parametrize("strategy", ["gossip", "allreduce"])
def test_early_stopping_ends_all_workers(strategy):
    def train(worker):
        return train_bert(
            callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
            eval_strategy="epoch",
            save_strategy="no",
            metric_for_best_model="eval_runtime",
            greater_is_better=True,
            num_train_epochs=50,
        ).state.global_step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", constant_evaluation)
        returned, result = simulated(train, strategy)
    assert result.steps < 40
    if strategy == "allreduce":
        assert len(set(returned.values())) == 1


def constant_evaluation(self, *args, **kwargs):
    metrics = {"eval_runtime": 1.0}
    self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
    return metrics


def test_what_cannot_be_is_refused():
    with pytest.raises(pl.UsageError, match="there is no run yet"):
        train_bert()
    for arguments, message in (
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"fp16": True}, "fp16"),
    ):
        with pytest.raises((pl.UsageError, pl.WorkerFailed), match=message):
            simulated(lambda worker, more=arguments: train_bert(**more))

    def resume(worker):
        trained_here = Trainer(
            trained.new_bert(), trained.bert_arguments("out"), train_dataset=trained.Tokens(8)
        )
        trained_here.train(resume_from_checkpoint="out")

    with pytest.raises(pl.UsageError, match=r"resume_from_checkpoint \(out\) must not be given"):
        simulated(resume)


# Accelerate --------------------------------------------------------------------------------------


def accelerated(worker, steps=2, schedule=None, **settings):
    """Train an epoch with accumulation; returns the accelerator, the net and what was counted."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **settings)
    net = trained.new_net()
    optimizer = trained.new_optimizer(net)
    rates = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    net, optimizer, batches, rates = accelerator.prepare(
        net, optimizer, trained.loader(32 * 13), rates
    )
    count = 0
    for x, y in batches:
        with accelerator.accumulate(net):
            accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        count += 1
    return accelerator, net, count, rates


def test_batches_are_accumulated_to_the_end_of_each_workers_epoch():
    def train(worker):
        *_, count, _ = accelerated(worker)
        return count, worker.steps

    returned, result = simulated(train, cluster="mixed-lab")
    assert sum(count for count, _ in returned.values()) == 13
    assert all(steps == -(-count // 2) for count, steps in returned.values())
    assert result.samples == 32 * 13


def test_a_schedule_makes_a_step_for_each_worker():
    def train(worker):
        *_, rates = accelerated(worker, steps=1)
        return rates.scheduler.last_epoch, worker.steps

    returned, _ = simulated(train, "allreduce")
    assert all(made == 3 * steps > 0 for made, steps in returned.values())


def test_the_main_process_leads_and_saves_the_answer(capsys):
    def train(worker):
        accelerator, net, *_ = accelerated(worker)
        accelerator.save_model(net, "saved")
        accelerator.on_main_process(lambda: print("decorated"))()
        accelerator.print("once")
        answer = {}
        with worker.answer():
            answer.update({name: value.clone() for name, value in net.state_dict().items()})
        return accelerator.is_main_process, accelerator.process_index, answer

    returned, _ = simulated(train, "easgd(interval=2)")
    assert [returned[rank][:2] for rank in range(3)] == [(True, 0), (False, 1), (False, 2)]
    saved = load_file("saved/model.safetensors")
    assert all(torch.equal(value, returned[0][2][name]) for name, value in saved.items())
    assert len(saved) == 4 and capsys.readouterr().out == "decorated\nonce\n"


def test_rows_of_all_workers_are_gathered_where_they_wait():
    def train(worker):
        accelerator, *_ = accelerated(worker)
        own = torch.arange(worker.rank + 1.0) + 10 * worker.rank
        gathered = accelerator.gather_for_metrics({"rows": own})["rows"].tolist()
        return gathered, accelerator.reduce(torch.tensor(1.0)).item()

    returned, _ = simulated(train, "allreduce")
    assert set(map(str, returned.values())) == {
        str(([0, 10, 11, 20, 21, 22], 3.0)).replace(
            "[0, 10, 11, 20, 21, 22]", "[0.0, 10.0, 11.0, 20.0, 21.0, 22.0]"
        )
    }


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda it: it.gather(torch.ones(1)), "gather waits for all workers"),
        (lambda it: it.reduce(torch.ones(1)), "accelerator.reduce waits for all workers"),
        (lambda it: it.save_state("folder"), "save_state must not be called"),
        (lambda it: it.load_state("folder"), "load_state must not be called"),
        (lambda it: it.clip_grad_norm_([], 1.0, 1), r"norm_type \(1\) must be 2"),
        (lambda it: it.prepare(trained.new_optimizer(trained.new_net())), "prepare must get one"),
    ],
)
def test_accelerate_refuses_with_a_reason(act, message):
    with pytest.raises(pl.UsageError, match=message):
        simulated(lambda worker: act(Accelerator(cpu=True)))
