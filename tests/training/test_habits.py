"""Loops as people write them, each run as a plain script and on workers.

With ``allreduce`` two workers end where one process does on batches that are twice as large. With
the other methods workers end with one finite answer, which is better than the beginning.
docs/habits.md names the loops of this file.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.training import beat, flat
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

METHODS = [
    "sasgd(interval=3)",
    "layered(group_size=2)",
    "downpour",
    "cyclic",
    "easgd(interval=2, sync=true)",
    "gossip",
]
"""One of each kind; tests/strategies/test_every_strategy.py has all of them."""
FEATURES, CLASSES, BATCH, SAMPLES, VALIDATION = 6, 3, 12, 48, 24


def data_of(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


DATA, HELD_OUT = data_of(SAMPLES, 1), data_of(VALIDATION, 2)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


class Script:
    """What a loop has: a worker, or nothing of Paceline."""

    def __init__(self, worker: pl.Worker | None = None) -> None:
        self.worker = worker
        self.size = 1 if worker is None else worker.size

    def setup(self, model: Any, optimizer: Optimizer) -> tuple[Any, Any]:
        return (model, optimizer) if self.worker is None else self.worker.setup(model, optimizer)

    def sgd(self, model: Any, lr: float = 0.2, **options: Any) -> tuple[Any, Any]:
        return self.setup(model, SGD(model.parameters(), lr=lr, **options))

    def loader(self, data: Any = DATA, batch: int = BATCH, **options: Any) -> Any:
        plain = DataLoader(data, batch_size=batch // self.size, **options)
        return plain if self.worker is None else self.worker.setup_dataloaders(plain)

    def reduce(self, value: Any, op: Any = "mean") -> Any:
        return value if self.worker is None else self.worker.reduce(value, op=op)

    def answer(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext() if self.worker is None else self.worker.answer(model)


def learn(model: Any, optimizer: Any, loader: Any, epochs: int = 3) -> None:
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()


# The loops: each returns its model ---------------------------------------------------------------


def plain_loop(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    learn(model, optimizer, script.loader())
    return model


def compile_before_setup(script: Script) -> Any:
    model, optimizer = script.sgd(torch.compile(network(), backend="eager"))
    learn(model, optimizer, script.loader())
    with script.answer(model), torch.no_grad():
        model(HELD_OUT[:2][0])
    return model


def compile_after_setup(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    compiled = torch.compile(model, backend="aot_eager")
    learn(compiled, optimizer, script.loader())
    with script.answer(compiled), torch.no_grad():
        compiled(HELD_OUT[:2][0])
    return model


def compile_in_place(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    model.compile(backend="eager")
    learn(model, optimizer, script.loader())
    return model


def gradient_accumulation(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for number, (x, y) in enumerate(script.loader(batch=BATCH // 2)):
        (cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


def zeroed_gradients(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        model.zero_grad(set_to_none=False)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


def gradient_checkpointing(script: Script) -> Any:
    model, optimizer = script.sgd(network())

    def forward(x: Tensor) -> Tensor:
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        return model[2](hidden)

    learn(forward, optimizer, script.loader())
    return model


def several_backwards(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        optimizer.zero_grad()
        out = model(x)
        cross_entropy(out, y).backward(retain_graph=True)
        out.square().mean().mul(0.1).backward()
        optimizer.step()
    return model


def gradient_penalty(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        optimizer.zero_grad()
        x.requires_grad_()
        loss = cross_entropy(model(x), y)
        (slope,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
        (loss + slope.square().sum(1).mean()).backward()
        optimizer.step()
    return model


def closures(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for x, y in script.loader():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
    return model


def schedulers(script: Script) -> Any:
    model, optimizer = script.sgd(network(), momentum=0.5)
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 6)]
    schedule = SequentialLR(optimizer, parts, milestones=[2])
    for _ in range(3):
        for x, y in script.loader():
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    return model


def rate_on_plateau(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for _ in range(3):
        total = 0.0
        for x, y in script.loader():
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        schedule.step(script.reduce(total))
    assert optimizer.param_groups[0]["lr"] < 0.2
    return model


def clipping_by_norm(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if script.worker is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            script.worker.clip_gradients(0.1)
        optimizer.step()
    return model


def clipping_by_value(script: Script) -> Any:
    """Each worker clips its own gradient; with the values here, none of them reaches the limit."""
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 10.0)
        optimizer.step()
    return model


def autocast(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return model


def gradient_scaler(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in script.loader():
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return model


class Tied(nn.Module):
    """A table of tokens whose rows are also the weights of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(CLASSES, 4)
        self.first, self.last = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES, bias=False)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.table(x.argmax(1) % CLASSES))


def weight_tying(script: Script) -> Any:
    model, optimizer = script.sgd(Tied().double())
    learn(model, optimizer, script.loader())
    assert model.last.weight is model.table.weight
    return model


def weight_norm(script: Script) -> Any:
    model = network()
    parametrizations.weight_norm(model[0])
    model, optimizer = script.sgd(model)
    learn(model, optimizer, script.loader())
    return model


def channels_last(script: Script) -> Any:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, CLASSES)).double()
    model, optimizer = script.sgd(net.to(memory_format=torch.channels_last))
    learn(lambda x: model(x.view(-1, 1, 2, 3)), optimizer, script.loader())
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    return model


def parameter_groups(script: Script) -> Any:
    model = network()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
    ]
    model, optimizer = script.setup(model, SGD(groups, lr=0.2))
    learn(model, optimizer, script.loader())
    return model


def freezing_a_part(script: Script) -> Any:
    model = network()
    model[0].requires_grad_(False)
    former = model[0].weight.clone()
    model, optimizer = script.sgd(model)
    learn(model, optimizer, script.loader())
    assert torch.equal(model[0].weight, former)
    return model


def freezing_in_mid_run(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    learn(model, optimizer, script.loader(), epochs=1)
    model[0].requires_grad_(False)
    learn(model, optimizer, script.loader(), epochs=1)
    return model


def adam_fused(script: Script) -> Any:
    model = network()
    model, optimizer = script.setup(model, AdamW(model.parameters(), lr=0.01, fused=True))
    learn(model, optimizer, script.loader())
    return model


def adam_for_each(script: Script) -> Any:
    model = network()
    model, optimizer = script.setup(model, Adam(model.parameters(), lr=0.01, foreach=True))
    learn(model, optimizer, script.loader())
    return model


def a_tensor_as_rate(script: Script) -> Any:
    model = network()
    adam = Adam(model.parameters(), lr=torch.tensor(0.01))
    model, optimizer = script.setup(model, adam)
    learn(model, optimizer, script.loader())
    return model


class Lion(Optimizer):
    """An optimizer that is not from torch."""

    def __init__(self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.sub_(torch.lerp(p.grad, m, group["betas"][0]).sign(), alpha=group["lr"])
                    m.lerp_(p.grad, 1 - group["betas"][1])


def an_optimizer_of_ones_own(script: Script) -> Any:
    model = network()
    model, optimizer = script.setup(model, Lion(model.parameters()))
    learn(model, optimizer, script.loader())
    return model


def hooks(script: Script) -> Any:
    model, seen = network(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    model[0].weight.register_hook(lambda grad: grad / 2)
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    model, optimizer = script.sgd(model)
    optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
    learn(model, optimizer, script.loader())
    counts = Counter(seen)
    assert len({*counts.values()}) <= 1 and len(counts) in (0, 4)
    return model


def copies_and_pickles(script: Script) -> Any:
    model, optimizer = script.sgd(network(), momentum=0.5)
    for _ in range(2):
        learn(model, optimizer, script.loader(), epochs=1)
        saved = io.BytesIO()
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)["model"]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            assert torch.equal(flat(other), flat(model))
            other(HELD_OUT[:2][0]).sum().backward()
            nn.init.zeros_(other[0].weight)
    return model


def copies_of_the_optimizer(script: Script) -> Any:
    model, optimizer = script.sgd(network(), momentum=0.5)
    learn(model, optimizer, script.loader(), epochs=1)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is SGD and other.param_groups[0]["lr"] == 0.2
        former = flat(model)
        other.step()  # of parameters of its own
        assert torch.equal(flat(model), former)
    learn(model, optimizer, script.loader(), epochs=1)
    return model


def parameters_as_a_vector(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        optimizer.zero_grad()
        weights = nn.utils.parameters_to_vector(model.parameters())
        (cross_entropy(model(x), y) + 0.01 * weights.square().sum()).backward()
        optimizer.step()
    return model


def functional_calls(script: Script) -> Any:
    model, optimizer = script.sgd(network())

    def forward(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(model.named_parameters()), (x,))

    learn(forward, optimizer, script.loader())
    return model


def ema_of_the_model(script: Script) -> Any:
    """Updated after each step, and used for evaluation; it is a model of this worker's own."""
    model, optimizer = script.sgd(network())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for x, y in script.loader():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
    with torch.no_grad():
        ema(HELD_OUT[:2][0])
    return ema.module


def ema_of_the_answer(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        learn(model, optimizer, script.loader(), epochs=1)
        with script.answer(model):
            ema.update_parameters(model)
    assert not torch.equal(flat(ema.module), flat(model))
    return model


def validation_that_each_worker_sees_whole(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    learn(model, optimizer, script.loader())
    model.eval()
    with script.answer(model), torch.no_grad():
        seen = sum(len(model(x)) for x, _ in DataLoader(HELD_OUT, batch_size=5))
    assert seen == VALIDATION
    return model


def validation_that_workers_share(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    learn(model, optimizer, script.loader())
    right = seen = 0
    with script.answer(model), torch.no_grad():
        for x, y in script.loader(HELD_OUT):
            right, seen = right + (model(x).argmax(1) == y).sum(), seen + len(x)
    assert script.reduce(seen, op="sum") == VALIDATION
    assert 0 < script.reduce(right, op="sum") / VALIDATION <= 1
    return model


def early_stopping(script: Script) -> Any:
    model, optimizer = script.sgd(network())
    for _ in range(100):
        learn(model, optimizer, script.loader(), epochs=1)
        with script.answer(model), torch.no_grad():
            loss = cross_entropy(model(HELD_OUT.tensors[0]), HELD_OUT.tensors[1])
        if script.reduce(loss) < 1.0:
            return model
    raise AssertionError("the loss must have come below 1")


def modes_that_the_model_has_already(script: Script) -> Any:
    """What scripts call for safety: devices, dtypes and modes that the model has already."""
    model, optimizer = script.sgd(network())
    for x, y in script.loader():
        model.to("cpu").train().double().requires_grad_(True)
        optimizer.zero_grad()
        with torch.autograd.set_detect_anomaly(False), torch.enable_grad():
            cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
    return model


COMPILED = [compile_before_setup, compile_after_setup, compile_in_place]
LOOPS = [
    plain_loop,
    gradient_accumulation,
    zeroed_gradients,
    gradient_checkpointing,
    several_backwards,
    gradient_penalty,
    closures,
    schedulers,
    rate_on_plateau,
    clipping_by_norm,
    clipping_by_value,
    gradient_scaler,
    weight_tying,
    weight_norm,
    channels_last,
    parameter_groups,
    freezing_a_part,
    freezing_in_mid_run,
    adam_fused,
    adam_for_each,
    a_tensor_as_rate,
    an_optimizer_of_ones_own,
    hooks,
    copies_and_pickles,
    copies_of_the_optimizer,
    parameters_as_a_vector,
    functional_calls,
    ema_of_the_model,
    ema_of_the_answer,
    validation_that_each_worker_sees_whole,
    validation_that_workers_share,
    early_stopping,
    modes_that_the_model_has_already,
]
EVERY = [*LOOPS, autocast, *COMPILED]
every_loop = pytest.mark.parametrize("loop", EVERY, ids=lambda loop: loop.__name__)
NO_AVERAGE = (ema_of_the_model, rate_on_plateau)
"""Loops whose model or rate is each worker's own where workers do not keep step."""


def on_workers(loop: Any, strategy: str, workers: int) -> dict[int, Tensor]:
    ends: dict[int, Tensor] = {}

    def train(worker: pl.Worker) -> None:
        model = loop(Script(worker))
        worker.finish()
        ends[worker.rank] = flat(model)

    pl.simulate(train, workers=workers, strategy=strategy, cluster=beat())
    return ends


@every_loop
def test_two_workers_end_where_a_plain_script_does(loop):
    plain = flat(loop(Script()))
    ends = on_workers(loop, "allreduce", 2)
    tolerance = 0.02 if loop is autocast else 1e-12  # sums of bfloat16 depend on the batch
    torch.testing.assert_close(ends[0], plain, rtol=tolerance, atol=tolerance)
    assert torch.equal(ends[0], ends[1])


@every_loop
def test_a_worker_that_is_alone_is_a_plain_script_bit_for_bit(loop):
    assert torch.equal(on_workers(loop, "allreduce", 1)[0], flat(loop(Script())))


@pytest.mark.parametrize("strategy", METHODS)
@pytest.mark.parametrize("loop", [*LOOPS, compile_after_setup], ids=lambda loop: loop.__name__)
def test_with_every_method_workers_end_with_one_answer(loop, strategy):
    ends = on_workers(loop, strategy, 3)
    assert all(torch.isfinite(end).all() for end in ends.values())
    if loop not in NO_AVERAGE:
        assert all(torch.equal(end, ends[0]) for end in ends.values())
        assert not torch.equal(ends[0], flat(network()))


# Refused, with a reason ---------------------------------------------------------------------------


@pytest.fixture
def process_group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_a_model_that_exchanges_by_itself_is_refused(wrap, process_group):
    def train(worker):
        options = {"mesh": init_device_mesh("cpu", (1,))} if wrap is fully_shard else {}
        model = wrap(network(), **options)
        worker.setup(model, SGD(model.parameters(), lr=0.1))

    message = r"the model \((DistributedDataParallel|FSDPModule).* must be a plain one"
    with pytest.raises(pl.UsageError, match=message):
        pl.simulate(train, workers=1)


def train_with_sync_batchnorm(worker):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))
    model, optimizer = worker.setup(model, SGD(model.parameters(), lr=0.1))
    model(torch.full((4, 2), float(worker.rank))).sum().backward()
    optimizer.step()
    worker.finish()
    worker.log(mean=model[0].running_mean[0])


def test_sync_batchnorm_is_batchnorm_and_says_so():
    with pytest.warns(UserWarning, match="SyncBatchNorm normalizes each worker's batch by itself"):
        result = pl.simulate(train_with_sync_batchnorm, workers=2, strategy="allreduce")
    assert [record["mean"] for record in result.metrics] == [pytest.approx(0.05)] * 2


def test_sync_batchnorm_that_would_wait_in_vain_is_refused(process_group):
    with pytest.raises(pl.UsageError, match="SyncBatchNorm waits for all processes"):
        pl.simulate(train_with_sync_batchnorm, workers=2, strategy="gossip")


def test_sparse_gradients_are_refused_where_they_would_be_sent():
    def train(worker):
        model = nn.EmbeddingBag(5, 2, sparse=True)
        model, optimizer = worker.setup(model, SGD(model.parameters(), lr=0.1))
        model(torch.tensor([[1]])).sum().backward()
        optimizer.step()

    pl.simulate(train, strategy="gossip")
    with pytest.raises(pl.UsageError, match="the gradient of weight is sparse: use sparse=False"):
        pl.simulate(train, strategy="allreduce")
