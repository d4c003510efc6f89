"""Log-probs before an update that its own forward pass gives, against a scoring pass for them
alone.
"""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.config import AlgorithmConfig, KLConfig, OptimizerConfig, ParallelConfig
from rftmega.config.options.algorithms import GSPO, TokenImportance
from rftmega.core.errors import GapExceeded
from rftmega.core.types import Completion, Prompt, Rollout
from rftmega.monitoring.observers.observer import Observer
from rftmega.trainer.experience import ExperienceMaker
from rftmega.trainer.learner import Learner
from rftmega.trainer.ppo import PPOTrainer, StepParts, StepSampling
from rftmega.weights import Exporter
from tests.layouts import build_actor
from tests.ranks import run_ranks
from tests.rollouts import rollout_of
from tests.tiny_models import save_tiny

OPTIMIZER = OptimizerConfig(epsilon=1e-4, learning_rate=1e-2, weight_decay=0.0)
PROMPTS = [Prompt((1, 5, 9)), Prompt((7,)), Prompt((2, 2, 3, 4))]


class Engine:
    """Answers that depend on the seed alone."""

    version = 0

    def push(self, *, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def generate(
        self, prompts: Sequence[Prompt], *, seeds: Sequence[int], **how: Any
    ) -> list[Rollout]:
        found = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            draw = random.Random(seed)
            tokens = tuple(draw.randrange(131) for _ in range(draw.randint(1, 9)))
            logprobs = tuple(-4 - draw.random() for _ in tokens)
            completion = Completion(tokens, logprobs, "stop", self.version)
            found.append(rollout_of(prompt, completion))
        return found


def longer_is_better(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout]
) -> list[dict[str, float]]:
    return [{"reward": float(len(completion.response_ids))} for completion in rollouts]


class Refuses:
    """A gate that finds the gap too large in the second step."""

    def __init__(self, weights: Any):
        self.weights, self.seen = weights, []

    def check(self, samples: Any, old_logp: Any, step: int) -> Any:
        chosen = torch.where(samples.rows.mask.flat, old_logp.flat, 0.0)
        self.seen.append((chosen, self.weights()))
        raise GapExceeded("too large")


def body(world: Any, folder: Path, parallel: ParallelConfig, late: bool, refuses: bool) -> Any:
    actor = build_actor(
        folder, parallel, OPTIMIZER, temperature=0.7, token_cap=40, keep_reference=True
    )
    passes = []
    score = actor.runner.score
    actor.runner.score = lambda rows, **how: passes.append(len(rows)) or score(rows, **how)

    def weights() -> dict[str, torch.Tensor]:
        return {
            name: x.clone()
            for name, x in Exporter(
                actor.manager.shards(), actor.topology.replica_group, bucket_bytes=2**20
            )
        }

    loss = policy_loss(
        options=GSPO(),
        correction=TokenImportance(cap=2.0),
        high_entropy_share=0.5,
        kl_coef=0.1,
        entropy_coef=0.05,
    )
    engine, gate = Engine(), Refuses(weights) if refuses else None
    trainer = PPOTrainer(
        engine=engine,
        weights=engine,
        reward=longer_is_better,
        maker=ExperienceMaker(actor, AlgorithmConfig(kl=KLConfig(coef=0.1))),
        learner=Learner(actor, loss),
        sampling=StepSampling(4, 0.7, seed=3),
        parts=StepParts(gate=gate, late_scoring=late),
    )
    experiences, metrics = [], []
    trainer.callbacks = [
        type(
            "Keeps",
            (Observer,),
            {"on_experience": lambda self, t, s, experience: experiences.append(experience)},
        )()
    ]
    trainer.phase = lambda name: nullcontext()
    if gate is not None:
        before = weights()
        with pytest.raises(GapExceeded):
            trainer.train_step(PROMPTS)
        ((old, seen),) = gate.seen
        assert all(torch.equal(x, before[name]) for name, x in (seen | weights()).items())
        return old, actor.manager.lr_scheduler.num_steps
    for _ in range(3):
        metrics.append(trainer.train_step(PROMPTS))
    return metrics, experiences, weights(), passes


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        pytest.param(1, ParallelConfig(), marks=pytest.mark.ranks),
        (2, ParallelConfig(pipeline=2)),
        pytest.param(4, ParallelConfig(tensor=2, pipeline=2), marks=pytest.mark.ranks),
    ],
)
def test_three_steps_are_the_same_and_only_the_reference_is_scored(
    processes: int, parallel: ParallelConfig, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    early, late = (
        run_ranks(processes, body, folder, parallel, late, False)[-1] for late in (False, True)
    )
    assert (early[3], late[3]) == ([12] * 6, [12] * 3)
    for step, (wanted, found) in enumerate(zip(early[0], late[0], strict=True)):
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=2e-6, abs=1e-6), step
    for wanted, found in zip(early[1], late[1], strict=True):
        for name in ("old_logp", "entropy", "advantage", "reference_logp"):
            one, other = getattr(found, name).flat, getattr(wanted, name).flat
            if name in ("old_logp", "entropy"):  # an update computes them for trained tokens alone
                assert not one[~wanted.mask.flat].any()
                other = other * wanted.mask.flat
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for name, weight in early[2].items():
        torch.testing.assert_close(late[2][name], weight, rtol=1e-6, atol=1e-6)


def test_a_gap_that_is_too_large_stops_every_process_before_the_optimizer_step(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path, "qwen3")
    early, late = (
        run_ranks(2, body, folder, ParallelConfig(pipeline=2), late, True) for late in (False, True)
    )
    for (wanted, _), (found, steps) in zip(early, late, strict=True):
        assert steps == 1, "the schedule stands where it begins"
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
