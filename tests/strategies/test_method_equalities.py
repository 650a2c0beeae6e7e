"""The exact equalities of the asynchronous, layered and hierarchical methods, in float64.

Each test is named after its number in the specification's table. What depends on the order of
events is run on the simulator, where the order is known, and compared with a direct oracle.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cyclic import cyclic_with
from support.training import Problem, beat, flat, gradient_at
from test_equalities import (
    assert_close,
    assert_replicas_equal,
    local_sgd,
    problems,
    ragged,
    rates,
    sgd,
)
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import paceline as pl
from paceline.errors import UsageError
from paceline.lab.tasks.recipe import learning_rate
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.strategies import make_strategy
from paceline.strategies.server import GradientServer

crowds = st.integers(2, 5)
intervals = st.integers(1, 4)


def move(x, g, lr):
    """A step of plain SGD, rounded as torch rounds it."""
    return x.add(g, alpha=-lr)


# Layered and hierarchical ------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    problem=problems,
    workers=st.integers(2, 8),
    group=st.integers(1, 8),
    lr=rates,
    momentum=st.floats(0, 0.95),
    decay=st.floats(0, 0.1),
)
def test_e5_layered_is_synchronous_sgd(problem, workers, group, lr, momentum, decay):
    """With a rate that changes at every step: it belongs to its gradient, though applied later."""
    problem.optimizer = sgd(lr, momentum=momentum, weight_decay=decay)
    problem.schedule = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step))
    expected, _ = problem.run("allreduce", workers)
    actual, _ = problem.run(f"layered(group_size={group})", workers)
    assert_replicas_equal(actual)
    assert_close(actual[0], expected[0])


@settings(max_examples=8)
@given(
    problem=problems | ragged,
    workers=st.integers(2, 6),
    inner=st.integers(1, 3),
    times=st.integers(1, 3),
)
def test_e23_hierarchical_with_one_group_or_groups_of_one_is_k_avg(problem, workers, inner, times):
    outer = inner * times
    settings_ = f"group_interval={inner}, interval={outer}"
    one_group, _ = problem.run(f"hierarchical(group_size={workers}, {settings_})", workers)
    assert_replicas_equal(one_group)
    assert_close(one_group[0], local_sgd(problem, workers, inner, 0.1))
    alone, _ = problem.run(f"hierarchical(group_size=1, {settings_})", workers)
    assert_close(alone[0], local_sgd(problem, workers, outer, 0.1))
    synchronous, _ = problem.run("allreduce", workers)
    every_step, _ = problem.run(
        f"hierarchical(group_size={workers}, group_interval=1, interval=3)", workers
    )
    assert_close(every_step[0], synchronous[0])


def mean(xs):
    return sum(xs) / len(xs)


def hier_avg(problem, workers, group, inner, outer):
    """The listing, with one more average of the groups and of all after the last step."""
    xs = [flat(problem.model())] * workers
    for step in range(1, problem.steps + 1):
        xs = [move(x, gradient_at(problem, x, r, step - 1), 0.1) for r, x in enumerate(xs)]
        if step % outer == 0:
            xs = [mean(xs)] * workers
        elif step % inner == 0:
            xs = [mean(xs[r // group * group :][:group]) for r in range(workers)]
    if problem.steps % inner and (problem.steps // inner + 1) * inner % outer:
        xs = [mean(xs[r // group * group :][:group]) for r in range(workers)]
    return mean(xs) if problem.steps % outer else xs[0]


@settings(max_examples=8)
@given(problem=problems, group=st.integers(1, 3), inner=st.integers(1, 2), times=st.integers(1, 3))
def test_hierarchical_follows_its_listing(problem, group, inner, times):
    options = f"group_size={group}, group_interval={inner}, interval={inner * times}"
    actual, _ = problem.run(f"hierarchical({options})", 2 * group)
    assert_replicas_equal(actual)
    assert_close(actual[0], hier_avg(problem, 2 * group, group, inner, inner * times))


# DiLoCo ------------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(problem=problems | ragged, workers=crowds, interval=intervals, lr=rates)
def test_e18_diloco_with_a_plain_outer_step_is_local_sgd(problem, workers, interval, lr):
    problem.optimizer = sgd(lr)
    options = f"interval={interval}, outer_lr=1.0, outer_momentum=0.0"
    actual, _ = problem.run(f"diloco({options})", workers)
    assert_replicas_equal(actual)
    assert_close(actual[0], local_sgd(problem, workers, interval, lr))


@settings(max_examples=10)
@given(problem=problems, workers=crowds, interval=intervals, mu=st.floats(0.1, 0.9))
def test_diloco_follows_its_listing(problem, workers, interval, mu):
    actual, _ = problem.run(f"diloco(interval={interval}, outer_momentum={mu!r})", workers)
    theta, velocity = flat(problem.model()), 0.0
    xs = [theta] * workers
    for step in range(problem.steps):
        xs = [move(x, gradient_at(problem, x, rank, step), 0.1) for rank, x in enumerate(xs)]
        if (step + 1) % interval == 0 or step == problem.steps - 1:
            delta = theta - sum(xs) / workers
            velocity = mu * velocity + delta
            theta = theta - 0.7 * (delta + mu * velocity)
            xs = [theta] * workers
    assert_close(actual[0], theta)


# Elastic averaging -------------------------------------------------------------------------------


def elastic(problem, workers, alpha, interval, lr, delta=0.0):
    """EASGD and EAMSGD round robin (algorithms 1 and 2): the center at the end."""
    c = flat(problem.model())
    xs, vs = [c.clone() for _ in range(workers)], [torch.zeros_like(c) for _ in range(workers)]
    for step in range(problem.steps):
        for rank in range(workers):
            e = torch.zeros_like(c)
            if step % interval == 0:
                e = alpha * (xs[rank] - c)
                c = c + e
            g = gradient_at(problem, xs[rank] + delta * vs[rank], rank, step)
            vs[rank] = delta * vs[rank] - lr * g
            xs[rank] = xs[rank] + vs[rank] - e
            if step == problem.steps - 1:  # its last exchange, before the others' last steps
                c = c + alpha * (xs[rank] - c)
    return c


@settings(max_examples=8)
@given(
    problem=problems,
    workers=crowds,
    interval=intervals,
    alpha=st.floats(0.05, 0.5),
    delta=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_e9_eamsgd_follows_its_listing_and_without_momentum_is_easgd(
    problem, workers, interval, alpha, delta
):
    options = f"interval={interval}, alpha={alpha!r}, momentum={delta}"
    actual, _ = problem.run(f"easgd({options})", workers, cluster=beat())
    center = elastic(problem, workers, alpha, interval, 0.1, delta)
    assert_replicas_equal(actual)
    assert_close(actual[0], center)


@settings(max_examples=8)
@given(problem=problems, workers=crowds, sync=st.booleans())
def test_e6_easgd_without_springs_is_independent_sgd(problem, workers, sync):
    actual, _ = problem.run(f"easgd(alpha=0, interval=2, sync={sync})", workers, cluster=beat())
    for rank in range(workers):
        x = flat(problem.model())
        for step in range(problem.steps):
            x = move(x, gradient_at(problem, x, rank, step), 0.1)
        assert torch.equal(problem.replicas[rank], x)
    assert torch.equal(actual[0], flat(problem.model()))  # the center never moved


def run_apart(strategy, workers, steps, cluster, width=6):
    """Workers at different places that have no gradient: their ways, ends, and the answer.

    A way begins where all were before they were put in their places.
    """
    ways, ends, answers = {}, {}, {}

    def train(worker):
        net = nn.Linear(width, 1, bias=False, dtype=torch.float64)
        net, paced = worker.setup(net, SGD(net.parameters(), lr=0.1))
        ways[worker.rank] = [flat(net)]
        with torch.no_grad():
            generator = torch.Generator().manual_seed(worker.rank)
            net.weight.copy_(torch.randn(1, width, generator=generator, dtype=torch.float64))
        ways[worker.rank].append(flat(net))
        if hasattr(worker.strategy, "show"):
            worker.strategy.show(worker._session.stepper.replica.flat.x)
            worker.comm.barrier()  # nobody reads what was shown before
        for _ in range(steps):
            paced.zero_grad()
            (net(torch.ones(1, width, dtype=torch.float64)).sum() * 0).backward()
            paced.step()
            ways[worker.rank].append(flat(net))
        if hasattr(worker.strategy, "flush"):
            worker.strategy.flush(worker._session.stepper.replica.flat.x)
        ends[worker.rank] = flat(net)
        worker.finish()
        answers[worker.rank] = flat(net)

    pl.simulate(train, workers=workers, strategy=strategy, cluster=cluster)
    ranks = sorted(ways)
    return [ways[r] for r in ranks], [ends[r] for r in ranks], [answers[r] for r in ranks]


@settings(max_examples=8)
@given(
    workers=crowds,
    steps=st.integers(1, 9),
    alpha=st.floats(0.01, 0.4),
    sync=st.booleans(),
    slowness=st.floats(1, 3),
)
def test_e7_springs_conserve_the_sum_of_workers_and_center(workers, steps, alpha, sync, slowness):
    strategy = f"easgd(alpha={alpha!r}, interval=2, sync={sync})"
    ways, ends, answers = run_apart(strategy, workers, steps, beat(1.0, slowness))
    center = ways[0][0]
    assert_close(sum(ends) + answers[0], sum(way[1] for way in ways) + center)


@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0, 1.5, 1.9])
def test_e8_round_robin_easgd_is_stable_up_to_its_bound(eta):
    """On x^2 / 2: the largest eigenvalue of a round crosses 1 at (4 - 2 eta) / (4 - eta)."""
    bound, workers = (4 - 2 * eta) / (4 - eta), 4

    def radius(alpha):
        round_ = np.eye(workers + 1)
        for rank in range(workers):
            one = np.eye(workers + 1)
            one[rank, rank], one[rank, workers] = 1 - eta - alpha, alpha
            one[workers, rank], one[workers, workers] = alpha, 1 - alpha
            round_ = one @ round_
        return max(abs(np.linalg.eigvals(round_)))

    assert radius(0.97 * bound) <= 1 + 1e-9 < radius(1.03 * bound)
    assert _grows(eta, 1.03 * bound) and not _grows(eta, 0.97 * bound)


def _grows(eta, alpha, steps=160):
    """Whether the strategy itself, round robin on x^2 / 2, ends farther out than half-way."""
    sizes = {}

    def train(worker):
        x = nn.Parameter(torch.tensor([1.0 + worker.rank], dtype=torch.float64))
        holder = nn.ParameterList([x])
        holder, paced = worker.setup(holder, SGD(holder.parameters(), lr=eta))
        with torch.no_grad():
            x.add_(worker.rank * 0.3)
        for step in range(steps):
            paced.zero_grad()
            (x * x / 2).sum().backward()
            paced.step()
            if step in (steps // 2, steps - 1):
                sizes[worker.rank, step] = abs(x.item())

    pl.simulate(train, workers=4, strategy=f"easgd(interval=1, alpha={alpha!r})", cluster=beat())
    half, last = (max(sizes[r, s] for r in range(4)) for s in (steps // 2, steps - 1))
    return last > 1.05 * half


# Servers -----------------------------------------------------------------------------------------


def only_rank_0(problem):
    """The other workers have no data."""
    return lambda rank: problem.steps if rank == 0 else 0


@settings(max_examples=8)
@given(problem=problems, lr=rates, shards=st.integers(1, 3))
@pytest.mark.parametrize("method", ["downpour(", "ssp(", "cyclic(form=gradient, "])
def test_e10_with_one_active_worker_a_served_method_is_sgd(method, problem, lr, shards):
    """The other worker has no data; the server steps as the plain optimizer would."""
    problem.batch += 1  # of one sample, torch rounds otherwise: its gradient lies column by column
    problem.optimizer = sgd(lr, momentum=0.9, weight_decay=0.01)
    strategy = f"{method}shards={shards})"
    actual, _ = problem.run(strategy, 2, steps=only_rank_0(problem), cluster=beat())
    assert_replicas_equal(actual)
    assert torch.equal(actual[0], problem.run_alone())


@settings(max_examples=10)
@given(problem=problems, interval=intervals, decay=st.floats(0, 0.5), maximize=st.booleans())
def test_e10_downpour_with_equal_intervals_is_sgd_to_rounding(problem, interval, decay, maximize):
    """Weight decay included: it belongs to each of the gradients that a push is the sum of."""
    problem.optimizer = sgd(0.1, weight_decay=decay, maximize=maximize)
    options = f"push_interval={interval}, fetch_interval={interval}"
    actual, _ = problem.run(f"downpour({options})", 2, steps=only_rank_0(problem), cluster=beat())
    assert_close(actual[0], problem.run_alone())


def delayed_sgd(problem, workers, lr):
    """Round robin: update k is the gradient that worker k mod p took p - 1 updates before."""
    w = flat(problem.model())
    read = [w] * workers
    for step in range(problem.steps):
        gradients = []
        for rank in range(workers):
            gradients.append(gradient_at(problem, read[rank], rank, step))
        for rank in range(workers):
            w = move(w, gradients[rank], lr)
            read[rank] = w
    return w


@settings(max_examples=8)
@given(problem=problems, workers=crowds, lr=rates, shards=st.integers(1, 3))
@pytest.mark.parametrize("method", ["downpour(", "cyclic(form=gradient, max_accumulated=1, "])
def test_e11_lock_step_pushes_are_delayed_sgd(method, problem, workers, lr, shards):
    problem.optimizer = sgd(lr)
    actual, result = problem.run(f"{method}shards={shards})", workers, cluster=beat())
    assert_replicas_equal(actual)
    assert torch.equal(actual[0], delayed_sgd(problem, workers, lr))
    assert result.staleness_max == workers - 1


@settings(max_examples=8)
@given(problem=problems, workers=crowds, lr=rates, shards=st.integers(1, 3))
def test_lock_step_moves_are_delayed_sgd_at_the_rate_over_p(problem, workers, lr, shards):
    problem.optimizer = sgd(lr)
    strategy = f"cyclic(max_accumulated=1, shards={shards})"
    actual, result = problem.run(strategy, workers, cluster=beat())
    assert_replicas_equal(actual)
    assert_close(actual[0], delayed_sgd(problem, workers, lr / workers))
    assert result.staleness_max == workers - 1


def served(problem, workers, batches, decay, server, local_move):
    """Round robin: every worker adds up so many gradients, with decay in each, and pushes them."""
    w = flat(problem.model())
    xs, sums = [w.clone()] * workers, [torch.zeros_like(w)] * workers
    optimizer = server([w])
    for step in range(problem.steps):
        for rank in range(workers):
            g = gradient_at(problem, xs[rank], rank, step) + decay * xs[rank]
            sums[rank] = sums[rank] + g
            if local_move:
                xs[rank] = xs[rank] - 0.1 * g
            if (step + 1) % batches == 0 or step == problem.steps - 1:
                w.grad = sums[rank]
                optimizer.step()
                xs[rank], sums[rank] = w.clone(), torch.zeros_like(w)
    return w


SERVED = {  # the batches of a push, and whether a worker moves between them
    "downpour": (1, True),
    "downpour(push_interval=4, fetch_interval=4)": (4, True),
    "ssp(bound=100)": (1, False),
    "cyclic(form=gradient, max_accumulated=1)": (1, False),
}
SERVERS = {
    "user": lambda w: SGD(w, lr=0.1),
    "sgd": lambda w: SGD(w, lr=0.1),
    "momentum": lambda w: SGD(w, lr=0.1, momentum=0.9),
    "adagrad": lambda w: torch.optim.Adagrad(w, lr=0.1),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("method", SERVED)
@settings(max_examples=4)
@given(problem=problems, workers=crowds, decay=st.floats(0, 0.5))
def test_weight_decay_belongs_to_each_gradient(method, server, problem, workers, decay):
    """It is taken at the model that the gradient was, and not at the server's of a later time."""
    batches, local_move = SERVED[method]
    problem.optimizer = sgd(0.1, weight_decay=decay)
    strategy = replace(pl.strategies.make_strategy(method), server_optimizer=server)
    actual, _ = problem.run(strategy, workers, cluster=beat())
    local_move = local_move and server != "adagrad"
    assert_close(
        actual[0], served(problem, workers, batches, decay, SERVERS[server], local_move), 1e-10
    )


def only_decay(strategy, kind, workers, steps, every=1):
    """Nothing moves but by decay: weights have zeros for a gradient, now and then; a bias none."""
    ends = {}

    def train(worker):
        net = nn.Linear(2, 3, dtype=torch.float64)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        net, paced = worker.setup(net, kind(net.parameters(), lr=0.1, weight_decay=0.5))
        for step in range(steps(worker.rank)):
            paced.zero_grad()
            net.weight.grad = None if step % every else torch.zeros_like(net.weight)
            paced.step()
        worker.finish()
        ends[worker.rank] = net

    pl.simulate(train, workers=workers, strategy=strategy, cluster=beat(1.0, 1.7, 3.1))
    assert torch.equal(ends[0].bias, torch.ones(3, dtype=torch.float64))
    return ends[0].weight.detach()


@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    "method",
    [
        "downpour(push_interval=3, fetch_interval=3, local_move=false)",
        "ssp",
        "cyclic(form=gradient, scale=mean)",
        "cyclic(form=gradient, scale=sum)",
    ],
)
def test_what_has_a_gradient_decays_once_for_each_that_a_push_counts_for(method, kind, monkeypatch):
    pushes, inner = [], GradientServer.step

    def step(server, request, *rest):
        if request.batches:
            pushes.append((request.batches, server.version - request.version))
        inner(server, request, *rest)

    monkeypatch.setattr(GradientServer, "step", step)
    weight = only_decay(method, kind, workers=3, steps=lambda rank: 6)
    w = [1.0]
    for batches, age in pushes:
        times = 1 if "mean" in method else batches
        at = w[-1 - age] if kind is SGD else w[-1]  # where the gradient was, or where the server is
        w.append(w[-1] - 0.1 * 0.5 * times * at)
    assert sum(batches for batches, _ in pushes) == 18
    assert_close(weight, torch.full_like(weight, w[-1]))


@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW])
def test_batches_without_a_gradient_do_not_decay_what_others_of_the_push_do(kind):
    strategy = "downpour(push_interval=4, fetch_interval=4, local_move=false)"
    weight = only_decay(strategy, kind, workers=2, steps=lambda rank: 8 * (rank == 0), every=2)
    assert_close(weight, torch.full_like(weight, (1 - 0.1 * 0.5 * 2) ** 2))


PUSHES: list[tuple[int, int, int]] = []
LEFT: dict[int, int] = {}
"""The number of the last push that each worker was in the ring for."""


class WatchedServer:
    """Writes down who pushed, how old it was, and of how many batches; and who left the ring."""

    def on_request(self, worker, request, vector):
        if request.last:
            LEFT[worker] = len(PUSHES) - (not request.batches)
        if request.batches:
            PUSHES.append((worker, self.version - request.version, request.batches))
        super().on_request(worker, request, vector)


WatchedCyclic = cyclic_with(WatchedServer)


def moved_in_turn(problem, workers, lr, momentum):
    """The servers' model after the pushes of a run: each of them made once more, by its listing."""
    w = flat(problem.model())
    read, velocities, steps = [w] * workers, [torch.zeros_like(w)] * workers, [0] * workers
    for number, (rank, _, batches) in enumerate(PUSHES):
        x = read[rank]
        for _ in range(round(batches)):
            g = gradient_at(problem, x, rank, steps[rank])
            velocities[rank] = momentum * velocities[rank] + g
            x = move(x, velocities[rank], lr)
            steps[rank] += 1
        ring = sum(LEFT[other] >= number for other in range(workers))
        w = w + (x - read[rank]) / ring
        read[rank] = w
    return w


@settings(max_examples=10)
@given(
    slowness=st.lists(st.floats(0.5, 4), min_size=2, max_size=5),
    bound=st.sampled_from([1, 3, 100]),
    momentum=st.sampled_from([0.0, 0.9]),
    lr=rates,
)
def test_at_any_speeds_moves_follow_their_listing(slowness, bound, momentum, lr):
    """Each turn takes the servers' model 1/p of the way that the worker went, p of the ring."""
    problem, workers = Problem(seed=1, steps=9, optimizer=sgd(lr, momentum=momentum)), len(slowness)
    PUSHES.clear()
    method = WatchedCyclic(max_accumulated=bound)
    actual, _ = problem.run(method, workers, cluster=beat(*slowness, 1.0))
    assert_replicas_equal(actual)
    assert_close(actual[0], moved_in_turn(problem, workers, lr, momentum))


@settings(max_examples=10)
@given(
    slowness=st.lists(st.floats(0.5, 4), min_size=2, max_size=6),
    bound=st.sampled_from([1, 3, 8, 100]),
)
@pytest.mark.parametrize("form", ["move", "gradient"])
def test_e12_pushes_are_cyclic_and_p_minus_1_old_at_any_speeds(form, slowness, bound):
    workers, steps = len(slowness), 12
    problem = Problem(seed=1, steps=steps)
    PUSHES.clear()
    _, result = problem.run(
        WatchedCyclic(form=form, max_accumulated=bound), workers, cluster=beat(*slowness, 1.0)
    )
    order = [src for src, _, _ in PUSHES]
    ended = min(len(order) - 1 - order[::-1].index(rank) for rank in range(workers))
    assert order[: ended + 1] == [k % workers for k in range(ended + 1)]
    for number, (_, age, batches) in enumerate(PUSHES[: ended + 1]):
        assert age == min(number, workers - 1)
        assert 1 <= batches <= bound
    assert sum(batches for *_, batches in PUSHES) == steps * workers == result.steps


def left_after_40_steps(strategy):
    """Of 1: how far 16 nearly equal workers still are from the least of x^2 / 2, at 0."""
    ends = []

    def train(worker):
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(net.weight)
        lr = 0.1 * worker.strategy.lr_factor(worker.size)
        net, paced = worker.setup(net, SGD(net.parameters(), lr=lr))
        for _ in range(40):
            paced.zero_grad()
            net.weight.square().sum().div(2).backward()
            paced.step()
        worker.finish()
        ends.append(abs(net.weight.item()))

    place = Cluster(compute=Compute(step_s=1.0, spread=0.05))
    pl.simulate(train, workers=16, strategy=strategy, cluster=place)
    return max(ends)


def test_equal_workers_come_as_far_in_turn_as_in_lockstep():
    """The paper's form does where nobody adds up; else its means of batches come less far."""
    together = left_after_40_steps("allreduce")
    assert left_after_40_steps("cyclic") < 2 * together
    assert left_after_40_steps("cyclic(form=gradient, max_accumulated=1)") < 2 * together
    assert left_after_40_steps("cyclic(form=gradient, max_accumulated=4)") > 10 * together


@pytest.mark.parametrize(
    "option", ["scale=sum", "local_move=true", "server_optimizer=sgd", "server_optimizer=adagrad"]
)
def test_moves_refuse_the_options_of_gradients(option):
    name, value = option.split("=")
    with pytest.raises(UsageError, match=rf"{name} \((?i:{value})\) must be .* unless form is"):
        make_strategy(f"cyclic({option})")
    make_strategy(f"cyclic(form=gradient, {option})")


def test_the_recipe_takes_the_rate_of_each_form():
    """The sweep was made with moves; the means of gradients want 1/p of it."""
    moves, means = make_strategy("cyclic"), make_strategy("cyclic(form=gradient)")
    for workers in (4, 8, 16):
        rate = learning_rate(moves, "cnn", workers)
        assert rate == learning_rate(moves, "cnn", 8)
        assert learning_rate(means, "cnn", workers) == rate / workers


@settings(max_examples=10)
@given(slowness=st.lists(st.floats(0.5, 4), min_size=2, max_size=5), lr=rates)
@pytest.mark.parametrize(
    "method", ["cyclic(form=gradient, scale=sum)", "downpour(push_interval=3)"]
)
def test_constant_gradients_add_up_whatever_the_speeds(method, slowness, lr):
    """Nothing is lost and nothing pushed twice: w ends at w0 - lr * the sum of all gradients."""
    ends, starts = {}, {}

    def train(worker):
        net = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        net, paced = worker.setup(net, SGD(net.parameters(), lr=lr))
        starts[worker.rank] = flat(net)
        for _ in range(7):
            paced.zero_grad()
            (net(torch.ones(1, 3, dtype=torch.float64)).sum() * (1 + worker.rank)).backward()
            paced.step()
        worker.finish()
        ends[worker.rank] = flat(net)

    workers = len(slowness)
    pl.simulate(train, workers=workers, strategy=method, cluster=beat(*slowness, 1.0))
    total = 7 * sum(1 + rank for rank in range(workers))
    assert_replicas_equal(list(ends.values()))
    assert_close(ends[0], starts[0] - lr * total, 1e-11)


@settings(max_examples=8)
@given(problem=problems, workers=crowds, lr=rates, shards=st.integers(1, 2))
def test_e21_ssp_of_bound_0_is_synchronous_sgd(problem, workers, lr, shards):
    problem.optimizer = sgd(lr)
    expected, _ = problem.run("allreduce", workers)
    problem.optimizer = sgd(lr / workers)
    uneven = beat(1.0, 2.5, 0.5)
    actual, _ = problem.run(f"ssp(bound=0, shards={shards})", workers, cluster=uneven)
    assert_replicas_equal(actual)
    assert_close(actual[0], expected[0])


@settings(max_examples=8)
@given(slowness=st.lists(st.floats(0.5, 6), min_size=2, max_size=6), bound=st.integers(0, 5))
def test_ssp_keeps_its_bound(slowness, bound):
    steps, clocks, apart = 12, dict.fromkeys(range(len(slowness)), 0), []

    def train(worker):
        net = nn.Linear(2, 1)
        net, paced = worker.setup(net, SGD(net.parameters(), lr=0.1))
        for _ in range(steps):
            paced.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            paced.step()
            clocks[worker.rank] += 1
            going = [clock for clock in clocks.values() if clock < steps]
            apart.append(clocks[worker.rank] - min(going, default=steps))
        clocks[worker.rank] = steps

    strategy = f"ssp(bound={bound})"
    pl.simulate(train, workers=len(slowness), strategy=strategy, cluster=beat(*slowness, 1.0))
    assert max(apart) <= bound + 1


# Without a center --------------------------------------------------------------------------------

GOSSIPS = [
    "gossip",
    "gossip(mode=push)",
    "gossip(sync=true, topology=ring)",
    "gossip(mode=push, sync=true)",
    "gossip(order=step_first, topology=exponential)",
    "gossip(order=parallel, probability=0.5)",
    "adpsgd",
]


@pytest.mark.parametrize("strategy", GOSSIPS)
@settings(max_examples=8)
@given(workers=st.integers(2, 6), slowness=st.floats(1, 3))
def test_e16_gossip_never_leaves_the_hull_and_comes_together(strategy, workers, slowness):
    ways, _, answers = run_apart(strategy, workers, 30, beat(1.0, slowness))
    starts = torch.stack([way[1] for way in ways])
    low, high = starts.amin(0), starts.amax(0)
    for way in ways:
        for x in way[1:]:
            assert bool(((low - 1e-12 <= x) & (x <= high + 1e-12)).all())
    spread = torch.stack([way[-1] for way in ways]).std(0).max()
    assert spread < 0.2 * starts.std(0).max()
    assert_replicas_equal(answers)


@settings(max_examples=8)
@given(workers=st.integers(2, 6), steps=st.integers(1, 12), slowness=st.floats(1, 4))
@pytest.mark.parametrize("topology", ["complete", "ring", "exponential"])
def test_adpsgd_conserves_the_mean(topology, workers, steps, slowness):
    strategy = f"adpsgd(topology={topology})"
    ways, _, answers = run_apart(strategy, workers, steps, beat(1.0, slowness, 0.7))
    assert_close(answers[0], sum(way[1] for way in ways) / workers)


@settings(max_examples=8)
@given(workers=st.integers(3, 6), latency_s=st.floats(0, 6))
def test_adpsgd_comes_together_on_slow_links(workers, latency_s):
    """However many steps an exchange takes, workers do not swing past each other."""
    links, stepper = pl.Cluster(network=Link(latency_s=latency_s)), beat()
    ways, _, _ = run_apart("adpsgd", workers, 80, replace(links, compute=stepper.compute))
    spreads = [torch.stack([way[step] for way in ways]).std(0).max() for step in (1, -1)]
    assert spreads[1] < 0.2 * spreads[0]


@settings(max_examples=6)
@given(problem=problems)
@pytest.mark.parametrize("order", ["mix_first", "parallel", "step_first"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_two_synchronous_gossips_follow_their_order(mode, order, problem):
    """Of two workers, each picks the other; both then are where the equations say."""
    options = f"mode={mode}, order={order}, sync=true"
    problem.run(f"gossip({options})", 2)
    xs = [flat(problem.model())] * 2
    for step in range(problem.steps):
        moved = [move(x, gradient_at(problem, x, rank, step), 0.1) for rank, x in enumerate(xs)]
        if order == "mix_first":
            xs = [(moved[0] + moved[1]) / 2] * 2
        elif order == "parallel":
            xs = [moved[r] - (xs[r] - xs[1 - r]) / 2 for r in range(2)]
        else:
            xs = [(moved[r] + xs[1 - r]) / 2 for r in range(2)]
    for rank in range(2):
        assert_close(problem.replicas[rank], xs[rank])


@settings(max_examples=6)
@given(problem=problems)
def test_a_pull_reads_the_peer_as_it_is_after_its_last_mixing(problem):
    """Of two workers that step in turn, each mixes with what the other ended its step with."""
    problem.run("gossip", 2, cluster=beat())
    xs, last = [flat(problem.model())] * 2, (1, problem.steps - 1)
    for step in range(problem.steps):
        for rank in range(2):
            moved = move(xs[rank], gradient_at(problem, xs[rank], rank, step), 0.1)
            alone = (rank, step) == last  # the other has come to its end
            xs[rank] = moved if alone else (moved + xs[1 - rank]) / 2
    for rank in range(2):
        assert_close(problem.replicas[rank], xs[rank])


@settings(max_examples=6)
@given(problem=problems)
def test_a_pull_over_a_slow_link_reads_the_step_of_a_peer_that_waits_itself(problem):
    """Two workers that ask each other at once both read what the other has just learned."""
    problem.run("gossip", 2, cluster=replace(beat(), network=Link(latency_s=10.0)))
    x = flat(problem.model())
    for step in range(problem.steps):
        x = sum(move(x, gradient_at(problem, x, rank, step), 0.1) for rank in range(2)) / 2
    for rank in range(2):
        assert_close(problem.replicas[rank], x)


@settings(max_examples=10)
@given(problem=problems, workers=crowds)
@pytest.mark.parametrize("strategy", ["gossip(interval=100)", "gossip(mode=push, interval=100)"])
def test_gossip_that_never_comes_is_independent_sgd(strategy, problem, workers):
    problem.run(strategy, workers, cluster=beat())
    for rank in range(workers):
        x = flat(problem.model())
        for step in range(problem.steps):
            x = move(x, gradient_at(problem, x, rank, step), 0.1)
        assert torch.equal(problem.replicas[rank], x)
