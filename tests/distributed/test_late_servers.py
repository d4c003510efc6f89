"""Servers that come between two pushes: they get the weights of the last one, and answer."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import ParallelConfig
from rftmega.core.interfaces import RolloutGroup
from rftmega.core.types import Prompt, Sampling
from rftmega.rollout.pool import streaming_pool
from rftmega.rollout.pool.streaming_pool import StreamingPool
from rftmega.rollout.servers import server_group_client
from rftmega.rollout.servers.vllm import auth
from rftmega.run.placement.phases import DevicePhases
from tests.distributed.test_servers_push import TEMPERATURE, Trainer
from tests.layouts import rows_of
from tests.ranks import run_ranks
from tests.rollouts import pool_of
from tests.server_groups import KEY, two_servers_elsewhere
from tests.tiny_models import save_tiny

GROUPS = [RolloutGroup(n, Prompt((5, 9, 10 + n), index=n), (2 * n, 2 * n + 1)) for n in range(60)]


@pytest.fixture(params=["network", "disk"])
def two_servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """Gives the transport, a model's folder, and a server list of two servers of `rftmega serve`."""
    model = save_tiny(tmp_path / "model", "qwen3")
    rollout = {
        "max_prompt_tokens": 32, "max_response_tokens": 12, "cpu_cache_gib": 0.05, "max_batch": 2,
        "transport": request.param,
    }  # fmt: skip
    run = {"model": {"path": str(model), "dtype": "float32"}, "rollout": rollout}
    with two_servers_elsewhere(run, tmp_path) as both:
        yield request.param, model, both


def late_body(world: Any, folder: Path, model: Path, both: Path, transport: str) -> Any:
    os.environ[auth.KEY] = KEY
    server_group_client.ELSEWHERE_SECONDS, streaming_pool.LATE_SECONDS = 0.2, 1.0
    while not both.exists() or len(both.read_text().split()) < 2:
        time.sleep(0.2)
    first, second = both.read_text().split()
    server_list = folder / "server_list"
    if world.is_main:
        server_list.write_text(first + "\n")
    parallel = ParallelConfig(tensor=2, sequence=True)
    trainer = Trainer(
        world, model, folder, parallel, transport=transport, server_list=str(server_list)
    )
    pool: Any = pool_of(
        trainer.engine,
        DevicePhases({}, offload=False),
        world,
        trainer.weights,
        processes_per_engine=world.size,
        restarts=0,
        reward_limit=60.0,
        kind=StreamingPool,
    )
    seen: dict[str, Any] = {}
    try:
        trainer.weights.push(version=0)
        trainer.change(0.9)
        trainer.weights.push(version=1)
        pool.begin(GROUPS, sampling=Sampling(TEMPERATURE), reward=None)
        taken = list(pool.take(1).rollouts)
        if world.is_main:
            server_list.write_text(f"{first}\n{second}\n")
        while len(taken) < 2 * len(GROUPS):
            taken += pool.take(1).rollouts
            if world.is_main and len(trainer.engine.healthy) == 2:
                seen["both before the end"] = True
        seen["intact"] = all(each.intact for each in trainer.weights.checksums())
        seen["requests"] = [each.health.requests for each in trainer.engine.server_group.members]
        rows = [rollout.trajectories[0] for rollout in taken]
        sent = rows_of([row.token_ids.tolist() for row in rows], [3] * len(rows))
        logp = trainer.actor.log_probs(sent).logp
        differences = [
            abs(logp[number, place - 1].item() - row.logprobs[place])
            for number, row in enumerate(rows)
            for place in range(3, len(row))
        ]
        seen["gap"] = max(differences)
        seen["versions"] = {version for rollout in taken for version in rollout.versions}
        trainer.change(0.9)
        seen["missed"] = trainer.weights.push(version=2)["push_missed"]
    finally:
        pool.close()
    return seen


@pytest.mark.ranks
def test_a_server_that_comes_between_two_pushes_gets_the_last_ones_weights(
    two_servers: tuple[str, Path, Path], tmp_path: Path
) -> None:
    transport, model, both = two_servers
    first, other = run_ranks(2, late_body, tmp_path, model, both, transport, timeout=400)
    assert first.pop("both before the end"), "it waited for the next push"
    requests = first.pop("requests")
    assert len(requests) == 2 and min(requests) > 0 and other.pop("requests") == []
    assert first == other
    assert first["versions"] == {1} and first["gap"] < 1e-5
    assert first["intact"] and first["missed"] == 0
