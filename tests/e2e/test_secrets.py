"""What is nobody else's business: not in any file of a run, nor in what it says."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, metrics_of
from tests.unit.rewards.test_remote import server

SECRETS = {
    "WANDB_API_KEY": "s3cr3t" + "0" * 40, "HF_TOKEN": "hf_s3cr3t-1", "HUGGING_FACE_HUB_TOKEN": "hf_s3cr3t-2",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t-3", "OPENAI_API_KEY": "sk-s3cr3t-4", "HTTPS_PROXY": "http://me:s3cr3t-5@127.0.0.1:9",
    "MY_PASSWORD": "s3cr3t-6",
}  # fmt: skip


def by_length(handler: Any, asked: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps({"rewards": [float(len(text)) for text in asked["responses"]]}).encode()


def leaks(folder: Path, *said: str) -> list[str]:
    """Files with, and lines of `said` around, a secret."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found += [str(path.relative_to(folder))] * (b"s3cr3t" in content)
    return found + [line for text in said for line in text.splitlines() if "s3cr3t" in line]


def test_a_run_writes_and_says_no_secret(arithmetic: Path, tmp_path: Path) -> None:
    """Of its environment, and of the address of a reward server: when it saves and tells everybody,
    and when it goes on.
    """
    pytest.importorskip("wandb")
    output = tmp_path / "out"
    environment = os.environ | SECRETS | {"WANDB_MODE": "offline"}
    with server(by_length) as (address, asked):
        host = address.partition("@")[2].partition("?")[0]
        for steps, secret in ((1, "s3cr3t-7"), (2, "s3cr3t-8")):
            options = [
                f"trainer.steps={steps}", f"trainer.output={output}", "reward.remote=0.5", "trainer.export=true",
                f"reward.remote_url=http://me:{secret}@{host}?key={secret}", "checkpoint.every=1", "checkpoint.hf=true",
                "trainer.trajectories=1", f"logging.timeline=[{steps},{steps}]", "logging.wandb=project",
            ]  # fmt: skip
            command = [
                sys.executable,
                str(ROOT / "train_rl.py"),
                str(arithmetic / "run.yaml"),
                *options,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT, env=environment,
                                  umask=0o022)  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert leaks(output, done.stdout, done.stderr) == []
            written = [path for path in (output, *output.rglob("*")) if not path.is_symlink()]
            assert [path for path in written if path.stat().st_mode & 0o007] == [], (
                "others may read it"
            )
    assert asked
    assert metrics_of(output)[-1]["step"] == 2
    assert {"checkpoints", "policy", "tensorboard", "timeline", "trajectories", "wandb"} <= {
        path.name for path in output.iterdir()
    }


def test_a_leak_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.gz").write_bytes(gzip.compress(b"its s3cr3t-1."))
    (tmp_path / "c").write_bytes(b"\xff\x00s3cr3t")
    (tmp_path / "d").write_bytes(b"none")
    assert leaks(tmp_path, "one\nwith s3cr3t\n") == ["a/b.gz", "c", "with s3cr3t"]
