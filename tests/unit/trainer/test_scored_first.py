"""A step whose answers are all of earlier policies is scored before its update: its gate asks for
new answers.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.core.interfaces import OneProcess
from rftmega.trainer.ppo import PPOTrainer
from tests.columns import ragged


class Scored(Exception):
    """Tells whether the maker was asked for log-probs."""


class Maker:
    teachers = ()

    def make(self, samples: Any, *, old_log_probs: bool) -> Any:
        raise Scored(old_log_probs)


@pytest.mark.parametrize(("version", "first"), [(0, False), (-1, True)])
def test_the_update_scores_only_answers_of_the_present_policy(version: int, first: bool) -> None:
    mask = ragged(torch.ones(2, 3, dtype=torch.bool))
    versions = ragged(torch.full((2, 3), version))
    samples = SimpleNamespace(rows=SimpleNamespace(mask=mask), versions=versions)
    trainer: Any = object.__new__(PPOTrainer)
    vars(trainer).update(
        late_scoring=True,
        callbacks=[],
        step=0,
        maker=Maker(),
        host=OneProcess(),
        learner=SimpleNamespace(frozen_steps=0),
        schedule=SimpleNamespace(samples=lambda *given: (samples, {})),
        phase=lambda name: nullcontext(),
    )
    with pytest.raises(Scored) as told:
        trainer.train_step([])
    assert told.value.args == (first,)
