"""The measurements of a calibration, and the cluster file."""

from __future__ import annotations

import dataclasses
import math
import os
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.common.reference import refer_to
from paceline.errors import UsageError
from paceline.lab.calibrate import clock as clocks
from paceline.lab.calibrate.fit import Line, Variation
from paceline.lab.calibrate.machine import (
    Calibration,
    Subject,
    batch_sizes,
    fit_means,
    fit_work,
    message_sizes,
    one_thread_a_rank,
    to_toml,
    usable_cores,
)
from paceline.lab.calibrate.messages import OperationTime, run_messages
from paceline.lab.calibrate.steps import (
    LEAST_STEPS,
    WARM_UP,
    WORK_KINDS,
    StepClock,
    StepTimes,
    Timed,
    run_steps,
    slowdown_after,
)
from paceline.sim.cluster import read_cluster


def own_train(worker, rows=64, epochs=3):
    net = nn.Linear(4, 2)
    net, sgd = worker.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    data = TensorDataset(torch.randn(rows, 4), torch.randn(rows, 2))
    loader = worker.setup_dataloaders(DataLoader(data, batch_size=4))
    for _ in range(epochs):
        for x, y in loader:
            sgd.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            sgd.step()


def sized_train(worker, batch_size=12):
    pass


def calibration(**changes):
    line = Line(1e-4, 2e-10, 0.03)
    example = Calibration(
        subject=Subject(name='a "script"', train={}, arguments={"steps": 3}),
        cores=2,
        nbytes=4000,
        batches=[8, 16],
        sizes=[4096],
        gradient=Line(2e-3, 1e-5, 0.01),
        loading=Line(1e-4, 0.0, 0.2),
        variation=Variation("lognormal", 0.25, (), 0.01),
        link=Line(3e-6, 0.0, 0.0),
        work=dict.fromkeys(WORK_KINDS, line),
        serve=Line(0.0, 5e-10, 0.0),
        crowding=1.1,
        queued=0.0,
    )
    return dataclasses.replace(example, **changes)


@pytest.mark.parametrize(
    "variation",
    [
        Variation("none", 0.0, (), 0.0),
        Variation("spread", 0.125, (), 0.0),
        Variation("lognormal", 0.25, (), 0.0),
        Variation("trace", 0.0, (0.5, 1.5), 0.0),
    ],
)
def test_the_file_is_read_back_as_the_same_cluster(variation, tmp_path):
    written = calibration(variation=variation)
    (tmp_path / "here.toml").write_text(to_toml(written))
    read = read_cluster(tmp_path / "here.toml")
    expected = written.cluster("here")
    assert dataclasses.replace(read, network=expected.network) == expected
    assert expected.cores == 2 and expected.node(0) == expected.node(7)
    assert expected.serving.bytes_per_s == pytest.approx(2e9)
    assert expected.inside.bytes_per_s == math.inf
    assert expected.handling.post.bytes_per_s == pytest.approx(5e9)
    if variation.kind != "none":
        assert getattr(expected.compute, variation.kind) == (variation.trace or variation.value)


def test_the_file_says_how_it_was_measured():
    text = to_toml(calibration(queued=0.25))
    for fact in ("'steps': 3", "4000 bytes", "torch ", "8, 16 samples", "25% of the time", "3.0%"):
        assert fact in text


def test_messages_are_measured_up_to_the_size_of_the_model():
    assert message_sizes(7_454_760) == [4096, 7_454_760]
    assert message_sizes(18) == [16]


def test_batch_sizes_vary_if_the_script_takes_a_batch_size():
    def sizes(train, **arguments):
        subject = Subject(name="", train=refer_to(train), arguments=arguments)
        return batch_sizes(subject, cores=2)

    assert sizes(sized_train) == [12, 6, 3]
    assert sizes(sized_train, batch_size=2) == [2, 1]
    assert sizes(own_train) == [None]


def test_runs_of_several_batch_sizes_give_the_cost_of_a_step_and_of_a_sample():
    def run(samples, *seconds):
        return [*(Timed(samples, s) for s in seconds), Timed(samples // 2, 99.0)]

    line = fit_means([run(10, 3.0, 1.0), run(20, 3.0), run(20, 3.1), run(20, 50.0), run(40, 5.0)])
    assert line.seconds(10) == pytest.approx(2.0, rel=0.02)
    assert line.slope == pytest.approx(0.1, rel=0.05)
    assert fit_means([[]]) == (0.0, 0.0, 0.0)


def test_one_thread_a_rank_restores_the_environment(monkeypatch):
    for before in (None, "3"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if before:
            monkeypatch.setenv("OMP_NUM_THREADS", before)
        with one_thread_a_rank():
            assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ.get("OMP_NUM_THREADS") == before
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_own_time_is_monotonic_and_excludes_waiting_for_a_core(monkeypatch):
    clock = clocks.OwnTime()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)
    monkeypatch.setattr(clock, "_queued", lambda: 5.0)
    assert clock.now() == pytest.approx(time.perf_counter() - 5.0, abs=0.5)


def test_the_clock_separates_gradients_loading_and_communication():
    times = iter(range(1000))
    clock = StepClock(torch.device("cpu"))
    clock._own.now = lambda: float(next(times))
    for number in range(WARM_UP + 4):
        epoch = number // 4  # time between two epochs is not loading
        clock.record(0.0, 0, "batch", epoch=epoch, index=number, samples=8)
        clock.updated("nothing" if number % 2 else "mail")
        clock.record(0.0, 0, "all_reduce")
        next(times)  # the time of communication
        clock.record(0.0, 0, "step", step=number, samples=8)
    assert [timed for _, timed in clock.gradients] == [(8, 1.0)] * (WARM_UP + 4)
    exchanges = [exchange for exchange, _ in clock.counted]
    assert exchanges == ["mail", "nothing"] * 2, "those of the step before"
    assert clock.loading == [(8, 1.0)] * (WARM_UP + 4 - 1 - (WARM_UP + 4 - 1) // 4)


def test_a_slower_gradient_is_charged_to_the_exchange_before_it():
    def after(exchange, *seconds):
        return [(exchange, Timed(8, s)) for s in seconds]

    gradients = [*after("nothing", 1.0, 1.1, 9.0), *after("window", 1.5, 1.6), *after("mail", 1.0)]
    gradients.append(("window", Timed(3, 99.0)))
    slowdowns = {"nothing": 0.0, "reduce": 0.0, "window": pytest.approx(0.45), "mail": 0.0}
    assert slowdown_after(gradients) == slowdowns


def times_of(nbytes, **work):
    return StepTimes([], [], work, nbytes, 0.0)


def test_work_is_fitted_to_the_model_between_gradients_and_to_small_messages_alone():
    runs = [times_of(1_004_000, peek=s, take=s) for s in (0.9, 1.0, 1.1)]
    messages = [OperationTime("peek", 4000, 0.1, 0.0), OperationTime("peek", 1_004_000, 0.2, 0.0)]
    line = fit_work("peek", runs, messages)
    assert line.seconds(1_004_000) == pytest.approx(1.0)
    assert line.seconds(4000) == pytest.approx(0.1)
    assert line.error == pytest.approx(((0.1 / 1.1) ** 2 / 3 + (0.1 / 0.9) ** 2 / 3) ** 0.5)
    half = fit_work("take", runs, [OperationTime("round_trip", 4000, 0.1, 0.0)])
    assert half.seconds(4000) == pytest.approx(0.05)
    assert fit_work("peek", [times_of(80, peek=2.0)], messages)[:2] == (0.0, 2.0 / 80)
    assert fit_work("peek", [times_of(8000, peek=0.05)], messages)[:2] == (0.05, 0.0)


def timed(train, ranks=2, transport="shared_memory", **arguments):
    return run_steps(
        refer_to(train),
        arguments,
        workers=ranks,
        transport=transport,
        steps=9,
        limit_s=60,
        seed=0,
    )


@pytest.mark.transport("shared_memory")
def test_a_script_is_timed_without_changes():
    times = timed(own_train)
    assert len(times.gradients) >= 2 * 4 and all(t.seconds > 0 for t in times.gradients)
    assert {timed.samples for timed in times.gradients} == {4}
    assert set(times.work) == {*WORK_KINDS, "serve"} and all(s > 0 for s in times.work.values())
    assert 0 <= times.queued < 1
    assert times.nbytes == 4 * (4 * 2 + 2)


@pytest.mark.transport("shared_memory")
def test_ranks_that_run_out_of_data_end_the_timing():
    times = timed(own_train, ranks=3, rows=4 * 3 * 16 + 1, epochs=1)
    assert len(times.gradients) >= 3 * LEAST_STEPS / 2


def test_a_script_with_too_few_steps_is_refused():
    rule = r"at least 13 steps on each of \d+ workers, .* one of them made 1: give it more data"
    with pytest.raises(UsageError, match=rule):
        timed(own_train, rows=8, epochs=1)


@pytest.mark.transport("shared_memory")
def test_messages_are_timed():
    messages = run_messages(4096, transport="shared_memory", repeats=2)
    assert [message.operation for message in messages] == [
        "reduce",
        "round_trip",
        "publish",
        "peek",
    ]
    assert all(m.nbytes == 4096 and m.work_s > 0 and m.wait_s >= 0 for m in messages)
