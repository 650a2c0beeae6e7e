"""Parameters of several dtypes: the vector has the widest, narrower ones are copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.resuming import Interruptible, same_models
from support.training import beat
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.strategies import STRATEGIES

SPECS = {
    "sasgd": "sasgd(interval=2)",
    "hierarchical": "hierarchical(group_size=2, group_interval=1, interval=2)",
    "diloco": "diloco(interval=2)",
    "downpour": "downpour(push_interval=2, fetch_interval=3, shards=2)",
}
EVERY = [SPECS.get(name, name) for name in STRATEGIES]
EVERY += ["easgd(momentum=0.9)", "cyclic(form=gradient)", "sasgd(interval=2, momentum=average)"]
EVERY += ["gossip(mode=push)", "easgd(sync=true)", "sasgd(interval=2, global_lr=0.05)"]
MIXES = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float16, torch.bfloat16),
]


class Mixed(nn.Module):
    """Two layers, each of its own dtype; it computes in double precision."""

    def __init__(self, kinds: tuple[torch.dtype, torch.dtype] = MIXES[0]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 5).to(kinds[0]), nn.Linear(5, 2).to(kinds[1])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first, self.second
        hidden = torch.tanh(x @ first.weight.double().T + first.bias.double())
        return hidden @ second.weight.double().T + second.bias.double()


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def backward(net: nn.Module, rank: int, step: int) -> None:
    net(batch_of(rank, step)).square().mean().backward()


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def optimizer_of(net: nn.Module, kind: Any = SGD) -> Any:
    return kind(net.parameters(), lr=0.05)


def run(strategy: str, workers: int, kinds: Any = MIXES[0], kind: Any = SGD, **how: Any) -> Any:
    """Train; after each step, parameters and vector must be the same numbers."""
    ends = {}

    def train(worker):
        net = Mixed(kinds)
        net, optimizer = worker.setup(net, optimizer_of(net, kind))
        flat = worker._session.stepper.replica.flat
        for step in range(6):
            optimizer.zero_grad()
            backward(net, worker.rank, step)
            optimizer.step()
            if workers > 1:
                check_agreement(flat)
        worker.finish()
        ends[worker.rank] = state_of(net)

    how.setdefault("cluster", beat())
    result = pl.simulate(train, workers=workers, strategy=strategy, **how)
    return ends, result


def check_agreement(flat):
    for span, view in zip(flat.spans, flat.views(flat.x), strict=True):
        assert torch.equal(span.parameter.detach().to(view.dtype), view), span.name


def plain(kinds: Any, kind: Any, workers: int = 1) -> dict[str, Tensor]:
    net = Mixed(kinds)
    optimizer = optimizer_of(net, kind)
    for step in range(6):
        optimizer.zero_grad()
        losses = [net(batch_of(rank, step)).square().mean() for rank in range(workers)]
        (sum(losses) / workers).backward()
        optimizer.step()
    return state_of(net)


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("kinds", MIXES, ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_one_worker_is_a_plain_script_bit_for_bit(name, kinds, kind):
    ends, _ = run(name, 1, kinds, kind)
    assert same(ends[0], plain(kinds, kind))


@pytest.mark.parametrize("kinds", MIXES, ids=str)
@pytest.mark.parametrize("strategy", EVERY)
def test_parameters_and_vector_agree_after_each_step_and_workers_at_the_end(strategy, kinds):
    ends, result = run(strategy, 4, kinds)
    assert all(same(end, ends[0]) for end in ends.values())
    assert [value.dtype for value in ends[0].values()] == [kinds[0]] * 2 + [kinds[1]] * 2
    assert all(value.isfinite().all() for value in ends[0].values())
    assert not same(ends[0], state_of(Mixed(kinds))) and result.dropped_updates == 0


@pytest.mark.parametrize("kind", [SGD, Adam])
@pytest.mark.parametrize("strategy", ["allreduce", "layered", "ssp(bound=0)"])
def test_steps_with_the_mean_are_those_of_one_process_up_to_rounding(strategy, kind):
    kinds = (torch.float32, torch.float64)
    if strategy == "ssp(bound=0)" and kind is Adam:
        return  # a server makes a step for each gradient
    scale = 3 if strategy == "ssp(bound=0)" else 1
    ends, _ = run(strategy, 3, kinds, lambda p, lr: kind(p, lr=lr / scale))
    expected = plain(kinds, kind, workers=3)
    for name, value in expected.items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_one_dtype_has_a_vector_of_that(dtype):
    def train(worker):
        net = nn.Linear(2, 1).to(dtype)
        net, _ = worker.setup(net, optimizer_of(net))
        flat = worker._session.stepper.replica.flat
        assert flat.x.dtype is dtype and not flat.apart
        assert net.weight.data_ptr() == flat.x.data_ptr()

    pl.simulate(train, workers=2)


@pytest.mark.parametrize("strategy", ["allreduce", "easgd", "gossip", "layered"])
def test_the_answer_leaves_no_trace(strategy):
    def train(worker):
        net = Mixed()
        net, optimizer = worker.setup(net, optimizer_of(net))
        for step in range(3):
            optimizer.zero_grad()
            backward(net, worker.rank, step)
            optimizer.step()
            worker.settle()
            before = state_of(net)
            with worker.answer(net):
                answer = state_of(net)
            assert same(state_of(net), before)
        net.load_state_dict(answer)
        with worker.answer(net):
            assert same(state_of(net), answer)
        worker.finish()
        assert same(state_of(net), answer)

    pl.simulate(train, workers=2, strategy=strategy, cluster=beat())


def test_what_the_user_writes_into_a_parameter_counts():
    def train(worker):
        net = Mixed()
        net, optimizer = worker.setup(net, SGD(net.parameters(), lr=1e-12))
        with torch.no_grad():
            net.first.bias.fill_(worker.rank + 1.0)
        backward(net, worker.rank, 0)
        optimizer.step()
        worker.finish()
        assert net.first.bias.tolist() == [1.5] * 5

    pl.simulate(train, workers=2, strategy="sasgd(interval=1, form=pseudo)")


@pytest.mark.parametrize("strategy", ["allreduce", "sasgd(interval=1)", "downpour"])
def test_clipping_is_of_all_parameters(strategy):
    def train(worker):
        net = Mixed()
        net, optimizer = worker.setup(net, SGD(net.parameters(), lr=1.0))
        before = torch.cat([p.detach().double().view(-1) for p in net.parameters()])
        (100 * net(batch_of(0, 0)).square().mean()).backward()
        worker.clip_gradients(0.5)
        optimizer.step()
        worker.finish()
        now = torch.cat([p.detach().double().view(-1) for p in net.parameters()])
        expected = 1.0 if strategy == "downpour" else 0.5  # both pushes count in full
        assert float((now - before).norm()) == pytest.approx(expected, rel=0.02)

    pl.simulate(train, workers=2, strategy=strategy, cluster=beat())


@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "sasgd(interval=2)"])
def test_several_optimizers_and_frozen_parameters_of_several_dtypes(strategy):
    ends = {}

    def train(worker):
        net = Mixed()
        net.first.bias.requires_grad_(False)
        both = [SGD(net.first.parameters(), lr=0.05), Adam(net.second.parameters(), lr=0.05)]
        net, (first, second) = worker.setup(net, both, with_frozen=True)
        for step in range(6):
            if step == 3:
                net.first.bias.requires_grad_(True)
            net.zero_grad()
            backward(net, worker.rank, step)
            first.step()
            second.step()
            check_agreement(worker._session.stepper.replica.flat)
        worker.finish()
        ends[worker.rank] = state_of(net)

    pl.simulate(train, workers=3, strategy=strategy, cluster=beat())
    assert all(same(end, ends[0]) for end in ends.values())


def train_on_pairs(worker):
    net = Mixed()
    net, optimizer = worker.setup(net, Adam(net.parameters(), lr=0.02))
    data = TensorDataset(torch.cat([batch_of(0, step) for step in range(20)]))
    for _ in range(2):
        for (x,) in worker.setup_dataloaders(DataLoader(data, batch_size=3, shuffle=True)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("strategy", ["allreduce", "downpour", "gossip", "sasgd(interval=3)"])
def test_a_run_resumes_bit_for_bit(strategy, tmp_path):
    train = Interruptible(train_on_pairs)
    how = {"workers": 2, "strategy": strategy, "checkpoint_steps": 3, "cluster": "ethernet-1g"}
    whole, ends = train.run(tmp_path / "whole", **how), train.ends
    assert train.run(tmp_path / "run", 8, **how) is None
    again = train.run(tmp_path / "run", **how, resume=True)
    assert again.resumed_at is not None and again.steps == whole.steps
    assert same_models(train.ends, ends)


def test_gradients_are_computed_alone_and_say_why():
    def train(worker):
        train_on_pairs(worker)

    result = pl.simulate(train, workers=2, strategy="allreduce", batched="auto")
    assert result.batched["why_not"] == "the parameters have several dtypes"


def test_dtypes_that_have_no_common_one_are_refused():
    def train(worker):
        net = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.float8_e4m3fn))])
        net.append(nn.Parameter(torch.ones(2)))
        worker.setup(net, optimizer_of(net))

    message = r"several dtypes \(torch.float32, torch.float8_e4m3fn\) must be of float64, float32"
    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(train, workers=2)


@pytest.mark.transport("shared_memory")
def test_processes_train_as_simulated_workers_do():
    real = pl.launch(train_and_tell, workers=2, strategy="allreduce")
    simulated = pl.simulate(train_and_tell, workers=2, strategy="allreduce")
    assert len({record["end"] for record in (*real.metrics, *simulated.metrics)}) == 1


def train_and_tell(worker):
    train_on_pairs(worker)
    worker.finish()
    worker.log(end=str([p.double().sum().item() for p in worker._session.model.parameters()]))
