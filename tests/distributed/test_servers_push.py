"""Weights that reach each server for itself: over a process group, or through files."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Prompt
from rftmega.rollout.servers.vllm import auth
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.server_groups import gap_of_completions
from tests.tiny_models import save_tiny

PROMPTS = [Prompt((5, 9, 100)), Prompt((3,)), Prompt((5, 9, 100, 7, 7, 8, 1, 2, 3, 4))]
TEMPERATURE = 0.7


class Trainer:
    """A trainer and its servers."""

    def __init__(
        self, world: Any, folder: Path, logs: Path, parallel: ParallelConfig, **rollout: Any
    ):
        from rftmega.rollout.servers.server_engine import ServerEngine

        self.actor = build_actor(folder, parallel, temperature=TEMPERATURE, token_cap=512)
        config = RolloutConfig(
            max_prompt_tokens=32,
            max_response_tokens=12,
            cpu_cache_gib=0.05,
            max_batch=8,
            weights_folder=str(logs / "weights"),
            **rollout,
        )
        self.engine = ServerEngine(
            folder, config, world, dtype="float32", stop_ids=[1], logs=logs / "servers"
        )
        shards = self.actor.manager.shards()
        self.weights: Any = self.engine.weight_sync(shards, bucket_bytes=20_000)

    def change(self, factor: float) -> None:
        with torch.no_grad():
            for item in self.actor.manager.bound:
                item.parameter.mul_(factor)

    def gap(self) -> tuple[float, set[int]]:
        """The largest difference of log-probs, and the versions of the answers."""
        largest, completions = gap_of_completions(self.engine, self.actor, PROMPTS, TEMPERATURE)
        return largest, {completion.policy_version for completion in completions}


def push_body(world: Any, folder: Path, logs: Path, parallel: ParallelConfig, rollout: Any) -> Any:
    trainer = Trainer(world, folder, logs, parallel, **rollout)
    weights = trainer.weights
    seen: dict[str, Any] = {"pushes": []}
    try:
        for version in range(3):
            seen["pushes"].append((weights.push(version=version), trainer.gap()))
            seen.setdefault("intact", []).append(all(each.intact for each in weights.checksums()))
            trainer.change(0.9)
        seen["changed since"] = not any(each.intact for each in weights.checksums())
    finally:
        trainer.engine.close()
    return seen


LAYOUTS = [
    pytest.param("network", {"tensor": 2, "sequence": True, "expert": 2}, {}, id="network-tp2-ep2"),
    pytest.param(
        "network",
        {"tensor": 2, "pipeline": 2},
        {"servers": 2, "tensor": 2},
        id="network-tp2-pp2-two-servers-of-two",
    ),
    pytest.param("disk", {"tensor": 2, "sequence": True, "expert": 2}, {}, id="disk-tp2-ep2"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("transport", "parallel", "rollout"), LAYOUTS)
def test_servers_answer_under_each_push_as_the_trainer_scores(
    transport: str, parallel: dict[str, Any], rollout: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3-moe" if "expert" in parallel else "qwen3")
    size = parallel["tensor"] * parallel.get("pipeline", 1)
    given = {"transport": transport, **rollout}
    for seen in run_ranks(
        size, push_body, folder, tmp_path, ParallelConfig(**parallel), given, timeout=300
    ):
        for version, (metrics, (gap, versions)) in enumerate(seen["pushes"]):
            assert gap < 1e-5 and versions == {version}
            assert metrics["push_ratio"] == 1 and metrics["push_missed"] == 0
            assert metrics["servers_healthy"] == metrics["server_starts"] == given.get("servers", 1)
            assert metrics["server_0_requests"] == 3 * version
        assert seen["intact"] == [True] * 3 and seen["changed since"]


@contextmanager
def another_vllm(folder: Path, log: Path) -> Iterator[str]:
    """Yields the address of a vLLM server that somebody started who knows nothing of this package."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}"),
        *("--host=127.0.0.1", f"--port={port}", "--enable-scale-out", "--dtype=float32"),
        *("--logprobs-mode=processed_logprobs", "--skip-tokenizer-init", "--max-model-len=64"),
        *("--kv-cache-memory-bytes=50000000", "--enforce-eager", "--api-key=the key"),
    ]
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as said:
        process = subprocess.Popen(
            command, env=os.environ | own, stdout=said, stderr=said, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


@pytest.mark.ranks
@pytest.mark.parametrize("on_update", ["wait", "keep"])
def test_a_vllm_server_without_this_package_answers_under_each_push(
    on_update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(auth.KEY, "the key")
    folder = save_tiny(tmp_path / "model", "qwen3")
    with another_vllm(folder, tmp_path / "vllm.log") as address:
        given = {"transport": "checkpoint", "addresses": [address], "on_update": on_update}
        layout = ParallelConfig(tensor=2)
        for seen in run_ranks(2, push_body, folder, tmp_path, layout, given, timeout=300):
            for version, (metrics, (gap, versions)) in enumerate(seen["pushes"]):
                assert gap < 1e-5 and versions == {version}
                assert metrics["push_ratio"] == metrics["servers_healthy"] == 1
            assert seen["intact"] == [True] * 3 and seen["changed since"]
    kept = {path.name for path in (tmp_path / "weights").iterdir()}
    assert kept == {"version-1", "version-2"}
