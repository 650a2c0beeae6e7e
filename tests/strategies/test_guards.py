"""Updates that are not finite, or explode: none of them reaches what ranks share."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import Problem, beat, flat
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.strategies import make_strategy
from paceline.strategies.served import ServerStrategy
from paceline.strategies.service import DROPPED
from paceline.strategies.toolbox.guard import DROP, IN_A_ROW, KNOWN, REMEMBERED, WARN, Guard, norm

LOCKSTEP = [
    "allreduce",
    "layered(group_size=2)",
    "sasgd(interval=3)",
    "sasgd(interval=3, global_lr=0.02)",
    "sasgd(interval=2, form=pseudo, momentum=average)",
    "hierarchical(group_size=2, group_interval=2, interval=4)",
    "diloco(interval=3)",
    "easgd(interval=2, sync=true)",
    "gossip(sync=true)",
]
SERVED = [
    "downpour",
    "downpour(push_interval=2, fetch_interval=3, shards=2)",
    "ssp(bound=1)",
    "cyclic(form=gradient, max_accumulated=4)",
    "cyclic",
    "cyclic(max_accumulated=1, shards=2)",
    "easgd(interval=2)",
    "easgd(interval=2, momentum=0.5)",
]
PEERS = ["gossip", "gossip(mode=push)", "gossip(order=parallel)", "adpsgd"]
SHARES_MODELS = [*LOCKSTEP[2:], *SERVED[-4:], *PEERS]
every = pytest.mark.parametrize("strategy", [*LOCKSTEP, *SERVED, *PEERS])
WORKERS, STEPS, BAD = 4, 16, 2


def run(strategy: str, spoil: Any, steps: int = STEPS) -> Any:
    """Train for so many steps; ``spoil(net, step)`` may harm the gradients or model of one rank."""
    problem, ends = Problem(seed=3), {}

    def train(worker: pl.Worker) -> None:
        net = problem.model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.05))
        for step in range(steps):
            sgd.zero_grad()
            problem.loss(net, worker.rank, step).backward()
            if worker.rank == BAD:
                spoil(net, step)
            sgd.step()
        worker.finish()
        ends[worker.rank] = flat(net)

    result = pl.simulate(train, workers=WORKERS, strategy=strategy, cluster="mixed-lab")
    return result, [ends[rank] for rank in sorted(ends)]


def scale_gradients(factor: float, *steps: int) -> Any:
    def spoil(net: nn.Module, step: int) -> None:
        if step in steps:
            for parameter in net.parameters():
                parameter.grad.mul_(factor)

    return spoil


def assert_sound(ends: list[torch.Tensor]) -> None:
    assert len(ends) == WORKERS
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert bool(torch.isfinite(ends[0]).all()) and float(ends[0].abs().max()) < 100


def events(result: pl.Result, kind: str) -> list[dict[str, Any]]:
    return [event for event in result.events if event["event"] == kind]


# The norm, and what is made of it ----------------------------------------------------------------

KINDS = {
    torch.float16: 6e4,
    torch.bfloat16: 1e38,
    torch.float32: 1e38,
    torch.float64: 1e100,
}


@given(
    kind=st.sampled_from([*KINDS]),
    numbers=st.lists(st.floats(-1, 1), min_size=1, max_size=40),
    bad=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    scale=st.floats(0, 1),
)
def test_the_norm_is_finite_if_and_only_if_all_numbers_are(kind, numbers, bad, scale):
    v = (torch.tensor(numbers, dtype=torch.float64) * KINDS[kind] * scale).to(kind)
    if bad is None:
        expected = math.hypot(*v.double().tolist())
        assert norm(v) == pytest.approx(expected, rel=1e-5)
        half = len(numbers) // 2
        assert norm(v[:half], v[half:]) == pytest.approx(expected, rel=1e-5)
    else:
        v[len(v) // 2] = bad
        assert not math.isfinite(norm(v)) and not math.isfinite(norm(v[:1], v[1:], v))


def test_nothing_has_the_norm_of_nothing():
    assert norm() == norm(torch.empty(0)) == 0.0


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=3 * REMEMBERED))
def test_what_is_usual_is_the_median_of_the_last_norms(norms):
    told = []
    guard = Guard(0, lambda event, **facts: told.append(facts))
    assert all(guard.admits(size, 0, "gradient") or size > DROP * 1e-3 for size in norms)
    usual = guard._usual["gradient"]
    last = norms[-REMEMBERED:]
    if not guard.dropped:
        assert usual.median == statistics.median_high(last)


def test_an_update_is_told_of_at_a_hundred_times_the_usual_and_dropped_at_ten_thousand():
    told = []
    guard = Guard(0, lambda event, **facts: told.append((event, facts["norm"])))
    for _ in range(KNOWN):
        assert guard.admits(2.0, 1, "gradient")
    assert guard.admits(2 * WARN, 1, "gradient") and told == []
    assert guard.admits(2.1 * WARN, 1, "gradient") and told == [("large", 2.1 * WARN)]
    assert guard.admits(2 * DROP, 1, "gradient")
    assert not guard.admits(2.1 * DROP, 1, "gradient")
    assert told[1:] == [("dropped", 2.1 * DROP)]
    assert guard.admits(2.1 * DROP, 1, "model")  # other things have other norms


def test_before_norms_are_known_and_beside_zeros_only_the_absurd_is_dropped():
    guard = Guard(0)
    for size in [1.0] * (KNOWN - 1) + [1e9]:
        assert guard.admits(size, 0, "gradient")
    assert not Guard(0).admits(1e30, 0, "gradient")
    for _ in range(2 * KNOWN):
        assert guard.admits(0.0, 0, "model")
    assert guard.admits(1.0, 0, "model")


def test_a_sender_is_set_aside_after_three_in_a_row():
    told = []
    guard = Guard(0, lambda event, **facts: told.append(event))
    bad = [math.nan, math.nan, 1.0, math.inf, math.nan]
    assert [guard.admits(size, 5, "gradient") for size in bad] == [size == 1.0 for size in bad]
    assert guard.aside == set()
    assert not guard.admits(math.nan, 5, "gradient")
    assert guard.aside == {5} and told == ["dropped"] * 5 + ["set_aside"]
    assert not guard.admits(1.0, 5, "gradient") and guard.admits(1.0, 6, "gradient")
    assert guard.dropped == {5: 6} and len(told) == 6


# In every method ---------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("factor", [math.nan, 1e6])
def test_one_bad_gradient_is_dropped_and_all_go_on(strategy, factor):
    result, ends = run(strategy, scale_gradients(factor, 11))
    assert_sound(ends)
    assert result.steps == WORKERS * STEPS and result.dropped_updates == 1
    [told] = events(result, "dropped")
    assert (told["rank"], told["sender"], told["what"]) == (BAD, BAD, "gradient")
    assert not events(result, "set_aside")


@every
def test_no_update_is_dropped_without_a_fault(strategy):
    result, ends = run(strategy, lambda net, step: None)
    assert_sound(ends)
    assert result.dropped_updates == 0 and result.events == []


@every
def test_a_worker_whose_every_gradient_is_bad_is_set_aside_and_the_run_ends(strategy):
    result, ends = run(strategy, scale_gradients(math.nan, *range(4, STEPS)))
    assert_sound(ends)
    assert result.steps == WORKERS * STEPS and result.dropped_updates >= STEPS - 4
    assert len([e for e in events(result, "dropped") if e["what"] == "gradient"]) == IN_A_ROW
    assert {e["sender"] for e in events(result, "set_aside")} == {BAD}
    assert not result.diverged


@every
def test_when_all_gradients_of_all_workers_are_bad_the_model_stays_as_it_is(strategy):
    problem, ends = Problem(seed=3), {}

    def train(worker: pl.Worker) -> None:
        net = problem.model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.05, momentum=0.0))
        for step in range(5 + worker.rank):
            sgd.zero_grad()
            (problem.loss(net, worker.rank, step) * math.nan).backward()
            sgd.step()
        worker.finish()
        ends[worker.rank] = flat(net)

    result = pl.simulate(train, workers=3, strategy=strategy, cluster="mixed-lab")
    assert len(ends) == 3 and result.diverged
    for end in ends.values():
        assert torch.allclose(end, flat(problem.model()), rtol=1e-6)


@every
def test_others_take_the_batches_that_one_set_aside_leaves(strategy):
    """Its loader ends; of one queue the others take the rest, and their shards else."""
    taken: list[tuple[int, int]] = []
    data = TensorDataset(torch.arange(160), torch.randn(160, 3))

    def train(worker: pl.Worker) -> None:
        net = nn.Linear(3, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        batches = worker.setup_dataloaders(DataLoader(data, batch_size=4))
        for _ in range(2):
            for numbers, x in batches:
                sgd.zero_grad()
                loss = (net(x) - 1).square().mean()
                (loss * math.nan if worker.rank == BAD else loss).backward()
                sgd.step()
                taken.extend((worker.rank, int(n)) for n in numbers)
        worker.finish()
        assert bool(torch.isfinite(flat(net)).all())
        with torch.no_grad():
            assert sum(1 for _ in batches) > 0 or worker.strategy.synchronous is False

    result = pl.simulate(train, workers=WORKERS, strategy=strategy, cluster="mixed-lab")
    assert {e["sender"] for e in events(result, "set_aside")} == {BAD}
    assert sum(rank == BAD for rank, _ in taken) == 4 * IN_A_ROW
    if not make_strategy(strategy).synchronous:
        assert sorted(n for _, n in taken) == sorted([*range(160), *range(160)])


def test_a_worker_without_a_good_gradient_does_not_keep_the_token():
    """The others, who wait for the token at each step, are not held up until its end."""
    made: list[tuple[float, int, int]] = []

    def train(worker: pl.Worker) -> None:
        net = nn.Linear(2, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        for step in range(STEPS):
            sgd.zero_grad()
            loss = net(torch.ones(1, 2)).sum()
            (loss * math.nan if worker.rank == BAD and step >= 4 else loss).backward()
            sgd.step()
            made.append((worker.comm.clock.now(), worker.rank, step))

    pl.simulate(train, workers=3, strategy="cyclic(max_accumulated=1)", cluster=beat(*[1.0] * 4))
    end_s = max(time_s for time_s, rank, _ in made if rank == BAD)
    others = [time_s for time_s, rank, step in made if rank != BAD and step == STEPS - 4]
    assert max(others) < end_s


@pytest.mark.parametrize("strategy", ["allreduce", "layered(group_size=2)"])
def test_the_mean_without_a_dropped_gradient_is_that_of_the_others(strategy):
    problem = Problem(seed=3)
    net = problem.model()
    sgd = SGD(net.parameters(), lr=0.05)
    for step in range(STEPS):
        sgd.zero_grad()
        there = [rank for rank in range(WORKERS) if (rank, step) != (BAD, 11)]
        sum(problem.loss(net, rank, step) for rank in there).div(len(there)).backward()
        sgd.step()
    _, ends = run(strategy, scale_gradients(math.inf, 11))
    assert torch.allclose(ends[0], flat(net), rtol=1e-12, atol=1e-14)


def train_with_one_bad(worker: pl.Worker) -> None:
    net = nn.Linear(2, 1)
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
    for step in range(STEPS):
        sgd.zero_grad()
        loss = net(torch.full((1, 2), 1.0 + worker.rank)).sum()
        (loss * math.nan if (worker.rank, step) == (1, 11) else loss).backward()
        sgd.step()
    worker.finish()
    worker.log(finite=bool(torch.isfinite(flat(net)).all()))


@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "gossip"])
def test_a_bad_gradient_is_dropped_in_every_world(transport, strategy):
    how: dict[str, Any] = {"workers": 2, "strategy": strategy}
    if transport == "simulated":
        result = pl.simulate(train_with_one_bad, **how)
    else:
        result = pl.launch(train_with_one_bad, transport=transport, **how)
    assert [record["finite"] for record in result.metrics] == [True, True]
    assert result.dropped_updates == 1 and result.steps == 2 * STEPS
    assert [event["sender"] for event in events(result, "dropped")] == [1]


def test_a_gradient_that_is_clipped_to_a_usual_norm_is_none_that_explodes():
    def train(worker: pl.Worker) -> None:
        net = nn.Linear(2, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        for step in range(STEPS):
            sgd.zero_grad()
            net(torch.full((1, 2), 1e9 if step == 12 else 1.0)).sum().backward()
            worker.clip_gradients(1.0)
            sgd.step()

    assert pl.simulate(train, workers=2, strategy="allreduce").dropped_updates == 0


# When the worker's own end does not hold ---------------------------------------------------------


@pytest.fixture
def blind_to_oneself(monkeypatch):
    """Workers hand on whatever they have computed."""
    admits = Guard.admits

    def admit(guard: Guard, size: float, sender: int, *rest: Any) -> bool:
        return sender == guard.rank or admits(guard, size, sender, *rest)

    monkeypatch.setattr(Guard, "admits", admit)


@pytest.mark.parametrize("strategy", [*SERVED[:5], "layered(group_size=2)"])
@pytest.mark.parametrize("factor", [math.nan, 1e9])
def test_a_server_drops_what_a_worker_lets_through(strategy, factor, blind_to_oneself):
    result, ends = run(strategy, scale_gradients(factor, 11))
    assert_sound(ends)
    assert result.steps == WORKERS * STEPS and result.dropped_updates > 0
    assert all(told["rank"] >= WORKERS for told in events(result, "dropped"))
    assert {told["sender"] for told in events(result, "dropped")} == {BAD}


@pytest.mark.parametrize("strategy", SERVED[:5])
def test_a_worker_that_a_server_sets_aside_is_told(strategy, blind_to_oneself):
    result, ends = run(strategy, scale_gradients(math.nan, *range(4, 40)), steps=40)
    assert_sound(ends)
    told = {(event["rank"] >= WORKERS, event["sender"]) for event in events(result, "set_aside")}
    assert told == {(True, BAD), (False, BAD)}


def break_model(value: float, at: int) -> Any:
    def spoil(net: nn.Module, step: int) -> None:
        if step == at:
            for parameter in net.parameters():
                parameter.data.fill_(value)

    return spoil


@pytest.mark.parametrize("value", [math.nan, 1e9])
def test_no_broken_model_moves_the_center(value, blind_to_oneself):
    result, ends = run("easgd(interval=1)", break_model(value, 11))
    assert_sound(ends)
    told = {(event["rank"], event["sender"]) for event in events(result, "dropped")}
    assert told == {(WORKERS, BAD)}


def test_a_dropped_push_is_no_update_and_its_worker_hears_so(monkeypatch, blind_to_oneself):
    heard = []
    take = ServerStrategy._take
    monkeypatch.setattr(
        ServerStrategy,
        "_take",
        lambda self, *args: heard.append((self.comm.rank, r := take(self, *args))) or r,
    )
    result, _ = run("downpour", scale_gradients(math.nan, 11))
    dropped = [rank for rank, reply in heard if reply.accepted == DROPPED]
    assert dropped == [BAD]
    assert max(reply.version for _, reply in heard) == WORKERS * STEPS - 1
    assert result.steps == WORKERS * STEPS


@pytest.mark.parametrize("strategy", SHARES_MODELS)
@pytest.mark.parametrize("value", [math.inf, 1e30])
def test_a_broken_model_spoils_no_other(strategy, value):
    result, ends = run(strategy, break_model(value, 9))
    assert_sound(ends)
    assert result.steps == WORKERS * STEPS


@pytest.mark.parametrize("strategy", SHARES_MODELS)
def test_a_number_that_a_glance_has_missed_breaks_one_model_and_an_exchange_mends_it(
    strategy, monkeypatch
):
    monkeypatch.setattr("paceline.strategies.toolbox.guard.GLANCE", 1)

    def spoil(net: nn.Module, step: int) -> None:
        if step == 9:
            next(net.parameters()).grad.view(-1)[-1] = math.nan

    result, ends = run(strategy, spoil)
    assert_sound(ends)
    assert result.steps == WORKERS * STEPS
    assert not events(result, "set_aside")
