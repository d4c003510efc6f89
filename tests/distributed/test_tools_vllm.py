"""The environment of tools on real vLLM: the same rollouts in process, over two engines, on one
engine of two processes and over servers; and log-probs that are the trainer's.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.types import Rollout, Sampling
from rftmega.rollout.pool.engine_pool import EnginePool, ServerPool
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.process_group import World
from tests.distributed.test_tools import SEEDS, Folder, scores, told
from tests.layouts import build_actor, rows_of
from tests.ranks import VLLM, run_ranks
from tests.tiny_models import transformers_logits

PRELOADED = VLLM

TASKS = 12
TEMPERATURE = 0.7


def engine_of(world: World, folder: Folder, kind: str, logs: Path) -> Any:
    """Returns a vLLM engine: "tensor" is one over all processes, "servers" are as many beside
    them.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(world.size)
    config = RolloutConfig(
        tensor=world.size if kind == "tensor" else 1,
        servers=world.size if kind == "servers" else 1,
        max_prompt_tokens=800,
        max_response_tokens=480,
        cpu_cache_gib=0.1,
        max_batch=4,
    )
    given: dict[str, Any] = {"dtype": "float32", "stop_ids": folder.tokenizer.stop_ids}
    if kind == "servers":
        from rftmega.rollout.servers.server_engine import ServerEngine

        return ServerEngine(folder.model, config, world, logs=logs, **given)
    from rftmega.rollout.engines.vllm import VLLMEngine

    return VLLMEngine(folder.model, config, world, **given)


def body(world: World, path: Path, kind: str) -> Any:
    """Rollouts; and the largest difference of their log-probs from those of the trainer, which reads
    whole rows at once.
    """
    folder = Folder(path)
    settings = {"temperature": TEMPERATURE, "token_cap": 2048}
    actor = build_actor(folder.model, ParallelConfig(tensor=world.size), **settings)
    engine = engine_of(world, folder, kind, path / f"logs-{kind}")
    pool = (ServerPool if kind == "servers" else EnginePool)(
        engine,
        DevicePhases({"policy": actor.manager.residency}, offload=False),
        world,
        folder.environment(),
        processes_per_engine=1 if kind == "engines" else world.size,
        restarts=0,
    )
    pool.weight_sync(actor.manager.shards(), bucket_bytes=2**20).push(version=0)
    try:
        rollouts = pool.generate(
            folder.tasks(TASKS),
            seeds=SEEDS[:TASKS],
            sampling=Sampling(TEMPERATURE),
            reward=scores,
        )
        found = [one for one in rollouts if one is not None]
        gap = gap_to(found, lambda rows: actor.log_probs(rows_of(rows)).logp)
        dist.barrier()
    finally:
        pool.close()
    return found, gap


def gap_to(rollouts: Sequence[Rollout], log_probs: Any) -> float:
    """Returns the largest difference of sampled tokens' log-probs from those of whole rows, [B, T],
    of which column t is of token t + 1.
    """
    own = [one.trajectories[0] for one in rollouts]
    others = log_probs([each.token_ids.tolist() for each in own])
    gaps = []
    for each, row in zip(own, others, strict=True):
        chosen = torch.from_numpy(each.loss_mask[1:].copy())
        said = torch.from_numpy(each.logprobs[1:].copy())
        gaps.append((row[: len(each) - 1][chosen] - said[chosen]).abs().max().item())
    return max(gaps)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rollout]]:
    """A folder, and the rollouts of one engine in one process."""
    path = tmp_path_factory.mktemp("vllm")
    Folder(path)
    ((rollouts, gap),) = run_ranks(1, body, path, "engines", timeout=300)
    assert gap < 1e-4
    return path, rollouts


@pytest.mark.ranks
def test_log_probs_of_every_turn_are_those_of_transformers_over_the_whole_row(
    alone: tuple[Path, list[Rollout]],
) -> None:
    path, rollouts = alone

    def log_probs(rows: list[list[int]]) -> list[torch.Tensor]:
        logits = transformers_logits(Folder(path).model, rows)
        found = []
        for row, own in zip(rows, logits, strict=True):
            whole = torch.log_softmax(own[:-1] / TEMPERATURE, dim=-1)
            found.append(whole.gather(1, torch.tensor(row[1:])[:, None])[:, 0])
        return found

    assert gap_to(rollouts, log_probs) < 1e-4
    turns = [one.measures["turns"] for one in rollouts]
    assert len(set(turns)) > 2 and max(turns) > 2, "the model calls nothing"
    assert any(one.measures["tool_errors"] for one in rollouts)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "kind"), [(2, "tensor"), (1, "servers"), (2, "engines"), (2, "servers")]
)
def test_rollouts_with_tools_are_those_of_one_process(
    world: int, kind: str, alone: tuple[Path, list[Rollout]]
) -> None:
    path, wanted = alone
    for rollouts, gap in run_ranks(world, body, path, kind, timeout=300):
        assert gap < 1e-4
        assert [sampled(one) for one in rollouts] == [sampled(one) for one in wanted]


def sampled(rollout: Rollout) -> Any:
    """All of a rollout but times and log-probs, whose last bits are the layout's."""
    (one,) = rollout.trajectories
    known = told(rollout)
    tokens, mask = one.token_ids.tolist(), one.loss_mask.tolist()
    ends = (one.truncated, one.turns, one.versions.tolist())
    return tokens, mask, ends, known.scores, known.rewards, known.measures, known.lost
