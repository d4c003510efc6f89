"""What is nobody else's business: not in any file of a run, nor in what it says."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import ROOT, metrics_of
from tests.unit.rewards.test_remote import server

SECRETS = {
    "WANDB_API_KEY": "s3cr3t" + "0" * 40, "HF_TOKEN": "hf_s3cr3t-1", "HUGGING_FACE_HUB_TOKEN": "hf_s3cr3t-2",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t-3", "OPENAI_API_KEY": "sk-s3cr3t-4", "HTTPS_PROXY": "http://me:s3cr3t-5@127.0.0.1:9",
    "MY_PASSWORD": "s3cr3t-6",
}  # fmt: skip
PART = """
from dataclasses import dataclass
from typing import Literal
from rftmega.config.options.parts import RewardPart, implements
from rftmega.config.options.secrecy import SecretText

@dataclass(frozen=True)
class Keyed(RewardPart):
    type: Literal["keyed"] = "keyed"
    key: SecretText = ""
    named: str = ""

@implements(Keyed)
def keyed(prompts, completions, options, **columns):
    assert options.key.startswith("s3cr3t") and options.named == "s3cr3t-6"
    return [0.0] * len(completions)
"""


def by_length(handler: Any, asked: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps({"rewards": [float(len(text)) for text in asked["responses"]]}).encode()


def leaks(folder: Path, *said: str) -> list[str]:
    """Files with, and lines of `said` around, a secret."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found += [str(path.relative_to(folder))] * (b"s3cr3t" in content)
    return found + [line for text in said for line in text.splitlines() if "s3cr3t" in line]


def started(command: list[str], environment: dict[str, str]) -> tuple[int, str, str, set[str]]:
    """Runs a command. Returns its code, what it said, and the arguments of all its processes."""
    seen: set[str] = set()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        umask=0o022,
    ) as process:  # fmt: skip
        watched, ended = psutil.Process(process.pid), threading.Event()

        def look() -> None:
            while not ended.wait(0.05):
                with contextlib.suppress(psutil.Error):
                    for each in (watched, *watched.children(recursive=True)):
                        seen.update(each.cmdline())

        looking = threading.Thread(target=look)
        looking.start()
        try:
            said, complained = process.communicate(timeout=600)
        finally:
            process.kill()
            ended.set()
            looking.join()
    return process.returncode, said, complained, seen


@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_run_writes_and_says_no_secret(runs: int, arithmetic: Path, tmp_path: Path) -> None:
    """Of its environment, of options that are marked or name a variable, and of the address of a
    reward server: when it saves and tells everybody, and when it goes on.
    """
    pytest.importorskip("wandb")
    output = tmp_path / "out"
    environment = os.environ | SECRETS | {"WANDB_MODE": "offline"}
    with server(by_length) as (address, asked):
        host = address.partition("@")[2].partition("?")[0]
        for steps, secret in ((1, "s3cr3t-7"), (2, "s3cr3t-8"))[:runs]:
            (tmp_path / "part.py").write_text(PART)
            (tmp_path / "run.yaml").write_text(f"""
base: {arithmetic / "run.yaml"}
plugins: [{tmp_path / "part.py"}]
reward:
  remote_url: http://me:{secret}@{host}?key={secret}
  custom: {{keyed: {{weight: 0.1, key: {secret}, named: "${{oc.env:MY_PASSWORD}}"}}}}
""")
            options = [
                f"trainer.steps={steps}", f"trainer.output={output}", "reward.remote=0.5", "trainer.export=true",
                "checkpoint.every=1", "checkpoint.hf=true", "--processes", "2",
                "trainer.trajectories=1", f"logging.timeline=[{steps},{steps}]", "logging.wandb=project",
            ]  # fmt: skip
            command = [
                sys.executable,
                str(ROOT / "train_rl.py"),
                str(tmp_path / "run.yaml"),
                *options,
            ]
            code, said, complained, arguments = started(command, environment)
            assert code == 0, complained
            assert leaks(output, said, complained, *arguments) == []
            assert str(ROOT / "train_rl.py") in arguments and len(arguments) > len(command)
            written = [path for path in (output, *output.rglob("*")) if not path.is_symlink()]
            assert [path for path in written if path.stat().st_mode & 0o007] == [], (
                "others may read it"
            )
    assert asked
    manifest = json.loads((output / f"checkpoints/step_00000{runs}/manifest.json").read_text())
    assert manifest["config"]["reward"]["custom"]["keyed"]["named"] == "${oc.env:MY_PASSWORD}"
    assert "key" not in manifest["config"]["reward"]["custom"]["keyed"]
    assert "${oc.env:MY_PASSWORD}" in (output / "policy/README.md").read_text()
    assert metrics_of(output)[-1]["step"] == runs
    assert {"checkpoints", "policy", "tensorboard", "timeline", "trajectories", "wandb"} <= {
        path.name for path in output.iterdir()
    }


def test_a_leak_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.gz").write_bytes(gzip.compress(b"its s3cr3t-1."))
    (tmp_path / "c").write_bytes(b"\xff\x00s3cr3t")
    (tmp_path / "d").write_bytes(b"none")
    assert leaks(tmp_path, "one\nwith s3cr3t\n") == ["a/b.gz", "c", "with s3cr3t"]
