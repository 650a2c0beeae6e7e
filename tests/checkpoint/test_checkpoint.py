"""States on disk: loaded as they were saved, complete or not at all, and free of code."""

from __future__ import annotations

import json
import os
import struct
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import warm
from torch import nn
from torch.optim import SGD, Adam

import paceline as pl
from paceline.checkpoint.disk import Disk
from paceline.checkpoint.states import load_state, save_state, save_tensors

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def round_trip(folder, state):
    save_state(folder, "rank0", state)
    return load_state(folder, "rank0")


def assert_same(a, b):
    """Equal in value and in type, tensors bit for bit."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b))
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2), (), (0,)], ids=str)
def test_tensors_come_back_in_their_dtype_and_shape(tmp_path, dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert_same(round_trip(tmp_path, {"x": tensor}), {"x": tensor})


def test_nans_come_back_bit_for_bit(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    back = round_trip(tmp_path, {"x": odd})["x"]
    assert torch.equal(back.view(torch.int32), odd.view(torch.int32))


keys = st.text(max_size=5) | st.integers()
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(torch.tensor)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.dictionaries(keys, trees, max_size=4))
def test_any_nesting_comes_back_with_its_types(tmp_path_factory, state):
    assert_same(round_trip(tmp_path_factory.mktemp("state"), state), state)


def test_names_that_a_state_is_written_with_do_not_confuse_it(tmp_path):
    state = {"tensor": "0", "dict": [["a", 1]], "tuple": {"tensor": torch.ones(1)}, "": {}}
    assert_same(round_trip(tmp_path, state), state)


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), Adam], ids=["SGD", "Adam"])
def test_an_optimizers_state_keeps_its_int_keys_and_tuples(tmp_path, make):
    net = nn.Linear(2, 1)
    optimizer = make(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert list(state["state"]) == [0, 1]
    back = round_trip(tmp_path, state)
    assert_same(back, state)
    fresh = make(nn.Linear(2, 1).parameters())
    fresh.load_state_dict(back)
    assert_same(fresh.state_dict(), state)


def test_loaded_tensors_share_no_memory(tmp_path):
    x = torch.ones(2)
    save_state(tmp_path, "rank0", {"x": x})
    load_state(tmp_path, "rank0")["x"].fill_(7)
    assert x.tolist() == load_state(tmp_path, "rank0")["x"].tolist() == [1.0, 1.0]


def test_only_the_visible_part_of_a_view_is_written(tmp_path):
    whole = torch.arange(100_000.0)
    save_tensors({"part": whole[10:13], "turned": whole[:6].view(2, 3).T}, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 1000
    back = load_file(tmp_path / "x")
    assert back["part"].tolist() == [10.0, 11.0, 12.0]
    assert back["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight


def test_tied_weights_are_written_under_both_names(tmp_path):
    net = Tied()
    save_tensors(net.state_dict(), tmp_path / "model.safetensors")
    back = load_file(tmp_path / "model.safetensors")
    assert torch.equal(back["embed.weight"], net.embed.weight)
    assert torch.equal(back["out.weight"], net.embed.weight)


def test_tied_weights_are_tied_after_a_worker_loads_them(tmp_path):
    def train(worker, load):
        net = Tied()
        net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.1))
        if load:
            worker.load(tmp_path)
            assert net.out.weight is net.embed.weight
            assert_same(dict(net.state_dict()), saved[worker.rank])
        net.out(net.embed(torch.tensor([worker.rank]))).sum().backward()
        sgd.step()
        worker.save(tmp_path)
        saved[worker.rank] = {name: value.clone() for name, value in net.state_dict().items()}

    saved = {}
    for load in (False, True):
        pl.simulate(train, workers=2, cluster="ideal", arguments={"load": load})


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, b"bytes", lambda: 0, 1j, torch.float32],
    ids=["object", "set", "bytes", "function", "complex", "dtype"],
)
def test_what_is_no_number_text_or_tensor_is_refused(tmp_path, value):
    kind = type(value).__name__
    with pytest.raises(pl.UsageError, match=f"a {kind} in the state cannot be saved"):
        save_state(tmp_path, "rank0", {"deep": [{"down": value}]})
    assert not list(tmp_path.iterdir())


def test_a_state_is_one_safetensors_file_that_names_all_its_bytes(tmp_path):
    save_state(tmp_path, "rank3", {"x": torch.ones(4), "more": [1, "text"]})
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.safetensors"]
    content = (tmp_path / "rank3.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    state = json.loads(header.pop("__metadata__")["state"])
    assert "text" in json.dumps(state)
    (tensor,) = header.values()
    assert content[8 + length :] == torch.ones(4).numpy().tobytes()
    assert tensor["data_offsets"] == [0, 16] and tensor["dtype"] == "F32"


def fail_halfway(self, path, content, on_half):
    path.write_bytes(b"half of a file")
    raise OSError(28, "No space left on device")


def fail(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("where", "name", "failure"),
    [
        (Disk, "write", fail_halfway),
        (os, "fsync", fail),
    ],
    ids=["write", "flush"],
)
def test_a_write_that_fails_leaves_the_old_state_and_nothing_else(
    tmp_path, monkeypatch, where, name, failure
):
    save_state(tmp_path, "rank0", {"x": torch.zeros(2), "step": 1})
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failure)
        with pytest.raises(OSError):
            save_state(tmp_path, "rank0", {"x": torch.ones(2), "step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.safetensors"]
    assert_same(load_state(tmp_path, "rank0"), {"x": torch.zeros(2), "step": 1})


_KILLED = """
import os, sys, torch
from pathlib import Path
from paceline.checkpoint.states import save_state

folder = Path(sys.argv[1])
save_state(folder, "rank0", {"x": torch.zeros(2), "step": 1})
os.environ["PACELINE_FAILPOINT"] = sys.argv[2]
save_state(folder, "rank0", {"x": torch.ones(2), "step": 2})
"""


def test_a_kill_in_the_middle_of_a_write_leaves_the_old_state(tmp_path):
    command = [warm.python(), "-c", _KILLED, str(tmp_path), "rank.write"]
    assert subprocess.run(command, check=False).returncode == -9
    assert_same(load_state(tmp_path, "rank0"), {"x": torch.zeros(2), "step": 1})
    assert_same(round_trip(tmp_path, {"step": 3}), {"step": 3})


def test_a_new_state_replaces_all_of_the_old_one(tmp_path):
    save_state(tmp_path, "rank0", {"x": torch.zeros(2), "old": 1})
    assert_same(round_trip(tmp_path, {"y": torch.ones(1)}), {"y": torch.ones(1)})


def test_a_missing_folder_is_made(tmp_path):
    assert round_trip(tmp_path / "a" / "b", {"step": 1}) == {"step": 1}


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def empty(path):
    path.write_bytes(b"")


def pickled(path):
    torch.save({"x": torch.ones(1)}, path)


def without_state(path):
    save_tensors({"x": torch.ones(1)}, path)


@pytest.mark.parametrize("spoil", [os.unlink, cut, empty, pickled, without_state])
def test_what_is_not_a_saved_state_is_named(tmp_path, spoil):
    save_state(tmp_path, "rank0", {"x": torch.zeros(2)})
    spoil(tmp_path / "rank0.safetensors")
    with pytest.raises(pl.UsageError, match=r"no saved state in .*rank0\.safetensors: "):
        load_state(tmp_path, "rank0")
