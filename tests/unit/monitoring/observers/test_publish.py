import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from rftmega.config import RewardConfig, RunConfig, TrainerConfig, without_secrets
from rftmega.core.errors import ConfigError
from rftmega.monitoring.observers.evaluation_table import EvaluationTable, ShownCompletion
from rftmega.monitoring.observers.publish import MLflow, Prometheus, WandB

TRAINER = SimpleNamespace(step=0, resumed=False)


def test_prometheus_is_told_the_last_steps_metrics_on_loopback_alone() -> None:
    watched = Prometheus("127.0.0.1", 0)
    watched.on_start(TRAINER, {"eval_easy-1_reward": 0.25})
    watched.on_step(SimpleNamespace(step=1), {"loss": 3.0})
    watched.on_step(SimpleNamespace(step=2), {"loss": 1.5})
    assert watched.server.server_address[0] == "127.0.0.1"
    address = f"http://127.0.0.1:{watched.port}/metrics"
    lines = httpx.get(address).text.splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "rftmega_eval_easy_1_reward 0.25",
        "rftmega_step 2.0",
        "rftmega_loss 1.5",
    ]
    watched.on_end(TRAINER)
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"logging.prometheus_port={port} can't be opened on 127.0.0.1 .Address already in use",
        ):
            Prometheus("127.0.0.1", port).on_start(TRAINER, {})


def test_what_may_carry_a_password_is_not_published() -> None:
    config = RunConfig(reward=RewardConfig(remote=1.0, remote_url="http://me:secret@host"))
    assert "secret" in str(asdict(config))
    kept = without_secrets(config)
    assert "secret" not in str(kept)
    assert kept["reward"]["remote"] == 1.0


def test_wandb_writes_offline_without_a_network_and_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr("sys.argv", ["train_rl.py", "reward.remote_url=http://me:s3cr3t@host"])
    table = EvaluationTable(str, printed=1)
    table.step, table.rows = 0, [ShownCompletion(0, "easy", 1, "ask", "answer-of-7", "", 0.5, "")]
    config = RunConfig(trainer=TrainerConfig(output=str(tmp_path / "run")))
    writer = WandB("a-project", config, table)
    writer.on_start(TRAINER, {"eval_reward": 0.5})
    monkeypatch.setattr(writer, "table", lambda **_: pytest.fail("an evaluation is a table once"))
    writer.on_step(SimpleNamespace(step=1), {"a_loss_of_1": 3.0})
    writer.on_end(TRAINER)
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # another process writes it
    while b"train/a_loss_of_1" not in written.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert b"a-project" in written.read_bytes()
    (evaluated,) = [path.read_text() for path in tmp_path.rglob("*.table.json")]
    assert "answer-of-7" in evaluated
    known = (tmp_path / "run" / "wandb.id").read_text()
    assert written.name == f"run-{known}.wandb"
    resumed = WandB("a-project", RunConfig(trainer=TrainerConfig(output=str(tmp_path / "run"))))
    resumed.on_start(SimpleNamespace(step=1, resumed=True), {})
    resumed.on_end(TRAINER)
    assert resumed.run.id == known, "a resumed run is another one there"
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()
    ]


def test_mlflow_has_the_options_and_every_step_and_a_resumed_run_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # and back to what it was, at the end
    output = tmp_path / "run"
    reward = RewardConfig(remote_url="http://me:s3cr3t@host")
    config = RunConfig(trainer=TrainerConfig(output=str(output), steps=7), reward=reward)
    first = MLflow("an experiment", config)
    first.on_start(TRAINER, {"eval_reward": 0.5})
    first.on_step(SimpleNamespace(step=1), {"loss": 3.0})
    first.on_end(SimpleNamespace(stopped=True))
    assert first.client.get_run(first.run).info.status == "KILLED"
    second = MLflow("an experiment", config)
    second.on_start(SimpleNamespace(step=1, resumed=True), {})
    second.on_step(SimpleNamespace(step=2), {"loss": 1.5, "grad_norm": float("nan")})
    second.on_end(SimpleNamespace(stopped=False))
    client = mlflow.MlflowClient(f"file://{output}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("an experiment").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.0), (2, 1.5)]
    assert run.data.params["trainer.steps"] == "7"
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()
    ]


TRACKED = """
import sys
from types import SimpleNamespace
from rftmega.monitoring.observers.publish import Trackio
from rftmega.config import RunConfig, TrainerConfig
step, resumed = int(sys.argv[1]), sys.argv[2] == "resumed"
writer = Trackio("a-project", RunConfig(trainer=TrainerConfig(output="run", steps=7)))
writer.on_start(SimpleNamespace(step=step, resumed=resumed), {} if resumed else {"eval_reward": 0.5})
writer.on_step(SimpleNamespace(step=step + 1), {"loss": 3.0 / (step + 1)})
writer.on_end(None)
"""


@pytest.mark.ranks
def test_trackio_has_every_step_and_a_resumed_run_goes_on_there(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    for given in (("0", "anew"), ("1", "resumed")):
        environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "kept")}
        command = [sys.executable, "-c", TRACKED, *given]
        subprocess.run(
            command, env=environment, cwd=tmp_path, check=True, timeout=120, capture_output=True
        )
    with sqlite3.connect(tmp_path / "kept/a-project.db") as kept:
        rows = kept.execute("select run_name, step, metrics from metrics order by id").fetchall()
        (config,) = kept.execute("select config from configs").fetchall()
    name = (tmp_path / "run/trackio.id").read_text()
    assert {run for run, _, _ in rows} == {name}
    found = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert found[:2] == [(0, {"eval/reward": 0.5}), (1, {"train/loss": 3.0})]
    assert found[-1] == (2, {"train/loss": 1.5})
    assert json.loads(config[0])["trainer"]["steps"] == 7


KILLED = """
import os, signal, sys
from types import SimpleNamespace
from rftmega.monitoring.observers.publish import WandB
from rftmega.config import RunConfig

config = RunConfig()
config.trainer.output = sys.argv[1]
WandB("project", config).on_start(SimpleNamespace(step=0, resumed=sys.argv[2] == "again"), {})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks
def test_a_killed_run_leaves_no_folders_of_wandb_but_in_its_own_until_the_next_start(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    shared, output = tmp_path / "tmp", tmp_path / "run"
    shared.mkdir()
    # not the service that an earlier test has started, which would outlive the killed run
    environment = {name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name}
    environment |= {"TMPDIR": str(shared), "WANDB_MODE": "offline"}
    found = []
    for start in ("first", "again"):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(output), start], env=environment, check=False
        )
        assert done.returncode == -9
        waited = time.monotonic() + 60  # for wandb's own process, which ends after ours
        while list(shared.glob("*wandb*")) and time.monotonic() < waited:
            time.sleep(0.2)
        assert list(shared.glob("*wandb*")) == []
        found.append({path.name for path in (output / "wandb/temporary").iterdir()})
    assert found[0] and len(found[0]) == len(found[1]) and not found[0] & found[1]
