"""``result.model`` and ``result.returned``: what the ranks of a run deliver beside numbers."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.worlds import on_hosts, on_shared_memory
from torch import nn
from torch.optim import SGD

import paceline as pl
from paceline.record.delivery import PART_BYTES, Delivery, packed_return, parts_of
from paceline.record.result import Result

WIDTH = 400
"""So that the model takes more than one message."""


def train(worker, returns="plain", steps=4):
    net = nn.Linear(WIDTH, WIDTH)
    net.register_buffer("ones", torch.ones(2))
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
    for _ in range(steps):
        sgd.zero_grad()
        net(torch.randn(4, WIDTH)).square().mean().backward()
        sgd.step()
    worker.finish()
    returned = {
        "plain": {"rank": worker.rank, "losses": [0.5, float(steps)], 7: (None, True, "text")},
        "tensors": [torch.full((2, PART_BYTES // 4), float(worker.rank)), net.weight],
        "a model": net if worker.rank == 1 else 3,
        "nothing": None,
    }
    return returned[returns]


def simulate(returns="plain", **how):
    return pl.simulate(train, **{"workers": 2, "arguments": {"returns": returns}, **how})


def launch(returns="plain", **how):
    return pl.launch(train, **{"workers": 2, "arguments": {"returns": returns}, **how})


WORLDS = [
    pytest.param(simulate, id="simulated"),
    pytest.param(launch, id="shared_memory", marks=on_shared_memory),
]
assert WIDTH * WIDTH * 4 > PART_BYTES


@pytest.mark.parametrize("run", WORLDS)
def test_plain_values_and_tensors_of_each_worker_are_returned(run):
    plain = {"losses": [0.5, 4.0], 7: (None, True, "text")}
    assert run().returned == [{"rank": 0, **plain}, {"rank": 1, **plain}]
    result = run("tensors")
    for rank, (full, weight) in enumerate(result.returned):
        assert torch.equal(full, torch.full_like(full, rank))
        assert torch.equal(weight, result.model["weight"]) and not weight.requires_grad
    assert run("nothing").returned == [None, None]


@pytest.mark.parametrize("run", WORLDS)
def test_something_else_is_a_warning_when_it_is_asked_for(run):
    result = run("a model")
    told = r"train returned what processes do not pass on \(a Linear, on rank 1\): return numbers"
    with pytest.warns(UserWarning, match=told):
        assert result.returned == [3, None]
    assert result.returned == [3, None], "it is said once"


@pytest.mark.parametrize("run", WORLDS)
def test_the_model_is_the_answer_in_memory_or_in_the_folder(run, tmp_path):
    """Also if a method has a server, which has no part in it."""
    how = {"strategy": "easgd", "seed": 3}
    if run is launch:  # whose workers meet their server in any order
        how["strategy"] = "sasgd(interval=2)"
    held, read = run("nothing", **how), run("nothing", out=tmp_path / "run", **how)
    written = load_file(tmp_path / "run" / "model.safetensors")
    assert set(held.model) == set(written) == {"weight", "bias", "ones"}
    assert all(torch.equal(held.model[name], written[name]) for name in written)
    assert all(torch.equal(read.model[name], written[name]) for name in written)
    again = nn.Linear(WIDTH, WIDTH)
    again.register_buffer("ones", torch.zeros(2))
    again.load_state_dict(held.model)


def test_a_result_still_is_what_its_files_say(tmp_path):
    result = simulate(out=tmp_path / "run")
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (
        record
        == json.loads(json.dumps(result.to_record()))
        == json.loads(json.dumps(asdict(result)))
    )
    again = Result(**record)
    assert again.returned == [None, None]
    with pytest.raises(pl.UsageError, match=r"result\.model is that of a run of this process"):
        _ = again.model


def test_a_model_that_a_later_run_has_replaced_is_refused(tmp_path):
    result = simulate(out=tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    save_file(load_file(path), tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(pl.UsageError, match=r"something has replaced .* since the run"):
        _ = result.model


def test_a_run_without_a_model_says_so(tmp_path):
    for how in ({}, {"out": tmp_path / "run"}):
        result = pl.simulate(lambda worker: worker.rank, workers=2, **how)
        assert result.returned == [0, 1]
        with pytest.raises(pl.UsageError, match=r"result\.model: "):
            _ = result.model


def test_a_lost_leader_delivers_nothing():
    result = simulate(strategy="gossip", faults=[pl.kill(rank=0).at(step=2)])
    assert [value and value["rank"] for value in result.returned] == [None, 1]
    assert set(result.model) == {"weight", "bias", "ones"}


@on_hosts
def test_ranks_on_many_hosts_deliver_too():
    result = launch("tensors", strategy="gossip", transport="hosts")
    assert [float(full[0, 0]) for full, _ in result.returned] == [0.0, 1.0]
    assert result.model["weight"].shape == (WIDTH, WIDTH)


# The parts ---------------------------------------------------------------------------------------


def test_what_a_rank_sends_again_replaces_what_it_sent_before():
    """A rank may be lost while it delivers, and be started again."""
    delivery, (what, content) = Delivery(2, None), packed_return(["x" * PART_BYTES])
    first, *rest = parts_of(what, 1, content)
    assert len(rest) == 1
    for part in (first, first, *rest):
        delivery.take(json.loads(json.dumps(part)))
    assert delivery.returned() == [None, ["x" * PART_BYTES]]


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "unfit"),
    [
        ({1, 2}, "a set"),
        ([1, {"deep": object()}], "a object"),
        ({(1, 2): 3}, "unhashable type: 'list'"),
        (torch.ones(2).to_sparse(), "unsupported memory format"),
    ],
)
def test_what_does_not_fit_is_named(value, unfit):
    delivery, (what, content) = Delivery(1, None), packed_return(value)
    delivery.put(what, 0, content)
    assert unfit in delivery.unfit() and delivery.unfit().endswith(", on rank 0")
    assert delivery.returned() == [None]


@pytest.mark.parametrize("value", [Point(1, 2.5), (1, 2.5), float("inf"), 10**30, "", [], {}])
def test_what_fits_comes_back(value):
    delivery, (what, content) = Delivery(1, None), packed_return(value)
    delivery.put(what, 0, content)
    assert delivery.returned() == [value] and delivery.unfit() is None
