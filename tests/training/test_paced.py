"""``pl.paced``: a loop that calls its own optimizer makes the steps of the method."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

DATA = TensorDataset(
    torch.randn(96, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
)


def new_model():
    torch.manual_seed(0)
    return nn.Linear(4, 1, dtype=torch.float64)


def loop(model, optimizer, loader, closure=False, epochs=2):
    """A loop that knows nothing of Paceline; returns its losses."""
    losses = []
    for _ in range(epochs):
        for (x,) in loader:

            def loss_of(x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            if closure:
                losses.append(optimizer.step(loss_of).item())
            else:
                losses.append(loss_of().item())
                optimizer.step()
    return losses


def plain(worker, optimizer_of, closure):
    model = new_model()
    model, optimizer = worker.setup(model, optimizer_of(model))
    loader = worker.setup_dataloaders(DataLoader(DATA, batch_size=8))
    return loop(model, optimizer, loader, closure)


def paced(worker, optimizer_of, closure):
    model = new_model()
    optimizer = optimizer_of(model)
    with pl.paced(model, optimizer):
        return loop(
            model, optimizer, worker.setup_dataloaders(DataLoader(DATA, batch_size=8)), closure
        )


def simulated(act, strategy, *arguments, workers=3):
    """What ``act`` returned on each rank, and the run's result."""
    returned = {}

    def train(worker):
        returned[worker.rank] = act(worker, *arguments)

    return returned, pl.simulate(train, workers=workers, strategy=strategy)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "downpour", "sasgd(interval=3)"])
@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        lambda model: Adam(model.parameters(), lr=0.05),
    ],
    ids=["sgd", "adam"],
)
def test_a_paced_loop_makes_the_same_steps(strategy, optimizer_of, closure):
    wanted, one = simulated(plain, strategy, optimizer_of, closure)
    got, other = simulated(paced, strategy, optimizer_of, closure)
    assert got == wanted
    assert other.trace_hash == one.trace_hash


class Counting(torch.optim.SGD):
    """Counts its steps in its parameter groups, as schedule-free optimizers do."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return loss


def test_an_optimizer_makes_each_step_once():
    def act(worker):
        model = new_model()
        optimizer = Counting(model.parameters(), lr=0.05)
        with pl.paced(model, optimizer):
            losses = loop(model, optimizer, [(DATA.tensors[0][:8],)] * 5, epochs=1)
        return len(losses), optimizer.param_groups[0]["steps"]

    returned, _ = simulated(act, "gossip")
    assert set(returned.values()) == {(5, 5)}


def test_hooks_of_the_user_run_once_a_step():
    def act(worker):
        model, seen = new_model(), []
        optimizer = SGD(model.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        with pl.paced(model, optimizer):
            optimizer.register_step_post_hook(lambda *_: seen.append("after"))
            loop(model, optimizer, [(DATA.tensors[0][:8],)] * 2, epochs=1)
        return tuple(seen)

    for strategy in ("gossip", "downpour"):
        returned, _ = simulated(act, strategy)
        assert set(returned.values()) == {("before", "after", "before", "after")}


def test_a_scheduler_made_before_sees_the_steps():
    def act(worker):
        model = new_model()
        optimizer = SGD(model.parameters(), lr=1.0)
        schedule = StepLR(optimizer, step_size=1, gamma=0.5)
        with pl.paced(model, optimizer), warnings.catch_warnings():
            warnings.simplefilter("error")
            loop(model, optimizer, [(DATA.tensors[0][:8],)] * 2, epochs=1)
            schedule.step()
        return optimizer.param_groups[0]["lr"]

    returned, _ = simulated(act, "allreduce")
    assert set(returned.values()) == {0.5}


def scaled_steps(worker, scaled, overflows):
    """The weights after 4 steps; in one of them, a worker's scaled gradient is infinite."""
    model = new_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0)
    with pl.paced(model, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            loss = model(DATA.tensors[0][8 * step : 8 * step + 8]).square().mean()
            scaler.scale(loss).backward()
            if overflows and step == 2 and worker.rank == 1:
                model.weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    return model.weight.tolist(), worker.steps


def test_a_gradient_scalers_scale_is_undone_once():
    plain, _ = simulated(scaled_steps, "allreduce", False, False)
    scaled, _ = simulated(scaled_steps, "allreduce", True, False)
    assert scaled == plain


def test_a_worker_with_an_overflow_makes_the_step_that_the_others_make():
    without, _ = simulated(scaled_steps, "allreduce", True, False)
    returned, _ = simulated(scaled_steps, "allreduce", True, True)
    assert [steps for _, steps in returned.values()] == [4, 4, 4]
    assert returned[0] == returned[1] == returned[2] != without[0]


def test_afterwards_the_model_is_the_answer_and_the_optimizer_the_users():
    def act(worker):
        model = new_model()
        optimizer = SGD(model.parameters(), lr=0.05)
        with pl.paced(model, optimizer):
            loop(model, optimizer, [(DATA.tensors[0][worker.rank : worker.rank + 8],)] * 5)
        answer = model.weight.tolist()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return answer, model.weight.tolist()

    returned, _ = simulated(act, "sasgd(interval=4)")
    answers = [answer for answer, _ in returned.values()]
    assert answers[0] == answers[1] == answers[2]
    for (answer,), (moved,) in returned.values():
        assert moved == pytest.approx([weight - 0.05 for weight in answer])


def test_outside_of_a_run_it_makes_its_own():
    model = new_model()
    optimizer = SGD(model.parameters(), lr=0.05)
    with pl.paced(model, optimizer, strategy="gossip") as worker:
        losses = loop(model, optimizer, [(DATA.tensors[0][:8],)] * 5)
    assert worker.size == 1 and worker.steps == 10 and losses[-1] < losses[0]
    again = new_model()
    with pl.paced(again, SGD(again.parameters(), lr=0.05)) as other:
        pass
    assert other is not worker


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "sasgd"}, r"strategy \(sasgd\) must be that of the run, gossip"),
        ({"seed": 1}, "seed must be given to what starts the run"),
    ],
)
def test_it_refuses_what_the_run_has_decided(options, message):
    def act(worker):
        model = new_model()
        with pl.paced(model, SGD(model.parameters(), lr=0.1), **options):
            pass

    with pytest.raises(pl.UsageError, match=message):
        simulated(act, "gossip")


def test_a_step_takes_a_closure_alone():
    def act(worker):
        model = new_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with pl.paced(model, optimizer):
            optimizer.step(noise=1)

    with pytest.raises(pl.UsageError, match="takes a closure, and nothing else"):
        simulated(act, "gossip")


def test_several_optimizers_are_paced_one_by_one():
    """As with worker.setup: 64 steps of two optimizers, each in its turn."""

    def train(worker, paced):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).double()
        optimizers = [SGD(model[0].parameters(), lr=0.05), Adam(model[1].parameters(), lr=0.05)]
        loader = DataLoader(DATA, batch_size=8)
        if paced:
            with pl.paced(model, optimizers):
                learn(model, optimizers, worker.setup_dataloaders(loader))
        else:
            model, optimizers = worker.setup(model, optimizers)
            learn(model, optimizers, worker.setup_dataloaders(loader))
            worker.finish()
        worker.log(end=float(nn.utils.parameters_to_vector(model.parameters()).sum().detach()))

    def learn(model, optimizers, loader):
        for (x,) in loader:
            model.zero_grad()
            model(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()

    for strategy in ("allreduce", "downpour", "gossip"):
        how = {"workers": 2, "strategy": strategy}
        runs = [pl.simulate(train, arguments={"paced": paced}, **how) for paced in (True, False)]
        assert runs[0].metrics == runs[1].metrics and runs[0].steps == 2 * 12
