"""What each method's docstring says of dead, frozen, slow and late workers, in virtual time."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
import torch
from support.cyclic import cyclic_with
from support.devices import Elsewhere
from support.training import beat, flat
from torch import nn
from torch.optim import SGD, Adagrad, Adam, RMSprop
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.comm.limits import Limits
from paceline.common.faults import freeze, join, kill, slow
from paceline.errors import PeerLost
from paceline.model.hyperparameters import read_hyperparameters
from paceline.model.replica import Replica
from paceline.record.trace import read
from paceline.sim.cluster import Cluster, Compute, Link
from paceline.strategies.toolbox.shard_optimizer import ShardOptimizer

GOES_ON = [
    "downpour",
    "downpour(shards=2)",
    "easgd(interval=2)",
    "cyclic",
    "cyclic(max_accumulated=1, shards=2)",
    "gossip",
    "gossip(mode=push, topology=ring)",
    "ssp",
    "ssp(bound=0)",
    "adpsgd",
]
ENDS = ["allreduce", "sasgd(interval=2)", "hierarchical(interval=4)", "diloco(interval=2)"]
ENDS += ["easgd(sync=true)", "gossip(sync=true)"]
WORKERS, SAMPLES = 4, 240
PLACE = Cluster(
    network=Link(latency_s=1e-3, bytes_per_s=1e9), compute=Compute(step_s=1.0, spread=0.1)
)


def run(strategy, faults=(), epochs=2, cluster=PLACE, **how):
    """Train from one queue of batches: the result, each end, and who took which batch when."""
    ends, taken = {}, []
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 3, generator=generator))

    def train(worker):
        torch.manual_seed(worker.rank)
        net = nn.Linear(3, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        batches = worker.setup_dataloaders(DataLoader(data, batch_size=4), epochs=epochs)
        for epoch in range(epochs):
            for numbers, x in batches:
                sgd.zero_grad()
                (net(x) - 1).square().mean().backward()
                sgd.step()
                taken.append((worker.comm.clock.now(), worker.rank, epoch, tuple(numbers.tolist())))
        worker.finish()
        ends[worker.rank] = flat(net)

    how.setdefault("limits", Limits(dead_s=5.0))
    result = pl.simulate(
        train, workers=WORKERS, strategy=strategy, cluster=cluster, faults=faults, **how
    )
    return result, ends, taken


def assert_same_answer(ends):
    answers = list(ends.values())
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])
    assert bool(torch.isfinite(answers[0]).all())


@pytest.mark.parametrize("strategy", GOES_ON)
@pytest.mark.parametrize(("rank", "at"), [(0, 3.3), (2, 21.0)])
def test_the_others_go_on_without_a_dead_worker(strategy, rank, at):
    result, ends, taken = run(strategy, [kill(rank=rank).at(seconds=at)])
    assert result.lost_workers == 1 and sorted(ends) == [r for r in range(WORKERS) if r != rank]
    assert_same_answer(ends)
    done = {(epoch, numbers) for *_, epoch, numbers in taken}
    assert len(done) >= 2 * SAMPLES // 4 - 1  # but for the batch that the dead one had taken
    after = [(time_s, r) for time_s, r, *_ in taken if time_s > at + 2]
    assert {r for _, r in after} == set(ends)


@pytest.mark.parametrize("strategy", GOES_ON)
def test_a_frozen_worker_is_left_behind(strategy):
    """Others wait for it only where the method's own rule says so, and not beyond dead_s."""
    result, ends, taken = run(strategy, [freeze(rank=1).at(seconds=4.5)])
    assert result.lost_workers == 1 and sorted(ends) == [0, 2, 3]
    assert_same_answer(ends)
    times = sorted(time_s for time_s, rank, *_ in taken if rank != 1)
    gaps = [after - before for before, after in pairwise(times)]
    waits = strategy.startswith(("ssp", "cyclic(max_accumulated=1"))
    assert max(gaps) < (5.0 + 3 if waits else 1.5)


@pytest.mark.parametrize("strategy", GOES_ON)
def test_a_frozen_worker_that_thaws_in_time_takes_part_again(strategy):
    result, ends, taken = run(strategy, [freeze(rank=1, for_s=3.0).at(seconds=4.5)])
    assert result.lost_workers == 0 and sorted(ends) == [0, 1, 2, 3]
    assert_same_answer(ends)
    assert any(rank == 1 and time_s > 8 for time_s, rank, *_ in taken)
    assert sorted(n for *_, e, numbers in taken for n in numbers if e == 0) == list(range(SAMPLES))


@pytest.mark.parametrize("strategy", GOES_ON)
def test_a_late_worker_takes_the_others_model_and_part(strategy):
    result, ends, taken = run(strategy, [join(rank=2).at(seconds=12.0)])
    assert result.joined_workers == 1 and sorted(ends) == [0, 1, 2, 3]
    assert_same_answer(ends)
    mine = [time_s for time_s, rank, *_ in taken if rank == 2]
    assert mine and min(mine) > 12.0
    first = [time_s for time_s, rank, *_ in taken if rank != 2]
    assert min(first) < 2.0  # nobody waited for it


@pytest.mark.parametrize("strategy", GOES_ON)
def test_a_late_worker_starts_from_a_trained_model(strategy):
    start = {}

    def train(worker):
        torch.manual_seed(worker.rank)
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        start[worker.rank] = net.weight.item()
        for _ in range(30):
            sgd.zero_grad()
            (net(torch.ones(1, 1)) - 1).square().sum().backward()
            sgd.step()

    late = [join(rank=2).at(seconds=20.0)]
    pl.simulate(train, workers=3, strategy=strategy, cluster=PLACE, faults=late)
    assert start[0] == 0.0 and start[2] > 0.2


@pytest.mark.parametrize("strategy", ["downpour", "easgd", "gossip", "adpsgd", "cyclic"])
def test_a_much_slower_worker_delays_nobody(strategy):
    """The others take as many batches as they would without it, in the same time."""
    factor = 10.0
    _, _, taken = run(strategy, [slow(rank=3, factor=factor).at(seconds=0.0)])
    until_s = 25.0
    counts = [sum(r == rank and t < until_s for t, r, *_ in taken) for rank in range(WORKERS)]
    assert min(counts[:3]) >= 0.85 * until_s and counts[3] <= until_s / factor


@pytest.mark.parametrize("strategy", ENDS)
@pytest.mark.parametrize("how", [kill, freeze])
def test_a_lost_worker_ends_a_synchronous_run_by_name(strategy, how):
    with pytest.raises(PeerLost) as caught:
        run(strategy, [how(rank=2).at(seconds=5.5)])
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("strategy", ["downpour", "gossip", "adpsgd"])
def test_a_worker_lost_before_the_first_step_is_not_waited_for(strategy):
    result, ends, _ = run(strategy, [kill(rank=2).at(seconds=0.0)])
    assert (result.lost_workers, set(ends)) == (1, {0, 1, 3})


@pytest.mark.parametrize("strategy", ["downpour", "gossip", "adpsgd"])
def test_the_worker_that_all_start_from_is_named_when_it_is_lost_before_they_do(strategy):
    with pytest.raises(PeerLost) as caught:
        run(strategy, [kill(rank=0).at(seconds=0.0)])
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize("strategy", ["downpour(shards=2)", "easgd", "cyclic", "ssp"])
def test_a_lost_server_ends_the_run_by_name_where_losses_are_to(strategy):
    with pytest.raises(PeerLost) as caught:
        run(strategy, [kill(rank=4).at(seconds=5.5)], on_loss="stop")
    assert caught.value.ranks == (4,)


@pytest.mark.parametrize("strategy", ["downpour(shards=2)", "easgd", "cyclic", "ssp"])
@pytest.mark.parametrize("at_s", [0.5, 1.0005, 1.0015, 3.3, 5.5])
def test_a_lost_server_is_followed_by_another(strategy, at_s):
    result, ends, taken = run(strategy, [kill(rank=4).at(seconds=at_s)])
    assert_same_answer(ends)
    assert len(ends) == WORKERS and result.lost_workers == 0
    assert [e["rank"] for e in result.events if e["event"] == "succeeded"] == [4]
    assert len(taken) == 2 * SAMPLES // 4


@pytest.mark.parametrize("strategy", [*ENDS, "layered", "layered(group_size=2)"])
@pytest.mark.parametrize("how", [kill, freeze])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("at_s", [2.5, 5.5])
def test_a_synchronous_run_can_go_on_with_those_who_are_left(strategy, how, rank, at_s):
    faults = [how(rank=rank).at(seconds=at_s)]
    result, ends, _ = run(strategy, faults, on_loss="continue")
    assert set(ends) == {0, 1, 2, 3} - {rank} and result.lost_workers == 1
    assert_same_answer(ends)


@pytest.mark.parametrize("at_s", [0.5, 1.0005, 1.0015, 1.0025, 3.7])
def test_the_only_communicator_is_followed_by_another(at_s):
    undisturbed = run("layered")[1]
    result, ends, _ = run("layered", [kill(rank=4).at(seconds=at_s)], on_loss="continue")
    assert [e["rank"] for e in result.events if e["event"] == "succeeded"] == [4]
    assert_same_answer(ends)
    assert torch.equal(ends[0], undisturbed[0])


def adds_up(strategy, workers, steps, faults=(), cluster=PLACE, **how):
    """Every gradient is 1, every rate 1: how far each worker's answer went."""
    ends = {}

    def train(worker):
        net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(net.weight)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=1.0))
        for _ in range(steps(worker.rank)):
            sgd.zero_grad()
            net(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
            sgd.step()
        worker.finish()
        ends[worker.rank] = -net.weight.item()

    result = pl.simulate(
        train, workers=workers, strategy=strategy, cluster=cluster, faults=faults, **how
    )
    return ends, result


@pytest.mark.parametrize("strategy", GOES_ON)
@pytest.mark.parametrize("at", [5.0, 8.0, 11.0])
@pytest.mark.parametrize("rank", [1, 3])
def test_the_end_is_reached_when_one_dies_on_the_way_there(strategy, rank, at):
    """Workers 0 to 2 have come to their end and wait when one of them, or the last one, dies."""
    ends, _ = adds_up(
        strategy, WORKERS, lambda r: 12 if r == 3 else 3, [kill(rank=rank).at(seconds=at)]
    )
    assert sorted(ends) == [r for r in range(WORKERS) if r != rank]
    assert len(set(ends.values())) == 1


@pytest.mark.parametrize("strategy", GOES_ON)
def test_two_may_die_one_after_the_other(strategy):
    faults = [kill(rank=1).at(seconds=4.2), kill(rank=2).at(seconds=6.3)]
    ends, _ = adds_up(strategy, WORKERS, lambda rank: 9, faults)
    assert sorted(ends) == [0, 3] and ends[0] == ends[3]


@pytest.mark.parametrize("at", [1.0 + 0.05 * k for k in range(24)])
def test_a_token_is_not_lost_between_two_hands(at):
    """Links of 100 ms: a worker may die between its push and the passing on of the token."""
    place = Cluster(network=Link(latency_s=0.1), compute=Compute(step_s=1.0))
    for rank in range(3):
        faults = [kill(rank=rank).at(seconds=at)]
        ends, _ = adds_up("cyclic(max_accumulated=1)", 3, lambda r: 5, faults, place)
        assert sorted(ends) == [r for r in range(3) if r != rank]


def test_a_late_worker_of_ssp_holds_nobody_back():
    times = []
    data = [join(rank=2).at(seconds=30.0)]

    def train(worker):
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        for _ in range(60):
            sgd.zero_grad()
            net(torch.ones(1, 1)).sum().backward()
            sgd.step()
            times.append((worker.rank, worker.comm.clock.now()))

    pl.simulate(train, workers=3, strategy="ssp(bound=3)", cluster=PLACE, faults=data)
    assert sum(rank == 0 and 35 < now_s < 55 for rank, now_s in times) >= 16


def test_an_idle_worker_of_adpsgd_pulls_nobody_back():
    ends, _ = adds_up("adpsgd", 3, lambda rank: 0 if rank == 2 else 20)
    assert ends[0] == ends[1] == ends[2] == pytest.approx(20.0)


@pytest.mark.parametrize("kind", [Adam, Adagrad, RMSprop])
def test_what_a_server_keeps_for_its_successor_may_lie_on_two_devices(kind):
    """As on a GPU: there lie the moments of the optimizer, its number of steps on the CPU."""
    net = nn.Linear(5, 1)
    replica = Replica(
        net, kind(net.parameters(), lr=0.1), lambda numel, like: like.new_zeros(numel)
    )
    hyperparameters, part = read_hyperparameters(replica.optimizer), slice(1, 6)

    def run(on, take_over):
        w = on(torch.arange(5.0))
        optimizer = ShardOptimizer(w, part, replica, "user", coupled=[True])
        for step in range(4):
            if step == 2 and take_over:
                left = optimizer.buffers()
                assert left.device == w.device
                optimizer = ShardOptimizer(w, part, replica, "user", coupled=[True])
                optimizer.load_buffers(left)
            optimizer.step(on(torch.arange(5.0) - step), hyperparameters, 1)
        return w

    expected = run(torch.clone, take_over=False)
    assert torch.equal(run(Elsewhere, take_over=True).inner, expected)
    assert torch.equal(run(torch.clone, take_over=True), expected)


@pytest.mark.parametrize("strategy", ["adpsgd", "gossip", "gossip(mode=push)"])
def test_a_worker_at_its_end_is_no_partner_and_the_others_go_on_averaging(strategy, tmp_path):
    def train(worker):
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        for _ in range(10 if worker.rank == 0 else 40):
            sgd.zero_grad()
            net(torch.ones(1, 1)).sum().backward()
            sgd.step()

    pl.simulate(train, workers=WORKERS, strategy=strategy, cluster=beat(), out=tmp_path / "run")
    kinds = ("peek",) if strategy == "gossip" else ("post",)
    met = [
        event["peer"]
        for event in read(tmp_path / "run" / "trace.jsonl")
        if event["event"] in kinds and 12 < event["t"] < 38
    ]
    assert 0 not in met
    assert len(met) >= 3 * 20  # of three workers, in 26 steps each


# The token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.5, 2.5, 3.5, 7.5, 11.2])
@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_token_whose_holder_died_is_made_anew(rank, at):
    """With the fixed method everybody waits for the token, so that one lost for good would hang."""
    strategy = "cyclic(max_accumulated=1)"
    result, ends, _ = run(strategy, [kill(rank=rank).at(seconds=at)], cluster=beat())
    assert sorted(ends) == [r for r in range(WORKERS) if r != rank]
    assert_same_answer(ends)
    assert result.staleness_max <= WORKERS


REFUSED: list[int] = []
TAKEN: defaultdict[int, float] = defaultdict(float)


class WatchedServer:
    """Writes down whose push was refused, and what was taken in of each worker."""

    def on_request(self, worker, request, vector):
        version = self.version
        super().on_request(worker, request, vector)
        if self.version > version:
            TAKEN[worker] += abs(vector[0].item())

    def reply(self, worker, vector=None, accepted=True, next_worker=-1):
        super().reply(worker, vector, accepted, next_worker)
        if not accepted:
            REFUSED.append(worker)


WatchedCyclic = cyclic_with(WatchedServer)


@pytest.mark.parametrize("form", ["move", "gradient"])
def test_a_token_of_an_older_generation_is_refused(form):
    """Worker 1 dies with the token; later worker 2 finds its old one, which counts no more."""
    counted = {}

    def train(worker):
        net = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(net.weight)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=1.0))
        for step in range(12):
            if worker.rank == 2 and step == 6:
                worker.strategy.seat.generation = 0
            sgd.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            sgd.step()
            if worker.rank == 2 and step == 6:
                counted["after"] = worker.strategy.pending
        worker.finish()
        counted[worker.rank] = -net.weight[0, 0].item()

    REFUSED.clear()
    TAKEN.clear()
    options = {"scale": "sum"} if form == "gradient" else {}
    method = WatchedCyclic(form=form, **options)
    place, faults = beat(1.0, 5.0, 1.0, 1.0), [kill(rank=1).at(seconds=3.0)]
    pl.simulate(train, workers=3, strategy=method, cluster=place, faults=faults)
    assert REFUSED == [2]
    assert counted["after"] > 0  # what was refused is still there
    assert pytest.approx({0: 12, 2: 12}) == TAKEN  # nothing is lost, or pushed twice
    assert counted[0] == counted[2] and (form == "move" or counted[0] == 12 + 12)


# Layers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0.5, 1.0005, 1.0015, 1.0025, 3.7, 9.2])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_layers_go_on_with_the_mean_of_those_alive(rank, at):
    result, ends, _ = run(
        "layered(group_size=2)", [kill(rank=rank).at(seconds=at)], on_loss="continue"
    )
    assert result.lost_workers == 1 and sorted(ends) == [r for r in range(WORKERS) if r != rank]
    assert_same_answer(ends)


@pytest.mark.parametrize("at", [0.5, 0.9005, 1.0005, 1.0015, 1.0025, 1.0035, 3.7, 9.2])
@pytest.mark.parametrize("communicator", [4, 5])
def test_a_group_goes_on_through_the_next_communicator(communicator, at):
    """Whenever it dies, no update is lost or made twice: the ends are those of a whole run."""
    faults = [kill(rank=communicator).at(seconds=at)]
    _, ends, _ = run("layered(group_size=2)", faults, on_loss="continue")
    _, expected, _ = run("allreduce")
    assert sorted(ends) == list(range(WORKERS))
    assert_same_answer(ends)
    assert float((ends[0] - expected[0]).abs().max()) < 1e-5


def test_a_group_goes_on_through_a_third_communicator():
    faults = [kill(rank=7).at(seconds=5.5), kill(rank=8).at(seconds=8.5)]
    ends, _ = adds_up("layered(group_size=2)", 6, lambda rank: 12, faults, on_loss="continue")
    assert ends == pytest.approx(dict.fromkeys(range(6), 12.0), abs=1e-9)


# One slow worker ---------------------------------------------------------------------------------


def samples_per_s(strategy, workers, slowness):
    """Over whole epochs, the last batch of each worker included."""
    place = Cluster(
        network=Link(latency_s=2e-5, bytes_per_s=1.25e9),
        compute=Compute(step_s=6e-3, spread=0.05, slow=slowness),
    )
    data = TensorDataset(torch.randn(4000, 2))

    def train(worker):
        net = nn.Linear(2, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.01))
        batches = worker.setup_dataloaders(DataLoader(data, batch_size=16))
        for _ in range(2):
            for (x,) in batches:
                sgd.zero_grad()
                net(x).mean().backward()
                sgd.step()

    result = pl.simulate(train, workers=workers, strategy=strategy, cluster=place)
    return result.samples / result.virtual_seconds


@pytest.mark.parametrize("strategy", ["gossip", "easgd", "downpour", "adpsgd", "cyclic"])
def test_of_8_workers_one_that_is_4_times_slower_costs_nothing(strategy):
    """They keep at least 0.85 of the speed of the 7 others without it."""
    kept = samples_per_s(strategy, 8, {7: 4.0}) / samples_per_s(strategy, 7, {})
    assert kept >= 0.85


@pytest.mark.parametrize("strategy", ["allreduce", "cyclic(max_accumulated=1)"])
def test_whoever_waits_for_the_slow_one_keeps_a_third(strategy):
    kept = samples_per_s(strategy, 8, {7: 4.0}) / samples_per_s(strategy, 7, {})
    assert 0.2 < kept < 0.4
