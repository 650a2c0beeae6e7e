"""Every sample is taken once an epoch, by whichever worker."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline as pl
from paceline.sim.cluster import Cluster, Compute
from paceline.training.division import global_batches, shard_epoch


@settings(max_examples=200)
@given(samples=st.integers(0, 400), batch=st.integers(1, 17), workers=st.integers(1, 9))
def test_shards_cover_an_epoch_evenly(samples, batch, workers):
    order = np.random.default_rng(0).permutation(samples)
    shards = [shard_epoch(order, batch * workers, workers, rank) for rank in range(workers)]
    seen = [int(i) for shard in shards for part in shard for i in part]
    assert sorted(seen) == list(range(samples))
    assert sum(global_batches(samples, batch * workers, workers)) == samples
    if samples >= workers:
        assert len({len(shard) for shard in shards}) == 1, "every worker makes as many steps"
    sizes = [len(part) for shard in shards for part in shard]
    assert all(size <= max(batch, 2) for size in sizes)


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(torch.arange(self.samples).float().view(-1, 1))


def take(loader, workers, epochs=2, strategy="allreduce", **how):
    """What each worker sees in each epoch: ``seen[rank][epoch]`` is a list of batches.

    In place of a loader, a function may make one for each worker.
    """
    seen = {}

    def train(worker):
        mine = seen[worker.rank] = []
        own = loader if isinstance(loader, DataLoader) else loader(worker)
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        for _ in range(epochs):
            batches = []
            for batch in worker.setup_dataloaders(own, **how):
                x = batch[0] if isinstance(batch, list) else batch
                batches.append([int(i) for i in x.view(-1)])
                sgd.zero_grad()
                net(x).sum().backward()
                sgd.step()
            mine.append(batches)

    result = pl.simulate(train, workers=workers, strategy=strategy, cluster="mixed-lab")
    return seen, result


def numbers(samples):
    return TensorDataset(torch.arange(samples).float().view(-1, 1))


def epoch_counts(seen, epoch):
    return Counter(i for mine in seen.values() for batch in mine[epoch] for i in batch)


SHARINGS = ["shard", "queue", "static"]


@pytest.mark.parametrize("data", SHARINGS)
@pytest.mark.parametrize("samples", [1, 3, 21, 64])
def test_each_sample_once_an_epoch(data, samples):
    loader = DataLoader(numbers(samples), batch_size=4, shuffle=True)
    seen, result = take(loader, 4, data=data)
    for epoch in range(2):
        assert epoch_counts(seen, epoch) == Counter(range(samples))
    assert result.samples == 2 * samples


@pytest.mark.parametrize("data", SHARINGS)
def test_streams_are_shared_batch_by_batch(data):
    loader = DataLoader(Stream(22), batch_size=4)
    seen, _ = take(loader, 3, data=data)
    for epoch in range(2):
        times = 3 if data == "static" else 1  # a static stream is each worker's own
        assert epoch_counts(seen, epoch) == Counter(dict.fromkeys(range(22), times))


def test_order_depends_on_seed_and_epoch_alone():
    def orders(shuffle):
        loader = DataLoader(numbers(32), batch_size=4, shuffle=shuffle)
        return take(loader, 2)[0]

    once, again = orders(True), orders(True)
    assert once == again
    assert once[0][0] != once[0][1], "epochs differ"
    in_order = orders(False)
    assert in_order[0][0][0] == [0, 1, 2, 3] and in_order[1][0][0] == [4, 5, 6, 7]


def test_a_static_shard_is_kept_and_shuffled():
    loader = DataLoader(numbers(20), batch_size=4, shuffle=True)
    seen, _ = take(loader, 4, data="static")
    for rank, mine in seen.items():
        shards = [sorted(i for batch in epoch for i in batch) for epoch in mine]
        assert shards[0] == shards[1] == list(range(5 * rank, 5 * rank + 5))
        assert mine[0] != mine[1]


def test_skewed_shards_hold_few_labels():
    labels = torch.arange(60) % 6
    dataset = TensorDataset(torch.arange(60).float().view(-1, 1), labels)
    seen, _ = take(DataLoader(dataset, batch_size=5, shuffle=True), 3, data="skewed")
    for mine in seen.values():
        assert len({int(labels[i]) for batch in mine[0] for i in batch}) == 2
    assert epoch_counts(seen, 0) == Counter(range(60))


def test_a_slow_worker_takes_fewer_from_the_queue():
    loader = DataLoader(numbers(400), batch_size=4, shuffle=True)
    seen, _ = take(loader, 4, data="queue", strategy=_Alone())
    counts = [sum(len(batch) for epoch in seen[rank] for batch in epoch) for rank in range(4)]
    assert counts[3] < counts[2] < counts[0]  # mixed-lab: factors 1, 1, 1.5, 3
    assert sum(counts) == 800


class _Alone(pl.Strategy):
    """Every worker trains alone."""

    synchronous = False

    def step(self, x, g):
        self.local_update(g)


def test_asynchronous_methods_take_from_the_queue_by_default():
    loader = DataLoader(numbers(40), batch_size=4)
    seen, _ = take(loader, 4, strategy=_Alone())
    assert epoch_counts(seen, 0) == Counter(range(40))
    assert len({len(mine[0]) for mine in seen.values()}) > 1


def test_drop_last_drops_for_everyone():
    loader = DataLoader(numbers(70), batch_size=4, shuffle=True, drop_last=True)
    seen, _ = take(loader, 4)
    assert all(len(batch) == 4 for mine in seen.values() for batch in mine[0])
    assert sum(epoch_counts(seen, 0).values()) == 64


def test_the_users_own_batches_are_dealt_out():
    own = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10, 11]]
    seen, result = take(DataLoader(numbers(12), batch_sampler=_Own(own)), 2)
    assert [seen[0][0], seen[1][0]] == [[own[0], own[2]], [own[1], own[3]]]
    assert result.epoch_samples == 12


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_batches_of_unequal_size_go_to_one_worker_each(strategy):
    own = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9], [10]]
    seen, _ = take(DataLoader(numbers(11), batch_sampler=_Own(own)), 3, strategy=strategy)
    for epoch in range(2):
        assert sorted(batch for mine in seen.values() for batch in mine[epoch]) == own


@pytest.mark.parametrize("data", SHARINGS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_plain_batch_sampler_is_what_a_plain_loader_makes(data, drop_last):
    """It has no rule of its own."""
    shuffled = numbers(21)
    sampler = BatchSampler(RandomSampler(shuffled), 4, drop_last)
    own, _ = take(DataLoader(shuffled, batch_sampler=sampler), 2, data=data)
    plain = DataLoader(shuffled, batch_size=4, shuffle=True, drop_last=drop_last)
    assert own == take(plain, 2, data=data)[0]


@pytest.mark.parametrize("data", SHARINGS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_is_replaced_by_our_sharing(data, shuffle):
    """Its padding, its rank and its seed are not used."""

    def loader(worker):
        sampler = DistributedSampler(
            numbers(21), num_replicas=worker.size, rank=worker.rank, shuffle=shuffle, seed=5
        )
        return DataLoader(numbers(21), batch_size=4, sampler=sampler)

    seen, result = take(loader, 2, data=data)
    assert seen == take(DataLoader(numbers(21), batch_size=4, shuffle=shuffle), 2, data=data)[0]
    assert result.samples == 42
    for epoch in range(2):
        assert epoch_counts(seen, epoch) == Counter(range(21))


def test_another_sampler_that_divides_the_data_is_refused():
    class Buckets(DistributedSampler):
        pass

    sampler = Buckets(numbers(20), num_replicas=2, rank=0)
    message = r"Buckets \(num_replicas 2\) must not divide the data.* remove it"
    with pytest.raises(pl.UsageError, match=message):
        take(DataLoader(numbers(20), batch_size=2, sampler=sampler), 2)
    with pytest.raises(pl.UsageError, match=message):
        take(DataLoader(numbers(20), batch_sampler=_Own([[0]], sampler)), 2)


class Shuffling(Sampler):
    """The user's own sampler, with one of several generators."""

    def __init__(self, shuffle):
        self._shuffle = shuffle

    def __iter__(self):
        items = list(range(16))
        self._shuffle(items)
        return iter(items)


class ByEpoch(Sampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(16).tolist())


OWN_SAMPLERS = {
    "subset": lambda: SubsetRandomSampler(range(16)),
    "generator": lambda: SubsetRandomSampler(range(16), torch.Generator()),
    "replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=16),
    "numpy": lambda: Shuffling(np.random.shuffle),
    "python": lambda: Shuffling(random.shuffle),
    "set_epoch": ByEpoch,
}


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
@pytest.mark.parametrize("name", OWN_SAMPLERS)
def test_the_draw_of_a_sampler_is_shared_by_all_workers(name, strategy):
    """One draw of 16 for all workers, even if a worker asked for the length before."""

    def loader(worker):
        made = DataLoader(numbers(20), batch_size=3, sampler=OWN_SAMPLERS[name]())
        if worker.rank == 1:
            len(worker.setup_dataloaders(made))
            random.random(), np.random.rand(), torch.rand(1)
        return made

    (seen, result), (again, _) = (take(loader, 3, strategy=strategy) for _ in range(2))
    assert seen == again and seen[0][0] != seen[0][1]
    assert result.epoch_samples == 16
    for epoch in range(2):
        drawn = epoch_counts(seen, epoch)
        assert drawn.total() == 16
        assert name == "replacement" or drawn == Counter(range(16))


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_weights_are_those_of_all_that_is_drawn(strategy):
    """The workers' shares of an epoch are parts of one draw."""
    weights = [0.0] * 100 + [1.0] * 100 + [3.0] * 100

    def loader(worker):
        sampler = WeightedRandomSampler(weights, 2000, generator=torch.Generator().manual_seed(1))
        return DataLoader(numbers(300), batch_size=20, sampler=sampler)

    seen, _ = take(loader, 4, strategy=strategy)
    for epoch in range(2):
        drawn = epoch_counts(seen, epoch)
        assert drawn.total() == 2000 and min(drawn) >= 100
        assert sum(n for i, n in drawn.items() if i >= 200) / 2000 == pytest.approx(0.75, abs=0.03)


def test_a_draw_without_replacement_has_nothing_twice():
    sampler = WeightedRandomSampler([1.0] * 40, 30, replacement=False)
    seen, _ = take(DataLoader(numbers(40), batch_size=2, sampler=sampler), 4, strategy="gossip")
    assert max(epoch_counts(seen, 0).values()) == 1 and epoch_counts(seen, 0).total() == 30


def test_a_sampler_that_no_two_workers_could_share_is_refused():
    sampler = Shuffling(np.random.default_rng(0).shuffle)
    with pytest.raises(pl.UsageError, match="Shuffling must draw the same for the same seed"):
        take(DataLoader(numbers(20), batch_size=2, sampler=sampler), 2)


class _Own:
    def __init__(self, batches, sampler=None):
        self._batches, self.sampler = batches, sampler

    def __iter__(self):
        return iter(self._batches)

    def __len__(self):
        return len(self._batches)


@pytest.mark.parametrize("persistent", [False, True])
def test_loader_processes_load_the_same_batches(persistent):
    plain, _ = take(DataLoader(numbers(24), batch_size=4, shuffle=True), 2, epochs=2)
    options = {"num_workers": 1, "persistent_workers": persistent}
    loader = DataLoader(numbers(24), batch_size=4, shuffle=True, **options)
    with_processes, _ = take(loader, 2, epochs=2)
    assert plain == with_processes


def test_len_and_attributes_of_a_loader():
    loader = DataLoader(numbers(30), batch_size=4, shuffle=True)

    def train(worker):
        paced = worker.setup_dataloaders(loader)
        assert len(paced) == len(list(paced))
        assert paced.batch_size == 4 and paced.dataset is loader.dataset
        assert worker.setup_dataloaders(loader) is paced
        assert worker.setup_dataloaders(paced) is paced
        two = worker.setup_dataloaders(loader, DataLoader(numbers(3)))
        assert len(two) == 2

    pl.simulate(train, workers=3, cluster="ideal")


def test_progress_goes_from_0_to_1():
    facts = []

    def train(worker):
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        with pytest.raises(pl.UsageError, match="progress needs a plan"):
            _ = worker.progress
        loader = worker.setup_dataloaders(DataLoader(numbers(40), batch_size=5), epochs=2)
        for _ in range(2):
            for (x,) in loader:
                net(x).sum().backward()
                sgd.step()
                if worker.rank == 0:
                    facts.append(worker.progress)

    pl.simulate(train, workers=2, cluster="ideal")
    assert facts == pytest.approx([n / 8 for n in range(1, 9)])


def test_an_interval_longer_than_the_run_warns():
    def train(worker):
        net = nn.Linear(1, 1)
        worker.setup(net, SGD(net.parameters(), lr=0.1))
        worker.setup_dataloaders(DataLoader(numbers(40), batch_size=5), epochs=3)

    with pytest.warns(UserWarning, match=r"interval \(500\) exceeds the 12 steps of this run"):
        pl.simulate(train, workers=2, strategy="sasgd(interval=500)", cluster="ideal")


@pytest.mark.parametrize(
    ("loader", "how", "message"),
    [
        ([1, 2], {}, "takes torch DataLoaders, got list"),
        (DataLoader(numbers(4)), {"data": "queu"}, r"data \(queu\) must be one of"),
        (DataLoader(Stream(4)), {"data": "skewed"}, "must not be used with an iterable"),
        (DataLoader(numbers(4), batch_size=None), {}, r"batch_size \(None\) must be a number"),
    ],
)
def test_what_cannot_be_shared_is_refused(loader, how, message):
    def train(worker):
        worker.setup_dataloaders(loader, **how)

    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(train, workers=2, cluster="ideal")


@pytest.mark.parametrize("ahead", [{}, {"num_workers": 1}])
@pytest.mark.parametrize("every", [1, 2])
def test_what_a_worker_had_drawn_before_it_was_left_behind_counts_once(ahead, every):
    """It had drawn batches and, with two batches a step, an unsent gradient."""
    taken = []

    def train(worker):
        net = nn.Linear(1, 1, bias=False)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        loader = worker.setup_dataloaders(DataLoader(numbers(240), batch_size=4, **ahead))
        mine = []
        for number, (x,) in enumerate(loader):
            life = worker.comm.members.incarnation(worker.rank)
            mine = [(its, x) for its, x in mine if its == life] + [(life, x)]
            net(x).sum().backward()
            if number % every == every - 1:
                assert net.weight.grad.item() == sum(x.sum() for _, x in mine)
                sgd.step()
                if worker.comm.members.incarnation(worker.rank) == life:
                    taken.extend(int(i) for _, x in mine for i in x)
                sgd.zero_grad()
                mine = []
        taken.extend(int(i) for _, x in mine for i in x)

    fault, limits = pl.freeze(rank=1, for_s=1.0).at(step=3), pl.Limits(dead_s=0.3)
    cluster = Cluster(compute=Compute(step_s=0.1))
    how = {"strategy": "gossip", "cluster": cluster, "faults": [fault], "limits": limits}
    result = pl.simulate(train, workers=3, **how)
    assert result.joined_workers == 1
    assert sorted(taken) == list(range(240))


# Looks -------------------------------------------------------------------------------------------


def preview(loader):
    next(iter(loader))


def preview_without_gradients(loader):
    with torch.no_grad():
        next(iter(loader))


def preview_some(loader):
    for number, _ in enumerate(loader):
        if number == 2:
            break


def preview_twice(loader):
    preview(loader), preview(loader)


kept = []


def preview_and_keep_the_iterator(loader):
    kept.append(iter(loader))
    next(kept[-1])


LOOKS = [
    preview,
    preview_without_gradients,
    preview_some,
    preview_twice,
    preview_and_keep_the_iterator,
]


def train_with_previews(data, previews, strategy="allreduce", make=None, **how):
    """What the workers saw in each epoch, and the final weight of the model."""
    seen, ends = {0: Counter(), 1: Counter()}, {}
    make = make or (lambda: DataLoader(numbers(44), batch_size=4, shuffle=True))

    def train(worker):
        net = nn.Linear(1, 1)
        nn.init.ones_(net.weight), nn.init.zeros_(net.bias)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=1e-4))
        loader = worker.setup_dataloaders(make(), data=data)
        for epoch in range(2):
            if previews is not None and worker.rank == 0:
                previews(loader)
                assert loader.epoch == epoch or previews is preview_and_keep_the_iterator
            for batch in loader:
                x = batch[0] if isinstance(batch, list) else batch
                seen[epoch].update(int(i) for i in x.view(-1))
                sgd.zero_grad()
                net(x).square().sum().backward()
                sgd.step()
        if previews is not None and worker.rank == 0:
            previews(loader)
        worker.finish()
        ends[worker.rank] = net.weight.item()

    result = pl.simulate(train, workers=2, strategy=strategy, cluster="mixed-lab", **how)
    return seen, ends, result


@pytest.mark.parametrize("data", SHARINGS)
@pytest.mark.parametrize("previews", LOOKS)
def test_a_preview_of_a_loader_has_no_effect(previews, data):
    """On one rank, with batches of unequal size: the same bits at the end."""
    strategy = "allreduce" if data == "shard" else "gossip"
    plain, ends, without = train_with_previews(data, None, strategy)
    seen, with_previews, result = train_with_previews(data, previews, strategy)
    assert seen == plain == {0: Counter(range(44)), 1: Counter(range(44))}
    assert (result.steps, result.samples) == (without.steps, without.samples)
    assert data != "shard" or with_previews == ends


@pytest.mark.parametrize("previews", LOOKS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(44), batch_size=4),
        lambda: DataLoader(numbers(44), batch_size=4, shuffle=True, num_workers=1),
    ],
    ids=["stream", "process"],
)
def test_a_preview_of_a_queue_leaves_every_batch_to_be_taken(previews, make):
    seen, _, _ = train_with_previews("queue", previews, "gossip", make)
    assert seen == {0: Counter(range(44)), 1: Counter(range(44))}


def test_batches_previewed_before_their_worker_was_left_behind_are_taken_once():
    seen = Counter()

    def train(worker):
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        one, other = worker.setup_dataloaders(*(DataLoader(numbers(240), 4) for _ in range(2)))
        if worker.rank == 0:
            preview(other)
        for loader in (one, other):
            for (x,) in loader:
                net(x).sum().backward()
                sgd.step()
                seen.update(int(i) for i in x if loader is other)

    fault, limits = pl.freeze(rank=0, for_s=1.0).at(step=3), pl.Limits(dead_s=0.3)
    how = {"strategy": "gossip", "cluster": Cluster(compute=Compute(step_s=0.1))}
    result = pl.simulate(train, workers=3, faults=[fault], limits=limits, **how)
    assert result.joined_workers == 1 and seen == Counter(range(240))


@pytest.mark.parametrize("data", SHARINGS)
def test_a_loop_that_is_left_after_a_step_has_had_its_epoch(data):
    """Batches that it drew for no step have no weight in the next one."""
    seen = {}

    def train(worker):
        mine = seen[worker.rank] = []
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        loader = worker.setup_dataloaders(DataLoader(numbers(64), 4, shuffle=True), data=data)
        for epoch in range(3):
            assert loader.epoch == epoch
            for number, (x,) in enumerate(loader):
                if number == 2:
                    break
                mine.append((epoch, tuple(int(i) for i in x)))
                net(x).sum().backward()
                sgd.step()

    result = pl.simulate(train, workers=2, strategy="allreduce", cluster="ideal")
    assert (result.steps, result.samples) == (12, 48)
    for epoch in range(3):
        batches = [batch for mine in seen.values() for e, batch in mine if e == epoch]
        assert len({i for batch in batches for i in batch}) == 16, "no sample twice"
    assert len({batch for _, batch in seen[0]}) == 6, "epochs differ"


@pytest.mark.parametrize("data", ["shard", "static"])
def test_a_batch_drawn_for_every_step_is_used(data):
    """As in plain torch, each is from another shuffle; it counts together with the loop's."""
    seen = {}

    def train(worker):
        mine = seen[worker.rank] = []
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        one, other, third = worker.setup_dataloaders(
            *(DataLoader(numbers(40), 4, shuffle=True) for _ in range(3)), data=data
        )
        for (x,) in one:
            (y,), (z,) = next(iter(other)), next(iter(third))
            mine.append((y, z))
            net(x + y + z).sum().backward()
            sgd.step()
        for _ in range(5):
            (y,), (z,) = next(iter(other)), next(iter(third))
            mine.append((y, z))
            net(y + z).sum().backward()
            sgd.step()

    result = pl.simulate(train, workers=2, cluster="ideal")
    assert (result.steps, result.samples) == (20, 5 * 2 * 12 + 5 * 2 * 8)
    for mine in seen.values():
        for part in (0, 1):
            assert len({tuple(pair[part].view(-1).tolist()) for pair in mine}) == 10


@pytest.mark.parametrize("data", SHARINGS)
def test_batches_that_are_added_up_over_a_break_count_for_the_step_after_it(data):
    def train(worker):
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        loader = worker.setup_dataloaders(DataLoader(numbers(64), 4), data=data)
        for number, (x,) in enumerate(loader):
            net(x).sum().backward()
            if number % 2 == 1:
                sgd.step()
            if number == 4:
                break
        sgd.step()

    assert pl.simulate(train, workers=2, cluster="ideal").samples == 2 * 5 * 4


def test_a_loop_inside_a_loop_over_the_same_loader_is_refused():
    def train(worker):
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        loader = worker.setup_dataloaders(DataLoader(numbers(40), 4))
        for (x,) in loader:
            preview(loader)
            net(x).sum().backward()
            sgd.step()

    with pytest.raises(pl.UsageError, match="must not continue after another loop"):
        pl.simulate(train, workers=2, cluster="ideal")


def test_a_preview_alone_is_no_training():
    def train(worker):
        net = nn.Linear(1, 1)
        worker.setup(net, SGD(net.parameters(), lr=0.0))
        preview(worker.setup_dataloaders(DataLoader(numbers(40), 4)))

    assert pl.simulate(train, workers=2, cluster="ideal").steps == 0


# Losses ------------------------------------------------------------------------------------------


def survive(strategy, kill_at, epochs, previews=False):
    """How often survivors took each sample when rank 1 of 4 is killed, and the result.

    15 steps an epoch, with a look of rank 0 before each, if asked for.
    """
    taken = Counter()

    def train(worker):
        net = nn.Linear(1, 1)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.0))
        loader = worker.setup_dataloaders(DataLoader(numbers(240), batch_size=4, shuffle=True))
        for _ in range(epochs):
            if previews and worker.rank == 0:
                preview(loader)
            for (x,) in loader:
                net(x).sum().backward()
                sgd.step()
                taken.update(int(i) for i in x if worker.rank != 1)

    fault = pl.kill(rank=1).at(step=kill_at)
    how = {"strategy": strategy, "on_loss": "continue", "faults": [fault], "cluster": "ideal"}
    return taken, pl.simulate(train, workers=4, **how)


@pytest.mark.parametrize("method", ["sasgd", "diloco"])
@pytest.mark.parametrize(("kill_at", "interval"), [(3, 20), (14, 20), (17, 20), (19, 20), (3, 15)])
@pytest.mark.parametrize("previews", [False, True])
def test_what_a_lost_worker_had_in_an_earlier_epoch_comes_again(
    method, kill_at, interval, previews
):
    """There was no collective with it, so all its batches since the start were lost."""
    taken, result = survive(f"{method}(interval={interval})", kill_at, epochs=2, previews=previews)
    assert taken == Counter(dict.fromkeys(range(240), 2))
    assert result.lost_batches == 0


@pytest.mark.parametrize("method", ["sasgd", "diloco"])
@pytest.mark.parametrize(
    ("kill_at", "interval", "since"), [(3, 500, 0), (17, 500, 0), (28, 20, 20)]
)
def test_batches_lost_after_the_last_collective_are_counted(method, kill_at, interval, since):
    taken, result = survive(f"{method}(interval={interval})", kill_at, epochs=2)
    unseen = 2 * 240 - taken.total() - 4 * since
    assert result.lost_batches == 30 - since and unseen == 4 * result.lost_batches


# Looking ahead -----------------------------------------------------------------------------------


class Streamed(IterableDataset):
    """Numbers, one after the other."""

    def __iter__(self):
        return iter(range(22))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("data", ["shard", "queue", "static"])
def test_a_loader_that_looks_ahead_knows_the_last_batch(data, streams):
    """It gives the same batches; each worker's last one of an epoch, and no other, is its last."""
    seen = {False: [], True: []}
    lasts = []

    def train(worker, ahead):
        model = nn.Linear(1, 1)
        model, optimizer = worker.setup(model, SGD(model.parameters(), lr=0.1))
        source = Streamed() if streams else TensorDataset(torch.arange(22))
        loader = worker.setup_dataloaders(DataLoader(source, batch_size=4), data=data)
        loader.looks_ahead = ahead
        for _ in range(2):
            told = []
            for batch in loader:
                values = batch if streams else batch[0]
                seen[ahead].extend((loader.epoch, value) for value in values.tolist())
                told.append(loader.at_last)
                optimizer.zero_grad()
                model(values[:, None].float()).sum().backward()
                optimizer.step()
            if ahead and told:
                lasts.append(told == [False] * (len(told) - 1) + [True])

    for ahead in (False, True):
        pl.simulate(train, workers=2, strategy="gossip", arguments={"ahead": ahead})
    assert sorted(seen[True]) == sorted(seen[False])
    assert len(lasts) > 1 and all(lasts)


def test_a_batch_that_was_drawn_ahead_goes_to_others_when_its_worker_is_lost():
    seen = []

    def train(worker):
        model = nn.Linear(1, 1)
        model, optimizer = worker.setup(model, SGD(model.parameters(), lr=0.1))
        loader = worker.setup_dataloaders(DataLoader(TensorDataset(torch.arange(40)), batch_size=2))
        loader.looks_ahead = True
        for (values,) in loader:
            optimizer.zero_grad()
            model(values[:, None].float()).sum().backward()
            optimizer.step()
            seen.extend(values.tolist())

    pl.simulate(train, workers=3, strategy="gossip", faults=[pl.kill(rank=1).at(step=2)])
    assert sorted(seen) == list(range(40))
