"""Train a head with a frozen backbone, and unfreeze that in mid-run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.resuming import Interruptible, same_models
from support.training import Problem, beat, flat
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.strategies import STRATEGIES

PROBLEM = Problem(seed=21, sizes=(5, 4, 3))
AT = 4
"""The step before which the backbone is unfrozen."""
SPECS = ["allreduce", "layered", "sasgd(interval=3)", "hierarchical(group_size=2)", "diloco"]
SPECS += ["easgd(sync=true)", "easgd(interval=2)", "cyclic", "gossip", "adpsgd"]
PUSHING = ["downpour", "ssp", "cyclic(form=gradient)"]


def frozen_network() -> tuple[nn.Module, nn.Module]:
    """A network and its backbone, which is frozen."""
    net = PROBLEM.model()
    net[0].requires_grad_(False)
    return net, net[0]


def with_the_head(net: nn.Module, kind: Any = SGD) -> Any:
    return kind(net[2].parameters(), lr=0.1)


def with_all(net: nn.Module, kind: Any = SGD) -> Any:
    return kind([{"params": net[2].parameters()}, {"params": net[0].parameters()}], lr=0.1)


def add(net: nn.Module, optimizer: Any) -> None:
    """As people write it."""
    for parameter in net[0].parameters():
        parameter.requires_grad = True
    optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.05})


def unfreeze(net: nn.Module, optimizer: Any) -> None:
    net[0].requires_grad_(True)


def learn(worker: Any, net: nn.Module, optimizer: Any, then: Any, at: int = AT) -> None:
    rank = 0 if worker is None else worker.rank
    for step in range(PROBLEM.steps):
        if step == at:
            then(net, optimizer)
        optimizer.zero_grad()
        PROBLEM.loss(net, rank, step).backward()
        optimizer.step()


def alone(made: Any, then: Any, workers: int, kind: Any = SGD) -> Tensor:
    """A plain script on the batches of so many workers."""
    net, _ = frozen_network()
    optimizer = made(net, kind)
    for step in range(PROBLEM.steps):
        if step == AT:
            then(net, optimizer)
        optimizer.zero_grad()
        losses = [PROBLEM.loss(net, rank, step) for rank in range(workers)]
        PROBLEM.mean(losses, [1] * workers).backward()
        optimizer.step()
    return flat(net)


def run(
    strategy: str, made: Any, then: Any, workers: int = 3, at: Any = lambda rank: AT, **how: Any
) -> tuple[dict[int, Tensor], pl.Result]:
    ends = {}

    def train(worker):
        net, backbone = frozen_network()
        before = flat(backbone)
        net, optimizer = worker.setup(net, made(net, how.get("kind", SGD)), with_frozen=True)
        learn(worker, net, optimizer, then, at(worker.rank))
        worker.finish()
        ends[worker.rank] = flat(net)
        assert not torch.equal(flat(backbone), before)

    options = {name: value for name, value in how.items() if name != "kind"}
    options.setdefault("cluster", beat())
    return ends, pl.simulate(train, workers=workers, strategy=strategy, **options)


# What it equals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize(("made", "then"), [(with_the_head, add), (with_all, unfreeze)])
@pytest.mark.parametrize("strategy", ["allreduce", "layered"])
def test_in_lockstep_workers_are_one_process_with_the_large_batch(strategy, made, then, kind):
    ends, _ = run(strategy, made, then, kind=kind)
    expected = alone(made, then, 3, kind)
    torch.testing.assert_close(ends[0], expected, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(end, ends[0]) for end in ends.values())


@pytest.mark.parametrize(("made", "then"), [(with_the_head, add), (with_all, unfreeze)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_worker_is_a_plain_script_bit_for_bit(name, made, then):
    assert torch.equal(run(name, made, then, workers=1)[0][0], alone(made, then, 1))


@pytest.mark.parametrize("strategy", ["sasgd(interval=1)", "sasgd(interval=1, form=pseudo)"])
def test_an_average_after_every_step_is_one_process_with_the_large_batch(strategy):
    ends, _ = run(strategy, with_the_head, add)
    expected = alone(with_the_head, add, 3)
    torch.testing.assert_close(ends[0], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("made", "then"), [(with_the_head, add), (with_all, unfreeze)])
@pytest.mark.parametrize("strategy", SPECS)
def test_with_every_method_workers_end_with_one_answer(strategy, made, then):
    ends, result = run(strategy, made, then)
    assert all(torch.equal(end, ends[0]) and end.isfinite().all() for end in ends.values())
    assert result.dropped_updates == 0


@pytest.mark.parametrize("strategy", ["gossip", "easgd(interval=2)", "cyclic"])
def test_each_worker_may_unfreeze_at_its_own_time(strategy):
    ends, _ = run(strategy, with_the_head, add, at=lambda rank: 2 + rank)
    assert all(torch.equal(end, ends[0]) for end in ends.values())


def test_a_method_that_averages_models_tells_of_workers_with_other_groups():
    with pytest.warns(UserWarning, match="2 parameter groups on rank 0 and 1 on rank 2"):
        ends, _ = run("diloco(interval=3)", with_the_head, add, at=lambda rank: 2 + 9 * (rank == 2))
    assert all(torch.equal(end, ends[0]) for end in ends.values())


@pytest.mark.parametrize("strategy", PUSHING)
def test_a_server_steps_what_the_optimizer_has_had_all_the_time(strategy):
    ends, _ = run(strategy, with_all, unfreeze)
    assert all(torch.equal(end, ends[0]) for end in ends.values())


def test_parameters_of_one_group_may_lie_apart():
    """The bias is added, and the weight before it is not."""

    def then(net, optimizer):
        for parameter in net[0].parameters():
            parameter.requires_grad = True
        optimizer.add_param_group({"params": net[0].bias, "lr": 0.05})

    for strategy in ("allreduce", "sasgd(interval=2)", "gossip"):
        ends = {}

        def train(worker, ends=ends):
            net = PROBLEM.model().requires_grad_(False)
            net[2].weight.requires_grad_(True)
            net, optimizer = worker.setup(net, SGD([net[2].weight], lr=0.1), with_frozen=True)
            before = [net[0].weight.detach().clone(), net[0].bias.detach().clone()]
            learn(worker, net, optimizer, then)
            worker.finish()
            same = [*map(torch.equal, before, [net[0].weight, net[0].bias])]
            assert same == [True, False]
            ends[worker.rank] = flat(net)

        pl.simulate(train, workers=2, strategy=strategy, cluster=beat())
        assert torch.equal(ends[0], ends[1])


# What is refused, and how ------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["allreduce", "layered"])
def test_workers_that_add_at_different_steps_are_told_so(strategy):
    with pytest.raises(pl.UsageError, match=r"other workers train parameter 0\.weight, and the"):
        run(strategy, with_the_head, add, at=lambda rank: AT + (rank == 1))


@pytest.mark.parametrize("strategy", [*PUSHING, "sasgd(global_lr=0.1)"])
def test_a_method_that_cannot_take_more_groups_says_what_to_write(strategy):
    message = r"add_param_group must be called before worker\.setup: .* then unfreeze them later"
    with pytest.raises(pl.UsageError, match=message):
        run(strategy, with_the_head, add)


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
@pytest.mark.parametrize("then", [add, unfreeze])
def test_without_a_place_for_frozen_parameters_the_message_says_what_to_write(strategy, then):
    def train(worker):
        net, _ = frozen_network()
        optimizer = with_the_head(net) if then is add else with_all(net)
        net, optimizer = worker.setup(net, optimizer)
        learn(worker, net, optimizer, then)

    what = r"worker\.setup\(model, optimizer, with_frozen=True\)"
    with pytest.raises(pl.UsageError, match=rf"parameter 0\.weight .* {what}"):
        pl.simulate(train, workers=2, strategy=strategy)


def test_several_optimizers_keep_their_parameters():
    def train(worker):
        net, _ = frozen_network()
        both = [SGD(net[0].parameters(), lr=0.1), SGD(net[2].parameters(), lr=0.1)]
        net, (first, second) = worker.setup(net, both, with_frozen=True)
        with pytest.raises(pl.UsageError, match="with several optimizers, the parameters of each"):
            second.add_param_group({"params": net[0].parameters()})
        for step in range(PROBLEM.steps):
            if step == AT:
                unfreeze(net, first)
            net.zero_grad()
            PROBLEM.loss(net, worker.rank, step).backward()
            first.step()
            second.step()
        worker.finish()
        assert not torch.equal(net[0].weight, PROBLEM.model()[0].weight)

    pl.simulate(train, workers=2, strategy="allreduce")


# Checkpoints -------------------------------------------------------------------------------------


def train_in_epochs(worker):
    net, _ = frozen_network()
    net, optimizer = worker.setup(net, with_the_head(net, Adam), with_frozen=True)
    pairs = TensorDataset(*Problem(seed=6, batch=24).batch_of(0, 0))
    loader = worker.setup_dataloaders(DataLoader(pairs, batch_size=3, shuffle=True))
    for epoch in range(4):
        if epoch == 2:
            add(net, optimizer)
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("at", [7, 11])
@pytest.mark.parametrize("strategy", ["allreduce", "easgd", "sasgd(interval=3)"])
def test_a_run_resumes_bit_for_bit(strategy, at, tmp_path):
    """From a checkpoint before, and after, the backbone was unfrozen."""
    train = Interruptible(train_in_epochs)
    how = {"workers": 2, "strategy": strategy, "checkpoint_steps": 3, "cluster": "ethernet-1g"}
    whole, ends = train.run(tmp_path / "whole", **how), train.ends
    assert train.run(tmp_path / "broken", at, **how) is None
    again = train.run(tmp_path / "broken", **how, resume=True)
    assert again.resumed_at is not None and again.steps == whole.steps
    assert same_models(train.ends, ends)


@pytest.mark.parametrize("by_the_worker", [True, False])
def test_a_loop_that_unfreezes_by_a_counter_of_its_own_is_refused_when_it_resumes(
    by_the_worker, tmp_path
):
    def body(worker):
        net, _ = frozen_network()
        net, optimizer = worker.setup(net, with_all(net), with_frozen=True)
        pairs = TensorDataset(*Problem(seed=6, batch=24).batch_of(0, 0))
        loader = worker.setup_dataloaders(DataLoader(pairs, batch_size=3, shuffle=True))
        counted = 0
        for _ in range(4):
            for x, y in loader:
                if (worker.steps if by_the_worker else counted) >= 2:
                    unfreeze(net, optimizer)
                optimizer.zero_grad()
                mse_loss(net(x), y).backward()
                optimizer.step()
                counted += 1

    train = Interruptible(body)
    how = {"workers": 2, "strategy": "allreduce", "checkpoint_steps": 3}
    whole, ends = train.run(tmp_path / "whole", **how), train.ends
    assert train.run(tmp_path / "run", 7, **how) is None
    if by_the_worker:
        assert train.run(tmp_path / "run", **how, resume=True).steps == whole.steps
        assert same_models(train.ends, ends)
        return
    with pytest.raises(pl.UsageError, match=r"parameter 0\.weight is frozen here, and not there"):
        train.run(tmp_path / "run", **how, resume=True)


def test_a_late_joiner_unfreezes_on_its_own():
    """Of a method whose workers step by themselves."""
    joins = [pl.join(rank=2).at(seconds=2.5)]
    ends, result = run("gossip", with_the_head, add, faults=joins, cluster=beat(1.0, 1.1, 1.0))
    assert result.joined_workers == 1
    assert all(torch.equal(end, ends[0]) for end in ends.values())


def test_a_newcomer_is_taken_in_after_the_others_have_unfrozen():
    ends = {}

    def train(worker):
        train_in_epochs(worker)
        worker.finish()
        ends[worker.rank] = flat(worker._session.model)

    how = {"faults": [pl.join(rank=2).at(seconds=10.5)], "on_loss": "continue"}
    result = pl.simulate(train, workers=3, strategy="allreduce", cluster=beat(), **how)
    assert result.joined_workers == 1
    assert all(torch.equal(end, ends[0]) for end in ends.values())


def test_frozen_parameters_cost_their_bytes():
    _, result = run("allreduce", with_the_head, add, at=lambda rank: 0)
    assert result.bytes_sent == 3 * flat(PROBLEM.model()).nbytes * (1 + PROBLEM.steps)
    _, later = run("allreduce", with_the_head, add)
    flags = 8 * (1 + len([*PROBLEM.model().parameters()]))  # while some have no gradient
    assert later.bytes_sent == result.bytes_sent + 3 * AT * flags
