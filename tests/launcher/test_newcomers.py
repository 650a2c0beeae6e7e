"""Workers that come to synchronous methods in real processes: on one host, and between hosts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import paceline as pl
from tests.support import growing
from tests.support.growing import SAMPLES, finals, plain_training, seen
from tests.support.runs import happened

TRANSPORTS = ["shared_memory", "hosts"]
LIMITS = pl.Limits(dead_s=1.0)


def launch(strategy, transport, *faults, **how):
    """Train until a newcomer has made some steps, at most for a great many epochs."""
    how = {"max_restarts": 2, "limits": LIMITS, "arguments": {"epochs": 500, "until": 9}, **how}
    return pl.launch(
        growing.train,
        workers=3,
        strategy=strategy,
        transport=transport,
        on_loss="continue",
        faults=faults,
        **how,
    )


@pytest.mark.parametrize("over", TRANSPORTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_died_is_taken_in_again(over, victim):
    run = launch("allreduce", over, pl.kill(rank=victim).at(step=3))
    assert happened(run, "joined") == [victim]
    epochs = seen(run)
    for epoch in sorted(epochs)[:-1]:  # the last one was cut short
        assert epochs[epoch] == Counter(range(SAMPLES))
    ends = finals(run)
    assert len(ends) == 3 and all(torch.equal(end, ends[0]) for end in ends.values())
    torch.testing.assert_close(ends[0], plain_training(run), rtol=0, atol=1e-12)


@pytest.mark.parametrize("over", TRANSPORTS)
@pytest.mark.parametrize("strategy", ["sasgd(interval=2)", "easgd(sync=true)"])
def test_two_workers_are_taken_in_at_once_or_in_turn(over, strategy):
    faults = [pl.kill(rank=rank).at(step=3) for rank in (0, 2)]
    run = launch(strategy, over, *faults)
    assert 2 >= len(happened(run, "joined")) >= 1, "one of them may have ended the run"
    ends = finals(run)
    assert all(torch.equal(end, next(iter(ends.values()))) for end in ends.values())


@pytest.mark.parametrize("over", TRANSPORTS)
def test_a_worker_that_was_stopped_too_long_is_replaced(over):
    run = launch("allreduce", over, pl.freeze(rank=1, for_s=60).at(step=3))
    assert happened(run, "lost") == happened(run, "joined") == [1]
    ends = finals(run)
    assert len(ends) == 3 and all(torch.equal(end, ends[0]) for end in ends.values())


@pytest.mark.parametrize("over", TRANSPORTS)
def test_a_run_that_lost_a_worker_is_resumed_with_those_left_and_with_all(over, tmp_path):
    how = {"max_restarts": 0, "checkpoint_steps": 6, "out": tmp_path, "arguments": {"epochs": 3}}
    first = launch("allreduce", over, pl.kill(rank=1).at(step=3), **how)
    assert first.checkpoint and len(finals(first)) == 2
    left = pl.launch(
        growing.train,
        workers=3,
        transport=over,
        out=tmp_path,
        resume=True,
        on_loss="stop",
        arguments={"epochs": 3},
    )
    assert finals(left).keys() == {0, 2}
    assert all(torch.equal(end, finals(first)[rank]) for rank, end in finals(left).items())
    both = launch("allreduce", over, **{**how, "resume": True})
    ends = finals(both)
    assert all(torch.equal(end, ends[0]) for end in ends.values())
