"""Groups that are rolled out on servers all the time: servers that die are passed over, and new
weights reach requests in flight.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rftmega.config import ParallelConfig, RolloutConfig
from rftmega.core.interfaces import RolloutGroup
from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.rollout.pool.streaming_pool import StreamingPool
from rftmega.rollout.servers import server as server_module
from rftmega.rollout.servers import server_engine
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.run.placement.phases import DevicePhases
from rftmega.runtime.parallel.process_group import World
from tests.distributed.test_engine_faults import Pushes
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.rollouts import NEVER, pool_of, save_scripted
from tests.tiny_models import save_tiny

GROUPS = [
    RolloutGroup(number, Prompt((5, 9, 10 + number), index=number, task=number), (7 * number, 7 * number + 1))
    for number in range(12)
]  # fmt: skip


class Scripted(ServerEngine):
    """Scripted servers in vLLM's place; of the second each start is counted."""

    folder = Path()

    def _started(self, number: int) -> Any:
        self._arguments = ["--marker", str(self.folder / f"server-{number}"), "--pause", "0.05"]
        return super()._started(number)


def scored(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"reward": float(sum(rollout.response_ids))} for rollout in rollouts]


def scripted_body(world: World, folder: Path) -> Any:
    server_module.PROGRAM = "scripted_server"
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    Scripted.folder = folder
    config = RolloutConfig(servers=2, max_batch=4, deadline_seconds=20.0)
    engine = Scripted(folder, config, world, dtype="float32", stop_ids=[NEVER], logs=folder)
    if engine.servers:
        engine.expect(["one"])
    weights = Pushes(engine)
    pool: Any = pool_of(
        engine,
        DevicePhases({}, offload=False),
        world,
        weights,
        processes_per_engine=world.size,
        restarts=1,
        reward_limit=60.0,
        kind=StreamingPool,
    )
    sampling = Sampling(1.0)
    seen: dict[str, Any] = {}
    try:
        weights.push(version=0)
        pool.begin(GROUPS[:8], sampling=sampling, reward=scored)
        first = pool.take(3)
        for server in engine.servers[1:]:  # in the middle of it
            server._process.send_signal(signal.SIGKILL)
        second = pool.take_these([7, 5])
        seen["asked beside"] = [
            list(rollout.response_ids)
            for rollout in pool.generate([Prompt((4,)), Prompt((6,))], seeds=[41, 42], sampling=Sampling(0.0))
        ]  # fmt: skip
        weights.push(version=1)  # the second is started again before
        pool.begin(GROUPS[8:], sampling=sampling, reward=scored)
        pool.join()
        seen["old"] = [group.number for group in pool.drop(1)]
        third = pool.take(100 if not pool.under_way else len(pool.under_way))
        for taken in (first, second, third):
            rollouts = list(taken.rollouts)
            for group in taken.groups:
                own, rollouts = rollouts[: len(group.seeds)], rollouts[len(group.seeds) :]
                seen[str(group.number)] = [
                    (list(each.response_ids), each.scores, sorted(each.versions)) for each in own
                ]
        seen["healthy"] = len(engine.healthy)
        # all of them die: they are started again, and given the weights
        pool.begin(
            [group._replace(number=group.number + 100) for group in GROUPS[:2]],
            sampling=sampling,
            reward=scored,
        )
        for server in engine.servers:
            server._process.send_signal(signal.SIGKILL)
        last = pool.take(2)
        seen["after all died"] = sorted(group.number for group in last.groups)
        seen["pushes"] = weights.versions
    finally:
        pool.close()
    return seen


def test_groups_are_trained_whichever_servers_die(tmp_path: Path) -> None:
    save_scripted(tmp_path)
    first, other = run_ranks(2, scripted_body, tmp_path)
    pushes, others = first.pop("pushes"), other.pop("pushes")
    assert pushes == others == [0, 1, 1]
    assert (first.pop("healthy"), other.pop("healthy")) == (2, 0), "the first process has them"
    assert first == other
    assert first["asked beside"] == [[4, 41], [6, 42]]
    assert first["after all died"] == [100, 101]
    taken = {int(name): own for name, own in first.items() if name.isdecimal()}
    assert sorted([*taken, *first["old"]]) == list(range(12)), "each is taken or dropped, once"
    assert {8, 9, 10, 11} <= taken.keys() and len(first["old"]) == 3
    for number, own in taken.items():
        for (ids, scores, versions), seed in zip(own, GROUPS[number].seeds, strict=True):
            assert ids == [5, 9, 10 + number, seed] and scores["reward"] == sum(ids)
            assert versions == [int(number >= 8)]


LENGTH, WAVES = 240, 2


def in_flight_body(
    world: World,
    folder: Path,
    logs: Path,
    on_update: str,
    *,
    length: int = LENGTH,
    **rollout: Any,
) -> Any:
    """Two versions of the weights, and answers of `length` tokens that see both: what transformers
    says of each token. `rollout`: further options of it.
    """
    # the trainer has a core of its own: on a shared one its collectives wait until the engine is idle
    core = str(min(os.sched_getaffinity(0)))
    server_engine.devices_of = lambda *_: {"VLLM_CPU_OMP_THREADS_BIND": core}
    actor = build_actor(folder, ParallelConfig(tensor=2), temperature=0.7, token_cap=512)
    config = RolloutConfig(
        max_prompt_tokens=8,
        max_response_tokens=length,
        cpu_cache_gib=0.05,
        max_batch=4,
        on_update=on_update,
        **rollout,
    )
    engine = ServerEngine(folder, config, world, dtype="float32", stop_ids=[], logs=logs)
    weights = engine.weight_sync(actor.manager.shards(), bucket_bytes=100_000)
    pool: Any = pool_of(
        engine,
        DevicePhases({}, offload=False),
        world,
        weights,
        processes_per_engine=world.size,
        restarts=0,
        reward_limit=60.0,
        kind=StreamingPool,
    )
    try:
        weights.push(version=3)
        pool.begin(
            [
                RolloutGroup(number, GROUPS[number % 12].prompt, (number,))
                for number in range(WAVES * 4)
            ],
            sampling=Sampling(0.7),
            reward=None,
        )
        pool.take(4)  # as many as run side by side: the next begin
        time.sleep(0.4)
        with torch.no_grad():
            for bound in actor.manager.bound:
                bound.parameter.mul_(1.1)
        weights.push(version=4)
        taken = pool.take(4 * (WAVES - 1))
        after = pool.generate([GROUPS[0].prompt], seeds=[3], sampling=Sampling(0.7))
    finally:
        pool.close()
    dist.barrier()
    rows = [rollout.trajectories[0] for rollout in (*taken.rollouts, *after)]
    return [(row.token_ids.tolist(), row.logprobs.tolist(), row.versions.tolist()) for row in rows]


def behaviour(
    models: Sequence[Any], ids: list[int], versions: list[int], *, kept: bool
) -> list[float]:
    """Log-probs of the tokens of version 3 under the first model, of version 4 under the second, over
    keys and values of the first where they are kept.
    """
    old, new = models
    tokens = torch.tensor([ids])
    switch = versions.index(4) if 4 in versions else len(ids)

    def logp(logits: torch.Tensor) -> torch.Tensor:
        return (logits / 0.7).log_softmax(-1)

    with torch.no_grad():
        before, found = logp(old(tokens).logits[0]), [0.0] * len(ids)
        after = logp(new(tokens).logits[0])
        if kept and 3 in versions and switch < len(ids):
            at = switch - 1
            cache = old(tokens[:, :at], use_cache=True).past_key_values
            after[at:] = logp(new(tokens[:, at:], past_key_values=cache).logits[0])
    for place in range(1, len(ids)):
        source = after if place >= switch else before
        found[place] = float(source[place - 1, ids[place]]) if versions[place] >= 0 else 0.0
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("on_update", ["wait", "abort", "recompute", "keep"])
def test_each_token_has_the_version_and_the_log_prob_that_it_was_drawn_under(
    on_update: str, tmp_path: Path
) -> None:
    """Weights come while answers are generated. How many of these get tokens of both depends on when
    a busy server hears of it: of answers this long all did where nothing else ran.
    """
    folder = save_tiny(tmp_path / "model", "qwen3")
    found, _ = run_ranks(2, in_flight_body, folder, tmp_path, on_update, timeout=400)
    assert_exact(folder, found, kept=on_update == "keep")


def assert_exact(folder: Path, found: Any, *, kept: bool, length: int = LENGTH) -> set[int]:
    """Holds what `in_flight_body` found against transformers. Returns how many versions answers had."""
    from transformers import AutoModelForCausalLM

    old, new = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    *rows, last = found
    for ids, logprobs, versions in rows:
        own = versions[3:]
        assert len(own) == length and own == sorted(own) and set(own) <= {3, 4}
        expected = behaviour((old, new), ids, versions, kept=kept)
        assert logprobs == pytest.approx(expected, abs=1e-5), versions
    assert set(last[2][3:]) == {4}
    assert last[1] == pytest.approx(behaviour((old, new), *last[::2], kept=False), abs=1e-5), (
        "a new request reads what old weights have computed"
    )
    return {len(set(versions[3:])) for _, _, versions in rows}
