"""A rollout of which one process is asked to stop: all of them end it, and agree on the answers
that are there.
"""

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.config import RolloutConfig
from rftmega.core.errors import Preempted
from rftmega.core.types import Prompt, Rollout, Sampling
from rftmega.rollout.pool import engine_pool
from rftmega.rollout.pool.engine_pool import EnginePool, ServerPool
from rftmega.rollout.pool.stop_consensus import EVERY
from rftmega.rollout.servers import server as server_module
from rftmega.rollout.servers.server_engine import ServerEngine
from rftmega.runtime.parallel import preemption
from rftmega.runtime.parallel.process_group import World
from tests.distributed.test_early_stop import AsLongAsItsSeed, NoPush, NoTurns
from tests.distributed.test_engine_faults import PROMPTS, SCORED_SERVER, SEEDS, Pushes, scores, told
from tests.ranks import run_ranks
from tests.rollouts import NEVER, pool_of, save_scripted

REQUESTS = [Prompt((5, place), index=place) for place in range(24)]
LENGTHS = [random.Random(place).randint(20, 60) for place in range(24)]
ASKED_AT = 50  # engine steps of about 100


def scored_by_index(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
) -> list[dict[str, float]]:
    return [{"reward": float(prompt.index)} for prompt in prompts]


def ask(
    engine: EnginePool, requests: Sequence[Prompt], until: bool, settings: dict[str, Any]
) -> Any:
    enough = (lambda completions: None not in completions) if until else None
    return engine.generate(requests, enough=enough, **settings)


def shared_body(world: World, folder: Path, per_engine: int, until: bool) -> Any:
    """The second process gets a signal in the middle of it."""
    preemption.LOOK = 0.02
    preemption.meet(dist.FileStore(str(folder / "board"), world.size))
    engine = AsLongAsItsSeed(lambda: asked() or 0.003)

    def asked() -> None:
        if world.rank == 1 and engine.steps == ASKED_AT:
            os.kill(os.getpid(), signal.SIGUSR1)

    engine.load_weights([], version=7)
    shared = pool_of(
        engine,
        NoTurns({}, offload=False),
        world,
        NoPush(),
        processes_per_engine=per_engine,
        restarts=0,
    )
    given_up = Event()

    def score(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        """The first answers' scores come when nobody waits for them any more."""
        if any(prompt.index < 2 for prompt in prompts) and not until:
            given_up.wait()
        return scored_by_index(prompts, rollouts)

    settings: dict[str, Any] = {"seeds": LENGTHS, "sampling": Sampling(1.0), "reward": score}
    with preemption.listening():
        with pytest.raises(Preempted) as raised:
            ask(shared, REQUESTS, until, settings)
        came = bool(preemption.request.came)
    given_up.set()
    steps = engine.steps
    preemption.meet(None)
    whole = shared.generate(REQUESTS, **settings)
    completions = [
        None if c is None else (len(c.response_ids), c.scores) for c in raised.value.completions
    ]
    return completions, steps, came, [(len(c.response_ids), c.scores) for c in whole]


@pytest.mark.parametrize("per_engine", [pytest.param(1, marks=pytest.mark.ranks), 2])
def test_all_engines_end_soon_and_every_process_has_what_was_answered(
    per_engine: int, tmp_path: Path
) -> None:
    (completions, steps, came, whole), other = run_ranks(
        2, shared_body, tmp_path, per_engine, False
    )
    assert (came, other[2]) == (False, True), "one of them heard of it from the other"
    assert completions == other[0]
    assert whole == [(length, {"reward": float(place)}) for place, length in enumerate(LENGTHS)]
    assert all(
        completion in (None, right) for completion, right in zip(completions, whole, strict=True)
    )
    assert None in completions and any(completions)
    assert 0 < steps < sum(LENGTHS) / 4 / (2 // per_engine), "it went on to its end"
    if per_engine == 2:
        assert (steps, other[1]) == (64, 64), "the processes of one engine end at one step"


def test_what_is_enough_can_no_longer_be_decided_so_nothing_is_kept(tmp_path: Path) -> None:
    for completions, steps, _, whole in run_ranks(2, shared_body, tmp_path, 1, True):
        assert completions == []
        assert steps % EVERY == 0 and steps < 100
        assert None not in whole


class Slow(ServerEngine):
    """Scripted servers in vLLM's place."""

    def _started(self, number: int) -> Any:
        self._arguments = ["--marker", str(self.folder / f"server-{number}"), "--pause", "0.2"]
        return super()._started(number)

    folder = Path()


def servers_body(world: World, folder: Path, asked: int, until: bool) -> Any:
    """One process alone speaks to the servers; `asked` is the one that gets a signal when three
    answers are there.
    """
    server_module.PROGRAM, preemption.LOOK, engine_pool.PATIENCE = "scripted_server", 0.02, 0.2
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    preemption.meet(dist.FileStore(str(folder / "board"), world.size))
    Slow.folder = folder
    config = RolloutConfig(servers=2, max_batch=1, deadline_seconds=20.0)
    engine = Slow(folder, config, world, dtype="float32", stop_ids=[NEVER], logs=folder)
    if engine.servers:
        engine.expect(["one"])
    weights = Pushes(engine)
    weights.push(version=4)
    shared = pool_of(
        engine,
        NoTurns({}, offload=False),
        world,
        weights,
        processes_per_engine=world.size,
        restarts=0,
        kind=ServerPool,
    )
    seen: list[int] = []

    def score(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        seen.append(len(prompts))
        if sum(seen) >= 3:
            (folder / "now").touch()
        return scores(prompts, rollouts)

    settings: dict[str, Any] = {"seeds": SEEDS, "sampling": Sampling(1.0), "reward": score}
    real = preemption.asked

    def asked_now() -> bool:
        if world.rank == asked and (folder / "now").exists():
            preemption.request.came = signal.SIGTERM
        return real()

    preemption.asked = asked_now
    try:
        with pytest.raises(Preempted) as raised:
            ask(shared, PROMPTS, until, settings)
        preemption.request.came, asked = 0, -1
        preemption.meet(None)
        weights.push(version=5)
        whole = shared.generate(PROMPTS, **settings)
    finally:
        engine.close()
    return told(raised.value.completions), told(whole)


@pytest.mark.parametrize(
    ("asked", "until"),
    [
        pytest.param(0, False, marks=pytest.mark.ranks),
        (1, False),
        pytest.param(1, True, marks=pytest.mark.ranks),
    ],
)
def test_servers_are_given_up_whichever_process_is_asked(
    asked: int, until: bool, tmp_path: Path
) -> None:
    save_scripted(tmp_path)
    for completions, whole in run_ranks(2, servers_body, tmp_path, asked, until, timeout=60):
        assert whole == SCORED_SERVER
        if until:
            assert completions == []
        else:
            assert all(
                completion in (None, right)
                for completion, right in zip(completions, whole, strict=True)
            )
            assert 3 <= sum(completion is not None for completion in completions) < 12
