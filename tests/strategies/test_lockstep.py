"""What synchronous methods do when workers are not alike: data, gradients, overflow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training import Problem, flat, gradient_at
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

BOTH = ["allreduce", "sasgd(interval=3)", "sasgd(interval=3, global_lr=0.02)"]


@pytest.mark.parametrize("strategy", BOTH)
@settings(max_examples=12)
@given(counts=st.lists(st.integers(0, 9), min_size=2, max_size=5), seed=st.integers(0, 999))
def test_workers_with_unequal_data_end_together_and_equal(strategy, counts, seed):
    problem = Problem(seed=seed)
    ends, result = problem.run(strategy, len(counts), steps=lambda rank: counts[rank])
    for end in ends[1:]:
        assert torch.equal(end, ends[0])
    assert result.steps == sum(counts)


def test_after_the_others_have_finished_a_worker_goes_on_alone():
    problem, counts = Problem(seed=3), [2, 5]
    ends, _ = problem.run("allreduce", 2, steps=lambda rank: counts[rank])
    x = flat(problem.model())
    for step in range(5):
        present = [rank for rank in range(2) if step < counts[rank]]
        x = x - 0.1 * sum(gradient_at(problem, x, rank, step) for rank in present) / len(present)
    assert float((ends[0] - x).abs().max()) < 1e-12


def test_early_finisher_of_sasgd_adds_its_partial_interval():
    problem, counts = Problem(seed=4), [4, 6]
    ends, _ = problem.run("sasgd(interval=3)", 2, steps=lambda rank: counts[rank])
    xs = [flat(problem.model())] * 2
    for step in range(6):
        for rank in range(2):
            if step < counts[rank]:
                xs[rank] = xs[rank] - 0.1 * gradient_at(problem, xs[rank], rank, step)
        if step in (2, 5):  # the second time, one batch and three
            xs = [problem.mean(xs, [3, 3] if step == 2 else [1, 3])] * 2
    assert float((ends[0] - xs[0]).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "strategy", ["allreduce", "sasgd(interval=4)", "sasgd(interval=4, global_lr=0.1)"]
)
@pytest.mark.parametrize("steps", [1, 4, 7, 8])
def test_the_closed_form_of_bytes_is_what_is_metered(strategy, steps):
    problem = Problem(seed=1, steps=steps)
    _, result = problem.run(strategy, 3)
    nbytes = flat(problem.model()).nbytes
    exchanges = steps if strategy == "allreduce" else -(-steps // 4)
    counts = 8 * exchanges if "global_lr" in strategy else 0
    assert result.bytes_sent == 3 * (nbytes * (1 + exchanges) + counts)


@pytest.mark.parametrize("strategy", ["allreduce", "layered", "sasgd(interval=1)"])
def test_ragged_batches_weigh_by_their_samples(strategy):
    x, y = torch.randn(22, 5, dtype=torch.float64), torch.randn(22, 3, dtype=torch.float64)
    problem, ends = Problem(seed=5), {}

    def train(worker):
        net = problem.model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        loader = DataLoader(TensorDataset(x, y), batch_size=4)
        for xs, ys in worker.setup_dataloaders(loader):
            sgd.zero_grad()
            nn.functional.mse_loss(net(xs), ys).backward()
            sgd.step()
        worker.finish()
        ends[worker.rank] = flat(net)

    pl.simulate(train, workers=4, strategy=strategy, cluster="ideal")
    net = problem.model()
    plain = SGD(net.parameters(), lr=0.1)
    for part in (slice(0, 16), slice(16, 22)):
        plain.zero_grad()
        nn.functional.mse_loss(net(x[part]), y[part]).backward()
        plain.step()
    assert float((ends[0] - flat(net)).abs().max()) < 1e-12


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(2, 1, dtype=torch.float64) for _ in range(3))

    def forward(self, x, which):
        return self.heads[which](x)


def test_workers_agree_which_parameters_have_a_gradient():
    """Worker 0 uses head 0, worker 1 head 1; nobody uses head 2, which must not decay."""
    ends = {}

    def train(worker):
        net = _TwoHeads()
        before = net.heads[2].weight.detach().clone()
        sgd = SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        net, sgd = worker.setup(net, sgd)
        for _ in range(3):
            sgd.zero_grad()
            net(torch.ones(1, 2, dtype=torch.float64), worker.rank).sum().backward()
            sgd.step()
            assert net.heads[2].weight.grad is None
            assert net.heads[1 - worker.rank].weight.grad is not None
        assert torch.equal(net.heads[2].weight, before)
        ends[worker.rank] = flat(net)

    pl.simulate(train, workers=2, cluster="ideal")
    assert torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=2)"])
def test_an_infinite_gradient_is_skipped_by_all_or_by_itself(strategy):
    """With a scaler: all-reduce skips the step everywhere, local steps only where it happened."""
    ends, moved = {}, {}

    def train(worker):
        net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(net.weight)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            sgd.zero_grad()
            factor = float("inf") if (worker.rank, step) == (1, 1) else 1.0
            scaler.scale(net(torch.ones(1, 2)).sum() * factor).backward()
            before = net.weight.detach().clone()
            scaler.step(sgd)
            scaler.update()
            moved[worker.rank, step] = not torch.equal(before, net.weight)
        worker.finish()
        ends[worker.rank] = net.weight.detach().clone()

    pl.simulate(train, workers=2, strategy=strategy, cluster="ideal")
    assert torch.equal(ends[0], ends[1])
    assert bool(torch.isfinite(ends[0]).all())
    if strategy == "allreduce":
        assert not moved[0, 1] and not moved[1, 1]
        assert torch.allclose(ends[0], torch.full((1, 2), 1 - 0.3))
    else:
        assert torch.allclose(ends[0], torch.full((1, 2), 1 - 0.35))


def momentum_oracle(problem, workers, interval, treat, lr=0.1, mu=0.9):
    xs, vs = [flat(problem.model())] * workers, [None] * workers
    for step in range(problem.steps):
        for rank in range(workers):
            g = gradient_at(problem, xs[rank], rank, step)
            vs[rank] = g if vs[rank] is None else mu * vs[rank] + g
            xs[rank] = xs[rank] - lr * vs[rank]
        if (step + 1) % interval == 0 or step == problem.steps - 1:
            xs = [sum(xs) / workers] * workers
            if treat == "reset":
                vs = [None] * workers
            elif treat == "average":
                vs = [sum(vs) / workers] * workers
    return xs[0]


@pytest.mark.parametrize("treat", ["keep", "reset", "average"])
@settings(max_examples=8)
@given(seed=st.integers(0, 999), workers=st.integers(2, 4), interval=st.integers(1, 4))
def test_momentum_is_kept_reset_or_averaged(treat, seed, workers, interval):
    problem = Problem(seed=seed, steps=9)
    problem.optimizer = lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)
    ends, _ = problem.run(f"sasgd(interval={interval}, momentum={treat})", workers)
    expected = momentum_oracle(problem, workers, interval, treat)
    assert float((ends[0] - expected).abs().max()) < 1e-11


def test_averaging_adams_buffers_sends_them_too():
    problem = Problem(seed=1, steps=6)
    problem.optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.01)
    ends, result = problem.run("sasgd(interval=3, momentum=average)", 2)
    nbytes = flat(problem.model()).nbytes
    assert result.bytes_sent == 2 * nbytes * (1 + 2 * 3)
    assert torch.equal(ends[0], ends[1])


def test_warmup_is_interval_1_and_then_the_interval():
    """Post-local SGD: steps 1 to 4 aggregate, then 4 + 3 and the end."""
    problem = Problem(seed=2, steps=9)
    _, result = problem.run("sasgd(interval=3, warmup=4)", 2)
    nbytes = flat(problem.model()).nbytes
    assert result.bytes_sent == 2 * nbytes * (1 + 4 + 2)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "message"),
    [
        ("sasgd(form=gradient)", {"lr": 0.1, "momentum": 0.9}, "form .gradient. must be pseudo"),
        ("sasgd", {"lr": 0.0, "momentum": 0.9}, "lr .0. accumulates gradients"),
    ],
)
def test_what_sasgd_cannot_do_is_refused(strategy, optimizer, message):
    problem = Problem(seed=1)
    problem.optimizer = lambda parameters: SGD(parameters, **optimizer)
    with pytest.raises(pl.UsageError, match=message):
        problem.run(strategy, 2)


def test_a_warm_up_from_0_is_no_lr_of_0():
    problem = Problem(seed=1)

    def train(worker):
        net = problem.model()
        sgd = SGD(net.parameters(), lr=0.1, momentum=0.9)
        warm_up = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: step / 10)
        net, sgd = worker.setup(net, sgd)
        for step in range(3):
            sgd.zero_grad()
            problem.loss(net, worker.rank, step).backward()
            sgd.step()
            warm_up.step()

    result = pl.simulate(train, workers=2, strategy="sasgd(interval=2)", cluster="ideal")
    assert result.steps == 6


@pytest.mark.parametrize("form", ["gradient", "pseudo"])
@pytest.mark.parametrize("factors", [[1, 1, 0.1, 0.1, 0, 0], [0.5, 0.5, 1, 1, 0, 0]])
def test_global_lr_follows_a_scheduler_down_to_0(form, factors):
    problem = Problem(seed=6, steps=6)
    problem.optimizer = lambda parameters: SGD(parameters, lr=0.1)
    problem.schedule = lambda sgd: LambdaLR(sgd, lambda step: factors[min(step, 5)])
    ends, _ = problem.run(f"sasgd(interval=2, global_lr=0.03, form={form})", 2)
    x = flat(problem.model())
    for first in (0, 2, 4):
        total = 0.0
        for rank in range(2):
            local = x
            for step in (first, first + 1):
                g = gradient_at(problem, local, rank, step)
                local, total = local - 0.1 * factors[step] * g, total + g
        x = x - 0.03 * factors[first] * total
    assert float((ends[0] - x).abs().max()) < 1e-12


def test_with_momentum_global_lr_goes_down_to_0_too():
    problem, ends = Problem(seed=6), {}
    problem.optimizer = lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)
    problem.schedule = lambda sgd: LambdaLR(sgd, lambda step: float(step < 3))
    for problem.steps in (3, 6):
        (ends[problem.steps], _), _ = problem.run("sasgd(interval=3, global_lr=0.03)", 2)
    assert torch.equal(ends[3], ends[6])


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=1)", "layered", "diloco"])
def test_clipping_bounds_what_a_step_moves(strategy):
    moved = {}

    def train(worker):
        net = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(net.weight)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=1.0))
        net(torch.full((1, 2), 10.0)).sum().backward()
        worker.clip_gradients(0.1)
        sgd.step()
        worker.finish()
        moved[worker.rank] = float(net.weight.detach().norm())

    pl.simulate(train, workers=2, strategy=strategy, cluster="ideal")
    assert 0 < moved[0] < 0.2


@pytest.mark.parametrize("strategy", ["layered", "downpour", "gossip", "adpsgd", "cyclic"])
def test_what_cannot_be_saved_says_so(strategy, tmp_path):
    def train(worker):
        net = nn.Linear(2, 1)
        worker.setup(net, SGD(net.parameters(), lr=1.0))
        with pytest.raises(pl.UsageError, match="cannot be saved"):
            worker.save(tmp_path)

    pl.simulate(train, workers=2, strategy=strategy, cluster="ideal")


# Learning rates ----------------------------------------------------------------------------------

EQUAL = ["allreduce", "layered(group_size=2)", "sasgd(interval=4)", "sasgd(global_lr=0.01)"]
"""Methods whose replicas are equal only while the rates of their workers are."""
OWN_STEPS = [
    "sasgd(interval=4, form=pseudo)",
    "hierarchical(group_size=2, group_interval=2, interval=4)",
    "diloco(interval=4)",
    "easgd(sync=true)",
    "gossip(sync=true)",
]


def train_on_plateaus(losses_of, steps, made=None):
    """A training whose scheduler follows, every 4 steps, a loss that depends on the rank."""

    def train(worker):
        net = nn.Linear(2, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0125))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, factor=0.5, patience=0)
        for step in range(steps):
            sgd.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            sgd.step()
            if made is not None:
                made[worker.rank] = step + 1
            if step % 4 == 3:
                scheduler.step(losses_of(worker.rank, step))

    return train


def flat_on_rank_0(rank, step):
    """Loses its way on rank 0, and falls on all others."""
    return 1.0 if rank == 0 and step < 8 else 1.0 / (2 + step)


def test_rates_are_compared_where_workers_have_made_unequally_many_steps():
    def train(worker):
        net = nn.Linear(2, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1 / (1 + (worker.rank == 2))))
        scheduler = StepLR(sgd, 2)
        for _ in range(7 * worker.rank):
            sgd.step()
            scheduler.step()

    with pytest.raises(pl.UsageError, match=r"in step 7 .* 0.0001 on rank 1 and 5e-05 on rank 2"):
        pl.simulate(train, workers=3, strategy="allreduce")


RATES = r"step 16 the learning rate is 0.00625 on rank 0 and 0.0125 on rank 1\. .*worker\.reduce"


@pytest.mark.parametrize("strategy", EQUAL)
def test_rates_that_let_replicas_drift_apart_are_an_error(strategy):
    with pytest.raises(pl.UsageError, match=RATES):
        pl.simulate(train_on_plateaus(flat_on_rank_0, 16), workers=3, strategy=strategy)


@pytest.mark.parametrize("strategy", OWN_STEPS)
def test_rates_that_differ_where_workers_step_by_themselves_are_told_of(strategy):
    with pytest.warns(UserWarning, match=RATES):
        pl.simulate(train_on_plateaus(flat_on_rank_0, 16), workers=3, strategy=strategy)


@pytest.mark.parametrize("strategy", EQUAL)
def test_rates_that_differ_are_found_long_before_the_end(strategy):
    made = {}
    with pytest.raises(pl.UsageError, match=r"in step (64|128) the learning rate is"):
        pl.simulate(train_on_plateaus(flat_on_rank_0, 9999, made), workers=3, strategy=strategy)
    assert max(made.values()) <= 128 + 16


@pytest.mark.parametrize("strategy", [*EQUAL, *OWN_STEPS])
def test_rates_that_differ_only_after_the_last_step_harm_nobody(strategy):
    train = train_on_plateaus(lambda rank, step: rank if step == 7 else 2.0, 8)
    pl.simulate(train, workers=3, strategy=strategy)


@pytest.mark.parametrize("strategy", ["allreduce", "layered(group_size=2)"])
def test_to_look_at_the_rates_of_others_costs_and_changes_nothing(strategy, monkeypatch):
    problem = Problem(seed=5, steps=130, schedule=lambda sgd: StepLR(sgd, 7))
    runs = []
    for every in (64, 1_000_000):
        monkeypatch.setattr("paceline.training.rates.EVERY", every)
        runs.append(problem.run(strategy, 3, lambda rank: 70 + 30 * rank, cluster="mixed-lab"))
    (first, one), (second, two) = runs
    assert (one.trace_hash, one.bytes_sent) == (two.trace_hash, two.bytes_sent)
    assert torch.equal(first[0], second[0])
