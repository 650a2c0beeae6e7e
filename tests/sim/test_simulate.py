"""Whole runs in virtual time: a function of their seed, with faults that are named."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training import Problem
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.comm import Comm
from paceline.comm.limits import Limits
from paceline.common.faults import parse_fault
from paceline.record.trace import read
from paceline.sim.cluster import (
    Cluster,
    CollectiveCosts,
    Compute,
    Link,
    Serving,
    load_cluster,
    read_faults,
)
from paceline.sim.models import MODELS, as_model


def train(worker, steps=6, seconds=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    x, y = torch.randn(48, 4), torch.randint(0, 2, (48,))
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)
    for _ in range(2):
        for xs, ys in worker.setup_dataloaders(loader):
            sgd.zero_grad()
            loss = nn.functional.cross_entropy(net(xs), ys)
            loss.backward()
            sgd.step()
        worker.log(loss=loss, draw=random.random() + np.random.rand() + torch.rand(1))


STRATEGIES = ["allreduce", "sasgd(interval=3)"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_is_a_function_of_its_seed(strategy):
    runs = [
        pl.simulate(train, workers=4, strategy=strategy, cluster="mixed-lab", seed=seed)
        for seed in (5, 5, 6)
    ]
    first, again, other = runs
    assert first.trace_hash == again.trace_hash != other.trace_hash
    assert first.metrics == again.metrics != other.metrics
    assert first.virtual_seconds == again.virtual_seconds > 0


def test_the_calling_programs_generators_are_left_alone():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = (torch.rand(1), np.random.rand(), random.random())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    pl.simulate(train, workers=3)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_ranks_draw_from_generators_of_their_own():
    result = pl.simulate(train, workers=3, cluster="ideal")
    draws = [record["draw"] for record in result.metrics]
    assert len(set(draws)) == len(draws)


_PROGRAM = """
import sys; sys.path[:0] = {path!r}
from test_simulate import train
import paceline as pl
run = pl.simulate(train, workers=4, strategy="sasgd(interval=3)", cluster="mixed-lab", seed=5)
print(run.trace_hash, [record["loss"] for record in run.metrics])
"""


def test_another_process_with_another_hash_seed_gives_the_same():
    from pathlib import Path

    here = Path(__file__).parent
    source = Path(pl.__file__).parents[1]
    program = _PROGRAM.format(path=[str(here), str(here.parent), str(source)])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@settings(max_examples=10)
@given(seed=st.integers(0, 99), workers=st.integers(2, 5), strategy=st.sampled_from(STRATEGIES))
def test_twice_all_times_is_twice_the_time_and_the_same_model(seed, workers, strategy):
    """G15: scaling every time constant by 2 doubles the duration and changes nothing else."""
    from dataclasses import replace

    problem = Problem(seed=seed)
    slow = pl.sim.cluster.load_cluster("mixed-lab")
    link, compute = slow.network, slow.compute
    twice = replace(
        slow,
        network=replace(link, latency_s=2 * link.latency_s, bytes_per_s=link.bytes_per_s / 2),
        compute=replace(compute, step_s=2 * compute.step_s, sample_s=2 * compute.sample_s),
    )
    one, first = problem.run(strategy, workers, cluster=slow)
    other, second = problem.run(strategy, workers, cluster=twice)
    assert second.virtual_seconds == 2 * first.virtual_seconds
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_synchronous_run_goes_at_the_pace_of_its_slowest():
    fast = pl.simulate(train, workers=2, cluster="ethernet-1g")  # both of factor 1
    slow = pl.simulate(train, workers=4, cluster="mixed-lab")  # the last of factor 3
    assert slow.virtual_seconds > fast.virtual_seconds
    assert slow.wait_share > 0.4 > fast.wait_share


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("when", [{"step": 3}, {"seconds": 0.012}])
def test_a_killed_worker_ends_the_run_by_its_name(strategy, when):
    before = threading.active_count()
    with pytest.raises(pl.PeerLost) as caught:
        pl.simulate(train, workers=4, strategy=strategy, faults=[pl.kill(rank=2).at(**when)])
    assert caught.value.ranks == (2,)
    assert caught.value.op == "all_reduce"
    assert "it died" in str(caught.value)
    assert threading.active_count() == before


def test_a_frozen_worker_is_lost_after_dead_s():
    faults = [pl.freeze(rank=1).at(seconds=0.01)]
    with pytest.raises(
        pl.PeerLost, match=r"lost rank 1 in all_reduce .* stopped for 5 s"
    ) as caught:
        pl.simulate(train, workers=3, faults=faults)
    assert 4.9 < caught.value.waited_s <= 5.0


@pytest.mark.parametrize("when", [{"step": 3}, {"seconds": 0.011}])
def test_a_worker_that_thaws_in_time_is_waited_for(when):
    plain = pl.simulate(train, workers=3)
    frozen = pl.simulate(train, workers=3, faults=[pl.freeze(rank=1, for_s=2.0).at(**when)])
    assert frozen.virtual_seconds == pytest.approx(plain.virtual_seconds + 2.0, abs=0.01)
    assert [m["loss"] for m in frozen.metrics] == [m["loss"] for m in plain.metrics]


def test_a_slow_down_lasts_as_long_as_it_says():
    def seconds(*faults):
        return pl.simulate(train, workers=2, cluster="ethernet-100g", faults=faults).virtual_seconds

    plain = seconds()
    for_good = seconds(pl.slow(rank=1, factor=3).at(step=0))
    half = seconds(pl.slow(rank=1, factor=3, for_s=1.5 * plain).at(seconds=0))
    assert for_good == pytest.approx(3 * plain, rel=0.15)
    assert plain < half < for_good


def test_faults_leave_the_order_of_the_data_alone(tmp_path):
    def order(*faults):
        pl.simulate(train, workers=3, faults=faults, out=tmp_path)
        records = read(tmp_path / "trace.jsonl")
        keys = ("rank", "epoch", "index")
        return sorted(tuple(r[k] for k in keys) for r in records if r["event"] == "batch")

    assert order() == order(pl.slow(rank=1, factor=5).at(seconds=0))


def test_a_worker_joins_when_it_is_told():
    """At the level of the contract: others see it once it has said that it has a state."""
    from support.worlds import run_program

    def program(transport, channel, argument):
        comm = Comm(transport)
        if comm.rank == 2:
            joined_s = comm.clock.now()
            comm.clock.charge(1.0)
            transport.members.announce_ready()
            comm.clock.charge(2.0)
            return joined_s
        seen = []
        while not seen or 2 not in seen[-1]:
            seen.append(comm.members.alive())
            comm.clock.charge(0.5)
        return seen

    outcome = run_program("simulated", program, 3, faults=[pl.join(rank=2).at(seconds=1.2)])
    assert outcome.values[2] == 1.2
    assert outcome.values[0] == [(0, 1)] * 5 + [(0, 1, 2)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (pl.kill(rank=4).at(step=1), r"kill: rank \(4\) must be below 4"),
        (pl.cut(rank=0, peer=4), r"cut: peer \(4\) must be below 4"),
        (pl.degrade(node=9, factor=0.1), r"degrade: node \(9\) must be below 4"),
        (pl.join(rank=1).at(seconds=1), "allreduce takes workers in only with on_loss=.continue"),
    ],
)
def test_faults_that_cannot_happen_are_refused(fault, message):
    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(train, workers=4, faults=[fault])


def test_a_program_that_would_hang_on_gloo_is_refused_with_every_rank_named():
    """Both send before they receive: that works only where messages are buffered."""

    def hang(worker):
        comm, other = worker.comm, 1 - worker.rank
        comm.send(torch.ones(1), other)
        comm.receive(torch.ones(1), other)

    with pytest.raises(pl.Deadlock) as caught:
        pl.simulate(hang, workers=2)
    assert "rank 0: send to rank 1" in str(caught.value)
    assert "rank 1: send to rank 0" in str(caught.value)


def test_a_rank_that_raises_is_named_with_the_virtual_time():
    def broken(worker):
        worker.comm.clock.charge(1.5)
        if worker.rank == 1:
            raise KeyError("oops")
        worker.comm.barrier()

    with pytest.raises(pl.WorkerFailed, match="rank 1: KeyError: 'oops'") as told:
        pl.simulate(broken, workers=3)
    assert told.value.details.count('raise KeyError("oops")') == 1
    assert "at 1.500000 s of virtual time" in told.value.details
    assert "kernel.py" not in told.value.details


def test_evaluation_through_a_loader_is_charged_as_forward_alone():
    def evaluate(worker, grad):
        loader = worker.setup_dataloaders(DataLoader(TensorDataset(torch.zeros(30, 4))))
        with torch.set_grad_enabled(grad):
            for _ in loader:
                pass

    charged = pl.simulate(evaluate, workers=1, arguments={"grad": False}).virtual_seconds
    free = pl.simulate(evaluate, workers=1, arguments={"grad": True}).virtual_seconds
    assert charged == pytest.approx(30 * 3e-4 / 3)
    assert free == 0.0


def test_accumulation_and_short_batches_are_charged_for_what_they_are():

    cluster = Cluster(compute=Compute(step_s=0.0, sample_s=1.0))

    def accumulate(worker, every):
        net = nn.Linear(4, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        data = DataLoader(TensorDataset(torch.zeros(10, 4)), batch_size=4)
        for index, (x,) in enumerate(worker.setup_dataloaders(data)):
            net(x).sum().backward()
            if (index + 1) % every == 0 or index == 2:
                sgd.step()

    for every in (1, 2):
        run = pl.simulate(accumulate, workers=1, cluster=cluster, arguments={"every": every})
        assert run.virtual_seconds == pytest.approx(10.0)


def test_the_limits_hold_in_virtual_time():
    def uneven(worker):
        if worker.rank == 0:
            worker.comm.clock.charge(100.0)
        worker.comm.barrier()

    with pytest.raises(pl.CommTimeout, match=r"waited 20 s in all_reduce for rank 0, alive"):
        pl.simulate(uneven, workers=2, limits=Limits(progress_limit_s=20.0))


def test_a_freeze_in_the_middle_of_computing_delays_the_arrival():
    def compute(worker):
        worker.comm.clock.charge(1.0 + worker.rank)
        worker.comm.barrier()
        worker.log(done=True)

    frozen = [pl.freeze(rank=1, for_s=3.0).at(seconds=0.5)]
    run = pl.simulate(compute, workers=3, cluster="ideal", faults=frozen)
    assert [record["t"] for record in run.metrics] == [5.0] * 3


def test_who_is_killed_while_computing_has_not_arrived():
    def compute(worker):
        worker.comm.clock.charge(1.0 + worker.rank)
        worker.comm.barrier()

    with pytest.raises(pl.PeerLost, match=r"lost rank 2 in all_reduce after 1\.00 s"):
        pl.simulate(compute, workers=3, cluster="ideal", faults=[pl.kill(rank=2).at(seconds=2.0)])


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=3)", "gossip"])
def test_ranks_that_share_a_core_take_as_long_as_one_after_the_other(strategy):
    def seconds(cores):
        compute = Compute(sample_s=0.01)
        cluster = Cluster(ranks_per_node=0, cores=cores, compute=compute)
        return pl.simulate(train, workers=4, strategy=strategy, cluster=cluster)

    alone, two, one = seconds(0), seconds(2), seconds(1)
    assert two.virtual_seconds == pytest.approx(2 * alone.virtual_seconds)
    assert one.virtual_seconds == pytest.approx(4 * alone.virtual_seconds)
    assert two.wait_share == pytest.approx(0.0, abs=1e-9), "a shared core is not a wait"
    assert two.bytes_sent == alone.bytes_sent


def test_faults_and_shared_cores_give_the_same_run_twice():
    cluster = Cluster(ranks_per_node=2, cores=1, compute=Compute(sample_s=0.01, spread=0.3))
    faults = [
        pl.kill(rank=3).at(step=2),
        pl.freeze(rank=0, for_s=0.2).at(seconds=0.05),
        pl.slow(rank=1, factor=3).at(seconds=0.1),
    ]
    runs = [
        pl.simulate(train, workers=4, strategy="gossip", cluster=cluster, faults=faults)
        for _ in range(2)
    ]
    assert runs[0].trace_hash == runs[1].trace_hash
    assert runs[0].lost_workers == 1 and runs[0].steps > 0


@pytest.mark.parametrize(
    "strategy",
    [
        "downpour(push_interval=1, fetch_interval=1)",
        "ssp",
        "easgd",
        "cyclic(max_accumulated=1)",
        "cyclic(form=gradient, max_accumulated=1)",
    ],
)
def test_a_server_is_busy_with_each_update(strategy):
    def run(**serving):
        cluster = Cluster(compute=Compute(sample_s=1e-4), serving=Serving(**serving))
        return pl.simulate(train, workers=3, strategy=strategy, cluster=cluster)

    free, busy = run(), run(bytes_per_s=23 * 4 * 2)  # half a second for the 23 parameters
    updates = round(busy.virtual_seconds / 0.5)
    assert updates >= 8 and busy.virtual_seconds > 100 * free.virtual_seconds


def test_a_communicator_lives_with_its_group():
    """Two tiers: what a group sends to its communicator does not leave the node."""
    inside, between = Link(bytes_per_s=1e9), Link(latency_s=1.0)
    cluster = Cluster(ranks_per_node=2, inside=inside, network=between)
    run = pl.simulate(train, workers=4, strategy="layered(group_size=2)", cluster=cluster)
    rounds = run.steps / 4 + 1  # in the last one, all say that they have come to their end
    assert run.virtual_seconds == pytest.approx(1 + 2 * rounds, abs=0.01)


# Links -------------------------------------------------------------------------------------------

WAYS = ("post", "send", "peek", "all_reduce")


def talk(transport, channel, argument):
    """Rank 1 gets a vector of rank 0 in one of the ways; when it has it."""
    comm, x = Comm(transport), torch.ones(1000)
    way = argument["way"]
    if way == "all_reduce":
        comm.all_reduce(x)
    elif way == "peek":
        if comm.rank == 0:
            comm.board.publish(x)
            comm.clock.charge(100.0)
        elif comm.rank == 1:
            comm.clock.charge(1e-6)
            comm.board.peek(0)
    elif comm.rank == 0:
        (comm.send if way == "send" else comm.board.post)(x, 1)
    elif comm.rank == 1:
        comm.receive(x, 0)
    return comm.clock.now()


def arrival(way, *faults, size=3, **how):
    from support.worlds import run_program

    return run_program("simulated", talk, size, faults=faults, way=way, **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fault", [pl.cut(rank=0, peer=1, for_s=7), pl.cut(rank=1, for_s=7), pl.cut(node=0, for_s=7)]
)
def test_what_goes_over_a_cut_link_waits_until_it_is_whole(way, fault):
    plain = arrival(way).values[1]
    assert 0 < plain < 0.01
    assert arrival(way, fault).values[1] == pytest.approx(7 + plain, abs=2e-6)
    other = pl.cut(rank=2, peer=1, for_s=7) if way != "all_reduce" else pl.cut(rank=3, for_s=7)
    assert arrival(way, other, size=4 if way != "all_reduce" else 3).values[1] == plain


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("for_s", [None, 50.0])
def test_a_link_that_stays_cut_ends_in_a_timeout_that_names_the_ranks(way, for_s):
    told = arrival(way, pl.cut(rank=0, peer=1, for_s=for_s), limits=Limits(progress_limit_s=20))
    with pytest.raises(pl.CommTimeout) as caught:
        _ = told.values
    assert caught.value.waited_s == pytest.approx(20)
    assert set(caught.value.ranks) <= {0, 1}


def test_two_messages_over_a_cut_link_keep_their_order_and_queue_at_the_card():
    def program(transport, channel, argument):
        comm = Comm(transport)
        if comm.rank == 0:
            comm.board.post(torch.full((125_000,), 1.0), 1)
            comm.clock.charge(3.0)
            comm.board.post(torch.full((125_000,), 2.0), 1)
            return None
        like, taken = torch.zeros(125_000), []
        for _ in range(2):
            taken.append((comm.receive(like, 0).x[0].item(), comm.clock.now()))
        return taken

    from support.worlds import run_program

    faults = [pl.cut(rank=1, for_s=2).at(seconds=0), pl.cut(node=1, for_s=4).at(seconds=1.5)]
    (first, first_s), (second, second_s) = run_program(
        "simulated", program, 2, faults=faults
    ).values[1]
    assert (first, second) == (1.0, 2.0)
    assert first_s == pytest.approx(5.5 + 5e-5 + 0.004)
    assert second_s == pytest.approx(first_s + 0.004)


def test_a_cut_delays_who_waits_for_each_other_and_nobody_else():
    def run(strategy, *faults):
        return pl.simulate(train, workers=4, strategy=strategy, faults=faults)

    cut = pl.cut(rank=3, for_s=5).at(seconds=0.005)
    plain, delayed = run("allreduce"), run("allreduce", cut)
    assert delayed.virtual_seconds == pytest.approx(plain.virtual_seconds + 5, abs=0.01)
    assert delayed.loss == plain.loss
    slowed = run("allreduce", pl.degrade(node=2, factor=0.001))
    assert plain.virtual_seconds < slowed.virtual_seconds and slowed.loss == plain.loss


SCRIPT = {
    "kill": "kill(rank=2).at(seconds=0.02)",
    "freeze": "freeze(rank=1, for_s=0.5).at(step=2)",
    "slow": "slow(rank=0, factor=3, for_s=0.1).at(seconds=0.01)",
    "cut": "cut(rank=1, for_s=0.2).at(seconds=0.01)",
    "degrade": "degrade(node=0, factor=0.01).at(seconds=0.01)",
}


@pytest.mark.parametrize("strategy", ["gossip", "adpsgd", "downpour(push_interval=2)"])
@pytest.mark.parametrize("kind", SCRIPT)
def test_a_fault_script_gives_the_same_trace_twice(kind, strategy, tmp_path):
    """As sentences, as a file, and again."""
    path = tmp_path / "script.toml"
    sentence = parse_fault(SCRIPT[kind])
    given_keys = {k: v for k, v in asdict(sentence).items() if v is not None}
    path.write_text("[[faults]]\n" + "".join(f"{k} = {v!r}\n" for k, v in given_keys.items()))

    def run(*faults):
        return pl.simulate(train, workers=4, strategy=strategy, faults=faults, cluster="mixed-lab")

    told, read_back, plain = run(sentence), run(*read_faults(path)), run()
    assert told.trace_hash == read_back.trace_hash != plain.trace_hash
    assert told.metrics == read_back.metrics


# Standing for another model ----------------------------------------------------------------------


def test_as_another_model_bytes_and_times_are_its_own_and_gradients_are_not(tmp_path):
    model = MODELS["resnet50"]
    assert (model.bytes, model.tensors) == (4 * 25_557_032, 161)
    plain = pl.simulate(train, workers=4, cluster="ethernet-1g")
    run = pl.simulate(train, workers=4, cluster="ethernet-1g", as_model="resnet50", out=tmp_path)
    assert run.loss == plain.loss and run.steps == plain.steps
    assert run.bytes_sent == pytest.approx(plain.bytes_sent * model.bytes / 92)
    assert run.wire_bytes == pytest.approx(plain.wire_bytes * model.bytes / 92)
    start_s, exchange_s = 2 * (5e-5 + model.bytes / 125e6), 6 * (5e-5 + model.bytes / 4 / 125e6)
    expected_s = start_s + run.steps / 4 * exchange_s + 2 * 12 * model.sample_s
    assert run.virtual_seconds == pytest.approx(expected_s, rel=0.01)
    assert run.as_model == "resnet50" and plain.as_model is None
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["as_model"].startswith("times and bytes as of resnet50; gradients of the network")
    assert config["cluster"]["stands_for"]["bytes"] == model.bytes
    sent = sum(r["bytes"] for r in read(tmp_path / "trace.jsonl") if r["event"] in SENDS)
    assert sent == run.bytes_sent


SENDS = ("broadcast", "all_reduce")


def test_a_step_takes_the_named_models_time():
    cluster = Cluster(compute=Compute(step_s=5.0, sample_s=1.0, factors=(2.0,)))
    run = pl.simulate(train, workers=1, cluster=cluster, as_model="vgg16")
    assert run.virtual_seconds == pytest.approx(2 * 2 * 48 * MODELS["vgg16"].sample_s)


def test_one_call_a_tensor_counts_the_tensors_of_the_model_that_is_stood_for():
    link = Link(latency_s=0.01)
    times = {}
    for calls in (0, 1):
        cluster = Cluster(network=link, collectives=CollectiveCosts(algorithm="ring", calls=calls))
        times[calls] = [
            pl.simulate(train, workers=2, cluster=cluster, as_model=model).virtual_seconds
            for model in (None, "resnet18")
        ]
    assert times[0][0] / times[1][0] == pytest.approx(4, rel=0.1)  # two layers, weights and biases
    assert times[0][1] / times[1][1] > 10


def test_an_unknown_model_gets_the_nearest_name():
    with pytest.raises(pl.UsageError, match='no model "resnet5"; did you mean "resnet50"'):
        pl.simulate(train, workers=2, as_model="resnet5")


def test_a_trial_in_another_process_stands_for_the_same_model():
    from paceline.lab.trials import Trial
    from paceline.strategies import make_strategy

    cluster = as_model(load_cluster("wan"), "gpt2-small")
    trial = Trial(strategy=make_strategy("allreduce"), workers=2, cluster=cluster)
    assert Trial.from_config(json.loads(json.dumps(trial.config()))).cluster == cluster
