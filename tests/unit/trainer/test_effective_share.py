"""The share of tokens that the importance weights leave is one number a rollout, however it is cut
into optimizer steps.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.mismatch import effectiveness_of
from rftmega.config.options.algorithms import NoImportance, TokenImportance
from rftmega.core.types import Experience, TokenStats
from rftmega.trainer import Learner
from rftmega.trainer.optimizer_steps import Schedule
from tests.columns import ragged

ROWS, TARGETS = 6, 4


class Still:
    """A policy that does not move, and says its log-probs where it is asked."""

    def __init__(self, logp: Any):
        self.logp = logp

    def step(self, experience: Any, loss_fn: Any, **given: Any) -> dict[str, float]:
        if "scored" in given:
            given["scored"](TokenStats(self.logp, None))
        return {"loss": float(len(experience))}


def rollout() -> Experience[Any]:
    torch.manual_seed(0)
    mask = ragged(torch.rand(ROWS, TARGETS) < 0.8)
    old, engine = -torch.rand(ROWS, TARGETS), -torch.rand(ROWS, TARGETS) * 3
    return Experience(
        tokens=ragged(torch.zeros(ROWS, TARGETS + 1)),
        prompt_lengths=torch.ones(ROWS, dtype=torch.int64),
        lengths=torch.full((ROWS,), TARGETS + 1),
        mask=mask,
        behaviour_logp=ragged(engine),
        old_logp=ragged(old),
        reference_logp=None,
        advantage=ragged(torch.ones(ROWS, TARGETS)),
    )


def looped(experience: Any) -> float:
    weights = [
        min(float((old - engine).double().exp()), 2.0)
        for old, engine, own in zip(
            experience.old_logp.flat,
            experience.behaviour_logp.flat,
            experience.mask.flat,
            strict=True,
        )
        if own
    ]
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_it_is_that_of_the_whole_rollout_however_many_steps_it_is_cut_into(parts: int) -> None:
    experience = rollout()
    schedule = Schedule(updates_per_epoch=parts, epochs=2)
    learner = Learner(
        Still(None),  # type: ignore[arg-type]
        policy_loss(correction=TokenImportance()),
        effective=effectiveness_of(TokenImportance()),
        schedule=schedule,
    )
    metrics = learner.update(experience, 0, experience)
    assert metrics["importance_effective"] == pytest.approx(looped(experience), rel=1e-5)


def test_it_takes_the_log_probs_that_the_update_itself_says() -> None:
    whole = rollout()
    unscored = replace(whole, old_logp=None)
    learner = Learner(
        Still(whole.old_logp), policy_loss(), effective=effectiveness_of(TokenImportance())
    )  # type: ignore[arg-type]
    metrics = learner.update(unscored, 0, unscored)
    assert metrics["importance_effective"] == pytest.approx(looped(whole), rel=1e-5)


def test_without_a_correction_and_where_the_policy_is_frozen_there_is_none() -> None:
    experience = rollout()
    plain = Learner(Still(None), policy_loss(), effective=effectiveness_of(NoImportance()))  # type: ignore[arg-type]
    assert "importance_effective" not in plain.update(experience, 0, experience)
    frozen = Learner(
        Still(None), policy_loss(), effective=effectiveness_of(TokenImportance()), frozen_steps=1
    )  # type: ignore[arg-type]
    assert "importance_effective" not in frozen.update(experience, 0, experience)
    assert "importance_effective" in frozen.update(experience, 1, experience)
