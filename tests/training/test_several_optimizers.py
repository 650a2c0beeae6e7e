"""Several models and optimizers in one run: each step is one of the method, for one of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.resuming import Interruptible, same_models
from support.several import Pair, assert_close, normed_and_adamw, split
from support.training import Problem, beat, flat
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.strategies import STRATEGIES

# A GAN -------------------------------------------------------------------------------------------


def small(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)).double()


def train_gan(setup: Any, batches: Any, size: int = 1) -> tuple[nn.Module, nn.Module]:
    """As DCGAN does it: the backward of the generator fills the discriminator's gradients, too."""
    g, d = small(3), small(4)
    (g, d), (g_opt, d_opt) = setup(
        (g, d), (Adam(g.parameters(), lr=0.02), Adam(d.parameters(), lr=0.03))
    )
    for real in batches:
        d.zero_grad()
        fake = g(real.flip(1))
        ones, zeros = torch.ones_like(real), torch.zeros_like(real)
        binary_cross_entropy_with_logits(d(real), ones).backward()
        binary_cross_entropy_with_logits(d(fake.detach()), zeros).backward()
        d_opt.step()
        g.zero_grad()
        binary_cross_entropy_with_logits(d(fake), ones).backward()
        g_opt.step()
    return g, d


REAL = torch.randn(24, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def run_gan(strategy: str, workers: int, **how: Any) -> tuple[dict[int, Tensor], pl.Result]:
    ends = {}

    def train(worker):
        data = DataLoader(TensorDataset(REAL), batch_size=6 // workers)
        loader = worker.setup_dataloaders(data)
        g, d = train_gan(worker.setup, (real for (real,) in loader))
        with worker.answer(g, d), worker.answer(d):
            pass
        worker.finish()
        ends[worker.rank] = torch.cat([flat(g), flat(d)])

    how.setdefault("cluster", beat())
    result = pl.simulate(train, workers=workers, strategy=strategy, **how)
    return ends, result


@pytest.mark.parametrize(("strategy", "workers"), [("allreduce", 3), ("layered", 3), ("gossip", 1)])
def test_a_gan_in_lockstep_is_one_process_with_the_large_batch(strategy, workers):
    plain = train_gan(lambda models, optimizers: (models, optimizers), REAL.split(6))
    ends, _ = run_gan(strategy, workers)
    assert_close(ends[0], torch.cat([*map(flat, plain)]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gan_trains_with_every_method(strategy):
    ends, result = run_gan(strategy, 3)
    assert all(torch.equal(end, ends[0]) and end.isfinite().all() for end in ends.values())
    assert result.samples == len(REAL)


def test_a_gan_leaves_both_models_under_their_numbers(tmp_path):
    from safetensors.torch import load_file

    ends, _ = run_gan("easgd", 3, out=tmp_path)
    both = nn.ModuleList([small(3), small(4)])
    both.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(flat(both), ends[0])


# Time and weights --------------------------------------------------------------------------------


def test_one_backward_is_charged_once():
    cluster = beat(1.0)
    _, pair = Pair(Problem(seed=5, steps=4)).run("allreduce", 2, cluster=cluster)
    assert pair.virtual_seconds == pytest.approx(4, rel=1e-3)
    _, gan = run_gan("allreduce", 3, cluster=cluster)  # two backwards for each batch
    assert gan.virtual_seconds == pytest.approx(2 * 4, rel=1e-3)


# State -------------------------------------------------------------------------------------------


def train_with_a_loader(worker, data=None):
    net = Problem(seed=6, dtype=torch.float32).model()
    net, optimizers = worker.setup(net, [*normed_and_adamw(net)])
    pairs = TensorDataset(*Problem(seed=6, batch=48, dtype=torch.float32).batch_of(0, 0))
    loader = worker.setup_dataloaders(DataLoader(pairs, batch_size=3, shuffle=True))
    for _ in range(3):
        for x, y in loader:
            net.zero_grad()
            mse_loss(net(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("every", [4, 5])
@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "layered", "sasgd(interval=3)"])
def test_a_run_resumes_bit_for_bit(strategy, every, tmp_path):
    """There are two steps to a batch, and checkpoints only between batches."""
    train = Interruptible(train_with_a_loader)
    how = {"workers": 2, "strategy": strategy, "checkpoint_steps": every, "cluster": "ethernet-1g"}
    whole, ends = train.run(tmp_path / "whole", **how), train.ends
    assert train.run(tmp_path / "broken", 18, **how) is None
    again = train.run(tmp_path / "broken", **how, resume=True)
    assert again.resumed_at == {4: 16, 5: 16}[every] and again.steps == whole.steps
    assert same_models(train.ends, ends)


@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "gossip"])
def test_a_checkpoint_between_two_steps_holds_the_gradient_of_the_second(strategy, tmp_path):
    """A loop without a loader makes checkpoints after a step, of whichever optimizer."""
    problem, ends, stops = Problem(seed=13), {}, []

    def train(worker):
        net = problem.model()
        net, optimizers = worker.setup(net, normed_and_adamw(net))
        for step in range(problem.steps):
            net.zero_grad()
            problem.loss(net, worker.rank, step).backward()
            for optimizer in optimizers:
                if stops and worker.steps == stops[0] and not worker.catching_up:
                    raise ValueError
                optimizer.step()
        worker.finish()
        ends.setdefault(worker.rank, []).append(flat(net))

    how = {"workers": 2, "strategy": strategy, "checkpoint_steps": 5, "cluster": "ethernet-1g"}
    pl.simulate(train, out=tmp_path / "whole", **how)
    stops.append(8)
    with pytest.raises(pl.WorkerFailed):
        pl.simulate(train, out=tmp_path / "run", **how)
    stops.clear()
    assert pl.simulate(train, out=tmp_path / "run", **how, resume=True).resumed_at == 5
    assert all(torch.equal(*both) for both in ends.values())


def test_a_run_continues_after_save_and_load(tmp_path):
    problem, ends = Problem(seed=14), {}

    def train(worker, part):
        net = problem.model()
        net, optimizers = worker.setup(net, normed_and_adamw(net))
        if part == "second":
            worker.load(tmp_path)
        for step in {"whole": range(6), "first": range(3), "second": range(3, 6)}[part]:
            net.zero_grad()
            problem.loss(net, worker.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        if part == "first":
            return worker.save(tmp_path)
        worker.finish()
        ends[part, worker.rank] = flat(net)

    for part in ("whole", "first", "second"):
        pl.simulate(train, workers=2, strategy="allreduce", arguments={"part": part})
    assert torch.equal(ends["whole", 0], ends["second", 0])


def test_each_optimizer_has_its_own_groups_state_and_scale():
    def train(worker):
        net = Problem(seed=3).model()
        inner = normed_and_adamw(net)
        net, (first, second) = worker.setup(net, inner)
        assert first.param_groups is inner[0].param_groups and second.state is inner[1].state
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        schedule = torch.optim.lr_scheduler.StepLR(second, 1, gamma=0.5)
        scaler.scale(Problem(seed=3).loss(net, worker.rank, 0)).backward()
        plain = [p.grad.clone() for p in split(net)[1]]
        scaler.unscale_(first)
        scaler.step(first)
        assert all(map(torch.equal, plain, [p.grad for p in split(net)[1]]))
        scaler.step(second)
        scaler.update()
        schedule.step()
        assert (first.param_groups[0]["lr"], second.param_groups[0]["lr"]) == (0.02, 0.01)
        assert {*second.state_dict()["state"]} == {*range(len(split(net)[1]))}
        first.zero_grad()
        assert all((p.grad is None) == (p.dim() == 2) for p in net.parameters())
        copied = copy.deepcopy(second.state_dict())
        second.load_state_dict(copied)
        assert second.param_groups is inner[1].param_groups

    pl.simulate(train, workers=2, strategy="allreduce")


def test_clipping_is_of_the_next_step_and_its_parameters():
    moved = {}

    def train(worker):
        net = Problem(seed=3).model()
        matrices, others = split(net)
        net, (first, second) = worker.setup(net, [SGD(matrices, lr=1.0), SGD(others, lr=1.0)])
        (1000 * Problem(seed=3).loss(net, worker.rank, 0)).backward()
        former = [p.detach().clone() for p in (*matrices, *others)]
        worker.clip_gradients(0.5)
        first.step()
        second.step()
        worker.finish()
        moves = [p.detach() - x for p, x in zip((*matrices, *others), former, strict=True)]
        norms = [torch.stack([m.norm() for m in part]).norm() for part in (moves[:2], moves[2:])]
        moved[worker.rank] = [float(norm) for norm in norms]

    pl.simulate(train, workers=2, strategy="allreduce")
    assert moved[0][0] == pytest.approx(0.5, rel=1e-5) and moved[0][1] > 100


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "downpour", "sasgd(interval=1)"])
def test_gradients_of_very_different_sizes_are_all_good(strategy):
    """Those of one optimizer are a hundred thousand times those of the other."""

    def train(worker):
        net = Problem(seed=3).model()
        matrices, others = split(net)
        for p in matrices:
            p.register_hook(lambda grad: grad * 1e5)
        optimizers = worker.setup(net, [SGD(matrices, lr=1e-7), SGD(others, lr=1e-2)])[1]
        for step in range(30):
            net.zero_grad()
            Problem(seed=3).loss(net, worker.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()

    assert pl.simulate(train, workers=2, strategy=strategy, cluster=beat()).dropped_updates == 0


# What is refused ---------------------------------------------------------------------------------


def again(worker, net):
    worker.setup(net, SGD(net.parameters(), lr=0.1))
    worker.setup(net, SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (again, r"must be called once, .* \(g, d\), \(g_opt, d_opt\) = worker.setup\(\(g, d\),"),
        (
            lambda w, net: w.setup(net, [SGD(net.parameters(), lr=1.0), Adam(net.parameters())]),
            "parameter 0.weight must be in one optimizer only",
        ),
        (lambda w, net: w.setup(net, []), r"optimizer \(nothing\) must be a torch Optimizer, or a"),
        (lambda w, net: w.setup([net, 1], SGD(net.parameters())), r"\(Sequential, int\) must be"),
        (
            lambda w, net: w.setup(
                net, [SGD(net[0].parameters()), SGD(net[2].requires_grad_(False).parameters())]
            ),
            "optimizer 1 has no parameter that requires a gradient",
        ),
        (
            lambda w, net: (
                w.setup([net, nn.BatchNorm1d(2)], SGD(net.parameters())),
                w.recalibrate([torch.ones(2, 2)]),
            ),
            "needs to be told which model",
        ),
    ],
)
def test_misuse_is_refused_with_a_message(use, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(lambda worker: use(worker, small(3)), workers=2)


def test_gradients_of_a_gan_are_computed_alone_and_say_why():
    ends, result = run_gan("allreduce", 3, batched="auto")
    assert result.batched["why_not"] == "worker.setup was given several models"
    assert torch.equal(ends[0], run_gan("allreduce", 3)[0][0])


# In processes ------------------------------------------------------------------------------------


@pytest.mark.transport("shared_memory")
@pytest.mark.parametrize("strategy", ["allreduce", "downpour"])
def test_processes_train_as_simulated_workers_do(strategy):
    result = pl.launch(train_and_tell, workers=2, strategy=strategy)
    ends = [record["end"] for record in result.metrics]
    assert ends[0] == ends[1]
    if strategy == "allreduce":
        simulated = pl.simulate(train_and_tell, workers=2, strategy=strategy)
        assert simulated.metrics[0]["end"] == ends[0]


def train_and_tell(worker):
    train_with_a_loader(worker)
    worker.finish()
    worker.log(end=str(flat(worker._session.model).double().sum().item()))
