"""Of several engines, each answer stands at the prompt that it is an answer to, whoever gave it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from rftmega.config import RolloutConfig
from rftmega.core.types import Completion, Prompt, Rollout, Sampling
from rftmega.rollout.engines import ScriptedEngine
from rftmega.rollout.pool.engine_pool import EnginePool, ServerPool
from rftmega.runtime.parallel.process_group import World
from tests.distributed.test_early_stop import NoPush, NoTurns
from tests.ranks import run_ranks
from tests.rollouts import pool_of, response_of

# of several expected lengths
PROMPTS = [Prompt(tuple([place] * (1 + place % 4))) for place in range(14) for _ in range(2)]
SEEDS = [1000 + place for place in range(len(PROMPTS))]


class Repeats(ScriptedEngine):
    """Answers with the prompt, its seed and who it is; after as many steps as the prompt has
    tokens.
    """

    def __init__(self, number: int):
        super().__init__(RolloutConfig(max_batch=3), vocabulary=9, stop_ids=[3])
        self.number = number
        self.load_weights([], version=0)

    def _serve(self, requests: Any, sampling: Sampling) -> None:
        asked = [*requests.take(3)]
        left = set(range(len(asked)))
        while left:
            number = min(left, key=lambda number: len(asked[number].token_ids))
            left.remove(number)
            ids = (*asked[number].token_ids, asked[number].seed, self.number)
            requests.finished([number], [Completion(ids, (0.0,) * len(ids), "stop", 0)])
            if requests.stopped():
                break
            further = requests.take(3 - len(left)) if len(left) < 3 else ()
            left |= set(range(len(asked), len(asked) + len(further)))
            asked += further


def scores(prompts: Sequence[Prompt], completions: Sequence[Rollout]) -> list[dict[str, float]]:
    """Of the prompt and its answer together."""
    return [
        {"reward": float(sum(p.token_ids) - sum(c.response_ids[:-1]))}
        for p, c in zip(prompts, completions, strict=True)
    ]


def all_there(completions: Sequence[Rollout | None]) -> bool:
    return None not in completions


def answers_body(world: World, per_engine: int, until: bool, by_one: bool) -> Any:
    engine = Repeats(world.rank // per_engine)
    kind, per_engine = (ServerPool, world.size) if by_one else (EnginePool, per_engine)
    turns = NoTurns({}, offload=False)
    shared = pool_of(
        engine,
        turns,
        world,
        NoPush(),
        kind=kind,
        processes_per_engine=per_engine,
        restarts=0,
    )
    asked: dict[str, Any] = {"seeds": SEEDS, "sampling": Sampling(1.0), "reward": scores}
    ask = partial(shared.generate, enough=all_there if until else None)
    lengths = [float(place % 5) for place in range(len(PROMPTS))]
    found = [ask(PROMPTS, expected_lengths=expected, **asked) for expected in (None, lengths)]
    return [
        [
            (response_of(completion), completion.scores)
            for completion in completions
            if completion is not None
        ]
        for completions in found
    ]


@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize(("per_engine", "by_one"), [(1, False), (2, False), (4, True)])
def test_each_answer_stands_at_its_prompt(per_engine: int, by_one: bool, until: bool) -> None:
    for rounds in run_ranks(4, answers_body, per_engine, until, by_one):
        for completions in rounds:
            assert [ids[:-1] for ids, _ in completions] == [
                (*p.token_ids, seed) for p, seed in zip(PROMPTS, SEEDS, strict=True)
            ]
            assert [score for _, score in completions] == [
                {"reward": -float(seed)} for seed in SEEDS
            ]
            assert len({ids[-1] for ids, _ in completions}) == (1 if by_one else 4 // per_engine), (
                "an engine has nothing to do"
            )
