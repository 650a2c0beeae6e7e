"""Models and loops for which a joint forward could go wrong: the same, or one by one with a reason.

Each case runs one at a time and with ``batched="auto"``, whose probe may not refuse for the time.
"""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from support.replays import repeating
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.common.faults import Fault
from paceline.lab.tasks.networks import GPT
from paceline.launcher import simulate
from paceline.sim.batching import proof

STEPS, WORKERS = 7, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(70, 12, dtype=torch.float64, generator=GENERATOR)
IMAGES = torch.randn(70, 3, 8, 8, dtype=torch.float64, generator=GENERATOR)
WORDS = torch.randint(0, 20, (70, 6), generator=GENERATOR)
Y = torch.randint(0, 4, (70,), generator=GENERATOR)


@pytest.fixture(autouse=True)
def any_speed(monkeypatch):
    """Have the probe accept a joint computation that is slower."""
    monkeypatch.setattr(proof, "WORTH", float("inf"))


IS_RECORDED = False


@pytest.fixture(autouse=True, params=["told", "recorded"])
def recorded(request, monkeypatch):
    """Compute as on the CPU, and as on a GPU."""
    monkeypatch.setitem(globals(), "IS_RECORDED", request.param == "recorded")
    if IS_RECORDED:
        monkeypatch.setattr(simulate, "_repeating", repeating)


# Models ------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 4)
        self.count, self.scale, self.notes = 0, 1.0, []

    def forward(self, x):
        return self.b(self.hidden(x))

    def hidden(self, x):
        return torch.relu(self.a(x))


class Scaled(Net):
    def forward(self, x):
        return super().forward(x) * self.scale


class Counting(Net):
    def forward(self, x):
        self.count += 1
        return super().forward(x)


class Noting(Net):
    def forward(self, x):
        self.notes.append(len(x))
        return super().forward(x)


class Mean(Net):
    """Reads other samples of its batch, and the batch's size as a number."""

    def forward(self, x):
        return super().forward(x - x.mean(0)) / x.shape[0]


class Branch(Net):
    def forward(self, x):
        return self.b(self.hidden(x) if self.a(x).sum() > 0 else torch.tanh(self.a(x)))


class Item(Net):
    def forward(self, x):
        return super().forward(x) * x.abs().mean().item()


class Parts(Net):
    def forward(self, x):
        hidden = self.hidden(x)
        return self.b(hidden), {"hidden": hidden, "best": hidden.argmax(1), "size": 16}


class Losses(Net):
    def forward(self, x, labels=None):
        logits = self.b(self.hidden(x))
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Checkpointed(Net):
    reentrant = False

    def forward(self, x):
        x = x.requires_grad_() if self.reentrant else x
        return self.b(checkpoint(self.hidden, x, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.a.weight.requires_grad_(False)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight


class Sorted(Net):
    def forward(self, x):
        return super().forward(x)[torch.argsort(x[:, 0])].clone()


class InPlace(Net):
    def forward(self, x):
        hidden = self.a(x)
        hidden[:, 0] = 0
        return self.b(hidden.relu_())


class Clamped(Net):
    def forward(self, x):
        with torch.no_grad():
            self.a.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class Replaced(Net):
    """Replaces a buffer in place of changing it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Listed(Net):
    """Uses its parameters through a list that torch does not know."""

    def __init__(self):
        super().__init__()
        self.list = [self.a.weight]

    def forward(self, x):
        return self.b(torch.relu(x @ self.list[0].T))


class Hidden(Net):
    def __init__(self):
        super().__init__()
        self.list = [nn.Linear(12, 12).double()]

    def forward(self, x):
        return super().forward(self.list[0](x).detach())


class Constant(Net):
    """Has a tensor of its own that is no buffer."""

    def __init__(self):
        super().__init__()
        self.weights = torch.linspace(0, 1, 12, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x * self.weights)


class Dice(Net):
    def forward(self, x):
        return super().forward(x) * (1 + random.random())


class Noise(Net):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Dropout(Net):
    def forward(self, x):
        return self.b(dropout(self.hidden(x), 0.5, self.training))


class Words(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.embedding, self.inner, self.last = nn.Embedding(20, 8), inner, nn.Linear(8, 4)

    def forward(self, x):
        x = self.embedding(x)
        is_attention = isinstance(self.inner, nn.MultiheadAttention)
        hidden = self.inner(x, x, x) if is_attention else self.inner(x)
        return self.last((hidden[0] if isinstance(hidden, tuple) else hidden).mean(1))


class Pooled(nn.Module):
    """The mean of what a model says of all places of a text."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).mean(1)


class Masked(nn.Module):
    """Attention, with a mask of one of several kinds."""

    def __init__(self, mask, dropped=0.0):
        super().__init__()
        self.a, self.b = nn.Linear(12, 24), nn.Linear(8, 4)
        self.mask, self.dropped = mask, dropped

    def forward(self, x):
        query, key, value = self.a(x.view(-1, 3, 4).repeat(1, 1, 3)).view(-1, 3, 3, 2, 4).unbind(2)
        parts = [part.transpose(1, 2) for part in (query, key, value)]
        seen = scaled_dot_product_attention(*parts, self.mask_of(x), self.dropped)
        return self.b(seen.transpose(1, 2).flatten(2)).mean(1)

    def mask_of(self, x):
        if self.mask == "of samples":
            return x.view(-1, 3, 4).sum(-1)[:, None, None, :]
        if self.mask == "of heads":
            return torch.arange(6.0, dtype=x.dtype).view(1, 2, 3, 1)
        return torch.ones(3, 3, dtype=torch.bool).tril() if self.mask == "of places" else None


class Told(Net):
    """Does something else for each type of an argument."""

    def forward(self, x, kind):
        return super().forward(x) * (2 if kind is True else 1)


def images(*layers):
    return lambda: nn.Sequential(*[copy.deepcopy(layer) for layer in layers])


def words(make):
    return lambda: Words(make())


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


# Loops -------------------------------------------------------------------------------------------


def stepped(loss_of):
    """A loop that makes one step for each batch."""

    @functools.wraps(loss_of)
    def loop(model, optimizer, x, y, step, worker):
        optimizer.zero_grad()
        loss = loss_of(model, x, y, worker)
        loss.backward()
        optimizer.step()
        return loss

    return loop


@stepped
def plain(model, x, y, worker):
    return cross_entropy(model(x), y)


def accumulate(model, optimizer, x, y, step, worker):
    if step % 2 == 0:
        optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    if step % 2:
        optimizer.step()
    return loss


@stepped
def thrice(model, x, y, worker):
    return cross_entropy(model(x), y) + (model(x + 0.1) - model(x * 2)).square().mean()


def two_backwards(model, optimizer, x, y, step, worker):
    optimizer.zero_grad()
    first, second = model(x), model(x * 2)
    second.square().mean().backward()
    loss = cross_entropy(first, y)
    loss.backward()
    optimizer.step()
    return loss


def clip(model, optimizer, x, y, step, worker):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss


def zero(model, optimizer, x, y, step, worker):
    optimizer.zero_grad(set_to_none=False)
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def skip(model, optimizer, x, y, step, worker):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    if not (worker.rank == 1 and step % 2):
        loss.backward()
        optimizer.step()
    return loss


@stepped
def one_part(model, x, y, worker):
    return cross_entropy(model(x)[0], y)


@stepped
def parts(model, x, y, worker):
    out, more = model(x)
    assert more["size"] == 16 and not more["best"].requires_grad
    loss = cross_entropy(out, y)
    return loss + more["hidden"].square().mean() if worker.rank % 2 else loss


def hidden_only(model, optimizer, x, y, step, worker):
    """Workers differ in which parameters have a gradient at all."""
    optimizer.zero_grad()
    out, more = model(x)
    loss = more["hidden"].square().mean() if worker.rank % 2 else cross_entropy(out, y)
    loss.backward()
    assert (model.b.weight.grad is None) == bool(worker.rank % 2)
    optimizer.step()
    return loss


@stepped
def loss_inside(model, x, y, worker):
    return model(x, labels=y)["loss"]


@stepped
def autocast(model, x, y, worker):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x.float())
    assert out.dtype is torch.bfloat16
    return cross_entropy(out.float(), y)


@stepped
def change_output(model, x, y, worker):
    out = model(x)
    out /= 2.0
    out[:, 0] += 1
    return cross_entropy(out, y)


def evaluate(model, optimizer, x, y, step, worker):
    loss = plain(model, optimizer, x, y, step, worker)
    if step == 2:
        with worker.answer(model):
            model.eval()
            with torch.no_grad():
                model(x)
            model(x)  # gradients are on, as people forget
            model.train()
    return loss


@stepped
def beside(model, x, y, worker):
    return cross_entropy(model.b(torch.relu(model.a(x))), y) + cross_entropy(model(x), y)


def average(model, optimizer, x, y, step, worker):
    loss = plain(model, optimizer, x, y, step, worker)
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)
    return loss


def schedule(model, optimizer, x, y, step, worker):
    model.scale = 1.0 if step < 3 else 0.5 + 0.1 * worker.rank
    return plain(model, optimizer, x, y, step, worker)


def gradients(model, optimizer, x, y, step, worker):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    found = torch.autograd.grad(loss, [*model.parameters()])
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return loss


def penalty(model, optimizer, x, y, step, worker):
    x = x.requires_grad_()
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    optimizer.step()
    return loss


def freeze(model, optimizer, x, y, step, worker):
    """Stop training a layer in mid-run."""
    model.a.weight.requires_grad_(step < 3)
    return plain(model, optimizer, x, y, step, worker)


@stepped
def talk(model, x, y, worker):
    loss = cross_entropy(model(x), y)
    worker.comm.group(range(worker.size)).all_reduce(loss.detach().reshape(1).clone())
    return loss


def second(model, optimizer, x, y, step, worker):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return loss


@stepped
def scaled(model, x, y, worker):
    """Give the model an argument that is equal to that of others, and of another type."""
    return cross_entropy(model(x, True if worker.rank % 2 else 1), y)


@stepped
def opaque(model, x, y, worker):
    return cross_entropy(model(x, random.Random(0)), y)


def higher(model, optimizer, x, y, step, worker):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    found = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + sum(g.square().sum() for g in found)).backward()
    optimizer.step()
    return loss


# Running them ------------------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def run(make, loop, data, strategy, batched, hook=None, dtype=torch.float64, optimize=sgd):
    """The result, and the last loss and parameters of each worker."""
    ends = {}

    def train(worker):
        torch.manual_seed(1)
        model = make().to(dtype)
        if hook is not None:
            hook(model)
        optimizer = optimize([p for p in model.parameters() if p.requires_grad])
        model, optimizer = worker.setup(model, optimizer)
        loader = DataLoader(TensorDataset(data, Y), batch_size=4, shuffle=True)
        loader = worker.setup_dataloaders(loader)
        step = 0
        while step < STEPS:
            for x, y in loader:
                loss = loop(model, optimizer, x, y, step, worker)
                worker.log(loss=loss)
                step += 1
                if step == STEPS:
                    break
        state = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
        ends[worker.rank] = loss.item(), state, getattr(model, "count", 0)

    # the speeds of workers differ, and they are not the same from step to step
    result = pl.simulate(
        train, workers=WORKERS, strategy=strategy, cluster="mixed-lab", batched=batched
    )
    return result, ends


def check(make=Net, loop=plain, data=X, strategy="sasgd(interval=3)", why=None, share=0.7, **more):
    """Run it in both ways and compare; ``why`` is what the reason contains if it is one by one."""
    one, alone = run(make, loop, data, strategy, "off", **more)
    many, together = run(make, loop, data, strategy, "auto", **more)
    assert many.trace_hash == one.trace_hash
    assert many.batched["why_not"] is None if why is None else why in many.batched["why_not"]
    assert many.batched["share"] > share if why is None else many.batched["share"] < 0.99
    assert many.batched["why_not_recorded"] is None
    if IS_RECORDED and why is None and share > 0:
        assert many.batched["recorded"] > 0.3
    tolerance = 1e-9 if more.get("dtype", torch.float64) is torch.float64 else 0.03
    for rank, (loss, state, count) in alone.items():
        assert together[rank][0] == pytest.approx(loss, rel=tolerance, abs=tolerance)
        assert together[rank][2] == count
        for a, b in zip(state, together[rank][1], strict=True):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


LOOPS = [plain, accumulate, thrice, two_backwards, clip, zero, skip, change_output, evaluate]
LOOPS += [beside, average, gradients, freeze]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_is_the_same(loop):
    check(loop=loop)


@pytest.mark.parametrize("strategy", ["gossip", "downpour", "layered", "allreduce"])
@pytest.mark.parametrize("loop", [plain, accumulate, thrice, talk], ids=lambda loop: loop.__name__)
def test_a_loop_is_the_same_with_another_method(loop, strategy):
    check(loop=loop, strategy=strategy, share=0.4 if loop is thrice else -1)


@pytest.mark.parametrize(
    ("make", "loop"),
    [(Parts, parts), (Parts, one_part), (Parts, hidden_only), (Losses, loss_inside)]
    + [(Scaled, schedule), (Told, scaled)],
    ids=["tuple and dict", "a part unused", "other parameters", "loss inside"]
    + ["an attribute that changes", "an argument"],
)
def test_a_model_and_its_loop_are_the_same(make, loop):
    check(make, loop, share=0.3)


MODELS = [Mean, Unused, Frozen, Tied, Sorted, InPlace, Replaced, Constant]


@pytest.mark.parametrize("make", MODELS)
def test_a_model_is_the_same(make):
    check(make)


LAYERS = {
    "convolution": [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)],
    "batch norm": [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    + [nn.Linear(144, 4)],
    "batch norm and pooling": [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    + [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)],
    "batch norm without statistics": [nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten()]
    + [nn.Linear(192, 4)],
    "group norm": [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 4)],
    "instance norm": [nn.InstanceNorm2d(3, affine=True), nn.Flatten(), nn.Linear(192, 4)],
    "layer norm": [nn.LayerNorm(8), nn.Flatten(), nn.Linear(192, 4)],
    "transposed": [nn.ConvTranspose2d(3, 4, 2, 2), nn.AvgPool2d(4), nn.Flatten()]
    + [nn.Linear(64, 4)],
    "groups": [nn.Conv2d(3, 6, 3, groups=3), nn.GELU(), nn.Flatten(), nn.Linear(216, 4)],
    "stride and padding": [nn.Conv2d(3, 4, 3, 2, padding="valid", dilation=2), nn.Flatten()]
    + [nn.Linear(16, 4)],
    "weight norm": [nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Flatten()]
    + [nn.Linear(144, 4)],
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_layers_of_images_are_the_same(layers):
    check(images(*layers), data=IMAGES)


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_the_same(name):
    check(optimize=OPTIMIZERS[name])


def test_a_transformer_is_the_same():
    check(lambda: Pooled(GPT(width=16, layers=1, heads=2)), data=WORDS)


@pytest.mark.parametrize("mask", ["none", "of places", "of heads", "of samples"])
def test_attention_with_a_mask_is_the_same(mask):
    check(lambda: Masked(mask))


def test_attention_is_the_same():
    check(words(lambda: nn.MultiheadAttention(8, 2, batch_first=True)), data=WORDS)
    check(words(encoder), data=WORDS)


def test_autocast_is_the_same_up_to_its_precision():
    check(loop=autocast, dtype=torch.float32)


def double(module, inputs, output):
    return output * 2


def test_hooks_on_the_model_itself_run_around_the_joint_forward():
    check(hook=lambda model: model.register_forward_hook(double))


def test_hooks_on_parameters_see_their_gradients():
    check(hook=lambda model: model.b.weight.register_hook(lambda gradient: gradient * 2))


ALONE = {
    "branch": (Branch, "data-dependent control flow"),
    "item": (Item, ".item()"),
    "counting": (Counting, "keeps state in Python"),
    "noting": (Noting, "keeps state in Python"),
    "clamped": (Clamped, "changes parameters"),
    "listed": (Listed, "holds a parameter"),
    "hidden": (Hidden, "a module that is not registered"),
    "dice": (Dice, "draws from the generators of Python"),
    "checkpoint": (Checkpointed, "heckpoint"),
    "reentrant": (Reentrant, ""),
    "lstm": (words(lambda: nn.LSTM(8, 8, batch_first=True)), "lstm"),
    "gru": (words(lambda: nn.GRU(8, 8, batch_first=True)), "gru"),
    "momentum": (images(nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.Linear(192, 4)), "item"),
    "spectral": (
        images(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
            nn.Flatten(),
            nn.Linear(144, 4),
        ),
        "",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_model_that_cannot_be_batched_says_why(name):
    make, why = ALONE[name]
    data = WORDS if name in ("lstm", "gru") else IMAGES if name in ("momentum", "spectral") else X
    check(make, data=data, why=why)


def test_hooks_on_submodules_are_named():
    check(hook=lambda model: model.a.register_forward_hook(double), why="module a has hooks")


def test_an_argument_that_cannot_be_compared_is_named():
    check(Told, opaque, why="an argument of model(x) holds a Random")


def test_the_models_are_left_as_they_were():
    kept = []
    check(make=lambda: kept.append(Net()) or kept[-1])
    assert not any("forward" in vars(model) for model in kept)


def test_an_unknown_mode_is_refused():
    with pytest.raises(pl.UsageError, match=r"batched \(sometimes\)"):
        run(Net, plain, X, "sasgd", "sometimes")


def test_a_gradient_penalty_is_computed_alone():
    check(loop=penalty, why="an argument of model(x) requires a gradient")


def test_communication_before_the_step_is_the_same_if_workers_are_in_step():
    check(loop=talk)


@pytest.mark.parametrize(
    ("loop", "strategy", "message"),
    [
        (second, "sasgd", "a second backward goes through the result of one model"),
        (higher, "sasgd", "create_graph=True goes through model"),
        (skip, "gossip", r"after model\(x\) and before optimizer.step"),
    ],
)
def test_what_cannot_be_is_refused(loop, strategy, message):
    with pytest.raises(pl.PacelineError, match=message):
        run(Net, loop, X, strategy, "on")


def test_on_refuses_what_auto_computes_alone():
    with pytest.raises(pl.UsageError, match=r"batched \(on\) must be off or auto: .*keeps state"):
        run(Counting, plain, X, "sasgd", "on")


RUNS = {
    "has faults": {"faults": [Fault(kind="slow", rank=1, at_s=0.001, factor=2.0)]},
    "makes checkpoints": {"checkpoint_steps": 5},
    "share its cores": {"cluster": pl.Cluster(cores=1)},
    "take no virtual time": {"cluster": "ideal"},
}


@pytest.mark.parametrize("why", RUNS)
def test_runs_whose_steps_depend_on_others_are_refused(why, tmp_path):
    def train(worker):
        raise AssertionError("it must not begin")

    with pytest.raises(pl.UsageError, match=why):
        pl.simulate(train, strategy="gossip", batched="on", out=tmp_path / "run", **RUNS[why])


DROPPING = [nn.Conv2d(3, 4, 3), nn.Dropout2d(), nn.Flatten(), nn.Linear(144, 4)]
RANDOM = {
    "dropout": (Dropout, X),
    "noise": (Noise, X),
    "dropout of channels": (images(*DROPPING), IMAGES),
    "dropout of attention": (lambda: Masked("of samples", 0.3), X),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_layers_repeat_from_run_to_run(name):
    make, data = RANDOM[name]
    first, ends = run(make, plain, data, "gossip", "auto")
    again, same = run(make, plain, data, "gossip", "auto")
    assert first.batched["share"] > 0.5
    assert [end[0] for end in ends.values()] == [end[0] for end in same.values()]
    assert again.trace_hash == first.trace_hash
