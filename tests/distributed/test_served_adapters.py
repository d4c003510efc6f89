"""Adapters that are pushed as adapters to vLLM servers: the frozen model goes to each once, and a server
says what the trainer says after every push.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.config import LoRA, OptimizerConfig, ParallelConfig, RolloutConfig
from rftmega.core.errors import EngineError
from rftmega.core.shards import AdapterSource
from rftmega.core.types import Prompt, Sampling
from rftmega.rollout.servers.vllm import auth
from rftmega.trainer.experience import given
from tests.layouts import build_actor, rows_of
from tests.plain_adapters import random_pairs, write_pairs
from tests.ranks import VLLM, run_ranks
from tests.server_groups import KEY, gap_of_completions, two_servers_elsewhere
from tests.tiny_models import save_tiny

PRELOADED = VLLM

P = ParallelConfig
# the last fills a block of the prefix cache, which is then found again
LONG = tuple((37 * i) % 129 + 2 for i in range(150))
PROMPTS = [Prompt((5, 9, 100)), Prompt((3,)), Prompt(LONG)]
ROWS = [[(37 * i + 11 * b) % 131 for i in range(n)] for b, n in enumerate((30, 17, 26))]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-4)
TEMPERATURE = 0.7


class Served:
    """A policy with adapters, and servers that answer with them."""

    def __init__(
        self, world: Any, folder: Path, adapter: Path, parallel: ParallelConfig, **rollout: Any
    ):
        from rftmega.rollout.servers.server_engine import ServerEngine

        lora = LoRA(rank=8, alpha=16, path=str(adapter), push="adapters")
        self.actor = build_actor(
            folder, parallel, OPTIMIZER, temperature=TEMPERATURE, token_cap=512, lora=lora
        )
        config = RolloutConfig(
            max_prompt_tokens=180, max_response_tokens=12, cpu_cache_gib=0.05, max_batch=8,
            weights_folder=str(adapter.parent / "weights"), **rollout,
        )  # fmt: skip
        self.engine = ServerEngine(
            folder, config, world, dtype="float32", stop_ids=[1], logs=adapter.parent / "servers",
            adapter_rank=lora.rank,
        )  # fmt: skip
        held = self.actor.adapters()
        assert held is not None
        self.weights: Any = self.engine.adapter_sync(
            self.actor.frozen_shards(),
            AdapterSource(held, self.actor.replica_group),
            bucket_bytes=50_000,
        )

    def gap(self) -> tuple[float, list[float], set[int]]:
        """The largest difference of log-probs, those of a few tokens, and the answers' versions."""
        largest, completions = gap_of_completions(self.engine, self.actor, PROMPTS, TEMPERATURE)
        said = [x for completion in completions for x in completion.logprobs]
        return largest, said[:3], {completion.policy_version for completion in completions}

    def learn(self) -> None:
        self.actor.step(given(rows_of(ROWS)), cross_entropy_loss())
        self.actor.manager.finish_param_sync()


def spoilt(payload: bytes) -> bytes:
    """The payload with one other bit in the last matrix."""
    return payload[:-1] + bytes([payload[-1] ^ 1])


def pushes_body(
    world: Any,
    folder: Path,
    adapter: Path,
    parallel: ParallelConfig,
    rollout: Any,
    killed: bool,
) -> Any:
    """Pushes to servers of which one is killed, or comes late."""
    served = Served(world, folder, adapter, parallel, **rollout)
    seen: dict[str, Any] = {"pushes": []}
    engine, weights = served.engine, served.weights
    try:
        for version in range(3):
            metrics = weights.push(version=version)
            seen["pushes"].append((metrics, *served.gap()))
            seen.setdefault("intact", []).append(all(x.intact for x in weights.checksums()))
            served.learn()
        seen["changed"] = {each.name for each in weights.checksums() if not each.intact}
        seen["model's sums"] = len(weights.base.checksums())
        if world.is_main:
            (*_, member) = engine.server_group.members
            land, note_miss = member.server.land_adapters, engine.server_group.note_miss
            missed: list[str] = []

            def noted(member: Any, error: EngineError) -> None:
                missed.append(str(error))
                note_miss(member, error)

            member.server.land_adapters = lambda version, payload: land(version, spoilt(payload))  # type: ignore[method-assign]
            engine.server_group.note_miss = noted  # type: ignore[method-assign]
        if rollout.get("servers", 1) == 1:
            with pytest.raises(EngineError, match="has the"):
                weights.push(version=3)
            with pytest.raises(EngineError, match="no weights"):
                engine.generate(PROMPTS, seeds=[1, 2, 3], sampling=Sampling(TEMPERATURE))
        else:
            seen["others"] = (weights.push(version=3), *served.gap())
        if world.is_main:
            member.server.land_adapters = land  # type: ignore[method-assign]
            seen["states"] = [str(each.state) for each in engine.server_group.members]
            assert len(missed) == 1 and "is not as it was sent" in missed[0], missed
        seen["mended"] = (weights.push(version=4), *served.gap())
        if not killed:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(member.server, "own", False)
                member.health.came()  # as if it had come since, from elsewhere
                landed = weights.push_to_late()
            seen["late"] = (landed, *served.gap())
            return seen
        if world.is_main:
            (server, *_) = engine.servers
            os.killpg(server._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            server._process.wait()  # type: ignore[attr-defined]
        served.learn()
        seen["restarted"] = (weights.push(version=5), *served.gap())
    finally:
        engine.close()
    return seen


TP2 = {"tensor": 2, "sequence": True}


@pytest.mark.parametrize(
    ("variant", "parallel", "rollout", "killed"),
    [
        pytest.param(
            "qwen3", {}, {"transport": "shared_memory"}, True, id="shared memory",
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            "qwen3", {}, {"transport": "network"}, False, id="network", marks=pytest.mark.ranks
        ),
        pytest.param("qwen3", {}, {"transport": "disk"}, True, id="disk", marks=pytest.mark.ranks),
        pytest.param(
            "qwen2", TP2, {"transport": "network", "tensor": 2}, True, id="network, two workers",
            marks=pytest.mark.ranks,
        ),
        pytest.param(
            "llama", TP2, {"transport": "shared_memory", "servers": 2}, True, id="two servers",
            marks=pytest.mark.ranks,
        ),
    ],
)  # fmt: skip
def test_servers_with_the_adapters_of_a_push_say_what_the_trainer_says(
    variant: str,
    parallel: dict[str, Any],
    rollout: dict[str, Any],
    killed: bool,
    tmp_path: Path,
) -> None:
    """And a server that got other bytes refuses; one that was started again, or comes late, gets the
    model again.
    """
    folder = save_tiny(tmp_path / "model", variant, hidden_size=128)
    pairs = random_pairs(folder, rank=8)
    adapter = write_pairs(tmp_path / "adapter", pairs, alpha=16)
    size = sum(x.nbytes for pair in pairs.values() for x in pair)
    servers = rollout.get("servers", 1)
    asked = (folder, adapter, P(**parallel), rollout, killed)
    for seen in run_ranks(parallel.get("tensor", 1), pushes_body, *asked, timeout=400):
        for version, (metrics, gap, _, versions) in enumerate(seen["pushes"]):
            assert gap < 1e-5 and versions == {version}
            assert metrics["push_adapter_bytes"] == size and metrics["push_ratio"] == 1
        first, *later = [metrics["push_bytes"] for metrics, *_ in seen["pushes"]]
        assert later == [servers * size] * 2 and first > 2 * size, "the model was sent again"
        said = [torch.tensor(said) for _, _, said, _ in seen["pushes"]]
        assert (said[0] - said[1]).abs().max() > 1e-3, "the second push changed nothing"
        assert seen["intact"] == [True] * 3 and seen["model's sums"] > 0
        assert seen["changed"] == {
            f"{name}.lora_{which}.weight" for name in pairs for which in "AB"
        }
        assert seen.get("states", ["healthy", "stale"])[-1] == "stale"
        if servers > 1:
            metrics, gap, _, versions = seen["others"]
            assert gap < 1e-5 and versions == {3} and metrics["servers_healthy"] == servers - 1
        metrics, gap, _, versions = seen["mended"]
        assert gap < 1e-5 and versions == {4} and metrics["push_bytes"] == servers * size
        if not killed:
            landed, gap, _, versions = seen["late"]
            assert landed == 1 and gap < 1e-5 and versions == {4}
            continue
        metrics, gap, _, versions = seen["restarted"]
        assert gap < 1e-5 and versions == {5}
        assert metrics["push_bytes_least"] > servers * size, "it has no model"
        assert metrics["servers_healthy"] == servers and metrics["server_starts"] == servers + 1


@pytest.fixture
def two_elsewhere(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Gives a model's folder, and a server list of two servers of `rftmega serve`."""
    model = save_tiny(tmp_path / "model", "qwen3", hidden_size=128)
    rollout = {
        "max_prompt_tokens": 180, "max_response_tokens": 12, "cpu_cache_gib": 0.05, "max_batch": 8,
        "transport": "network", "engine": "vllm",
    }  # fmt: skip
    own = {"path": str(model), "dtype": "float32", "lora": {"rank": 8, "push": "adapters"}}
    run = {"model": own, "rollout": rollout, "strategy": "separate"}
    with two_servers_elsewhere(run, tmp_path) as both:
        yield model, both


def late_body(world: Any, model: Path, both: Path, adapter: Path) -> Any:
    os.environ[auth.KEY] = KEY
    while not both.exists() or len(both.read_text().split()) < 2:
        time.sleep(0.2)
    first, second = both.read_text().split()
    server_list = both.parent / "server_list"
    server_list.write_text(first)
    served = Served(world, model, adapter, P(), transport="network", server_list=str(server_list))
    engine, weights = served.engine, served.weights
    seen: dict[str, Any] = {}
    try:
        for version in range(2):
            weights.push(version=version)
            if version == 0:
                served.learn()
        server_list.write_text(f"{first}\n{second}")
        engine.server_group.find_remote_servers()
        seen["landed"] = weights.push_to_late()
        known, late = engine.server_group.members
        known.health.missed()  # so that the late one answers alone
        seen["late"] = served.gap()
        seen["asked"] = late.health.requests
        known.health.landed()
        served.learn()
        seen["both"] = (weights.push(version=2), *served.gap())
    finally:
        engine.close()
    return seen


@pytest.mark.ranks
def test_a_server_that_comes_between_two_pushes_gets_model_and_adapters(
    two_elsewhere: tuple[Path, Path], tmp_path: Path
) -> None:
    model, both = two_elsewhere
    pairs = random_pairs(model, rank=8)
    adapter = write_pairs(tmp_path / "adapter", pairs, alpha=16)
    size = sum(x.nbytes for pair in pairs.values() for x in pair)
    (seen,) = run_ranks(1, late_body, model, both, adapter, timeout=300)
    assert seen["landed"] == 1 and seen["asked"] == len(PROMPTS)
    gap, _, versions = seen["late"]
    assert gap < 1e-5 and versions == {1}
    metrics, gap, _, versions = seen["both"]
    assert gap < 1e-5 and versions == {2}
    assert metrics["servers_healthy"] == 2 and metrics["push_bytes"] == 2 * size
