"""Gradients that are computed together: the same run, for every method."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.replays import repeating
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.launcher import simulate
from paceline.strategies import STRATEGIES

SAMPLES = 140


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 3, 4, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (SAMPLES,), generator=generator))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 4))


def cnn():
    first = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4))


MODELS = {"mlp": mlp, "cnn": cnn}


GRADIENTS = {}
"""What each worker had in each step, by rank and step."""


def train(worker, model):
    torch.manual_seed(1)
    model = MODELS[model]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = worker.setup(model, optimizer)
    loader = worker.setup_dataloaders(DataLoader(data(), batch_size=4, shuffle=True))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            worker.log(loss=loss)
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            GRADIENTS[worker.rank, worker.steps] = gradient
            optimizer.step()


def records(result):
    """The records of each worker, in order."""
    return sorted(result.metrics, key=lambda record: (record["rank"], record["t"]))


@pytest.mark.parametrize("cluster", ["mixed-lab", "ethernet-10g"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_every_method_has_the_same_run(model, strategy, cluster, monkeypatch):
    one, alone = run_of(model, strategy, cluster, "off")
    check(one, alone, *run_of(model, strategy, cluster, "on"))
    monkeypatch.setattr(simulate, "_repeating", partial(repeating, at_most=4))
    many, together = run_of(model, strategy, cluster, "on")
    check(one, alone, many, together)
    assert many.batched["recorded"] > 0.5 and many.batched["why_not_recorded"] is None


def run_of(model, strategy, cluster, batched):
    """A run, and the gradients of its workers in each step."""
    GRADIENTS.clear()
    run = pl.simulate(
        train,
        workers=8,
        strategy=strategy,
        cluster=cluster,
        batched=batched,
        arguments={"model": model},
    )
    return run, dict(GRADIENTS)


def check(one, alone, many, together):
    assert many.trace_hash == one.trace_hash
    assert many.batched["share"] > 0.8
    assert many.batched["mean"] > 2
    assert many.batched["why_not"] is None
    for a, b in zip(records(one), records(many), strict=True):
        assert (a["rank"], a["t"]) == (b["rank"], b["t"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-9)
    assert alone.keys() == together.keys()
    for step, gradient in alone.items():
        torch.testing.assert_close(together[step], gradient, rtol=1e-12, atol=1e-12)
