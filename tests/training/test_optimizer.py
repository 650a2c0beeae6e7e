"""The user's optimizer is a torch optimizer in every respect."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import paceline as pl


def on_two_workers(body, strategy="allreduce", workers=2):
    """Run ``body(worker, net, optimizer)`` on virtual workers; return what each returned."""
    given = {}

    def train(worker):
        net = nn.Linear(2, 1, bias=False)
        nn.init.ones_(net.weight)
        inner = SGD(net.parameters(), lr=0.5, momentum=0.9)
        net, paced = worker.setup(net, inner)
        given[worker.rank] = body(worker, net, paced, inner)

    pl.simulate(train, workers=workers, strategy=strategy, cluster="ideal")
    return given


def backward(net, factor=1.0):
    (net(torch.ones(1, 2)).sum() * factor).backward()


def test_it_is_an_optimizer_with_the_inner_ones_groups_and_state():
    def body(worker, net, paced, inner):
        assert isinstance(paced, Optimizer)
        assert paced.param_groups is inner.param_groups
        assert paced.state is inner.state and paced.defaults is inner.defaults
        backward(net)
        paced.step()
        assert paced.state[net.weight]["momentum_buffer"] is not None
        assert "PacedSGD" in repr(paced)

    on_two_workers(body)


def test_state_dict_goes_round_and_groups_stay_the_inner_ones():
    def body(worker, net, paced, inner):
        backward(net)
        paced.step()
        saved = copy.deepcopy(paced.state_dict())
        paced.param_groups[0]["lr"] = 9.0
        paced.load_state_dict(saved)
        assert paced.param_groups is inner.param_groups
        assert inner.param_groups[0]["lr"] == 0.5
        assert set(saved) == {"state", "param_groups"}

    on_two_workers(body)


def test_schedulers_drive_the_inner_learning_rate():
    def body(worker, net, paced, inner):
        step, plateau = StepLR(paced, 1, gamma=0.1), ReduceLROnPlateau(paced, patience=0)
        backward(net)
        paced.step()
        step.step()
        plateau.step(1.0)
        return inner.param_groups[0]["lr"]

    assert on_two_workers(body) == {0: pytest.approx(0.05), 1: pytest.approx(0.05)}


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    def body(worker, net, paced, inner):
        calls = []

        def closure():
            paced.zero_grad()
            loss = net(torch.ones(1, 2)).sum()
            loss.backward()
            calls.append(1)
            return loss

        with torch.no_grad():
            loss = paced.step(closure)
        return loss.item(), len(calls), net.weight.tolist()

    assert on_two_workers(body)[1] == (2.0, 1, [[0.5, 0.5]])


def test_hooks_of_the_user_run_around_a_step():
    def body(worker, net, paced, inner):
        seen = []
        paced.register_step_pre_hook(lambda *_: seen.append("before"))
        paced.register_step_post_hook(lambda *_: seen.append("after"))
        backward(net)
        paced.step()
        return seen

    assert on_two_workers(body)[0] == ["before", "after"]


def test_gradient_accumulation_is_one_step():
    def body(worker, net, paced, inner):
        backward(net, 1 + worker.rank)
        backward(net, 1 + worker.rank)
        paced.step()
        return net.weight.tolist(), worker._session.stepper.steps

    ends = on_two_workers(body)
    assert ends[0] == ends[1] == ([[-0.5, -0.5]], 1)


def test_clipping_is_after_the_reduction():
    """Gradients 3 and 0 average to 1.5 a coordinate; the norm of that is clipped to 1."""

    def body(worker, net, paced, inner):
        backward(net, 0.0 if worker.rank else 3.0)
        worker.clip_gradients(1.0)
        paced.step()
        first = net.weight.detach().clone()
        backward(net, 0.0)
        paced.step()  # clipping is requested once, and done once
        return float((1 - first).norm())

    assert on_two_workers(body)[0] == pytest.approx(0.5, abs=1e-5)


def test_no_sync_steps_are_local():
    def body(worker, net, paced, inner):
        with worker.no_sync():
            backward(net, worker.rank)
            paced.step()
        return net.weight[0, 0].item()

    assert on_two_workers(body) == {0: 1.0, 1: 0.5}


def test_adding_parameters_later_is_refused():
    def body(worker, net, paced, inner):
        with pytest.raises(pl.UsageError, match="so that add_param_group must be called before"):
            paced.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    on_two_workers(body)


@pytest.mark.parametrize("unscale", [True, False])
def test_a_gradient_scaler_changes_nothing_but_precision(unscale):
    def body(worker, net, paced, inner):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(3):
            paced.zero_grad()
            scaler.scale(net(torch.ones(1, 2)).sum() * (1 + worker.rank)).backward()
            if unscale:
                scaler.unscale_(paced)
            scaler.step(paced)
            scaler.update()
        return net.weight.tolist()

    def plain(worker, net, paced, inner):
        for _ in range(3):
            paced.zero_grad()
            backward(net, 1 + worker.rank)
            paced.step()
        return net.weight.tolist()

    assert on_two_workers(body) == on_two_workers(plain)


def test_lbfgs_is_refused():
    def train(worker):
        net = nn.Linear(2, 1)
        worker.setup(net, torch.optim.LBFGS(net.parameters()))

    with pytest.raises(pl.UsageError, match="LBFGS"):
        pl.simulate(train, workers=2, cluster="ideal")


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "downpour"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_of_the_original_optimizer_is_refused_at_once(strategy, workers, scaled):
    def body(worker, net, paced, inner):
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.step(inner)

    returned = r"the one that it returned: model, optimizer = worker.setup\(model, optimizer\)"
    with pytest.raises(pl.UsageError, match=returned):
        on_two_workers(body, strategy, workers)


def test_after_the_end_the_users_optimizer_works_again():
    def body(worker, net, paced, inner):
        backward(net)
        paced.step()
        worker.finish()
        before = net.weight.clone()
        inner.step()
        assert not torch.equal(net.weight, before)

    on_two_workers(body)
