"""Runs in real processes, from the call to the files in the folder."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, load_file
from support import runs, warm
from support.worlds import on_both, on_distributed, on_hosts, on_shared_memory

import paceline as pl
from paceline.common.reference import refer_to
from paceline.launcher.fork_client import ForkServer
from paceline.launcher.supervisor import run_ranks
from paceline.record.trace import is_duration


@pytest.fixture
def one_thread(monkeypatch):
    """One thread, here and in every rank, because more threads round differently."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_in(folder):
    return (folder / "model.safetensors").read_bytes()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_rank(records, ranks):
    """The records of each rank in order, without times and what depends on them."""
    kept = [record for record in records if record.get("event") != "alive"]
    timed = ("t", "all_samples", "all_bytes")
    timeless = [{k: v for k, v in r.items() if k not in timed and not is_duration(k)} for r in kept]
    return [[record for record in timeless if record["rank"] == rank] for rank in range(ranks)]


# The same in every world -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world",
    [
        pytest.param("shared_memory", marks=on_shared_memory),
        pytest.param("hosts", marks=on_hosts),
    ],
)
@pytest.mark.parametrize(
    ("strategy", "seed"),
    [
        ("allreduce", 3),
        ("sasgd(interval=4)", 11),
        ("hierarchical(group_size=2, group_interval=2, interval=4)", 1),
        ("diloco(interval=4)", 2),
        ("layered(group_size=2)", 4),
        ("easgd(interval=3, sync=true)", 5),
        ("gossip(sync=true)", 6),
    ],
)
def test_a_real_run_is_the_simulated_one_bit_for_bit(strategy, seed, world, one_thread, tmp_path):
    how = {"workers": 4, "strategy": strategy, "seed": seed}
    virtual = pl.simulate(runs.train, cluster="mixed-lab", out=tmp_path / "virtual", **how)
    real = pl.launch(runs.train, out=tmp_path / "real", transport=world, **how)
    assert model_in(tmp_path / "real") == model_in(tmp_path / "virtual")
    assert by_rank(real.metrics, 4) == by_rank(virtual.metrics, 4)
    traces = [lines_of(tmp_path / world / "trace.jsonl") for world in ("real", "virtual")]
    assert by_rank(traces[0], 4) == by_rank(traces[1], 4)
    for number in ("steps", "samples", "bytes_sent", "consensus_distance"):
        assert getattr(real, number) == getattr(virtual, number), number


@on_shared_memory
def test_another_seed_is_another_run(one_thread, tmp_path):
    for seed in (3, 4):
        pl.launch(runs.train, workers=2, seed=seed, out=tmp_path / str(seed))
    assert model_in(tmp_path / "3") != model_in(tmp_path / "4")


SCRIPT = """
import sys

import paceline as pl
from support.runs import train

with pl.init(strategy="sasgd(interval=3)", seed=5, out=sys.argv[1]) as worker:
    train(worker)
"""


@on_distributed
def test_a_script_under_torchrun_trains_as_a_launched_one(one_thread, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--local-addr=127.0.0.1",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={tmp_path}/meeting",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", *torchrun, str(script), str(tmp_path / "init")],
        env=runs.environment(
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # it would listen on all interfaces
            TMPDIR=str(tmp_path),  # torchrun leaves a folder there
        ),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    how = {"workers": 2, "strategy": "sasgd(interval=3)", "seed": 5}
    pl.launch(runs.train, transport="distributed", out=tmp_path / "launch", **how)
    assert model_in(tmp_path / "init") == model_in(tmp_path / "launch")


@on_distributed
@pytest.mark.parametrize("agent", [False, True])
def test_in_rank_order_gloo_sums_as_shared_memory_does(agent, one_thread, tmp_path):
    """With three ranks: a sum of two has only one order. Rank 0 or an agent has the store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        fd = listener.detach() if agent else None
    how = {"wait_for_workers": False, "master_listen_fd": fd}
    store = dist.TCPStore("127.0.0.1", port, None, True, **how) if agent else None
    argument = {"port": port, "agent": agent, "seed": 6, "out": str(tmp_path / "init")}
    run_ranks(refer_to(runs.train_by_environment), [argument] * 3)
    del store
    pl.launch(runs.train, workers=3, seed=6, out=tmp_path / "launch")
    assert model_in(tmp_path / "init") == model_in(tmp_path / "launch")


LAUNCHERS = {
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "PMIX_NAMESPACE": "prterun-host-{job}@1",
    },
    "srun": {
        "SLURM_JOB_ID": "{job}",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "{rank}",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "node07",
    },
}


@on_distributed
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_mpirun_and_srun_are_one_run(launcher, one_thread, tmp_path):
    variables, job = LAUNCHERS[launcher], os.getpid()
    argument = {"variables": variables, "job": job, "seed": 5, "out": str(tmp_path / "init")}
    results = run_ranks(refer_to(runs.train_by_variables), [argument] * 2)
    assert results == [[0, 2], [1, 2]]
    pl.launch(runs.train, workers=2, seed=5, out=tmp_path / "launch")
    assert model_in(tmp_path / "init") == model_in(tmp_path / "launch")


def test_a_launch_in_each_process_of_a_launcher_is_refused(monkeypatch):
    for name, text in LAUNCHERS["mpirun"].items():
        monkeypatch.setenv(name, text.format(rank=1, job=7))
    with pytest.raises(pl.UsageError, match=r"started 2 processes: use pl\.init instead"):
        pl.launch(runs.train)


ONE_WORKER = (
    "downpour",
    "ssp",
    "cyclic(form=gradient)",
    "layered",
    "cyclic",
    "easgd(interval=3)",
)


@on_distributed
def test_one_worker_and_its_server_under_a_launcher_train_together(one_thread, tmp_path):
    """Nothing is stale then: except for EASGD, the result is that of the plain optimizer."""
    argument = {
        "strategies": ONE_WORKER,
        "ports": [runs.free_port() for _ in ONE_WORKER],
        "seed": 8,
        "out": str(tmp_path),
    }
    worked, served = run_ranks(refer_to(runs.serve_one_worker), [argument] * 2)
    assert served == ["ended with 0"] * len(ONE_WORKER)
    assert all(steps == 40 and sent > 0 for steps, sent in worked)
    pl.launch(runs.train, workers=1, seed=8, out=tmp_path / "plain")
    *exact, moves, center = (model_in(tmp_path / str(number)) for number in range(len(ONE_WORKER)))
    plain = model_in(tmp_path / "plain")
    assert exact == [plain] * len(exact)
    for name, value in load(plain).items():
        torch.testing.assert_close(load(moves)[name], value)  # a sum of moves is rounded
    pl.launch(runs.train, workers=1, seed=8, out=tmp_path / "untrained", arguments={"epochs": 0})
    assert center not in (plain, model_in(tmp_path / "untrained"))


@on_shared_memory
def test_init_alone_is_a_world_of_one(monkeypatch, one_thread, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    with torch.random.fork_rng(), pl.init(seed=9, out=tmp_path / "init") as worker:
        assert (worker.rank, worker.size, worker.comm.members.alive()) == (0, 1, (0,))
        runs.train(worker)
    pl.launch(runs.train, workers=1, seed=9, out=tmp_path / "launch")
    assert model_in(tmp_path / "init") == model_in(tmp_path / "launch")
    logged = lines_of(tmp_path / "init" / "metrics.0.jsonl")
    assert [record["step"] for record in logged] == list(range(1, 41))


@on_both
@pytest.mark.parametrize("strategy", ["downpour", "gossip"])
def test_ranks_reduce_stop_together_and_have_the_command_line(world, strategy, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script.py", "--depth", "3"])
    how = {"workers": 2, "strategy": strategy, "transport": world, "arguments": {"step": 5}}
    result = pl.launch(runs.stop_at_step, **how)
    assert [(m["mean"], m["arguments"]) for m in result.metrics] == [(0.5, "--depth 3")] * 2
    assert result.steps < 2000


# When something is wrong -------------------------------------------------------------------------


@on_shared_memory
def test_long_messages_arrive_complete_between_signals():
    train, lengths = runs.log_long_texts_between_signals, [100_000, 2_000_000, 65_536, 1, 1_000_000]
    how = {"lengths": lengths, "raises": False}
    result = pl.launch(train, workers=2, arguments=how)
    received = {
        rank: [len(m["text"]) for m in result.metrics if m["rank"] == rank] for rank in (0, 1)
    }
    assert received == {0: lengths, 1: lengths}
    with pytest.raises(pl.WorkerFailed, match=r"TimeoutError: . has logged 2!"):
        pl.launch(train, workers=1, arguments={**how, "raises": True})


@on_both
def test_a_rank_that_raises_is_named_with_its_own_traceback(world, capfd):
    with pytest.raises(pl.WorkerFailed) as caught:
        pl.launch(runs.raise_on_one, workers=3, transport=world, arguments={"rank": 1})
    assert caught.value.rank == 1
    message = str(caught.value)
    assert message.startswith("rank 1: KeyError: 'no such thing in step 3'\n\nTraceback (most")
    assert message.count("Traceback") == 1
    assert 'raise KeyError(f"no such thing in step {number}")' in message
    assert str(Path(pl.__file__).parent) not in message
    assert runs.ranks_left() == []
    output = capfd.readouterr()
    assert "Traceback" not in output.out + output.err


def test_a_function_that_other_processes_cannot_find_is_refused_by_name():
    def train(worker):
        pass

    name = r"test_a_function_that.*<locals>"
    for function, called in [
        (train, rf"{name}\.train\W* must be defined at the top level"),
        (lambda worker: None, rf"{name}\.<lambda>\W* must be defined at the top level"),
        (functools.partial(runs.train, epochs=1), r"partial\(.*train.*must be defined at the top"),
    ]:
        with pytest.raises(pl.UsageError, match=called):
            pl.launch(function)


@pytest.mark.parametrize("value", [{1, 2}, torch.zeros(2), runs.train, b"bytes", 1j])
def test_arguments_that_json_cannot_hold_are_refused(value):
    with pytest.raises(pl.UsageError, match=r"arguments must hold numbers, strings, lists"):
        pl.launch(runs.train, arguments={"epochs": [value]})


@pytest.mark.parametrize("value", [(1, 2), {0: 0.1}])
def test_arguments_that_json_would_change_are_refused(value):
    with pytest.raises(pl.UsageError, match=r"arguments must hold .* would become"):
        pl.launch(runs.train, arguments={"samples": value})


def test_a_refused_launch_leaves_the_folder_of_an_earlier_run(tmp_path):
    (tmp_path / "model.safetensors").write_text("precious")
    with pytest.raises(pl.UsageError, match="arguments"):
        pl.launch(runs.train, arguments={"samples": object()}, out=tmp_path)
    with pytest.raises(pl.UsageError, match="transport"):
        pl.launch(runs.train, transport="tcp", out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@on_shared_memory
def test_a_launch_in_a_thread_leaves_later_ones_alone():
    ForkServer.stop_idle()
    thread = threading.Thread(target=pl.launch, args=(runs.log_surroundings,))
    thread.start()
    thread.join()
    assert len(pl.launch(runs.log_surroundings, workers=2).metrics) == 2


@on_shared_memory
def test_a_script_that_launches_without_a_guard_is_told_to_add_one(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import paceline as pl\ndef train(worker):\n    pass\npl.launch(train, workers=2)\n"
    )
    done = subprocess.run([warm.python(), str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'must be under if __name__ == "__main__":' in done.stderr


def test_unknown_names_are_refused():
    with pytest.raises(pl.UsageError, match=r"workers \(0\) must be at least 1"):
        pl.launch(runs.train, workers=0)
    with pytest.raises(pl.UsageError, match=r"workers \(100000\) must be at most"):
        pl.launch(runs.train, workers=100_000)
    with pytest.raises(pl.UsageError, match=r'no strategy "alreduce"; did you mean "allreduce"'):
        pl.launch(runs.train, strategy="alreduce")


@on_distributed
def test_ranks_that_leave_one_after_the_other_do_not_wait_for_a_process_to_end(tmp_path):
    argument = {"folder": str(tmp_path)}
    results = run_ranks(refer_to(runs.leave_in_turn), [argument] * 3, transport="distributed")
    assert results == [True] * 3


# The processes -----------------------------------------------------------------------------------


def surroundings(**how):
    result = pl.launch(runs.log_surroundings, **how)
    return [(record["threads"], record["told"]) for record in result.metrics]


@on_shared_memory
def test_cores_are_divided_and_the_environment_is_that_of_the_call(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert surroundings(workers=1) == [(cores, None)]
    monkeypatch.setenv("PACELINE_TEST_WORD", "set after the fork server was there")
    each = (max(1, cores // 2), "set after the fork server was there")
    assert surroundings(workers=2) == [each] * 2
    monkeypatch.delenv("PACELINE_TEST_WORD")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert surroundings(workers=2) == [(3, None)] * 2


@on_shared_memory
def test_ranks_that_share_memory_open_no_tcp_socket():
    result = pl.launch(runs.log_sockets, workers=2)
    assert [(r["ranks"], r["own"], r["listening"]) for r in result.metrics] == [(2, "", "")] * 2


@on_distributed
def test_a_distributed_run_on_one_host_listens_only_on_the_loopback():
    result = pl.launch(runs.log_sockets, workers=2, transport="distributed")
    for record in result.metrics:
        assert record["ranks"] == 2
        assert len(record["listening"].split()) >= 2
        assert set(record["listening"].split()) <= {"127.0.0.1", "::1"}


# The folder --------------------------------------------------------------------------------------


@on_shared_memory
def test_the_folder_records_the_whole_run(tmp_path):
    out, records = tmp_path / "a" / "run", []
    how = {"workers": 3, "strategy": "sasgd(interval=4)", "seed": 8}
    result = pl.launch(
        runs.train, arguments={"samples": 50}, out=out, on_metric=records.append, **how
    )
    names = {"config.json", "events.jsonl", "metrics.jsonl", "model.safetensors", "progress.jsonl"}
    assert {path.name for path in out.iterdir()} == names | {"result.json", "trace.jsonl"}
    assert result.out == str(out)

    config = json.loads((out / "config.json").read_text())
    assert (config["world"], config["workers"], config["seed"]) == ("shared_memory", 3, 8)
    assert config["strategy"].startswith("SASGD(interval=4")
    assert config["arguments"] == {"samples": 50}
    assert config["versions"]["torch"] == torch.__version__

    assert lines_of(out / "metrics.jsonl") == result.metrics
    pairs = zip(result.metrics, records, strict=True)
    assert [{**record, **passed_on} for record, passed_on in pairs] == result.metrics, "plus totals"
    recorded = json.loads((out / "result.json").read_text())
    assert recorded == json.loads(json.dumps(result.to_record()))
    assert result.loss == result.metrics[-1]["loss"]

    net = runs.new_net()
    net.load_state_dict(load_file(out / "model.safetensors"), strict=True)


@on_shared_memory
def test_the_trace_has_every_batch_once_an_epoch_and_each_rank_in_order(tmp_path):
    how = {"workers": 3, "strategy": "sasgd(interval=4)", "seed": 8}
    result = pl.launch(runs.train, arguments={"samples": 50}, out=tmp_path, **how)
    records = lines_of(tmp_path / "trace.jsonl")
    assert [r["t"] for r in records] == sorted(r["t"] for r in records)

    batches = Counter((r["rank"], r["epoch"], r["index"]) for r in records if r["event"] == "batch")
    expected = {(rank, epoch, index) for rank in range(3) for epoch in (0, 1) for index in range(5)}
    assert batches == Counter(expected)
    for epoch in (0, 1):
        seen = [r["samples"] for r in records if r["event"] == "batch" and r["epoch"] == epoch]
        assert sum(seen) == 50
    for mine in by_rank(records, 3):
        events = [r["event"] for r in mine]
        met = ["batch", "all_reduce", "all_reduce_end", "step"]
        alone = ["batch", "step"]
        exchange = ["all_reduce", "all_reduce_end"]
        first = [*alone * 3, "batch", *exchange * 2, "step"]  # they also agree on weights
        last = [*exchange * 2, "finish"]
        assert events == ["broadcast", *first, *alone * 3, *met, *alone * 2, *last]
        assert [r["step"] for r in mine if r["event"] == "step"] == list(range(10))
    assert sum(r["bytes"] for r in records) == result.bytes_sent


@on_shared_memory
def test_what_an_earlier_run_left_is_removed_and_other_files_stay(tmp_path):
    stale = ["config.json", "metrics.jsonl", "trace.jsonl", "trace.7.jsonl", "model.safetensors"]
    stale.append("result.json")
    for name in [*stale, "notes.txt"]:
        (tmp_path / name).write_text("of an earlier run")
    pl.launch(runs.log_surroundings, workers=2, out=tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    run_files = {"config.json", "events.jsonl", "metrics.jsonl", "progress.jsonl", "result.json"}
    assert left == run_files | {"notes.txt", "trace.jsonl"}
    assert json.loads((tmp_path / "result.json").read_text())["workers"] == 2
    assert (tmp_path / "notes.txt").read_text() == "of an earlier run"
    assert len(lines_of(tmp_path / "metrics.jsonl")) == 2
    assert lines_of(tmp_path / "trace.jsonl") == []


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_refused(out, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pl.UsageError, match=r"out \(.*\) must be a writable folder"):
        pl.launch(runs.train, out=tmp_path / out)
