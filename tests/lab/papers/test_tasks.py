"""The tasks of the claims: data sets from a folder, and the functions that train on them."""

from dataclasses import fields

import numpy as np
import pytest
import torch

import paceline as pl
from paceline.lab.papers.curves import final_accuracy, mean_accuracy, mean_lead, speedup
from paceline.lab.papers.tasks import load, make_network
from paceline.lab.papers.training import descend, tick, trail, train
from paceline.record.result import Result

CIFAR = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a few samples of CIFAR-10."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    (root / "cifar-10-batches-bin").mkdir()
    for name in CIFAR:
        records = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(root / "cifar-10-batches-bin" / name)
    return root


def test_the_samples_of_a_folder(folder):
    samples = load("cifar10", str(folder))
    assert (samples.x_train.shape, len(samples.x_test)) == ((20, 3, 32, 32), 4)


@pytest.mark.parametrize(("name", "shape"), [("mlp", 28), ("cnn", 28), ("resnet20", 32)])
def test_the_networks_tell_ten_classes_apart(name, shape):
    images = torch.zeros(2, 3 if name == "resnet20" else 1, shape, shape)
    assert make_network(name)(images).shape == (2, 10)


def test_cifars_records_are_a_label_and_three_planes(folder):
    raw = np.fromfile(folder / "cifar-10-batches-bin" / CIFAR[0], np.uint8)[:3073]
    samples = load("cifar10", str(folder))
    assert samples.y_train[0] == raw[0]
    red = (raw[1] / 255 - 0.4914) / 0.2470
    assert samples.x_train[0, 0, 0, 0].item() == pytest.approx(red, abs=1e-5)


# Training functions ------------------------------------------------------------------------------


def test_a_run_is_evaluated_twice_an_epoch_at_equal_samples():
    arguments = {"task": "bundled", "epochs": 1, "lr": 0.05, "batch_size": 100}
    evaluated = {}
    for strategy in ("allreduce", "downpour"):
        run = pl.simulate(train, workers=2, strategy=strategy, cluster="ideal", arguments=arguments)
        evaluated[strategy] = [round(record["progress"], 2) for record in run.metrics]
    assert evaluated["allreduce"] == [0.5, 1.0]
    assert evaluated["downpour"] == pytest.approx([0.5, 1.0], abs=0.05)


def test_tick_takes_virtual_time_without_gradients():
    arguments = {"steps": 3, "parameters": 10}
    run = pl.simulate(tick, workers=2, cluster="ethernet-1g", arguments=arguments)
    assert run.steps == 6 and run.virtual_seconds > 3e-3
    assert len(run.metrics) == 6


def test_a_quadratic_without_noise_falls_as_its_formula_says():
    arguments = {"steps": 4, "lr": 0.5, "dimensions": 3, "noise": 0.0}
    run = pl.simulate(
        descend, workers=2, strategy="sasgd(interval=2)", cluster="ideal", arguments=arguments
    )
    h = torch.linspace(0.1, 1.0, 3, dtype=torch.float64)
    expected = [float((h * (1 - 0.5 * h) ** step).square().sum()) for step in (2, 4)]
    assert [record["square"] for record in run.metrics] == pytest.approx(expected)


def test_a_trail_differs_where_the_method_differs():
    trails = {
        strategy: pl.simulate(
            trail,
            workers=2,
            strategy=strategy,
            cluster="ideal",
            arguments={"steps": 3, "batch_size": 4},
        ).metrics
        for strategy in ("allreduce", "layered(group_size=1)", "sasgd(interval=2)")
    }
    views = {name: [record["view_0"] for record in trail] for name, trail in trails.items()}
    assert views["layered(group_size=1)"] == pytest.approx(views["allreduce"], rel=1e-12)
    assert views["sasgd(interval=2)"] != pytest.approx(views["allreduce"], rel=1e-6)


# Curves ------------------------------------------------------------------------------------------


def run_of(points, first_step_s=0.0):
    empty = dict.fromkeys(field.name for field in fields(Result))
    records = [{"t": t, "progress": p, "accuracy": a} for t, p, a in points]
    return Result(**{**empty, "metrics": records, "first_step_s": first_step_s})


def line(steepness, seconds, noise=0.0):
    """A run whose accuracy rises evenly; every second record is too high by ``noise``."""
    shares = np.linspace(0.1, 1.0, 10)
    points = [
        (1.0 + seconds * share, share, steepness * share + noise * (number % 2))
        for number, share in enumerate(shares.tolist())
    ]
    return run_of(points, first_step_s=1.0)


def test_speedup_compares_the_times_to_an_accuracy_that_both_reach():
    assert speedup(line(0.8, 2.0), line(0.8, 6.0)) == pytest.approx(3.0)
    assert speedup(line(0.8, 6.0), line(0.8, 2.0)) == pytest.approx(1 / 3)
    assert speedup(line(0.8, 2.0), line(0.4, 2.0)) == pytest.approx(2.0)


def test_speedup_does_not_reward_the_peaks_of_a_noisy_curve():
    assert speedup(line(0.8, 2.0, noise=0.1), line(0.8, 2.0)) < 1.2
    assert final_accuracy(line(0.8, 2.0, noise=0.1)) == pytest.approx(0.9)


def test_the_mean_lead_covers_the_time_of_both_runs():
    assert mean_lead(line(0.8, 2.0), line(0.8, 2.0)) == 0
    ahead = mean_lead(line(0.8, 2.0), line(0.8, 4.0))
    assert ahead == pytest.approx(-mean_lead(line(0.8, 4.0), line(0.8, 2.0)))
    assert ahead == pytest.approx(0.5 * 0.72 * 0.5625, rel=0.01)  # half of 0.72, at 0.5625 of it


def test_the_mean_accuracy_does_not_depend_on_the_number_of_records():
    coarse = run_of([(1, 0.125, 0.1), (2, 1.0, 0.8)])
    fine = run_of([(1, p, 0.8 * p) for p in np.linspace(0.125, 1, 50)])
    assert mean_accuracy(coarse) == pytest.approx(mean_accuracy(fine), abs=1e-9)
