"""TensorBoard, Weights & Biases, MLflow and frames, with the real packages."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support import runs
from support.hermetic import outside
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from wandb.proto import wandb_internal_pb2

import paceline as pl

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def train(worker):
    runs.train(worker)
    worker.log(note="a text")


@pytest.fixture(autouse=True)
def platforms(monkeypatch, tmp_path):
    """MLflow and W&B look which platform they are on, and whether the script is in a repository."""
    roots = [os.environ[outside.ROOTS], "/databricks", "/opt/ml", "/.dockerenv"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    with monkeypatch.context() as within:
        within.setenv(outside.ROOTS, os.pathsep.join(roots))
        outside.watch()
        yield
    outside.watch()


def simulate(log, out, **more):
    """Three workers, of whom one is lost."""
    faults = [pl.kill(rank=1).at(step=3)]
    how = {"workers": 3, "strategy": "gossip", "faults": faults, "seed": 7}
    return pl.simulate(train, log=log, out=out, **how, **more)


def losses(result, rank):
    return [m["loss"] for m in result.metrics if m["rank"] == rank and "loss" in m]


# TensorBoard -------------------------------------------------------------------------------------


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def test_tensorboard_has_every_workers_metrics_the_loss_and_the_settings(tmp_path):
    result = simulate("tensorboard", tmp_path)
    for rank in (0, 2):
        seen = read(tmp_path / "tensorboard" / f"worker-{rank}")
        tensors = seen.Tensors("loss")
        values = [tensor.tensor_proto.float_val[0] for tensor in tensors]
        assert values == pytest.approx(losses(result, rank))
        steps = [m["step"] for m in result.metrics if m["rank"] == rank and "loss" in m]
        assert [tensor.step for tensor in tensors] == steps
        assert [t.tensor_proto.string_val[0] for t in seen.Tensors("note")] == [b"a text"]
    whole = read(tmp_path / "tensorboard")
    (lost,) = whole.Tensors("events")
    assert b"rank 1 lost" in lost.tensor_proto.string_val[0]
    content = whole.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = metadata.parse_session_start_info_plugin_data(content).hparams
    assert settings["workers"].number_value == 3 and settings["spec"].string_value == "gossip"


def test_a_tensorboard_folder_that_is_deleted_is_made_again(tmp_path):
    folder = tmp_path / "tensorboard"

    def delete(record):
        if record["rank"] == 0 and record["step"] == 5:
            shutil.rmtree(folder, ignore_errors=True)

    result = simulate("tensorboard", tmp_path, on_metric=delete)
    assert result.loss is not None
    last = [m["step"] for m in result.metrics if m["rank"] == 0 and "loss" in m][-1]
    assert read(folder / "worker-0").Tensors("loss")[-1].step == last


# Weights & Biases --------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))


def wandb_records(folder: Path):
    """The records of the only offline run in a folder."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for data in parts_of(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def parts_of(data: bytes):
    """The records of a LevelDB log, after a header of 7 bytes; a record may be in many blocks."""
    whole, at, block = b"", 7, 32768
    while at + 7 < len(data):
        if block - at % block < 7:
            at += block - at % block
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


def named(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_wandb_has_every_workers_metrics_the_loss_and_the_settings(offline, tmp_path):
    result = simulate("wandb", tmp_path / "run")
    records = [*wandb_records(tmp_path / "run")]
    history = [named(r.history.item) for r in records if r.HasField("history")]
    for rank in (0, 2):
        name = f"loss/worker-{rank}"
        logged = [row[name] for row in history if name in row]
        assert logged == pytest.approx(losses(result, rank))
    assert [row["events/lost"] for row in history if "events/lost" in row] == [1]
    config = named(next(r.run.config.update for r in records if r.HasField("run")))
    assert config["workers"] == 3 and config["spec"] == "gossip"


# MLflow ------------------------------------------------------------------------------------------


def test_mlflow_has_every_workers_metrics_the_loss_and_the_settings(monkeypatch, tmp_path):
    import mlflow  # here, because its import looks at the platform

    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    result = simulate("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["workers"] == "3" and run.data.params["spec"] == "gossip"
    for rank in (0, 2):
        history = client.get_metric_history(run.info.run_id, f"loss/worker-{rank}")
        assert [point.value for point in history] == pytest.approx(losses(result, rank))
    assert run.data.metrics["events/lost"] == 1
    assert "rank 1 lost" in run.data.tags["event.0001"]


class Refusing(BaseHTTPRequestHandler):
    """A server that has an error for everyone."""

    asked = 0

    def do_POST(self):
        type(self).asked += 1
        self.send_error(500)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *args):
        pass


@pytest.fixture
def broken_server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_run_goes_on_without_an_mlflow_that_has_errors(monkeypatch, broken_server, tmp_path):
    whole = simulate((), tmp_path / "whole")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", broken_server)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(UserWarning, match=r"log \(mlflow\) loses records: .*500") as seen:
        result = simulate("mlflow", tmp_path / "run")
    assert len([w for w in seen if "loses records" in str(w.message)]) == 1
    assert Refusing.asked and result.trace_hash == whole.trace_hash
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


# Real processes -----------------------------------------------------------------------------------


def test_real_workers_are_logged_by_the_command_line(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "loggers.md").read_text()
    (line,) = [one for one in page.splitlines() if one.startswith("paceline run --log")]
    program = [sys.executable, "-m", *shlex.split(line)]
    subprocess.run(program, cwd=tmp_path, check=True)
    folder = tmp_path / "runs" / "logged"
    assert (folder / "metrics.csv").exists()
    assert "loss" in read(folder / "tensorboard" / "worker-0").Tags()["tensors"], "it evaluates"


# Frames ------------------------------------------------------------------------------------------


def test_a_frame_has_a_row_for_each_record(tmp_path):
    result = simulate((), None)
    frame = result.frame()
    assert type(frame).__module__.startswith("pandas")
    assert len(frame) == len(result.metrics)
    assert frame[frame["rank"] == 0]["loss"].dropna().tolist() == losses(result, 0)


def test_without_pandas_it_is_a_frame_of_polars(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = simulate((), None)
    frame = result.frame()
    assert type(frame).__module__.startswith("polars")
    assert len(frame) == len(result.metrics) and set(frame.columns) >= {"t", "loss", "note"}
