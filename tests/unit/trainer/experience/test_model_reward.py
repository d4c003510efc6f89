"""What a reward model says of answers, and what it must not say."""

from typing import Any

import pytest
import torch

from rftmega.core.errors import RewardError
from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Rows, Samples, TokenValues
from rftmega.trainer.experience import ModelReward
from tests.columns import ragged


class Judge:
    """A value model that says `score` of every state."""

    def __init__(self, score: float):
        self.score = score

    def values(self, rows: Any) -> Any:
        found = torch.zeros(rows.padded().mask.shape)
        found[1] = self.score
        return rows.like(TokenValues(found)).value


def samples() -> Samples[Ragged]:
    rows = Rows.of_completions(
        torch.zeros(2, 4, dtype=torch.int64), torch.tensor([1, 1]), torch.tensor([4, 3])
    )
    nothing = torch.zeros(2)
    return Samples(
        [Prompt((1,), index=7), Prompt((1,), index=8)],
        rows.ragged(),
        ragged(torch.zeros(2, 3)),
        nothing,
        nothing.long(),
        nothing.bool(),
        {},
    )


def test_a_score_is_weighed_and_kept_as_a_part() -> None:
    found = ModelReward(Judge(2.0), 0.5)(samples())
    assert found.reward.tolist() == [0.0, 1.0]
    assert found.reward_parts["model"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_no_number_is_refused_with_its_prompt(score: float) -> None:
    with pytest.raises(
        RewardError, match=f"The reward model gave {score} for a completion of prompt 8, and 1 such"
    ):
        ModelReward(Judge(score), 0.5)(samples())
