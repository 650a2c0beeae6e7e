"""``paceline calibrate`` with the smallest settings: what it writes, shows and refuses."""

from __future__ import annotations

import json
import subprocess

import pytest
from support import runs, warm
from support.worlds import on_hosts

from paceline.sim.cluster import read_cluster

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

def learn(worker, steps=int(sys.argv[1])):
    net = torch.nn.Linear(8, 2)
    net, sgd = worker.setup(net, torch.optim.Adam(net.parameters()))
    data = TensorDataset(torch.randn(8192, 8), torch.randn(8192, 2))
    loader = worker.setup_dataloaders(DataLoader(data, batch_size=4))
    for number, (x, y) in enumerate(loader):
        if number == steps:
            break
        sgd.zero_grad()
        (net(x) - y).square().mean().backward()
        sgd.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "mine.py").write_text(SCRIPT)
    return folder


def output_of(folder, *arguments, env=None):
    command, *more = arguments
    done = subprocess.run(
        [warm.python(), "-m", "paceline", command, "--json", *more],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@on_hosts
def test_a_calibration_of_two_hosts_has_the_link_between_them(folder):
    address, settings = f"127.0.0.1:{runs.free_port()}", ["--model", "mlp", "--steps", "16"]
    other = [warm.python(), "-m", "paceline", "run", "--join", address]
    token = runs.environment() | {"PACELINE_TOKEN": "5a" * 32}
    with subprocess.Popen(other, env=token, cwd=folder, stderr=subprocess.PIPE) as joined:
        measured = [
            "calibrate",
            "--listen",
            address,
            *settings,
            "--rounds",
            "1",
            "--out",
            "two.toml",
        ]
        found = output_of(folder, *measured, env=token)
        assert joined.wait() == 0
    fits = {fit["what"]: fit for fit in found["fits"]}
    assert found["transport"] == "hosts" and fits["network"]["start_s"] > 0
    cluster = read_cluster(folder / "two.toml")
    assert cluster.registrar == 0 and cluster.ranks_per_node == cluster.cores
    assert cluster.network.latency_s == fits["network"]["start_s"]
    run = ["sim", "-s", "gossip", "--cluster", "two.toml", "--model", "mlp", "--steps", "4"]
    assert output_of(folder, *run, "--workers", "4")["steps"] == 16


@pytest.mark.transport("shared_memory")
def test_a_calibration_is_a_cluster_that_simulations_read(folder):
    found = output_of(folder, "calibrate", "--model", "mlp", "--steps", "16", "--rounds", "1")
    assert found["cluster"] == "machine.toml" and found["transport"] == "shared_memory"
    assert found["cores"] >= 1 and found["model_bytes"] == 407080 and found["crowding"] > 0
    fits = {fit["what"]: fit for fit in found["fits"]}
    assert {"gradient", "loading", "link", "variation"} < set(fits)
    for what in ("gradient", "post", "take", "publish", "peek", "reduce", "serve"):
        assert fits[what]["start_s"] >= 0 and fits[what]["error"] >= 0
        assert fits[what]["start_s"] + fits[what].get("byte_s", fits[what].get("sample_s")) > 0
    run = ["sim", "--cluster", "machine.toml", "--model", "mlp", "--steps", "4", "--workers", "3"]
    result = output_of(folder, *run)
    assert result["virtual_seconds"] > 0 and result["samples_per_s"] > 0


@pytest.mark.transport("distributed")
def test_a_check_predicts_then_measures_and_reports_each_error(folder):
    choose = ["--strategy", "sasgd(interval=2),downpour", "--workers", "2", "--repeats", "2"]
    less = ["--rounds", "1", "--transport", "distributed"]  # over the file of the other test
    script = ["mine.py", "--function", "learn"]
    found = output_of(folder, "calibrate", *script, "--check", *choose, *less, "--", "16")
    assert [row["what"] for row in found["rows"]] == [
        "mine.py, sasgd(interval=2), 2 workers",
        "mine.py, downpour, 2 workers",
    ]
    for row in found["rows"]:
        low, high = sorted(row["runs"])
        assert row["measured"] == pytest.approx((low + high) / 2) and low > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        assert row["spread"] == pytest.approx((high - low) / 2**0.5 / row["measured"])
        assert 0 <= row["busy"] <= 1
        assert row["within"] == (abs(row["error"]) <= max(0.15, 2 * row["spread"]))
    (ranking,) = found["ranking"]
    methods = ["downpour", "sasgd(interval=2)"]
    assert sorted(ranking["predicted"]) == sorted(ranking["measured"]) == methods
    assert found["within"] == sum(row["within"] for row in found["rows"])
    assert "mine.py" in (folder / "machine.toml").read_text()
    assert found["clusters"] == ["machine.toml"]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("--model widest", "model (widest) must be one of cnn, mlp, wide"),
        ("--transport pigeon", "transport (pigeon) must be one of shared_memory, distributed"),
        ("--rounds 0", "rounds (0) must be at least 1"),
        ("--steps 0", "steps (0) must be at least 1"),
        ("--repeats 3", "--repeats (3) must be given together with --check"),
        ("--workers 3", "--workers (['3']) must be given together with --check"),
        ("--check --repeats 0", "repeats (0) must be at least 1"),
        ("--check --workers many", "workers (many) must be a whole number"),
        ("--check --strategy gosip", 'no strategy "gosip"; did you mean "gossip"?'),
        ("--out machine.txt", "out (machine.txt) must end in .toml"),
        ("--out no/where.toml", "out (no/where.toml) must be in a folder that exists"),
        ("--out own.toml", "out (own.toml) exists and is not the file of an earlier calibration"),
        ("mine.py --function learn --model mlp", "learn in mine.py has no parameter model"),
        ("absent.py", "script (absent.py) cannot be read"),
    ],
)
def test_bad_input_is_refused(line, rule, paceline, tmp_path):
    (tmp_path / "own.toml").write_text("cores = 2\n")
    (tmp_path / "mine.py").write_text(SCRIPT)
    assert rule in paceline("calibrate", *line.split(), code=2).err
