"""A real run, replayed in the simulator: the same order, and so the same parameters."""

from __future__ import annotations

import json
import random
import re
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.worlds import on_hosts, on_shared_memory

import paceline as pl
from paceline.comm.comm import Comm
from paceline.comm.limits import Limits
from paceline.comm.metered import MeteredPorts
from paceline.comm.ports import Lost
from paceline.common.reference import find
from paceline.errors import PeersGone
from paceline.record.folder import largest_difference
from paceline.record.trace import Trace, is_duration, read
from paceline.sim.cluster import load_cluster
from paceline.sim.replay import Replay
from paceline.sim.world import World

RUN = {"workers": 3, "seed": 4}
SCRIPT = '''
"""With momentum and dropout; each rank is slower than the one before it."""
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset


def train(worker, epochs=2, stops=False, data="auto"):
    draws = torch.Generator().manual_seed(5)
    x, y = torch.randn(62, 6, generator=draws), torch.randint(3, (62,), generator=draws)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    net, sgd = worker.setup(net, SGD(net.parameters(), lr=0.05, momentum=0.9))
    loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    batches = worker.setup_dataloaders(loader, data=data)
    loss = None  # others may take every batch
    for _ in range(epochs):
        for inputs, targets in batches:
            end_s = time.monotonic() + 5e-4 * worker.rank
            while time.monotonic() < end_s:
                pass
            sgd.zero_grad()
            loss = cross_entropy(net(inputs), targets)
            loss.backward()
            sgd.step()
        with worker.answer():
            worker.log(loss=loss)
        if worker.rank == 0 and stops:
            worker.stop_all()
'''


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the simulator, each rank computes in one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A file that ranks load sooner than this one."""
    path = tmp_path_factory.mktemp("script") / "mine.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def reference(script):
    return {"script": str(script), "name": "train"}


@pytest.fixture(scope="module")
def train(reference):
    return find(reference)


@pytest.fixture(scope="module")
def recorded(reference, tmp_path_factory):
    """The folder of a real run."""
    folder = tmp_path_factory.mktemp("recorded")
    pl.launch(reference, strategy="downpour", out=folder, arguments={"epochs": 1}, **RUN)
    return folder


# Real runs ---------------------------------------------------------------------------------------


@on_shared_memory
@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        "downpour",
        "downpour(push_interval=2, fetch_interval=3)",
        "easgd(interval=2)",
        "cyclic",
        "gossip",
        "gossip(mode=push)",
        "adpsgd",
        "ssp(shards=2)",
    ],
)
def test_a_replay_ends_in_the_parameters_of_the_real_run(strategy, reference, train, tmp_path):
    real, virtual = tmp_path / "real", tmp_path / "virtual"
    pl.launch(reference, strategy=strategy, out=real, **RUN)
    pl.simulate(train, strategy=strategy, cluster="wan", replay=real, out=virtual, **RUN)
    assert largest_difference(virtual / "model.safetensors", real / "model.safetensors") is None
    assert events_of(virtual) == events_of(real)


@on_hosts
@pytest.mark.parametrize("strategy", ["downpour(shards=2)", "cyclic", "gossip"])
def test_a_replay_follows_a_run_over_hosts(strategy, reference, train, tmp_path):
    how = {**RUN, "strategy": strategy}
    real, virtual = tmp_path / "real", tmp_path / "virtual"
    pl.launch(reference, out=real, **{**how, "transport": "hosts"})
    pl.simulate(train, cluster="wan", replay=real, out=virtual, **how)
    assert largest_difference(virtual / "model.safetensors", real / "model.safetensors") is None
    assert events_of(virtual) == events_of(real)


@on_shared_memory
def test_a_replay_stops_each_worker_where_it_saw_that_all_were_to_stop(reference, train, tmp_path):
    how = {**RUN, "strategy": "gossip", "arguments": {"epochs": 40, "stops": True}}
    real = pl.launch(reference, out=tmp_path / "real", **how)
    virtual = pl.simulate(train, cluster="wan", replay=tmp_path / "real", **how)
    assert virtual.steps == real.steps < 40 * 16


@on_shared_memory
@pytest.mark.parametrize(
    "strategy", ["allreduce", "downpour", "easgd(interval=2)", "cyclic", "gossip", "adpsgd"]
)
def test_a_replay_goes_through_the_loss_of_a_worker(strategy, reference, train, tmp_path):
    real, virtual = tmp_path / "real", tmp_path / "virtual"
    how = {**RUN, "strategy": strategy, "arguments": {"data": "static"}}  # all come to step 3
    fault = pl.kill(rank=1).at(step=3)
    pl.launch(reference, faults=[fault], on_loss="continue", out=real, **how)
    result = pl.simulate(train, cluster="wan", replay=real, out=virtual, **how)
    assert [(e["event"], e["rank"]) for e in result.events] == [("lost", 1)]
    assert largest_difference(virtual / "model.safetensors", real / "model.safetensors") is None
    assert events_of(virtual) == events_of(real)


@on_shared_memory
def test_a_run_that_lacks_what_others_had_of_a_killed_worker_is_not_replayed(
    recorded, train, tmp_path
):
    folder = edited(recorded, tmp_path, 1, lambda lines: lines[: len(lines) // 2])
    tell_events(folder, {"t": 0.1, "event": "lost", "rank": 1})
    with pytest.raises(pl.UsageError, match="lacks the last moments of rank 1"):
        pl.simulate(train, strategy="downpour", arguments={"epochs": 1}, replay=folder, **RUN)


def tell_events(folder, *events):
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "events": events}))


@on_shared_memory
def test_a_run_in_which_a_rank_came_again_is_not_replayed(recorded, train, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "again")
    for event, rank in [("restarted", 1), ("lost", 3)]:
        tell_events(folder, {"t": 0.1, "event": event, "rank": rank})
        with pytest.raises(pl.UsageError, match="a replay can follow only the loss of workers"):
            how = {"strategy": "downpour", "arguments": {"epochs": 1}, **RUN}
            pl.simulate(train, replay=folder, **how)


def events_of(folder):
    """What each rank did, without the times."""
    told = {}
    for record in read(folder / "trace.jsonl"):
        facts = {k: v for k, v in record.items() if k not in ("t", "rank") and not is_duration(k)}
        told.setdefault(record["rank"], []).append(facts)
    return told


# What chance decides -----------------------------------------------------------------------------

X = torch.zeros(1)


def act_at_random(comm, seed, stepper):
    """Do what comes to mind, at one's own pace, and leave; tell all that was seen."""
    choose, seen = random.Random(seed * 64 + comm.rank), []
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for number in range(choose.randrange(30)):
        comm.clock.charge(choose.random() * stepper[comm.rank])
        x, peer = torch.tensor([comm.rank + number / 64]), choose.choice(others)
        tag = choose.randrange(2)
        deed = choose.choice(
            [
                partial(comm.board.post, x, peer, tag),
                partial(comm.board.poll, X, tag),
                partial(comm.board.publish, x),
                partial(comm.board.peek, peer),
                partial(comm.ports.queue.draw, 0, number // 8),
                comm.members.alive,
            ]
        )
        seen.append(repr(deed()))
    return seen


def serve(comm, seed, stepper):
    """Take what comes, from whomever, until nobody is left."""
    seen = []
    try:
        while True:
            got = comm.receive_any(X)
            seen.append(f"lost {got.ranks}" if isinstance(got, Lost) else repr(got))
            comm.clock.charge(stepper[comm.rank])
    except PeersGone:
        return seen


def run_at_random(folder, seed, cluster, stepper, replay=None):
    """Three ranks that act, and one that serves: what each of them saw."""
    world = World(load_cluster(cluster), 4, seed=0, limits=Limits(), faults=())
    trace, seen = Trace(folder / "trace.jsonl"), {}

    def body(transport):
        metered = replay.follow(transport, trace) if replay else MeteredPorts(transport, trace)
        act = serve if transport.rank == 3 else act_at_random
        seen[transport.rank] = act(Comm(metered), seed, stepper)
        metered.close()

    try:
        world.run(body)
    finally:
        trace.close()
    return seen


SLOWEST_LAST, SLOWEST_FIRST = (1e-4, 4e-4, 9e-4, 1e-4), (9e-4, 2e-4, 1e-4, 6e-4)


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_whatever_ranks_do_a_replay_at_another_pace_shows_them_the_same(seed):
    with TemporaryDirectory() as name:
        folder = Path(name)
        seen = run_at_random(folder, seed, "ethernet-1g", SLOWEST_LAST)
        replay = Replay(folder / "trace.jsonl")
        (folder / "again").mkdir()
        again = run_at_random(folder / "again", seed, "ideal", SLOWEST_FIRST, replay)
        assert again == seen
        assert events_of(folder / "again") == events_of(folder)


def test_at_another_pace_ranks_see_something_else_unless_it_is_a_replay(tmp_path):
    seen = run_at_random(tmp_path, 0, "ethernet-1g", SLOWEST_LAST)
    events = [event["event"] for mine in events_of(tmp_path).values() for event in mine]
    wanted = {"alive", "ticket", "peek", "recv", "post", "post_refused", "gone"}
    assert wanted <= set(events)
    assert run_at_random(tmp_path, 0, "ideal", SLOWEST_FIRST) != seen


def test_who_is_here_is_noted_when_it_changes(tmp_path):
    def leave_in_turn(worker):
        worker.comm.clock.charge(worker.rank * 1.0)
        for _ in range(4):
            worker.comm.clock.charge(0.4)
            worker.comm.members.alive()

    pl.simulate(leave_in_turn, workers=3, cluster="ideal", out=tmp_path)
    told = {
        rank: [(event["missing"], event["look"]) for event in mine]
        for rank, mine in events_of(tmp_path).items()
    }
    assert told == {1: [([0], 2)], 2: [([0], 1), ([0, 1], 2)]}


# Traces that do not fit --------------------------------------------------------------------------


def edited(recorded, tmp_path, rank, change):
    """A copy of a run's folder, with other events of one rank."""
    folder = shutil.copytree(recorded, tmp_path / "edited")
    lines = (folder / "trace.jsonl").read_text().splitlines(keepends=True)
    mine = [line for line in lines if json.loads(line)["rank"] == rank]
    others = [line for line in lines if json.loads(line)["rank"] != rank]
    (folder / "trace.jsonl").write_text("".join(others + change(mine)))
    return folder


def without_first(event):
    def change(lines):
        place = next(n for n, line in enumerate(lines) if f'"{event}"' in line)
        return lines[:place] + lines[place + 1 :]

    return change


def with_other_bytes(lines):
    return [re.sub(r'("post", .*"bytes": )', r"\g<1>1", line) for line in lines]


@on_shared_memory
@pytest.mark.parametrize(
    ("rank", "change", "told"),
    [
        (0, without_first("ticket"), r"rank 0 .*: recorded is .*, the replay comes to ticket"),
        (3, with_other_bytes, r"rank 3 .* is post \(peer \d, bytes 1\d+, tag 2\), .*to post \("),
        (2, lambda lines: lines[:-1], r"rank 2 .*is nothing more, the replay comes to finish \("),
        (2, lambda lines: [*lines, lines[-1]], r"rank 2 .*finish \(.*comes to the end of the rank"),
        (
            3,
            without_first("recv"),
            r"rank 3 .* is publish \(.*comes to receive_any with tag 1",
        ),
    ],
)
def test_a_trace_that_does_not_fit_is_refused_by_rank_and_event(
    rank, change, told, recorded, train, tmp_path
):
    folder = edited(recorded, tmp_path, rank, change)
    with pytest.raises(pl.PacelineError, match=told) as caught:
        pl.simulate(train, strategy="downpour", replay=folder, arguments={"epochs": 1}, **RUN)
    assert caught.match(r"leaves the recorded run at its event \d+ of \d+: ")


@on_shared_memory
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"workers": 4}, r"workers \(4\) must be 3, as in the run in "),
        ({"seed": 5}, r"seed \(5\) must be 4"),
        ({"strategy": "ssp"}, r"strategy \(SSP\(.*must be Downpour\("),
        ({"arguments": {}}, r"arguments \({}\) must be {'epochs': 1}"),
        ({"faults": [pl.slow(rank=1, factor=2.0)]}, "replay must not be used with faults"),
    ],
)
def test_another_run_is_no_replay(other, told, recorded, train):
    how = {"strategy": "downpour", "arguments": {"epochs": 1}, **RUN, **other}
    with pytest.raises(pl.UsageError, match=told):
        pl.simulate(train, replay=recorded, **how)


@on_shared_memory
def test_the_recorded_run_is_not_overwritten(recorded, train):
    before = events_of(recorded)
    how = {"strategy": "downpour", "arguments": {"epochs": 1}, **RUN}
    with pytest.raises(pl.UsageError, match=r"out \(.*\) must not be the folder of the run"):
        pl.simulate(train, replay=recorded, out=recorded.parent / "." / recorded.name, **how)
    assert events_of(recorded) == before


# The command -------------------------------------------------------------------------------------


@on_shared_memory
def test_a_script_is_replayed_by_the_folder_of_its_run(script, paceline):
    paceline("run", script, "-s", "gossip", "-w", 3, "--seed", 4, "--epochs", 1, "--out", "real")
    done = paceline("sim", "--replay", "real", "-c", "wan", "--quiet")
    assert "same parameters as the recorded run" in done.out

    model = load_file("real/model.safetensors")
    model["0.bias"][3] += 0.5
    save_file(model, "real/model.safetensors")
    done = paceline("sim", "--replay", "real", "--quiet")
    assert "parameters differ by up to 0.5 from the recorded run" in done.out
    told = json.loads(paceline("sim", "--replay", "real", "--json").out.splitlines()[-1])
    assert (told["replay"], told["same_parameters"]) == ("real", False)
    assert (told["strategy"], told["workers"], told["seed"]) == ("gossip", 3, 4)


@on_shared_memory
@pytest.mark.parametrize(
    ("beside", "name"),
    [
        (["mine.py"], "script"),
        (["-s", "downpour"], "--strategy"),
        (["--workers", 3], "--workers"),
        (["--seed", 0], "--seed"),
        (["--set", "shards=1"], "--set"),
        (["--full"], "--full"),
    ],
)
def test_what_the_recorded_run_decides_is_refused_beside_it(beside, name, paceline, recorded):
    done = paceline("sim", *beside, "--replay", recorded, code=2)
    assert f"{name} must not be given with --replay: the recorded run decides it" in done.err


@on_shared_memory
def test_a_folder_that_cannot_be_replayed_is_refused_with_what_to_do(
    paceline, recorded, train, tmp_path
):
    pl.simulate(train, workers=2, out=tmp_path / "simulated")
    for name in ("trace.jsonl", "model.safetensors"):
        folder = shutil.copytree(recorded, tmp_path / f"no {name}")
        (folder / name).unlink()
    for folder, why in {
        "nowhere": "config.json cannot be read",
        "simulated": "it was simulated",
        "no trace.jsonl": "it has no trace.jsonl",
        "no model.safetensors": "it has no model.safetensors",
    }.items():
        done = paceline("sim", "--replay", folder, code=2)
        assert f"replay ({folder}) must be the folder that paceline run --out" in done.err
        assert why in done.err


EVIL = """
from pathlib import Path

Path({marker!r}).touch()


class Method:
    pass


def train(worker, epochs=1):
    pass
"""


def rewritten(recorded, folder, **changes):
    """A copy of a run's folder, with another configuration."""
    shutil.copytree(recorded, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def spoil_trace(folder):
    (folder / "trace.jsonl").write_text('{"t": 1.0, "rank": "all"}\n')


def spoil_model(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def forget_threads(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["threads"]
    (folder / "config.json").write_text(json.dumps(config))


def list_config(folder):
    (folder / "config.json").write_text("[]")


def give_more_arguments(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "arguments": {"no": "such"}}))


@on_shared_memory
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_trace, "not a record of a trace"),
        (spoil_model, "model.safetensors cannot be read"),
        (forget_threads, "config.json: threads (None) must be of type int"),
        (list_config, "config.json cannot be read: it must be a JSON object"),
        (give_more_arguments, "--no (such) cannot be passed"),
    ],
    ids=["trace", "model", "threads", "list", "arguments"],
)
def test_a_folder_is_looked_at_before_anything_that_it_names_is_run(
    spoil, told, recorded, paceline, tmp_path
):
    script, marker = tmp_path / "evil.py", tmp_path / "ran"
    script.write_text(EVIL.format(marker=str(marker)))
    evil = {"script": str(script), "name": "train"}
    method = {"class": {"script": str(script), "name": "Method"}, "fields": {}}
    spoil(rewritten(recorded, tmp_path / "hostile", train=evil, method=method))
    assert told in paceline("sim", "--replay", "hostile", code=2).err
    assert not marker.exists()


@on_shared_memory
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train": {"module": "subprocess", "name": "call"}}, "must not be in Python's library"),
        ({"train": {"module": "os.path", "name": "exists"}}, "must not be in Python's library"),
        (
            {"train": {"script": "evil.py", "name": "train"}},
            "be the absolute path of a script",
        ),
        ({"train": {"script": "/dev/no.py", "name": "train"}}, "absolute path of a script"),
        ({"train": {"module": "torch", "name": "a.__globals__"}}, "must consist of names"),
        ({"train": {"module": "torch", "script": "x", "name": "a"}}, "one of main, script, module"),
        ({"train": {"module": 3, "name": "a"}}, "must consist of names"),
        (
            {"method": {"class": {"module": "subprocess", "name": "Popen"}, "fields": {}}},
            "must not be in Python's library",
        ),
        (
            {"method": {"class": {"module": "torch.nn", "name": "Linear"}, "fields": {}}},
            "must be a class of strategies",
        ),
        ({"method": {"class": "evil", "fields": {}}}, "must have a class and fields"),
    ],
)
def test_a_folder_that_names_what_no_run_has_written_is_refused(
    changes, told, recorded, paceline, tmp_path
):
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "ran")))
    rewritten(recorded, tmp_path / "hostile", **changes)
    assert told in paceline("sim", "--replay", "hostile", code=2).err
    assert not (tmp_path / "ran").exists()


@on_shared_memory
def test_what_a_replay_runs_is_said(script, recorded, paceline):
    done = paceline("sim", "--replay", recorded)
    assert f"Replaying {recorded}, a run of train in {script}" in " ".join(done.out.split())
