"""Joint computations that are recorded, as on a GPU; here they are repeated on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.replays import Replays, repeating
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.launcher import simulate
from paceline.sim.batching import row
from paceline.sim.batching.batching import Repeating
from paceline.sim.batching.joint import Arguments, Place, Program
from paceline.sim.batching.recorded import Recorded
from paceline.sim.batching.rows import Rows

WORKERS, STEPS = 4, 8


# Rows --------------------------------------------------------------------------------------------


def test_the_first_vectors_of_a_worker_are_rows():
    rows, like = Rows(3), torch.zeros(7)
    x, g, more = (rows.allocate(1, 5, like) for _ in range(3))
    assert rows.holds(1, x, g) and not rows.holds(0, x, g) and not rows.holds(1, x, more)
    x.fill_(2)
    g.fill_(3)
    assert rows.x[1].tolist() == [2] * 5 and rows.x.sum() == 10 and rows.g.sum() == 15
    assert x.is_contiguous() and rows.x[1].data_ptr() % 128 == rows.x[0].data_ptr() % 128


def test_other_vectors_are_none():
    rows = Rows(2)
    rows.allocate(0, 5, torch.zeros(1))
    for rank, numel, dtype in ((1, 6, torch.float32), (1, 5, torch.float64), (7, 5, torch.float32)):
        other = rows.allocate(rank, numel, torch.zeros(1, dtype=dtype))
        assert (other.numel(), other.dtype) == (numel, dtype) and not other.any()
    assert rows.x.shape == (3, 5) and not rows.holds(1, other, other)


# A recorded computation --------------------------------------------------------------------------


class Net(nn.Module):
    """Two parameters, a buffer, and results of which one does not depend on both parameters."""

    def __init__(self, share=0.0):
        super().__init__()
        self.share = share
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        hidden = dropout(x * self.a, self.share, self.training)
        return hidden.sum() * self.b, hidden.square().sum(), x.sum()


class Lab:
    """Three workers and what is recorded of them; ``told`` is what each computes by itself."""

    def __init__(self, share=0.0, size=4):
        net, self.rows = Net(share), Rows(3)
        generator = torch.Generator().manual_seed(1)
        for rank in range(3):
            self.rows.allocate(rank, 4, torch.zeros(1)).copy_(torch.rand(4, generator=generator))
            self.rows.allocate(rank, 4, torch.zeros(1)).fill_(9)
            self.rows.adopt(rank, "seen", net.seen)
        self.rows.fill_spare(torch.ones(4))
        places = {"a": Place(0, 0, net.a.shape, (1,)), "b": Place(1, 3, net.b.shape, ())}
        arguments, self.inputs = Arguments.of((torch.rand(3, generator=generator),), {})
        self.x = [torch.rand(3, generator=generator) for _ in range(3)]
        program = Program(net, places, arguments, None)
        self.recorded = Recorded(program, self.rows, size, self.inputs, Replays())

    def forward(self, *ranks):
        self.recorded.forward(ranks, [[self.x[rank]] for rank in ranks])
        return [output.clone() for output in self.recorded.outputs]

    def told(self, rank, first, second):
        """The gradient of a worker, given those of two results; without dropout."""
        a, b = self.rows.x[rank, :3], self.rows.x[rank, 3]
        own = 2 * second * a * self.x[rank].square() if second is not None else 0
        return torch.cat([first * b * self.x[rank] + own, (first * self.x[rank] * a).sum().view(1)])


def test_it_computes_the_rows_of_any_workers():
    lab = Lab()
    for ranks in ((2, 0), (1,), (0, 1, 2)):
        firsts, seconds, sums = lab.forward(*ranks)
        for number, rank in enumerate(ranks):
            hidden = lab.x[rank] * lab.rows.x[rank, :3]
            assert firsts[number] == pytest.approx(float(hidden.sum() * lab.rows.x[rank, 3]))
            assert seconds[number] == pytest.approx(float(hidden.square().sum()))
            assert sums[number] == pytest.approx(float(lab.x[rank].sum()))
        one = torch.ones(())
        sizes = lab.recorded.backward(dict.fromkeys(range(len(ranks)), (2 * one, one, None)))
        for number, rank in enumerate(ranks):
            torch.testing.assert_close(lab.rows.g[rank], lab.told(rank, 2.0, 1.0))
            assert sizes.of(number)() == pytest.approx(float(lab.rows.g[rank].norm()))
    assert lab.rows.rest["seen"][:3].tolist() == [2, 2, 2]
    assert lab.recorded.varying == [True, True, False]


def test_it_leaves_the_rows_of_others_alone():
    lab = Lab()
    lab.forward(1)
    lab.recorded.backward({0: (torch.ones(()), None, None)})
    assert lab.rows.g[0].tolist() == lab.rows.g[2].tolist() == [9, 9, 9, 9]
    assert lab.rows.rest["seen"][[0, 2]].tolist() == [0, 0]


def test_a_parameter_that_a_result_does_not_depend_on_has_no_gradient():
    lab, one = Lab(), torch.ones(())
    assert lab.recorded.reached((one, one, None)) == (True, True)
    assert lab.recorded.reached((None, one, None)) == (True, False)
    lab.forward(2)
    lab.recorded.backward({0: (None, one, None)})
    a, b = lab.recorded.parts(lab.rows.g[2], (None, one, None))
    torch.testing.assert_close(a, lab.told(2, 0.0, 1.0)[:3])
    assert b is None


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_second_backward_computes_the_rest(share):
    """A backward leaves nothing; what it needs is computed again, with the same random numbers."""
    lab, grads = Lab(share), (torch.ones(()), None, None)
    torch.manual_seed(3)
    lab.forward(0, 1, 2)
    lab.recorded.backward(dict.fromkeys(range(3), grads))
    wanted, after = lab.rows.g.clone(), torch.rand(1)
    torch.manual_seed(3)
    lab.rows.g.fill_(9)
    lab.forward(0, 1, 2)
    lab.recorded.backward({1: grads})
    lab.recorded.backward({0: grads, 2: grads})
    torch.testing.assert_close(lab.rows.g[:3], wanted[:3], rtol=0, atol=0)
    assert lab.rows.rest["seen"][:3].tolist() == [2, 2, 2]
    assert torch.equal(torch.rand(1), after)


# In runs -----------------------------------------------------------------------------------------


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, 2, 4, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (80,), generator=generator))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def plain(model, optimizer, x, y, step):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def run(loop=plain, batched="on", strategy="sasgd(interval=3)", keep=lambda model: None):
    """The result, and the last parameters and buffers of each worker."""
    ends = {}

    def train(worker):
        torch.manual_seed(1)
        model = mlp().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = worker.setup(model, optimizer)
        loader = worker.setup_dataloaders(DataLoader(data(), batch_size=2, shuffle=True))
        while worker.steps < STEPS:
            for x, y in loader:
                worker.log(loss=loop(model, optimizer, x, y, worker.steps))
                if worker.steps == STEPS:
                    break
        keep(model)
        ends[worker.rank] = [t.clone() for t in (*model.parameters(), *model.buffers())]

    return pl.simulate(train, workers=WORKERS, strategy=strategy, batched=batched), ends


def same(loop, strategy="sasgd(interval=3)"):
    """Check that a loop makes the same run when it is computed together; return that."""
    (one, alone), (many, together) = (run(loop, how, strategy) for how in ("off", "on"))
    assert many.trace_hash == one.trace_hash
    for rank, state in alone.items():
        for a, b in zip(state, together[rank], strict=True):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)
    return many


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Record; return what has happened in the run, in order."""
    seen, recorder = [], Replays()

    class Logged(Replays):
        def record(self, forward, between, backward):
            there, back = super().record(forward, between, backward)
            for graph, name in ((there, "forward"), (back, "backward")):
                graph.replay = partial(self.log, name, graph.replay)
            return there, back

        def log(self, name, replay):
            seen.append(name)
            replay()

    recorder = Logged()
    monkeypatch.setattr(
        simulate, "_repeating", lambda spec: Repeating(recorder, Rows(spec.workers), 2, 2)
    )
    note = row.Row.note_direct
    monkeypatch.setattr(row.Row, "note_direct", lambda self: seen.append("direct") or note(self))
    return seen


def test_gradients_are_set_without_autograd_once_a_loop_was_watched(as_on_a_gpu):
    many = same(plain)
    assert as_on_a_gpu.count("direct") == WORKERS * (STEPS - row.WATCHED)
    assert many.batched["recorded"] > 0.5


@pytest.mark.parametrize("strategy", ["allreduce", "gossip"])
def test_the_device_gets_a_second_part_before_the_host_takes_up_the_first(strategy, as_on_a_gpu):
    def loop(model, optimizer, x, y, step):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        as_on_a_gpu.append("step")
        optimizer.step()
        return loss

    same(loop, strategy)
    events = [event for event in as_on_a_gpu if event != "direct"]
    at = [place for place, event in enumerate(events) if event == "backward"]
    ahead = [events[place + 1] == "forward" for place in at[4:-2]]
    assert sum(ahead) >= len(ahead) / 3  # one of the two parts of each step


def accumulate(model, optimizer, x, y, step):
    """Gradients of two backward passes, and then those of one."""
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    for factor in (1, 2) if step % 3 else (1,):
        loss = cross_entropy(model(x * factor), y)
        loss.backward()
    optimizer.step()
    return loss


def change(model, optimizer, x, y, step):
    """Change the gradients before the step."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    optimizer.step()
    return loss


def keep_gradients(model, optimizer, x, y, step):
    """Add the gradients of the step before, which are left in ``.grad``."""
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def hook(model, optimizer, x, y, step):
    """Hook into a gradient after some steps."""
    if step == 5:
        model[1].weight.register_hook(lambda gradient: gradient * 2)
    return plain(model, optimizer, x, y, step)


def by_grad(model, optimizer, x, y, step):
    loss = cross_entropy(model(x), y)
    found = torch.autograd.grad(loss, [*model.parameters()])
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return loss


LOOPS = [accumulate, change, keep_gradients, hook, by_grad]


@pytest.mark.parametrize("strategy", ["sasgd(interval=3)", "allreduce"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_is_the_same(loop, strategy, as_on_a_gpu):
    same(loop, strategy)
    assert ("direct" in as_on_a_gpu) == (loop is not by_grad)


def test_gradients_that_are_taken_in_another_way_later_are_refused(as_on_a_gpu):
    def loop(model, optimizer, x, y, step):
        return (plain if step < 5 else by_grad)(model, optimizer, x, y, step)

    with pytest.raises(pl.PacelineError, match="appears to not have been used in the graph"):
        run(loop)


def test_a_step_without_the_gradients_of_its_forward_is_refused(as_on_a_gpu):
    def loop(model, optimizer, x, y, step):
        loss = cross_entropy(model(x), y)
        if step < 5:
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        return loss

    with pytest.raises(pl.PacelineError, match="a step was made without loss"):
        run(loop)


def test_the_norm_is_that_of_the_gradient_as_it_is(as_on_a_gpu, monkeypatch):
    told = []
    size = row.Row.size

    def seen(self):
        known = size(self)
        told.append((known, float(self._g.norm())))
        return known

    monkeypatch.setattr(row.Row, "size", seen)
    run(strategy="allreduce")
    known = [(norm, own) for norm, own in told if norm is not None]
    assert len(known) > len(told) / 2
    assert all(norm == pytest.approx(own, rel=1e-12) for norm, own in known)
    told.clear()
    run(change, strategy="allreduce")
    assert {norm for norm, _ in told} == {None}


def test_afterwards_models_have_memory_of_their_own(as_on_a_gpu):
    kept = []

    def train(worker):
        model = mlp().double()
        model[1].bias.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, sgd = worker.setup(model, torch.optim.SGD(trained, lr=0.1))
        for x, y in worker.setup_dataloaders(DataLoader(data(), batch_size=2)):
            plain(model, sgd, x, y, 0)
        kept.append(model)

    many = pl.simulate(train, workers=WORKERS, strategy="sasgd(interval=3)", batched="on")
    assert many.batched["recorded"] > 0.5
    places = set()
    for model in kept:
        assert "forward" not in vars(model)
        of_model = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        assert sum({place.data_ptr(): place.nbytes() for place in of_model}.values()) < 5000
        assert places.isdisjoint(place.data_ptr() for place in of_model)
        places |= {place.data_ptr() for place in of_model}


class Failing(Replays):
    def record(self, forward, between, backward):
        raise RuntimeError("operation not permitted when stream is capturing")


class Wrong(Replays):
    """What it repeats is another computation: the last worker's result is off."""

    def record(self, forward, between, backward):
        def off():
            first, *rest = forward()
            return [first * torch.tensor([1.0] * (len(first) - 1) + [1.1])[:, None, None], *rest]

        return super().record(off, between, backward)


@pytest.mark.parametrize(
    ("recorder", "why"), [(Failing, "stream is capturing"), (Wrong, "is another one")]
)
def test_what_cannot_be_recorded_is_told_each_time(recorder, why, monkeypatch):
    monkeypatch.setattr(
        simulate, "_repeating", lambda spec: Repeating(recorder(), Rows(spec.workers), 4, 2)
    )
    many = same(plain)
    assert many.batched["recorded"] == 0 and why in many.batched["why_not_recorded"]
    assert many.batched["share"] == 1 and many.batched["why_not"] is None


def test_recorded_computations_are_used_again_when_nobody_needs_them(monkeypatch):
    recorders = []

    def repeats(spec):
        recorders.append(Replays())
        return Repeating(recorders[-1], Rows(spec.workers), 2, 2)

    def loop(model, optimizer, x, y, step):
        model(x)  # a forward without a backward
        return plain(model, optimizer, x, y, step)

    monkeypatch.setattr(simulate, "_repeating", repeats)
    same(plain)
    assert len(recorders[-1].graphs) == 1  # for two parts of each step, one after the other
    same(loop)
    assert len(recorders[-1].graphs) <= 4


def test_images_are_laid_channels_last():
    from paceline.sim.batching.recorded import _laid

    images = torch.randn(3, 2, 4, 5, 6)  # workers, samples, channels
    laid = _laid(images)
    assert torch.equal(laid, images)
    merged = laid.movedim(0, 1).flatten(1, 2)
    assert merged.is_contiguous(memory_format=torch.channels_last)
    assert merged.data_ptr() == laid.data_ptr()


def test_a_whole_run_of_a_random_model_repeats(monkeypatch):
    monkeypatch.setattr(simulate, "_repeating", partial(repeating, at_most=2))

    def train(worker):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(32, 8), nn.Dropout(), nn.Linear(8, 4))
        model, sgd = worker.setup(model.double(), torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in worker.setup_dataloaders(DataLoader(data(), batch_size=2)):
            worker.log(loss=plain(model, sgd, x, y, 0))

    one, other = (pl.simulate(train, workers=4, strategy="gossip", batched="on") for _ in range(2))
    assert one.metrics == other.metrics and one.batched["recorded"] > 0.3
