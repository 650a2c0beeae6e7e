"""The scripts in ``benchmarks``: they run without a GPU, and find what is wrong."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import warm
from support.replays import Replays
from support.runs import train

import paceline as pl
from paceline.lab.network.hosts import HostNetwork
from paceline.sim.cluster import Compute, Link, Loading, load_cluster
from paceline.sim.models import MODELS

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", GPU)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_simulated_models_have_the_sizes_of_the_timed_ones():
    spec = importlib.util.spec_from_file_location(
        "steps_benchmark", GPU.with_name("model_steps.py")
    )
    steps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    assert set(steps.MODELS) == set(MODELS)
    for name, model in steps.MODELS.items():
        with torch.device("meta"):
            parameters = list(model.make().parameters())
        assert sum(p.nbytes for p in parameters) == MODELS[name].bytes, name
        assert len(parameters) == MODELS[name].tensors, name


def load(name, monkeypatch):
    """A script of the benchmarks as a module; it may import other scripts."""
    monkeypatch.syspath_prepend(GPU.parent)
    spec = importlib.util.spec_from_file_location(name, GPU.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_verdicts_says_whether_a_set_up_can_decide_its_claim(monkeypatch):
    texts = {"id": "it", "source": "abstract", "decides": "no, 1 of 2"}
    reports = [
        {"seed": seed, "rates_sha256": "abc", "claims": [{**texts, "verdict": "too small to tell"}]}
        for seed in range(2)
    ]
    head, _, row, *_ = load("papers_table", monkeypatch).verdict_table(reports)
    assert head == "| claim | source | seed 0 | seed 1 | can the set-up decide it? |"
    assert row == "| `it` | abstract | too small to tell | too small to tell | no, 1 of 2 |"


def test_the_table_of_the_drill_shows_its_rows(monkeypatch, tmp_path):
    page, output = tmp_path / "faults.md", tmp_path / "output.json"
    page.write_text("<!-- drill -->\n<!-- end -->\n")
    figures = {"noticed_s": 0.1, "gap_s": 0.25, "throughput": None, "accuracy": 0.8}
    row = {"case": "kill", "method": "gossip", "happened": "it died", "outcome": "passed"}
    rows = [{**row, **figures, "undisturbed": [0.81, 0.01]}]
    output.write_text(json.dumps({"rows": rows, "passed": 1}))
    table = load("drill_table", monkeypatch)
    monkeypatch.setattr(table, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["drill_table", str(output)])
    table.main()
    expected = "| `gossip` | it died | 0.10 s | 0.25 s |  | 0.800 (0.810 ± 0.010) | passed |"
    assert "1 of 1 passed." in page.read_text() and expected in page.read_text()


def test_the_table_of_hosts_has_a_column_for_each_engine(monkeypatch):
    table = load("hosts_table", monkeypatch)
    case = {"link": "100 Mbit", "what": "send", "bytes": 4 << 20}
    rows = [
        {**case, "engine": engine, "ms": 1000.0 + number, "share_of_line": 0.5}
        for number, engine in enumerate(table.ENGINES)
    ]
    rows += [
        {**case, "what": "64 bytes behind it", "engine": engine, "ms": 5.0, "small_ms": 5.0}
        for engine in table.ENGINES
    ]
    assert table.table_of(rows) == [
        "| line | what | bytes | encrypted | not encrypted | gloo |",
        "|---|---|---|---|---|---|",
        "| 100 Mbit | send | 4 MB | 1,000.0 ms (0.50) | 1,001.0 ms (0.50) | 1,002.0 ms (0.50) |",
        "| 100 Mbit | 64 bytes behind it | 4 MB | 5.0 ms | 5.0 ms | 5.0 ms |",
    ]


@pytest.mark.transport("distributed")
def test_the_gpu_check_compares_the_cpu_with_itself(tmp_path):
    chosen = ["--device", "cpu", "--strategies", "allreduce,downpour", "--optimizers", "momentum"]
    done = subprocess.run(
        [warm.python(), GPU, *chosen], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines, summary = done.stdout.splitlines()
    assert first.startswith("cpu, torch ")
    assert [line.split()[:4] for line in lines] == [
        [name, many, "worker" + "s" * (many == "2"), "momentum"]
        for name in ("allreduce", "downpour")
        for many in "12"
    ]
    assert all(" PASS  finite, parameters differ by 0.0e+00" in line for line in lines[:3])
    assert " PASS  finite, loss " in lines[3]
    assert summary.startswith("4 of 4 passed, 0 failed")


def outcomes(gpu, ours, cpu):
    """Replaces the runs: the outcome on the device, and on the CPU."""

    def outcome(case, device, transport, amp):
        planned = cpu if device == "cpu" else ours
        if isinstance(planned, Exception):
            raise planned
        loss, value = planned
        return gpu.Outcome(loss, {"weight": torch.tensor([3.0, 4.0]) * value})

    return outcome


@pytest.mark.parametrize(
    ("ours", "cpu", "deterministic", "asynchronous"),
    [
        ((0.2, 1.0), (0.2, 1.0), "PASS  finite, parameters differ by 0.0e+00", "PASS"),
        ((0.2, 1.00009), (0.2, 1.0), "PASS  finite, parameters differ by 9.0e-05", "PASS"),
        ((0.2, 1.00011), (0.2, 1.0), "FAIL  finite, parameters differ by 1.1e-04", "PASS"),
        ((0.8, 2.0), (0.2, 1.0), "FAIL", "FAIL  finite, loss 0.800 differs by 6.0e-01"),
        ((0.5, 1.0), (0.2, 1.0), "PASS", "PASS  finite, loss 0.500 differs by 3.0e-01"),
        ((0.2, math.nan), (0.2, 1.0), "FAIL  not finite", "FAIL  not finite"),
        ((None, 1.0), (0.2, 1.0), "FAIL  not finite", "FAIL  not finite"),
        ((0.2, 1.0), (0.2, 0.0), "FAIL  finite, parameters differ by inf", "PASS"),
        ((0.2, 0.0), (0.2, 0.0), "PASS  finite, parameters differ by 0.0e+00", "PASS"),
        (pl.UsageError("no\nnccl"), (0.2, 1.0), "FAIL  on meta: no nccl", "FAIL  on meta"),
    ],
)
def test_the_gpu_check_finds_what_is_wrong(
    gpu, ours, cpu, deterministic, asynchronous, monkeypatch, capsys
):
    monkeypatch.setattr(gpu, "outcome", outcomes(gpu, ours, cpu))
    line = ["gpu.py", "--device", "meta", "--strategies", "sasgd(interval=2, warmup=1),ssp"]
    monkeypatch.setattr(sys, "argv", line)
    code = gpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 8 + 1
    for shown in lines[1:9]:
        assert (asynchronous if "ssp" in shown and "2 workers" in shown else deterministic) in shown
    failed = sum("FAIL" in shown for shown in lines)
    assert code == int(failed > 0)
    assert lines[-1].startswith(f"{8 - failed} of 8 passed, {failed} failed")


def test_the_gpu_check_needs_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        gpu.main()


@pytest.mark.parametrize(
    ("device", "visible", "used"),
    [("cuda", "", "0"), ("cuda:1", "", "1"), ("cuda", "5,7", "5"), ("cuda:1", "5,7", "7")],
)
def test_the_gpu_check_has_workers_share_a_gpu(gpu, device, visible, used, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.use_one_gpu(device) == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == used
    assert gpu.use_one_gpu("cpu") == "cpu"


def test_the_gpu_check_covers_every_method(gpu, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    options = gpu.read_options()
    cases = list(gpu.cases_of(options.strategies, options.optimizers))
    assert {case.strategy for case in cases} == set(gpu.strategy_names())
    assert len(cases) == 4 * len(gpu.strategy_names())
    assert options.transport == "distributed"


@pytest.fixture
def slow_network(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU.parent))
    yield importlib.import_module("slow_network")
    for name in ("slow_network", "methods_table"):
        del sys.modules[name]


def outcome_of(slow_network, *evaluations, samples=100):
    return slow_network.Outcome(
        seconds=10.0,
        steps=4,
        samples=samples,
        bytes_sent=None,
        wire_bytes=3_000_000,
        evaluations=[
            slow_network.Evaluation(at_s, 0.5, accuracy) for at_s, accuracy in evaluations
        ],
    )


def test_the_slow_network_table_is_sorted_by_time_to_accuracy(slow_network):
    quick = outcome_of(slow_network, (1.0, 0.7), (2.0, 0.8), (3.0, 0.79))
    slow, never = outcome_of(slow_network, (8.0, 0.81)), outcome_of(slow_network, (4.0, 0.5))
    outcomes_by_way = {
        "cyclic": [quick, never],
        slow_network.DDP: [slow, slow],
        "sasgd": [quick, quick],
    }
    _, _, *rows = slow_network.lines_of(outcomes_by_way)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["`sasgd`", "torch DDP", "`cyclic`"]
    assert [row[1] for row in cells] == ["4", "4", "5"]
    assert cells[0][2:5] == ["2.0 (2.0 to 2.0)", "0.25", "0.790 (0.790 to 0.790)"]
    assert cells[2][2:4] == ["not reached (1 of 2)", "-"]
    assert cells[1][5:] == ["10", "-", "3 MB"]


def test_the_slow_network_runs_no_job_twice(slow_network, tmp_path, monkeypatch):
    jobs = []

    def run_job(network, job):
        jobs.append(job)
        return outcome_of(slow_network, (1.0, 0.9), samples=len(jobs))

    monkeypatch.setattr(slow_network, "run_job", run_job)
    network, job = HostNetwork(4, rate_mbit=100), slow_network.Job(way="sasgd")
    first = slow_network.JobCache(tmp_path).outcome(network, job)
    assert slow_network.JobCache(tmp_path).outcome(network, job) == first
    assert jobs == [job]
    for line in ({"rate_mbit": 1000}, {"rate_mbit": 100, "delay_ms": 50}):
        slow_network.JobCache(tmp_path).outcome(HostNetwork(4, **line), job)
    assert len(jobs) == 3


def test_a_prediction_is_compared_with_its_own_measurement(slow_network):
    row = slow_network.row_of("sasgd", [110.0, 220.0, 55.0], [100.0, 200.0, 50.0])
    assert row["error"] == pytest.approx(0.1) and row["spread"] == pytest.approx(0.75)
    assert slow_network.prediction_lines([row])[-1].endswith("| +10% | ±75% | yes |")


def test_bench_scale_times_a_step_by_method_and_workers():
    from paceline.lab.bench.sim import bench_scale

    rows = bench_scale(["gossip", "downpour"], (2, 3), repeats=1, steps=2)
    assert [(row["strategy"], row["workers"]) for row in rows] == [
        (strategy, workers) for strategy in (None, "gossip", "downpour") for workers in (2, 3)
    ]
    assert all(row["cpu_us_per_step"] > 0 for row in rows)
    assert [row["ratio_to_fewest"] for row in rows[::2]] == [1.0] * 3


# The laboratory ---------------------------------------------------------------------------------


def test_bench_lab_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    from paceline.lab.bench import lab

    monkeypatch.setattr(lab, "WARM_UP", 2)
    monkeypatch.setattr(lab, "STEPS", 2)
    cases = [*lab.cases_of(["mlp"], [3], ["gossip", "no method"], ["default"], "cpu", "on")]
    seen, file = [], tmp_path / "rows.jsonl"
    first = lab.bench_lab(cases[1:], file, on_row=seen.append)
    rows = lab.bench_lab(cases, file, on_row=seen.append)
    assert rows[1] == first[0]
    # what has failed is tried again
    assert [row["method"] for row in seen] == ["gossip", "no method", "joint step", "no method"]
    joint, simulated, failed = rows
    assert [row["method"] for row in rows] == ["joint step", "gossip", "no method"]
    for row in (joint, simulated):
        assert min(row[f"{name}_us"] for name in ("batched", "one_by_one", "big_batch")) > 0
    assert simulated["share"] > 0.5 and simulated["recorded"] == 0
    # parameters, gradients and momentum of three MLPs
    assert simulated["own_gb"] == pytest.approx(3 * 3 * 4 * 101_770 / 1e9)
    assert "no method" in failed["error"]
    assert lab.bench_lab(cases, seconds=-1.0) == []


@pytest.mark.parametrize("model", ["cnn", "resnet20"])
def test_a_recorded_joint_step_is_the_one_that_is_told(model, monkeypatch):
    from paceline.lab.bench import lab

    monkeypatch.setattr(lab, "AT_MOST", 2)
    monkeypatch.setattr(lab.Case, "batch_size", 2)
    case, ends = lab.Case(model=model, workers=3, method=lab.JOINT), []
    for recorder in (None, Replays()):
        torch.manual_seed(0)
        step, rows = lab.joint_step(case, recorder)
        for _ in range(2):
            step()
        ends.append(rows.x[:3].clone())
    told, recorded = ends
    assert float((recorded - told).norm() / told.norm()) < 1e-4  # of sums in another order


def test_the_check_of_a_gpu_makes_each_piece_once(tmp_path, monkeypatch, capsys):
    script = load("lab_gpu", monkeypatch)
    monkeypatch.setattr(script, "STRATEGIES", ["gossip", "allreduce"])
    out = tmp_path / "lab.jsonl"
    monkeypatch.setattr(sys, "argv", ["lab_gpu.py", "--device", "cpu", "--out", str(out)])
    assert script.main() == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 9 and all(record.get("ok", True) for record in records)
    assert "9 done, 0 left, 0 failed: none" in capsys.readouterr().out
    assert script.main() == 0 and len(out.read_text().splitlines()) == 9


def test_the_check_of_a_gpu_finds_another_gradient(monkeypatch):
    script = load("lab_gpu", monkeypatch)
    together = script.joint_of

    def off(program, cases):
        return together(program, [case._replace(x=case.x * 1.0001) for case in cases])

    options = script.Options("cpu", 4)
    assert script.check_gradients("mlp", options)["ok"]
    monkeypatch.setattr(script, "joint_of", off)
    assert not script.check_gradients("mlp", options)["ok"]


# Timelines ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timelines():
    spec = importlib.util.spec_from_file_location("timelines", GPU.parent / "timelines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cluster_is_recovered_from_the_timeline_of_a_run_on_it(timelines, tmp_path):
    """docs/timelines/here.toml is made this way."""
    truth = pl.Cluster(
        ranks_per_node=0,
        inside=Link(latency_s=timelines.LATENCY_S, bytes_per_s=1e6),
        compute=Compute(step_s=0.02, trace=(0.5, 1.0, 1.5)),
        loading=Loading(batch_s=0.003),
    )
    pl.simulate(train, workers=2, cluster=truth, out=tmp_path, arguments={"epochs": 4})
    (tmp_path / "here.toml").write_text(timelines.measure(tmp_path))
    measured = load_cluster(tmp_path / "here.toml")
    assert (measured.name, measured.ranks_per_node) == ("this machine", 0)
    assert measured.compute.step_s == pytest.approx(0.02, rel=0.01)
    assert set(measured.compute.trace) == {0.5, 1.0, 1.5}
    assert measured.loading.batch_s == pytest.approx(0.003, rel=0.01)
    assert measured.inside.bytes_per_s == pytest.approx(1e6, rel=0.01)


def test_garbage_at_every_listener_stops_nothing():
    line = [sys.executable, GPU.with_name("fuzz_hosts.py"), "--frames", "300"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = [line.split()[0] for line in ended.stdout.splitlines()[:-2]]
    assert found == ["agent", "launcher", *["pl-rank-0"] * 2, *["pl-rank-1"] * 2, "pl-registrar"]
