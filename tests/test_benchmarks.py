"""The scripts in ``benchmarks``: they run where there is no GPU, too, and see what is wrong."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline as pl

GPU = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu_benchmark", GPU)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.transport("distributed")
def test_the_gpu_check_compares_the_cpu_with_itself(tmp_path):
    chosen = ["--device", "cpu", "--strategies", "allreduce,downpour", "--optimizers", "momentum"]
    done = subprocess.run(
        [sys.executable, GPU, *chosen], capture_output=True, text=True, cwd=tmp_path, check=False
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
    """In place of the runs: what the device comes to, and what the CPU does."""

    def outcome(case, device, transport):
        told = cpu if device == "cpu" else ours
        if isinstance(told, Exception):
            raise told
        loss, value = told
        return gpu.Outcome(loss, {"weight": torch.tensor([3.0, 4.0]) * value})

    return outcome


@pytest.mark.parametrize(
    ("ours", "cpu", "repeated", "free"),
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
def test_the_gpu_check_sees_what_is_wrong(gpu, ours, cpu, repeated, free, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "outcome", outcomes(gpu, ours, cpu))
    line = ["gpu.py", "--device", "meta", "--strategies", "sasgd(interval=2, warmup=1),ssp"]
    monkeypatch.setattr(sys, "argv", line)
    code = gpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 8 + 1
    for shown in lines[1:9]:
        assert (free if "ssp" in shown and "2 workers" in shown else repeated) in shown
    failed = sum("FAIL" in shown for shown in lines)
    assert code == int(failed > 0)
    assert lines[-1].startswith(f"{8 - failed} of 8 passed, {failed} failed")


def test_the_gpu_check_needs_one(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        gpu.main()


@pytest.mark.parametrize(
    ("device", "seen", "left"),
    [("cuda", "", "0"), ("cuda:1", "", "1"), ("cuda", "5,7", "5"), ("cuda:1", "5,7", "7")],
)
def test_the_gpu_check_has_workers_share_one(gpu, device, seen, left, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert gpu.see_one(device) == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert gpu.see_one("cpu") == "cpu"


def test_the_gpu_check_takes_every_method(gpu, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    options = gpu.read_options()
    cases = list(gpu.cases_of(options.strategies, options.optimizers))
    assert {case.strategy for case in cases} == set(gpu.strategy_names())
    assert len(cases) == 4 * len(gpu.strategy_names())
    assert options.transport == "distributed"
