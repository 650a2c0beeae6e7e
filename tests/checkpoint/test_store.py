"""Checkpoints on disk: intact or absent, whatever happens during or after writing."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import warm

import paceline as pl
from paceline.checkpoint.disk import KINDS, POINTS, Disk
from paceline.checkpoint.states import MAX_HEADER_BYTES, load_state, pack_state
from paceline.checkpoint.store import (
    LATEST,
    MANIFEST,
    VERSION,
    Saved,
    Store,
    open_checkpoint,
    seal,
)
from paceline.lab.faulttest.power import FragileDisk, check_image

RANKS = 2
CONFIG = {"strategy": "AllReduce()", "workers": 2}


def save(store: Store, step: int, ranks: int = RANKS) -> list[Saved]:
    """Make the checkpoint of a step."""
    saved = [
        store.save_rank(step, rank, step / 10, pack_state({"step": step, "x": torch.ones(64)}))
        for rank in range(ranks)
    ]
    store.commit(saved, CONFIG, {"metrics": [{"rank": 0, "loss": 0.5}], "events": []})
    return saved


@pytest.fixture
def store(tmp_path):
    """A store with the checkpoints of steps 1 and 2."""
    store = Store(tmp_path / "checkpoints")
    store.prepare(None)
    save(store, 1)
    save(store, 2)
    return store


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_is_a_folder_of_ranks_and_a_manifest(store):
    found = store.newest()
    assert (found.step, found.time_s, found.path) == (2, 0.2, store.folder(2))
    assert files_in(found.path) == ["manifest.json", "metrics.json", "rank0.safetensors"] + [
        "rank1.safetensors"
    ]
    assert found.records() == {"metrics": [{"rank": 0, "loss": 0.5}], "events": []}
    assert (store.path / LATEST).read_text() == "step-000000002\n"
    assert load_state(found.path, "rank1")["step"] == 2


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path, keep):
    store = Store(tmp_path, keep)
    for step in range(1, 6):
        save(store, step)
    kept = [path.name for path in sorted(tmp_path.glob("step-*"))]
    assert kept == [f"step-{step:09d}" for step in range(6 - keep, 6)]


def test_committing_a_checkpoint_does_not_remove_a_newer_unfinished_one(tmp_path):
    store = Store(tmp_path)
    store.save_rank(7, 0, 0.7, pack_state({}))
    save(store, 6)
    assert store.folder(7).is_dir()


def test_a_resumed_run_removes_what_is_newer(store):
    store.save_rank(9, 0, 0.9, pack_state({}))
    (store.folder(1) / ".rank0.safetensors.7.part").write_text("half")
    store.prepare(store.newest())
    assert [path.name for path in sorted(store.path.glob("step-*"))] == [
        "step-000000001",
        "step-000000002",
    ]
    assert not list(store.path.rglob("*.part"))


def test_another_configuration_is_refused_by_its_first_difference(store):
    found = store.newest()
    found.check_config(CONFIG)
    with pytest.raises(pl.UsageError, match=r"workers \(3\) must be 2, as in the checkpoint"):
        found.check_config({**CONFIG, "workers": 3, "seed": 1})
    with pytest.raises(pl.UsageError, match=r"seed \(1\) must be None"):
        found.check_config({**CONFIG, "seed": 1})
    with pytest.raises(pl.UsageError, match=r"strategy \(None\) must be AllReduce\(\)"):
        found.check_config({"workers": 2})


# Crashes -----------------------------------------------------------------------------------------

_KILLED = """
import os, sys, torch
from pathlib import Path
from paceline.checkpoint.states import pack_state
from paceline.checkpoint.store import Store

def save(store, step):
    content = pack_state({"step": step, "x": torch.ones(9)})
    saved = [store.save_rank(step, rank, 0.0, content) for rank in range(2)]
    store.commit(saved, {}, {"metrics": [], "events": []})

for name in sys.argv[2:]:
    store = Store(Path(sys.argv[1]) / name, keep=1)
    save(store, 1)
    pid = os.fork()
    if pid == 0:
        os.environ["PACELINE_FAILPOINT"] = name
        save(store, 2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9, name
"""
FAILPOINTS = [f"{kind}.{point}" for kind in KINDS for point in POINTS]
NEW_FROM = FAILPOINTS.index("manifest.folder")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder for each failpoint, left by a process that was killed there."""
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run([warm.python(), "-c", _KILLED, str(folder), *FAILPOINTS], check=True)
    return folder


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint(killed, name):
    store = Store(killed / name)
    found = store.newest()
    assert found.step == (2 if FAILPOINTS.index(name) >= NEW_FROM else 1)
    assert load_state(found.path, "rank1")["step"] == found.step
    store.prepare(found)
    save(store, 3)
    assert store.newest().step == 3 and not list(store.path.rglob("*.part"))


def test_a_loss_of_power_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path):
    disk = FragileDisk(tmp_path)
    store, made = Store(tmp_path / "checkpoints", 1, disk), []
    for step in (1, 2, 3):
        save(store, step)
        made += [step - 1 or None] * (len(disk.images) - len(made))
    for image, last in zip(disk.images, made, strict=True):
        found = check_image(image, last)
        assert found is None or found.step in (last, (last or 0) + 1)


@pytest.mark.parametrize("number", [28, 30, 122], ids=["full", "read-only", "quota"])
@pytest.mark.parametrize("operation", ["write", "flush", "rename", "make_folder"])
def test_a_failing_disk_leaves_the_previous_checkpoint(store, monkeypatch, operation, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    before = files_in(store.path)
    with monkeypatch.context() as patch:
        patch.setattr(Disk, operation, fail)
        saved = store.save_rank(3, 0, 0.3, pack_state({"x": torch.ones(64)}))
    assert saved.error == os.strerror(number) and not saved.digest
    store.abandon(3)
    assert files_in(store.path) == before and store.newest().step == 2


# What is not what was written --------------------------------------------------------------------


def flip(path: Path, seed: int = 0) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def turn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("spoil", [flip, cut, lengthen, turn, link, os.unlink])
@pytest.mark.parametrize("name", ["rank0.safetensors", "rank1.safetensors", "metrics.json"])
def test_a_changed_file_is_detected_and_the_previous_checkpoint_is_taken(store, spoil, name):
    spoil(store.folder(2) / name)
    with pytest.warns(UserWarning, match=rf"step-000000002 cannot be used: {name}.*an earlier one"):
        assert store.newest().step == 1


def test_swapped_files_of_two_ranks_are_detected(tmp_path):
    store = Store(tmp_path)
    saved = [store.save_rank(1, rank, 0.0, pack_state({"rank": rank})) for rank in range(2)]
    store.commit(saved, {}, {"metrics": [], "events": []})
    one, other = (store.folder(1) / f"rank{rank}.safetensors" for rank in range(2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    with pytest.raises(pl.UsageError, match=r"rank0\.safetensors has changed since it was written"):
        store.newest()


@settings(max_examples=60)
@given(st.integers(0, 2**31), st.sampled_from(["rank0.safetensors", "metrics.json", MANIFEST]))
def test_any_flipped_bit_is_detected(tmp_path_factory, seed, name):
    store = Store(tmp_path_factory.mktemp("store"))
    save(store, 1)
    whole = (store.folder(1) / MANIFEST).read_text()
    flip(store.folder(1) / name, seed)
    content = (store.folder(1) / name).read_bytes()
    if name == MANIFEST and is_same_json(content, seal(json.loads(whole))):
        return  # a space became another kind of space
    with pytest.raises(pl.UsageError, match="cannot be used"):
        open_checkpoint(store.folder(1))


def is_same_json(content: bytes, manifest) -> bool:
    try:
        return json.loads(content) == manifest
    except ValueError:
        return False


def edit(**changes):
    def change(path):
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps(seal({**manifest, **changes})))

    return change


def name_another_folder(path):
    manifest = json.loads(path.read_text())
    manifest["files"]["../../outside"] = manifest["files"].pop("rank1.safetensors")
    path.write_text(json.dumps(seal(manifest)))


def say_twice(path):
    path.write_text(path.read_text().replace('"step": 2', '"step": 1, "step": 2'))


def nest(path):
    path.write_text("[" * 100_000)


@pytest.mark.parametrize(
    "spoil",
    [
        *(
            edit(version=VERSION + 1),
            edit(step=1),
            edit(step="2"),
            edit(ranks=1),
            edit(ranks=10**12),
        ),
        *(edit(files=[]), edit(config=[]), edit(time_s="soon"), name_another_folder, say_twice),
        *(nest, os.unlink, flip, lambda path: path.write_bytes(b"\x80\x04\x95 pickle")),
        lambda path: path.write_bytes(b" " * (5 << 20)),
    ],
    ids=lambda spoil: getattr(spoil, "__name__", "spoil"),
)
def test_a_manifest_that_is_not_one_is_refused(store, spoil):
    spoil(store.folder(2) / MANIFEST)
    with pytest.warns(UserWarning, match="step-000000002 cannot be used"):
        assert store.newest().step == 1


@pytest.mark.parametrize(
    "text", ["", "../../etc", "step-000000009", "step-1", "\0", "\udcff", "step-000000002\n" * 9]
)
def test_a_wrong_latest_is_reported_and_ignored(store, text):
    (store.path / LATEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match=r"latest names .*; step-000000002 is the newest"):
        assert store.newest().step == 2


def test_with_any_flipped_bit_in_latest_the_newest_checkpoint_is_taken(store):
    """Even if ``latest`` then names an older one."""
    pointer = store.path / LATEST
    content = pointer.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        pointer.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert store.newest().step == 2
        strayed = damaged.decode(errors="replace").strip()
        assert bool(caught) == (strayed not in ("step-000000002", "step-000000001"))


def test_a_missing_latest_is_reported(store):
    (store.path / LATEST).unlink()
    with pytest.warns(UserWarning, match="latest is missing; step-000000002 is the newest"):
        assert store.newest().step == 2


def test_where_no_checkpoint_can_be_used_each_is_named_with_its_reason(store):
    lengthen(store.folder(1) / "metrics.json")
    edit(version=VERSION + 1)(store.folder(2) / MANIFEST)
    with pytest.raises(pl.UsageError, match="nothing was removed") as caught:
        store.newest()
    assert caught.match(rf"step-000000002 .*: version \({VERSION + 1}\) must be {VERSION}")
    assert caught.match(r"step-000000001 .*: metrics\.json has \d+ bytes, but was written with")


def test_latest_alone_shows_that_there_was_a_checkpoint(store):
    for step in (1, 2):
        shutil.rmtree(store.folder(step))
    assert store.has_any
    with pytest.raises(pl.UsageError, match="latest names 'step-000000002', which does not exist"):
        store.newest()


def test_a_skipped_checkpoint_is_kept_under_another_name(store):
    for kept in ("step-000000002.unusable", "step-000000002.unusable-2"):
        cut(store.folder(2) / "rank0.safetensors")
        with pytest.warns(UserWarning, match=r"keeping this one as \*\.unusable"):
            store.prepare(store.newest())
        assert (store.path / kept / MANIFEST).is_file() and not store.folder(2).exists()
        save(store, 2)
    save(store, 3)
    save(store, 4)
    assert len(list(store.path.glob("*.unusable*"))) == 2


def test_newer_means_more_steps_however_long_the_name_is(tmp_path):
    store = Store(tmp_path)
    for step in (999_999_999, 1_000_000_000):
        save(store, step)
    assert store.newest().step == 1_000_000_000


class Bomb:
    """A class that a pickle would call."""

    def __reduce__(self):
        return os.system, ("touch exploded",)


def header(length, content=b""):
    return struct.pack("<Q", length) + content


def entries(**tensors):
    text = json.dumps({"__metadata__": {"state": '{"dict": []}'}, **tensors}).encode()
    return header(len(text), text)


HUGE = {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}
TWINS = b'{"__metadata__": {"state": "1"}, "a": 1, "a": 2}'
HOSTILE = {
    "length": header(2**63),
    "header": header(MAX_HEADER_BYTES + 1, b" " * (MAX_HEADER_BYTES + 1)),
    "tensor": entries(x=HUGE),
    "twins": header(len(TWINS), TWINS),
    "nothing": b"",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_before_memory_is_allocated(tmp_path, content):
    (tmp_path / "rank0.safetensors").write_bytes(content)
    with pytest.raises(pl.UsageError, match=r"no saved state in .*rank0\.safetensors: "):
        load_state(tmp_path, "rank0")


def test_a_pickle_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(Bomb(), "rank0.safetensors")
    with pytest.raises(pl.UsageError, match="no saved state"):
        load_state(tmp_path, "rank0")
    assert not Path("exploded").exists()


trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dict", "tuple", "tensor", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=100)
@given(trees)
def test_any_json_for_a_state_is_read_or_refused(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("state")
    text = json.dumps({"__metadata__": {"state": json.dumps(tree)}}).encode()
    (folder / "rank0.safetensors").write_bytes(header(len(text), text))
    try:
        assert isinstance(load_state(folder, "rank0"), dict)
    except pl.UsageError as error:
        assert "no saved state in" in str(error)


def test_the_folder_of_a_store_may_vanish(store):
    shutil.rmtree(store.path)
    assert store.newest() is None and not store.has_any
