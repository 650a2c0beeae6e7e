"""The methods of ``Worker``, on virtual workers."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.strategies import STRATEGIES
from paceline.strategies.base import SERVER, WORKER


def simulate(train, workers=2, **how):
    how.setdefault("cluster", "ideal")
    return pl.simulate(train, workers=workers, **how)


def make(worker, net=None, lr=0.5):
    net = net or nn.Linear(2, 1)
    return worker.setup(net, SGD(net.parameters(), lr=lr))


def test_all_workers_start_with_rank_0s_parameters_and_buffers():
    seen = {}

    def train(worker):
        torch.manual_seed(worker.rank)
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        net[1].running_mean.fill_(worker.rank + 5.0)
        net[1].num_batches_tracked.fill_(worker.rank + 7)
        net[2].requires_grad_(False)
        net, _ = make(worker, net)
        seen[worker.rank] = {name: value.clone() for name, value in net.state_dict().items()}

    simulate(train, 3)
    for rank in (1, 2):
        for name, value in seen[0].items():
            assert torch.equal(value, seen[rank][name]), name
    assert seen[2]["1.running_mean"].tolist() == [5.0] * 3


def test_the_model_keeps_its_names_and_can_be_copied_and_saved():
    def train(worker):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        names = list(net.state_dict())
        net, _ = make(worker, net)
        assert list(net.state_dict()) == names
        copy.deepcopy(net)(torch.ones(1, 2))
        torch.save(net, io.BytesIO())

    simulate(train, 2, strategy=Deferring())


@dataclass(kw_only=True)
class Deferring(pl.Strategy):
    """Updates when the parameters are next read, with the gradient of the step before."""

    defers = True

    def setup(self, x):
        super().setup(x)
        self.pending = None

    def step(self, x, g):
        self.pending = g.vector.clone()

    def settle(self, x):
        if self.pending is not None:
            x.sub_(self.pending, alpha=0.5)
            self.pending = None


def read_by_forward(worker, net, paced):
    net(torch.ones(1, 2))


def read_by_part(worker, net, paced):
    net[0](torch.ones(1, 2))


def read_by_state_dict(worker, net, paced):
    net.state_dict()


def read_by_parts_state_dict(worker, net, paced):
    net[0].state_dict()


def read_by_settle(worker, net, paced):
    worker.settle()


def read_by_answer(worker, net, paced):
    with worker.answer(net):
        pass


def read_by_finish(worker, net, paced):
    worker.finish()


@pytest.mark.parametrize(
    "read",
    [
        read_by_forward,
        read_by_part,
        read_by_state_dict,
        read_by_parts_state_dict,
        read_by_settle,
        read_by_answer,
        read_by_finish,
    ],
)
def test_a_deferred_update_is_settled_before_parameters_are_read(read):
    ends = []

    def train(worker):
        net = nn.Sequential(nn.Linear(2, 1, bias=False))
        nn.init.ones_(net[0].weight)
        net, paced = make(worker, net)
        net(torch.ones(1, 2)).sum().backward()
        paced.step()
        assert net[0].weight.tolist() == [[1.0, 1.0]]
        read(worker, net, paced)
        ends.append(net[0].weight.tolist())

    simulate(train, strategy=Deferring())
    assert ends == [[[0.5, 0.5]]] * 2


@dataclass(kw_only=True)
class Centered(pl.Strategy):
    """A method whose answer is not the replica."""

    def step(self, x, g):
        self.local_update(g)

    def answer(self, x):
        return x * 0


def test_the_answer_replaces_the_parameters_only_inside_the_block():
    def train(worker):
        net, paced = make(worker)
        before = net.weight.detach().clone()
        with worker.answer(net):
            assert not net.weight.any()
            with pytest.raises(pl.UsageError, match=r"must not be called inside worker\.answer"):
                paced.step()
        assert torch.equal(net.weight, before)
        worker.finish()
        assert not net.weight.any()
        with pytest.raises(pl.UsageError, match=r"must not be called after worker\.finish"):
            paced.step()

    simulate(train, strategy=Centered())


@dataclass(kw_only=True)
class OneServer(pl.Strategy):
    """Workers post gradients to a server, and receive its parameters."""

    synchronous = False

    def roles(self, workers):
        return (WORKER,) * workers + (SERVER,)

    def step(self, x, g):
        self.comm.send(g.vector, self.workers)
        x.copy_(self.comm.receive(x, self.workers).x)

    def serve(self, x):
        while True:
            got = self.comm.receive_any(x)
            if not isinstance(got, pl.Lost):
                x.sub_(got.x, alpha=0.1)
                self.comm.send(x, got.src)


def server_training(worker):
    net = nn.Linear(2, 1, bias=False)
    nn.init.ones_(net.weight)
    net, paced = worker.setup(net, SGD(net.parameters(), lr=0.5))
    for _ in range(3):
        paced.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        paced.step()
    worker.log(weight=net.weight[0, 0].item(), seen=worker.size)


def test_a_server_serves_and_ends():
    result = simulate(server_training, 3, strategy=OneServer())
    assert [record["seen"] for record in result.metrics] == [3, 3, 3]
    assert min(record["weight"] for record in result.metrics) == pytest.approx(1 - 0.9)
    assert result.steps == 9


@pytest.mark.transport("shared_memory")
def test_a_server_serves_in_a_process_of_its_own():
    result = pl.launch(server_training, workers=2, strategy=OneServer())
    assert min(record["weight"] for record in result.metrics) == pytest.approx(1 - 0.6)


def test_one_worker_needs_no_server():
    result = simulate(server_training, 1, strategy=OneServer())
    assert result.metrics[0]["weight"] == pytest.approx(-0.5)


def test_a_world_that_does_not_fit_the_roles_is_refused():
    from paceline.strategies.base import workers_in

    @dataclass(kw_only=True)
    class Pairs(pl.Strategy):
        def roles(self, workers):
            return (WORKER,) * 2 * workers

        def step(self, x, g):
            self.local_update(g)

    assert workers_in(OneServer(), 5) == 4
    assert workers_in(Pairs(), 6) == 3
    with pytest.raises(pl.UsageError, match=r"pairs needs 4 .for 2 workers. or 6 .for 3 workers"):
        workers_in(Pairs(), 5)


def test_log_takes_numbers_and_texts():
    def train(worker):
        worker.log(loss=torch.tensor(0.5), accuracy=1, note="x", nan=float("nan"), none=None)
        with pytest.raises(pl.UsageError, match=r"grid .shape .2,.. must be a single number"):
            worker.log(grid=torch.zeros(2))
        with pytest.raises(pl.UsageError, match=r"data .dict. must be a number or a text"):
            worker.log(data={})

    result = simulate(train, 1)
    assert result.metrics == [
        {"t": 0.0, "rank": 0, "step": 0, "samples": 0, "loss": 0.5, "accuracy": 1}
        | {"note": "x", "nan": None, "none": None}
    ]
    assert (result.loss, result.accuracy) == (0.5, 1)


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=3)", "sasgd(global_lr=0.1)"])
@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_a_run_continues_after_save_and_load_as_if_nothing_happened(tmp_path, strategy, optimizer):
    ends = {}

    def steps(worker, net, paced, first, last):
        for step in range(first, last):
            paced.zero_grad()
            net(torch.full((1, 2), 1.0 + step + worker.rank)).sum().backward()
            paced.step()

    def train(worker, part):
        torch.manual_seed(3)
        net = nn.Linear(2, 1)
        net, paced = worker.setup(net, optimizer(net.parameters(), lr=0.01))
        if part == "first":
            steps(worker, net, paced, 0, 4)
            worker.save(tmp_path)
            return
        if part == "second":
            worker.load(tmp_path)
        steps(worker, net, paced, 4 if part == "second" else 0, 9)
        worker.finish()
        ends[part, worker.rank] = net.weight.detach().clone()

    for part in ("whole", "first", "second"):
        simulate(train, 2, strategy=strategy, arguments={"part": part})
    for rank in range(2):
        assert torch.equal(ends["whole", rank], ends["second", rank])


def load_inside_of_answer(worker, net):
    make(worker, net)
    with worker.answer(net):
        net.load_state_dict(nn.Linear(2, 1).state_dict())


def test_no_hooks_remain_on_a_model_after_the_end():
    def train(worker):
        net = nn.Sequential(nn.Linear(2, 1))
        make(worker, net)
        worker.finish()
        for module in net.modules():
            assert not module._forward_pre_hooks and not module._state_dict_pre_hooks
            assert not module._load_state_dict_pre_hooks

    simulate(train, 2, strategy="layered")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda worker, net: worker.settle(), r"call worker.setup\(model, optimizer\) first"),
        (lambda worker, net: (make(worker, net), make(worker, net)), "must be called once"),
        (lambda worker, net: (make(worker, net), worker.clip_gradients(0)), "max_norm .0. must"),
        (lambda worker, net: (make(worker, net), worker.load("/dev/nowhere")), "no saved state in"),
        (
            lambda worker, net: (make(worker, net), worker.answer(nn.Linear(1, 1)).__enter__()),
            "takes the model that worker.setup was given",
        ),
        (
            lambda worker, net: load_inside_of_answer(worker, net),
            "must not be called inside worker",
        ),
        (
            lambda worker, net: (make(worker, net)[1].step(), worker.load_weights("/dev/nowhere")),
            "load_weights must be called before the first step, got 1 steps",
        ),
    ],
)
def test_misuse_is_refused_with_a_message(use, message):
    with pytest.raises(pl.UsageError, match=message):
        simulate(lambda worker: use(worker, nn.Linear(2, 1)), 2)


def batches(worker, **how):
    data = TensorDataset(torch.arange(16.0).view(-1, 2))
    return worker.setup_dataloaders(DataLoader(data, batch_size=2), **how)


def train_with_another_optimizer(worker):
    net, _ = make(worker)
    another = SGD(net.parameters(), lr=0.5)
    for (x,) in batches(worker):
        net(x).sum().backward()
        another.step()


@pytest.mark.parametrize("strategy", ["allreduce", "gossip", "downpour"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_with_batches_and_no_step_fails_with_the_reason(strategy, workers):
    message = "no worker made a step: call step.. of the optimizer that worker.setup returned"
    with pytest.raises(pl.PacelineError, match=message) as raised:
        simulate(train_with_another_optimizer, workers, strategy=strategy)
    assert raised.value.exit_code == 1


def test_real_workers_and_a_plain_script_say_that_no_step_was_made():
    with pytest.raises(pl.WorkerFailed, match="no worker made a step") as raised:
        pl.launch(train_with_another_optimizer, workers=2)
    assert raised.value.exit_code == 1
    with pytest.raises(pl.PacelineError, match="no worker made a step"), pl.init() as worker:
        train_with_another_optimizer(worker)


def test_evaluation_needs_no_step():
    def train(worker):
        net, _ = make(worker)
        with torch.no_grad():
            for (x,) in batches(worker):
                net(x)
        with worker.answer():
            for (x,) in batches(worker):
                net(x)

    assert simulate(train).steps == 0


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_a_worker_without_a_step_is_no_failure_if_others_have_made_some(strategy):
    """It had too few batches for one accumulated step."""

    def train(worker):
        net, sgd = make(worker)
        for number, (x,) in enumerate(batches(worker, data="static")):
            net(x).sum().backward()
            if worker.rank == 0 or number == 9:
                sgd.step()

    assert simulate(train, strategy=strategy).steps > 0


# Exchanges of the user's own ---------------------------------------------------------------------

EVERY = sorted(STRATEGIES)


def train_step(net, sgd):
    sgd.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    sgd.step()


@pytest.mark.parametrize("strategy", EVERY)
def test_a_metric_is_reduced_over_the_workers_whatever_other_ranks_there_are(strategy):
    def train(worker):
        net, sgd = make(worker, lr=0.01)
        for epoch in range(2):
            train_step(net, sgd)
            assert worker.reduce(worker.rank + epoch) == 1.0 + epoch
            assert worker.reduce(2, "sum") == 6.0
            both = worker.reduce(torch.tensor([[1.0, worker.rank]]), op="sum")
            assert both.tolist() == [[3.0, 3.0]] and both.dtype is torch.float32
            worker.comm.barrier()
            assert (worker.comm.rank, worker.comm.size) == (worker.rank, 3)

    simulate(train, 3, strategy=strategy)


def test_a_reduction_among_ranks_that_do_something_else_is_refused():
    def train(worker):
        make(worker)
        if worker.rank == 0:
            worker.comm.all_reduce(torch.zeros(2, dtype=torch.float64))
        else:
            worker.reduce(1.0)

    with pytest.raises(pl.UsageError, match=r"worker\.reduce must be called by every worker"):
        simulate(train)
    with pytest.raises(pl.UsageError, match=r"op \(max\) must be one of mean, sum"):
        simulate(lambda worker: worker.reduce(1.0, "max"))


def test_a_reduction_that_checkpoints_could_wait_for_is_refused(tmp_path):
    def train(worker):
        make(worker)
        worker.reduce(1.0)

    how = {"out": tmp_path / "run", "checkpoint_steps": 2}
    simulate(train, strategy="sasgd", **how)
    with pytest.raises(pl.UsageError, match=r"under Gossip with checkpoints .*worker\.stop_all"):
        simulate(train, strategy="gossip", **how | {"out": tmp_path / "other"})


@pytest.mark.parametrize("strategy", EVERY)
def test_one_worker_stops_all_and_every_method_finishes(strategy):
    steps, ends, after = {}, {}, []
    data = TensorDataset(torch.ones(600, 2))

    def train(worker):
        net, sgd = make(worker, lr=0.01)
        loader = worker.setup_dataloaders(DataLoader(data, batch_size=2))
        for _ in range(5):
            for _ in loader:
                train_step(net, sgd)
                if worker.rank == 1 and worker.steps == 4:
                    worker.stop_all()
            with torch.no_grad():
                after.append(len([*worker.setup_dataloaders(DataLoader(data, batch_size=100))]))
            if worker.stopping:
                break
        steps[worker.rank] = worker.steps
        worker.finish()
        ends[worker.rank] = net.weight.detach().clone()

    simulate(train, 3, strategy=strategy, cluster="ethernet-10g")
    assert 4 <= steps[1] <= 5 and all(count < 20 for count in steps.values())
    assert sum(after) == 6, "an evaluation goes on"
    assert all(torch.equal(end, ends[0]) for end in ends.values())


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), np.array(0.5), np.array([0.5])]
)
def test_numpys_numbers_can_be_logged(value):
    (record,) = simulate(lambda worker: worker.log(loss=value), 1).metrics
    assert record["loss"] == 0.5 and type(record["loss"]) is float
