"""Seeds: what they depend on, and what they don't."""

from collections.abc import Sequence
from typing import Any

import pytest

from rftmega.config import RolloutConfig
from rftmega.core.sampling_seeds import sampling_seed, turn_seed
from rftmega.core.types import Prompt, Rollout
from rftmega.trainer import DynamicSampler, PPOTrainer
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.ppo import StepParts, StepSampling
from tests.rollouts import Alone


def test_another_run_task_sample_or_turn_draws_otherwise() -> None:
    seeds = [
        turn_seed(sampling_seed(run, task, sample), turn)
        for run in range(3)
        for task in range(30)
        for sample in range(8)
        for turn in range(3)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_seeds_are_the_same_in_every_version_and_the_first_turn_is_the_single_turn() -> None:
    import hashlib

    digest = hashlib.blake2b(b"7/12/3", digest_size=8).digest()
    assert sampling_seed(7, 12, 3) == int.from_bytes(digest, "big") % 2**31
    assert turn_seed(99, 0) == 99


class Asked(Alone):
    """Notes the answer to each task and sample."""

    def __init__(self) -> None:
        super().__init__(RolloutConfig(max_response_tokens=9), vocabulary=50, stop_ids=[1])
        self.completions: dict[int, list[list[int]]] = {}
        self.load_weights([], version=0)

    def generate(self, prompts: Sequence[Prompt], **asked: Any) -> Any:
        found: list[Rollout] = super().generate(prompts, **asked)
        for prompt, rollout in zip(prompts, found, strict=True):
            self.completions.setdefault(prompt.index, []).append(rollout.response_ids)
        return found


def completions_of(batch_size: int, refill: DynamicSampler) -> dict[int, list[list[int]]]:
    """Answers to 12 tasks, in steps of so many; the same weights at every step."""
    engine = Asked()
    batches = [
        [Prompt((5,), index=begin + place) for place in range(batch_size)]
        for begin in range(0, 12, batch_size)
    ]
    trainer = PPOTrainer(
        engine=engine,
        weights=None,  # type: ignore[arg-type]
        reward=lambda prompts, rollouts: [{"reward": 0.0}] * len(rollouts),
        maker=ExperienceMaker(None),  # type: ignore[arg-type]
        learner=None,  # type: ignore[arg-type]
        sampling=StepSampling(4, 1.0, seed=3),
        parts=StepParts(refill=refill),
    )
    trainer.supply.source(batches)
    for batch in trainer.supply:
        trainer.refill(trainer.rollout, batch, trainer.supply)
    return engine.completions


@pytest.mark.parametrize("refill", [DynamicSampler(0), DynamicSampler(2), DynamicSampler(1)])
def test_neither_batch_size_nor_step_nor_refills_change_an_answer(refill: DynamicSampler) -> None:
    alone = completions_of(1, DynamicSampler(0))
    assert len({tuple(map(tuple, group)) for group in alone.values()}) == 12
    assert all(len(group) == 4 for group in alone.values())
    assert completions_of(3, refill) == alone
    assert completions_of(4, refill) == alone
