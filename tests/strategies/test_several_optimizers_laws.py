"""What every method does with several optimizers of one network, compared with plain scripts."""

from __future__ import annotations

import copy

import pytest
import torch
from support.several import Pair, assert_close, normed_and_adamw, split, two_plain_sgds, two_sgds
from support.training import Problem, beat, flat
from test_every_strategy import EAMSGD, FORMS, WORKERS
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.strategies import STRATEGIES

TURNS = "cyclic(form=gradient, max_accumulated=1)"
KINDS = ["allreduce", "layered", "sasgd(interval=3)", "downpour", "cyclic", "easgd", "gossip"]


# What it must equal ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_worker_is_a_plain_script_bit_for_bit(name, set_to_none):
    pair = Pair(set_to_none=set_to_none)
    assert torch.equal(pair.run(name, 1)[0][0], pair.alone(1))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("strategy", ["allreduce", "layered(group_size=2)"])
def test_in_lockstep_workers_are_one_process_with_the_large_batch(strategy, set_to_none, ragged):
    pair = Pair(Problem(seed=7, ragged=ragged, batch=5), set_to_none=set_to_none)
    ends, result = pair.run(strategy, 3)
    assert_close(ends[0], pair.alone(3))
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert result.steps == 2 * 3 * pair.problem.steps


@pytest.mark.parametrize(
    "strategy",
    [
        "sasgd(interval=1)",
        "sasgd(interval=2, form=gradient)",
        "hierarchical(group_size=3, group_interval=1, interval=2)",
        "diloco(interval=2, outer_lr=1.0, outer_momentum=0.0)",
    ],
)
def test_averages_after_every_batch_are_one_process_with_the_large_batch(strategy):
    pair = Pair(Problem(seed=8), two_plain_sgds)
    assert_close(pair.run(strategy, 3)[0][0], pair.alone(3))


def push_in_turn(pair: Pair, workers: int, token: bool) -> Tensor:
    """What a server has at the end: both steps of each worker, or with a token one at a time."""
    problem, server = pair.problem, pair.problem.model()
    optimizers = pair.optimizers(server)
    replicas = [copy.deepcopy(server) for _ in range(workers)]
    for step in range(problem.steps):
        for rank, replica in enumerate(replicas):
            replica.zero_grad()
            problem.loss(replica, rank, step).backward()
        pushes = [(replica, optimizer) for replica in replicas for optimizer in optimizers]
        if token:
            pushes.sort(key=lambda push: push[1] is optimizers[1])
        for replica, optimizer in pushes:
            for w, x in zip(server.parameters(), replica.parameters(), strict=True):
                w.grad = x.grad
            optimizer.step()
            replica.load_state_dict(server.state_dict())
    return flat(server)


@pytest.mark.parametrize("optimizers", [normed_and_adamw, two_sgds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", ["downpour", "ssp", TURNS])
def test_a_server_steps_the_optimizer_that_a_push_is_for(strategy, optimizers):
    """Moments and weight decay of the other one do not move on its zeros."""
    pair = Pair(Problem(seed=9), optimizers)
    ends, _ = pair.run(strategy, 2)
    assert_close(ends[0], push_in_turn(pair, 2, token=strategy == TURNS))


def test_a_push_of_several_gradients_counts_each_for_its_optimizer():
    """One push for two batches: two gradients of each of the two optimizers."""
    pair = Pair(Problem(seed=10, steps=2), normed_and_adamw)
    ends, _ = pair.run("downpour(push_interval=4, fetch_interval=4, local_move=false)", 2)
    problem, server = pair.problem, pair.problem.model()
    optimizers = pair.optimizers(server)
    replica = copy.deepcopy(server)
    for rank in range(2):
        replica.zero_grad()
        for step in range(2):
            problem.loss(replica, rank, step).backward()
        for w, x in zip(server.parameters(), replica.parameters(), strict=True):
            w.grad = x.grad
        for group in optimizers[1].param_groups:  # AdamW, made by a server: a decay each
            for w in group["params"]:
                w.data.mul_((1 - group["lr"] * 0.1) ** 1 - group["lr"] * 0.1)
            group["weight_decay"] = 0.0
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ends[0], flat(server), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["sasgd(form=gradient)", "downpour", "layered", "allreduce"])
def test_gradients_of_the_others_are_whole_after_a_step(strategy):
    def train(worker):
        net = Problem(seed=3).model()
        net, (first, second) = worker.setup(net, two_plain_sgds(net))
        matrices, others = split(net)
        for _ in range(3):
            first.zero_grad(set_to_none=False)
            second.zero_grad(set_to_none=False)
            Problem(seed=3).loss(net, worker.rank, 0).backward()
            before = [[p.grad.clone() for p in each] for each in (matrices, others)]
            first.step()
            assert all(map(torch.equal, before[1], [p.grad for p in others]))
            then = [p.grad.clone() for p in matrices]
            second.step()
            assert all(map(torch.equal, then, [p.grad for p in matrices]))

    pl.simulate(train, workers=2, strategy=strategy)


@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "sasgd(momentum=average)"])
def test_torchs_muon_beside_adamw_learns(strategy):
    losses = []

    def train(worker):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        matrices, others = split(net)
        optimizers = [torch.optim.Muon(matrices, lr=0.1), AdamW(others, lr=0.05)]
        net, optimizers = worker.setup(net, optimizers)
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(worker.rank))
        for _ in range(20):
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(x), x[:, :3].argmax(1))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(loss.item())

    pl.simulate(train, workers=2, strategy=strategy, cluster=beat())
    assert losses[-1] < losses[0] / 3


# The laws of all methods -------------------------------------------------------------------------


@pytest.mark.parametrize("optimizers", [normed_and_adamw, two_sgds], ids=lambda f: f.__name__)
@pytest.mark.parametrize("spec", FORMS)
def test_with_every_method_workers_end_with_one_answer_and_one_trace(spec, optimizers):
    pair = Pair(Problem(seed=11), optimizers)
    if optimizers is normed_and_adamw and "shards" in spec and not spec.startswith("easgd"):
        with pytest.raises(pl.UsageError, match=r"shards must be 1 .* where that is Normed"):
            pair.run(spec, WORKERS)
        return
    runs = [pair.run(spec, WORKERS, cluster="mixed-lab") for _ in "ab"]
    (ends, one), (again, two) = runs
    assert all(torch.equal(end, ends[0]) and end.isfinite().all() for end in ends + again)
    assert one.trace_hash == two.trace_hash
    assert one.steps == WORKERS * 2 * pair.problem.steps and one.dropped_updates == 0


@pytest.mark.parametrize("spec", EAMSGD)
def test_velocity_moves_only_what_is_stepped(spec):
    """With an optimizer whose learning rate is 0, its parameters stay where they are."""
    problem = Problem(seed=12)

    def train(worker):
        net = problem.model()
        matrices, others = split(net)
        before = [p.detach().clone() for p in others]
        net, (first, second) = worker.setup(net, [SGD(matrices, lr=0.1), SGD(others, lr=0.0)])
        for step in range(4):
            problem.loss(net, worker.rank, step).backward()
            first.step()
            second.step()
        worker.finish()
        assert all(map(torch.equal, before, others))

    pl.simulate(train, workers=3, strategy=spec)


@pytest.mark.parametrize("strategy", KINDS)
def test_workers_with_unequal_data_end_together(strategy):
    ends = {}
    data = TensorDataset(torch.randn(50, 3, generator=torch.Generator().manual_seed(1)))

    def train(worker):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        net, optimizers = worker.setup(net, [*normed_and_adamw(net)])
        assert isinstance(optimizers, list)
        for (x,) in worker.setup_dataloaders(DataLoader(data, batch_size=3 + worker.rank)):
            net.zero_grad()
            net(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        worker.finish()
        ends[worker.rank] = flat(net)

    pl.simulate(train, workers=3, strategy=strategy, cluster=beat(1.0, 1.3, 2.0))
    assert all(torch.equal(end, ends[0]) for end in ends.values())


@pytest.mark.parametrize("strategy", ["allreduce", "layered"])
def test_workers_that_step_different_optimizers_are_told_so(strategy):
    def train(worker):
        net = Problem(seed=3).model()
        net, optimizers = worker.setup(net, two_sgds(net))
        for step in range(3):
            Problem(seed=3).loss(net, worker.rank, step).backward()
            optimizers[step == 2 and worker.rank == 1].step()

    with pytest.raises(pl.UsageError, match=r"must call step\(\) of the same optimizer in the"):
        pl.simulate(train, workers=3, strategy=strategy)


def test_allreduce_sends_only_what_is_stepped():
    pair = Pair(Problem(seed=4))
    _, result = pair.run("allreduce", 3)
    nbytes, told = flat(pair.problem.model()).nbytes, 2 * 2 * 8
    assert result.bytes_sent == 3 * (nbytes + pair.problem.steps * (nbytes + told))
