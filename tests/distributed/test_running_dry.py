"""Engines that run dry take what others have not begun: the same answers, whoever gives them."""

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist

from rftmega.config import RolloutConfig
from rftmega.core.errors import EngineFault
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.engine_pool import EnginePool
from rftmega.rollout.requests.order import ordered
from rftmega.runtime.parallel.process_group import World
from rftmega.trainer.expected_lengths import ExpectedLengths
from tests.distributed.test_early_stop import NoPush, NoTurns
from tests.distributed.test_engine_faults import Pushes
from tests.ranks import run_ranks
from tests.rollouts import Wrapped, completion_of, pool_of, rollout_of

SIBLINGS, SLOTS = 3, 2
PROMPTS = [Prompt((5, number), index=number) for number in range(16) for _ in range(SIBLINGS)]
SEEDS = [1700 + place for place in range(len(PROMPTS))]


def tokens_of(seed: int) -> tuple[int, ...]:
    """Few, or very many; nothing tells which."""
    rng = random.Random(seed)
    return tuple(rng.randrange(50) for _ in range(min(500, int(25 * rng.paretovariate(0.9)))))


class LongTailed(ScriptedEngine):
    """Notes what it begins; after each step comes `then`."""

    def __init__(self, then: Callable[["LongTailed"], None] = lambda engine: None):
        super().__init__(RolloutConfig(max_batch=SLOTS), vocabulary=50, stop_ids=[3])
        self.then, self.begun = then, list[int]()

    def _completion(self, seed: int) -> Completion:
        assert self.version is not None
        self.begun.append(seed)
        ids = tokens_of(seed)
        return Completion(ids, tuple(-0.5 for _ in ids), "stop", self.version)

    def _serve(self, requests: Any, sampling: Sampling) -> None:
        def stepped() -> bool:
            self.then(self)
            return requests.stopped()

        super()._serve(Wrapped(requests, stopped=stepped), sampling)


def scores(prompts: Sequence[Prompt], completions: Sequence[Rollout]) -> list[dict[str, float]]:
    return [
        {"reward": float(prompt.index + sum(c.response_ids))}
        for prompt, c in zip(prompts, completions, strict=True)
    ]


@cache
def by_one_engine() -> list[Any]:
    """Of all requests, asked in their order."""
    engine = LongTailed()
    engine.load_weights([], version=7)
    completions = engine.generate(PROMPTS, seeds=SEEDS, sampling=Sampling(1.0))
    rollouts = [
        rollout_of(prompt, completion)
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    scored = scores(PROMPTS, rollouts)
    return [
        (completion.token_ids, completion.logprobs, score)
        for completion, score in zip(completions, scored, strict=True)
    ]


def all_there(completions: Sequence[Rollout | None]) -> bool:
    return None not in completions


def asked_of(shared: EnginePool, until: bool) -> list[Any]:
    settings: dict[str, Any] = {"seeds": SEEDS, "sampling": Sampling(1.0), "reward": scores}
    found: Any = shared.generate(PROMPTS, enough=all_there if until else None, **settings)
    completions = map(completion_of, found)
    return [
        (completion.token_ids, completion.logprobs, rollout.scores)
        for completion, rollout in zip(completions, found, strict=True)
    ]


def first_of(engines: int) -> list[list[int]]:
    """Seeds that each engine begins with."""
    first, rest = ordered(PROMPTS, ExpectedLengths().expected(PROMPTS), engines, SLOTS)
    assert len(rest) > engines
    return [[SEEDS[place] for place in places] for places in first]


def body(world: World, per_engine: int, until: bool) -> Any:
    """Each process at a pace of its own."""
    rng = random.Random(world.rank)
    engine = LongTailed(lambda engine: time.sleep(0.0005 * rng.random()))
    engine.load_weights([], version=7)
    shared = pool_of(
        engine,
        NoTurns({}, offload=False),
        world,
        NoPush(),
        processes_per_engine=per_engine,
        restarts=0,
    )
    return asked_of(shared, until), engine.begun, engine.steps


@pytest.mark.parametrize(
    ("per_engine", "until"),
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.ranks),
        pytest.param(1, True, marks=pytest.mark.ranks),
        (2, True),
    ],
)
def test_answers_are_one_engines_and_each_request_is_begun_once_by_all_processes_of_one(
    per_engine: int, until: bool
) -> None:
    results = run_ranks(4, body, per_engine, until, timeout=60)
    assert all(completions == by_one_engine() for completions, *_ in results)
    begun = [seeds for _, seeds, _ in results]
    assert begun == [begun[rank - rank % per_engine] for rank in range(4)], (
        "processes of one engine took other requests"
    )
    engines = begun[::per_engine]
    assert sorted(seed for seeds in engines for seed in seeds) == SEEDS
    for seeds, first in zip(engines, first_of(4 // per_engine), strict=True):
        assert seeds[: len(first)] == first
    if until:  # step by step together, so that time plays no part
        assert max(steps for *_, steps in results) < 0.9 * dealt_once(4 // per_engine)


def dealt_once(engines: int) -> int:
    """Steps of engines that get all requests at the beginning."""
    found = []
    for part in ordered(PROMPTS, ExpectedLengths().expected(PROMPTS), engines, len(PROMPTS)).first:
        engine = LongTailed()
        engine.load_weights([], version=7)
        engine.generate(
            [PROMPTS[place] for place in part],
            seeds=[SEEDS[place] for place in part],
            sampling=Sampling(1.0),
        )
        found.append(engine.steps)
    return max(found)


def test_while_one_engine_stands_still_the_others_answer_all_that_it_has_not_begun() -> None:
    results = run_ranks(4, one_stands_still)
    assert all(completions == by_one_engine() for completions, _ in results)
    assert results[0][1] == first_of(4)[0]


def one_stands_still(world: World) -> Any:
    """The first engine's first step ends when all the others are through."""
    board = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())

    def then(engine: LongTailed) -> None:
        if world.rank == 0 and engine.steps == 1:
            while board.add("through", 0) < 3:
                time.sleep(0.01)

    engine = LongTailed(then)
    engine.load_weights([], version=7)
    shared = pool_of(
        engine, NoTurns({}, offload=False), world, NoPush(), processes_per_engine=1, restarts=0
    )
    plain = shared._ask

    def ask(asking: Any) -> Any:
        found = plain(asking)
        board.add("through", 1)
        return found

    shared._ask = ask  # type: ignore[method-assign]
    return asked_of(shared, False), engine.begun


def fault_body(world: World, per_engine: int, until: bool, breaks: int) -> Any:
    """One engine breaks down, its first process a few steps after the others.

    The other engines go on.
    """
    number, place = divmod(world.rank, per_engine)

    def then(engine: LongTailed) -> None:
        if number == breaks and engine.steps == (14 if place == 0 else 8):
            raise EngineFault("out of pages")

    engine = LongTailed(then)
    weights = Pushes(engine)
    weights.push(version=7)
    shared = pool_of(
        engine,
        NoTurns({}, offload=False),
        world,
        weights,
        processes_per_engine=per_engine,
        restarts=1,
    )
    return asked_of(shared, until), weights.versions


@pytest.mark.parametrize(
    ("per_engine", "until", "breaks"),
    [
        (1, False, 1),
        pytest.param(1, True, 1, marks=pytest.mark.ranks),
        pytest.param(2, False, 1, marks=pytest.mark.ranks),
        pytest.param(2, True, 0, marks=pytest.mark.ranks),
    ],
)
def test_an_engine_that_breaks_down_meanwhile_costs_no_answer(
    per_engine: int, until: bool, breaks: int
) -> None:
    for completions, versions in run_ranks(4, fault_body, per_engine, until, breaks, timeout=60):
        assert completions == by_one_engine()
        assert versions == [7, 7]
