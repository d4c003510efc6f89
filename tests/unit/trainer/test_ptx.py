from typing import Any

import pytest
import torch

from rftmega.algorithms.losses import policy_loss
from rftmega.algorithms.supervised import cross_entropy_loss
from rftmega.core.types import Auxiliary
from rftmega.data.sampler import PromptOrder
from rftmega.data.supervised import Example, rows_of
from rftmega.trainer import Learner
from rftmega.trainer.experience import given
from rftmega.trainer.ptx import PTX
from tests.unit.monitoring.observers.test_checkpointing import read, written

EXAMPLES = [Example((1, 2), (first, 3)) for first in range(10, 17)]


def ptx() -> PTX:
    return PTX(
        PromptOrder(EXAMPLES, batch_size=3, seed="0/ptx", collate=rows_of),
        cross_entropy_loss(),
        0.5,
    )


class Remembering:
    """A policy that learns nothing."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def step(self, experience: Any, loss_fn: Any, **beside: Any) -> dict[str, float]:
        self.seen.append(beside)
        return {"loss": 0.0}


def firsts(auxiliary: Auxiliary) -> list[int]:
    return auxiliary.experience.tokens[:, 2].tolist()


def test_each_update_gets_the_next_batch_of_given_answers_and_a_frozen_policy_none() -> None:
    policy, source = Remembering(), ptx()
    learner = Learner(policy, policy_loss(), frozen_steps=1, ptx=source)
    completions = given(rows_of(EXAMPLES))
    for step in range(4):
        learner.update(completions, step, completions)
    drawn = [beside["auxiliary"] for beside in policy.seen]
    assert [auxiliary.coef for auxiliary in drawn] == [0.5] * 3
    assert sorted(sum(map(firsts, drawn), [])[:7]) == list(range(10, 17)), (
        "an epoch has every example once"
    )
    assert all(
        torch.equal(auxiliary.experience.mask, auxiliary.experience.rows.mask)
        for auxiliary in drawn
    )
    assert source.state()["position"] == 9


def test_without_given_answers_a_policy_is_updated_as_ever() -> None:
    policy = Remembering()
    completions = given(rows_of(EXAMPLES))
    Learner(policy, policy_loss()).update(completions, 0, completions)
    assert policy.seen == [{}]


@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_resumed_source_goes_on_where_it_was(before: int) -> None:
    whole, first = ptx(), ptx()
    wanted = [firsts(whole()) for _ in range(before + 3)]
    found = [firsts(first()) for _ in range(before)]
    resumed = ptx()
    saved = read(written(Learner(Remembering(), policy_loss(), ptx=first).state()))
    Learner(Remembering(), policy_loss(), ptx=resumed).load_state(saved)
    assert found + [firsts(resumed()) for _ in range(3)] == wanted
    assert wanted[0] != sorted(wanted[0]), "the order is shuffled"
