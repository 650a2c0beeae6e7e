"""The laws that every registered method obeys; a new one inherits them by its registration."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import battery
from support.battery import BATCH, STEPS, UNEVEN, WORKERS
from support.training import Problem, beat, flat
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

import paceline as pl
from paceline.checkpoint.states import load_state, save_state
from paceline.lab.tasks.fashion import load_images, make_loader, make_model
from paceline.lab.tasks.recipe import learning_rate
from paceline.record.trace import read
from paceline.strategies import STRATEGIES, make_strategy
from paceline.strategies.service import REQUEST, REQUEST_NUMBERS, Reply

SPECS = {
    "sasgd": "sasgd(interval=4)",
    "hierarchical": "hierarchical(group_size=2, group_interval=2, interval=4)",
    "diloco": "diloco(interval=3)",
    "downpour": "downpour(push_interval=2, fetch_interval=3, shards=2)",
    "layered": "layered(group_size=2)",
}
"""Methods in a form whose intervals do not divide the 7 steps of a run."""
CYCLIC_SUM = "cyclic(form=gradient, scale=sum, shards=2, local_move=true)"
VARIANTS = {
    "sasgd": ["sasgd(interval=3, global_lr=0.01)", "sasgd(interval=2, momentum=average, warmup=3)"],
    "downpour": [
        "downpour",
        "downpour(phase=paper, push_interval=3)",
        "downpour(server_optimizer=adagrad)",
    ],
    "easgd": ["easgd(interval=3, sync=true)", "easgd(interval=2, shards=3)"],
    "cyclic": ["cyclic(max_accumulated=1)", CYCLIC_SUM],
    "gossip": [
        "gossip(mode=push, interval=2)",
        "gossip(sync=true, interval=2)",
        "gossip(mode=push, sync=true, topology=ring)",
        "gossip(order=parallel, probability=0.5)",
        "gossip(order=step_first, topology=exponential)",
    ],
    "ssp": ["ssp(bound=0, shards=2)"],
    "adpsgd": ["adpsgd(interval=2, topology=ring)"],
}
"""More forms, for the simulator."""

EAMSGD = ["easgd(momentum=0.9)", "easgd(interval=3, momentum=0.9, sync=true)"]
"""Forms that take no optimizer with momentum of its own."""
FORMS = [form for n in STRATEGIES for form in [SPECS.get(n, n), *VARIANTS.get(n, [])]]

every_name = pytest.mark.parametrize("name", STRATEGIES)
every_form = pytest.mark.parametrize("spec", FORMS)
every_plain_form = pytest.mark.parametrize("spec", FORMS + EAMSGD)
every_kind = pytest.mark.parametrize(
    "spec", [*(SPECS.get(n, n) for n in STRATEGIES), "sasgd(interval=3, global_lr=0.01)", *EAMSGD]
)


def run_on(transport: str, train: Any, spec: str, **how: Any) -> pl.Result:
    if transport == "simulated":
        return pl.simulate(train, workers=WORKERS, strategy=spec, cluster="mixed-lab", **how)
    return pl.launch(train, workers=WORKERS, strategy=spec, transport=transport, **how)


def told(result: pl.Result, what: str) -> list[dict[str, Any]]:
    records = [record for record in result.metrics if record.get("what") == what]
    return sorted(records, key=lambda record: record["rank"])


@pytest.fixture(scope="module")
def equal_run(tmp_path_factory):
    """A run of workers with equally many batches, made once for all laws about it."""

    @cache
    def run(transport: str, spec: str) -> tuple[pl.Result, list[dict[str, Any]]]:
        out = tmp_path_factory.mktemp("run")
        result = run_on(transport, battery.train_equal, spec, out=out)
        return result, list(read(out / "trace.jsonl"))

    return run


# On every transport ------------------------------------------------------------------------------


@every_name
def test_all_ranks_are_equal_after_setup(transport, name, equal_run):
    result, _ = equal_run(transport, SPECS.get(name, name))
    digests = {record["digest"] for record in told(result, "setup")}
    assert len(told(result, "setup")) == WORKERS and len(digests) == 1


@every_name
def test_all_ranks_end_with_the_same_finite_answer(transport, name, equal_run):
    result, _ = equal_run(transport, SPECS.get(name, name))
    ends = told(result, "end")
    assert len(ends) == WORKERS and all(end["finite"] for end in ends)
    assert len({end["digest"] for end in ends}) == 1
    assert ends[0]["digest"] not in {record["digest"] for record in told(result, "setup")}
    assert result.steps == WORKERS * STEPS


@every_name
def test_every_sample_is_taken_once(transport, name, equal_run):
    result, _ = equal_run(transport, SPECS.get(name, name))
    taken = [int(n) for end in told(result, "end") for n in end["taken"].split(",")]
    assert sorted(taken) == list(range(BATCH * STEPS * WORKERS))


@every_name
def test_the_closed_form_of_bytes_is_what_is_metered(transport, name, equal_run):
    spec = SPECS.get(name, name)
    result, trace = equal_run(transport, spec)
    assert result.bytes_sent == expected_bytes(spec, result, trace)


def expected_bytes(spec: str, result: pl.Result, trace: list[dict[str, Any]]) -> int:
    """By the closed form of the run; where that depends on chance, by that of each exchange."""
    payload = told(result, "end")[0]["payload"]
    if payload is not None:
        return int(payload)
    method, problem = make_strategy(spec), nn.ParameterList(battery.net_of(0).parameters())
    nbytes = sum(parameter.nbytes for parameter in problem)
    ranks = len(method.roles(WORKERS))
    events = [(r["event"], r.get("tag")) for r in trace]
    if hasattr(method, "max_accumulated"):
        settings = 8 * 4  # lr, momentum, dampening and weight decay of SGD's only group
        numbers = 8 * (REQUEST_NUMBERS + len(Reply._fields))
        turn = 2 * nbytes + method.shards * (numbers + settings)
        turns = sum(r["event"] == "recv" and r["tag"] == REQUEST for r in trace) // method.shards
        tokens = sum(r["bytes"] == 16 for r in trace if r["event"] == "post")
        return turns * turn + 16 * tokens + nbytes * ranks
    messages = sum(event == "post" for event, _ in events)
    messages += sum(r["event"] == "peek" and r["version"] is not None for r in trace)
    asked = sum(r["bytes"] for r in trace if r["event"] == "all_reduce" and r["bytes"] < nbytes)
    return messages * (nbytes + 16) + 2 * nbytes * WORKERS + asked  # whether offers are open


@every_name
def test_workers_with_0_1_7_and_100_batches_all_end(transport, name):
    result = run_on(transport, battery.train_uneven, SPECS.get(name, name))
    ends = sorted(result.metrics, key=lambda record: record["rank"])
    assert [end["taken"] for end in ends] == [BATCH * batches for batches in UNEVEN]
    assert all(end["once"] for end in ends)
    assert len({end["digest"] for end in ends}) == 1
    assert result.steps == sum(UNEVEN)


@every_name
def test_a_world_of_one_is_the_plain_optimizer_bit_for_bit(transport, name):
    problem = Problem(seed=7, optimizer=lambda p: AdamW(p, lr=0.02, weight_decay=0.1))
    if transport == "simulated":
        [end], result = problem.run(name, 1)
        assert torch.equal(end, problem.run_alone())
    else:
        result = pl.launch(battery.train_alone, workers=1, strategy=name, transport=transport)
        assert result.metrics[-1]["digest"] == result.metrics[-1]["plain"]
    assert result.bytes_sent == 0


# In every form, in virtual time ------------------------------------------------------------------


@every_form
def test_in_every_form_bytes_samples_and_ends_are_right(spec, equal_run):
    result, trace = equal_run("simulated", spec)
    ends = told(result, "end")
    assert result.bytes_sent == expected_bytes(spec, result, trace)
    assert len({end["digest"] for end in ends}) == 1 and all(end["finite"] for end in ends)
    taken = [int(n) for end in ends for n in end["taken"].split(",")]
    assert sorted(taken) == list(range(BATCH * STEPS * WORKERS))


@every_form
def test_the_same_seed_is_the_same_run(spec):
    problem = Problem(seed=3)
    runs = [problem.run(spec, 4, cluster="mixed-lab", seed=seed) for seed in (5, 5, 6)]
    (first, one), (second, two), (_, other) = runs
    assert one.trace_hash == two.trace_hash != other.trace_hash
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_form
def test_zero_gradients_leave_everything_where_it_is(spec):
    ends = {}

    def train(worker):
        net = nn.Linear(3, 2)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.5))
        start = flat(net)
        for _ in range(STEPS):
            sgd.zero_grad()
            (net(torch.ones(1, 3)).sum() * 0).backward()
            sgd.step()
            assert torch.allclose(flat(net), start, rtol=1e-6, atol=0)
        worker.finish()
        ends[worker.rank] = flat(net), start

    pl.simulate(train, workers=WORKERS, strategy=spec, cluster=beat(1.0, 2.0))
    for end, start in ends.values():
        assert torch.allclose(end, start, rtol=1e-6, atol=0)


@every_form
@pytest.mark.parametrize("at", [1, 4, 5])
def test_state_goes_on_where_it_was_saved_in_mid_interval(spec, at, tmp_path):
    """At one step each worker's strategy is replaced by a new one that loads its saved state."""
    problem = Problem(seed=11)

    def run(swap: bool):
        ends = {}

        def train(worker):
            net = problem.model()
            net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.05, momentum=0.8))
            fresh = _snapshot(worker.strategy)
            for step in range(STEPS):
                if swap and step == at:
                    worker.settle()
                    _replace(worker, fresh, tmp_path)
                sgd.zero_grad()
                problem.loss(net, worker.rank, step).backward()
                sgd.step()
            worker.finish()
            ends[worker.rank] = flat(net)

        pl.simulate(train, workers=WORKERS, strategy=spec, cluster="mixed-lab")
        return ends

    kept, swapped = run(False), run(True)
    assert all(torch.equal(kept[rank], swapped[rank]) for rank in range(WORKERS))


def _snapshot(strategy: Any) -> dict[str, Any]:
    """What a strategy is right after its setup; its state is copied, since it goes on changing."""
    state = copy.deepcopy(strategy.state_dict())
    return {**vars(strategy), **state}


def _replace(worker: pl.Worker, fresh: dict[str, Any], folder: Any) -> None:
    name = f"rank{worker.rank}"
    save_state(folder, name, worker.strategy.state_dict())
    new = object.__new__(type(worker.strategy))
    vars(new).update(fresh)
    new.load_state_dict(load_state(folder, name))
    session = worker._session
    worker.strategy = session.strategy = session.stepper.strategy = new


@every_plain_form
def test_a_scaler_whose_first_scales_overflow_costs_these_steps_and_no_more(spec):
    """About ten overflow one after the other, each halves the scale, and nobody is set aside."""
    problem, ends = Problem(seed=19, steps=20, dtype=torch.float32), {}

    def train(worker):
        net = problem.model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.02))
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient / 1000)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for step in range(problem.steps):
            sgd.zero_grad()
            scaler.scale(1000 * problem.loss(net, worker.rank, step % 2)).backward()
            scaler.step(sgd)
            scaler.update()
        worker.finish()
        ends[worker.rank] = loss_over_all(net), scaler.get_scale(), worker._session.set_aside

    def loss_over_all(net):
        batches = [(rank, step) for rank in range(WORKERS) for step in range(2)]
        return sum(problem.loss(net, *batch).item() for batch in batches)

    result = pl.simulate(train, workers=WORKERS, strategy=spec, cluster=beat())
    for loss, scale, set_aside in ends.values():
        assert scale < 2.0**122 and not set_aside
        assert loss < loss_over_all(problem.model())
    assert result.dropped_updates == 0


def read_in_every_way(net):
    """The parameters after all that reads a model without training it."""
    net(torch.ones(1, 5, dtype=torch.float64))
    net.state_dict()
    copy.deepcopy(net)(torch.ones(1, 5, dtype=torch.float64))
    return flat(net)


@every_kind
def test_nothing_touches_the_answer_that_is_read(spec, tmp_path):
    problem, ends = Problem(seed=23), {}

    def train(worker):
        net = problem.model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.05))
        for step in range(problem.steps):
            sgd.zero_grad()
            problem.loss(net, worker.rank, step).backward()
            sgd.step()
            with worker.answer(net):
                answer = flat(net)
                worker.settle()
                assert torch.equal(read_in_every_way(net), answer)
        worker.finish()
        ends[worker.rank] = answer = flat(net)
        worker.settle()
        assert torch.equal(read_in_every_way(net), answer)
        net.load_state_dict(Problem(seed=30).model().state_dict())
        with worker.answer(net):
            assert torch.equal(flat(net), flat(Problem(seed=30).model()))
        nn.utils.vector_to_parameters(answer, net.parameters())
        with pytest.raises(pl.UsageError, match="must not be called after"):
            sgd.step()

    pl.simulate(train, workers=WORKERS, strategy=spec, out=tmp_path)
    saved = problem.model()
    saved.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(flat(saved), ends[0])


# What the user loads -----------------------------------------------------------------------------


def train_and(problem, ends, load, at_step=None):
    """A training that calls ``load(worker, net)`` before a step, or after the last one."""

    def train(worker):
        net = problem.model()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.05))
        for step in range(problem.steps):
            if step == at_step:
                load(worker, net)
            sgd.zero_grad()
            problem.loss(net, worker.rank, step).backward()
            sgd.step()
        if at_step is None:
            load(worker, net)
        worker.finish()
        ends[worker.rank] = flat(net)

    return train


@every_kind
@pytest.mark.parametrize("loaders", [range(WORKERS), [0]], ids=["all", "first"])
def test_weights_that_are_loaded_after_the_last_step_are_the_answer(spec, loaders, tmp_path):
    problem, ends, plain = Problem(seed=29), {}, {}

    def load(worker, net):
        if worker.rank in loaders:
            net.load_state_dict(Problem(seed=30).model().state_dict())
            with worker.answer(net):
                assert torch.equal(flat(net), flat(Problem(seed=30).model()))

    pl.simulate(train_and(problem, ends, load), workers=WORKERS, strategy=spec, out=tmp_path)
    pl.simulate(train_and(problem, plain, lambda *_: None), workers=WORKERS, strategy=spec)
    best = flat(Problem(seed=30).model())
    for rank, end in ends.items():
        assert torch.equal(end, best if rank in loaders else plain[rank])
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(torch.cat([saved[name].reshape(-1) for name in net_names(problem)]), best)


def net_names(problem):
    return [name for name, _ in problem.model().named_parameters()]


@every_kind
def test_weights_that_are_loaded_in_mid_run_are_refused_at_the_next_step(spec):
    def load(worker, net):
        net.load_state_dict(Problem(seed=30).model().state_dict())

    with pytest.raises(pl.UsageError, match=r"step\(\) must not follow load_state_dict: .*setup"):
        train = train_and(Problem(seed=29), {}, load, at_step=2)
        pl.simulate(train, workers=WORKERS, strategy=spec)


@every_kind
def test_a_look_at_other_weights_and_back_changes_nothing(spec):
    problem, ends, plain = Problem(seed=29), {}, {}

    def look(worker, net):
        before = copy.deepcopy(net.state_dict())
        net.load_state_dict(Problem(seed=30).model().state_dict())
        net.load_state_dict(before)

    def do_not_look(worker, net):
        worker.settle()

    for at_step in (3, None):
        pl.simulate(train_and(problem, ends, look, at_step), workers=WORKERS, strategy=spec)
        pl.simulate(train_and(problem, plain, do_not_look, at_step), workers=WORKERS, strategy=spec)
        assert all(torch.equal(ends[rank], plain[rank]) for rank in range(WORKERS))


@every_kind
def test_weights_that_are_loaded_before_the_first_step_are_those_to_begin_with(spec, tmp_path):
    first, other, ends, plain = Problem(seed=29), Problem(seed=30), {}, {}
    save_file(other.model().state_dict(), tmp_path / "weights.safetensors")

    def load(worker, net):
        worker.load_weights(tmp_path / "weights.safetensors")
        with worker.answer(net):
            assert torch.equal(flat(net), flat(other.model()))

    first.batch_of = other.batch_of
    how = {"workers": WORKERS, "strategy": spec, "cluster": beat()}
    pl.simulate(train_and(first, ends, load, at_step=0), **how)
    pl.simulate(train_and(other, plain, lambda *_: None), **how)
    assert all(torch.equal(ends[rank], plain[rank]) for rank in range(WORKERS))


# A law that training alone cannot pass -----------------------------------------------------------


@cache
def trained_alone() -> list[float]:
    """The accuracy of each worker of 4 that trains on its own skewed shard only."""
    accuracies = []
    for rank in range(WORKERS):
        images = load_images()
        order = torch.argsort(images.y_train, stable=True).tensor_split(WORKERS)[rank]
        accuracies.append(_accuracy_alone(images.x_train[order], images.y_train[order]))
    return accuracies


def _accuracy_alone(x: torch.Tensor, y: torch.Tensor) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net, images = make_model("mlp"), load_images()
    sgd = SGD(net.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        for part in torch.randperm(len(y)).split(16):
            sgd.zero_grad()
            cross_entropy(net(x[part]), y[part]).backward()
            sgd.step()
    with torch.no_grad():
        return float((net(images.x_test).argmax(1) == images.y_test).float().mean())


@every_name
def test_on_skewed_shards_the_answer_beats_every_worker_alone(name):
    """Each worker sees 2 or 3 of 10 classes; together they must know more than any of them."""
    accuracy = []

    def train(worker):
        images = load_images()
        torch.manual_seed(0)
        net = make_model("mlp")
        rate = learning_rate(worker.strategy, "mlp", 8)
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=rate, momentum=0.9))
        batches = worker.setup_dataloaders(make_loader(images, 16), data="skewed")
        for _ in range(2):
            for x, y in batches:
                sgd.zero_grad()
                cross_entropy(net(x), y).backward()
                sgd.step()
        worker.finish()
        with torch.no_grad():
            right = net(images.x_test).argmax(1) == images.y_test
        accuracy.append(float(right.float().mean()))

    pl.simulate(train, workers=WORKERS, strategy=name)
    assert min(accuracy) > max(trained_alone()) + 0.15
