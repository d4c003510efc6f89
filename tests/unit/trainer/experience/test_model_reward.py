"""The scores of reward and cost models of whole completions, and scores that are refused."""

from typing import Any

import pytest
import torch

from rftmega.config import RewardConfig
from rftmega.config.options.scoring_models import ScoringModel
from rftmega.core.errors import RewardError
from rftmega.core.interfaces import OneProcess
from rftmega.core.ragged import Ragged
from rftmega.core.types import Prompt, Rows, Samples, TokenValues
from rftmega.trainer.experience import ModelReward, model_rewards
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


HELPFUL = ScoringModel("model", 0.5, "folder", "reward.model_path")


def test_a_score_is_weighed_and_kept_as_a_part() -> None:
    found = ModelReward(Judge(2.0), HELPFUL)(samples())
    assert found.reward.tolist() == [0.0, 1.0]
    assert found.reward_parts["model"].tolist() == [0.0, 2.0]


def test_the_weighted_score_of_a_cost_model_is_subtracted() -> None:
    config = RewardConfig(model=0.5, model_path="a", cost=2.0, cost_path="b")
    models = {"cost_model": Judge(3.0), "reward_model": Judge(4.0)}
    found = samples()
    for reward in model_rewards(config, models, OneProcess()):
        found = reward(found)
    assert found.reward.tolist() == [0.0, 0.5 * 4.0 - 2.0 * 3.0]
    assert {name: part.tolist() for name, part in found.reward_parts.items()} == {
        "model": [0.0, 4.0],
        "cost": [0.0, 3.0],
    }
    assert model_rewards(RewardConfig(), {}, OneProcess()) == ()


@pytest.mark.parametrize("score", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_no_number_is_refused_with_its_prompt(score: float) -> None:
    with pytest.raises(
        RewardError,
        match=f"reward.model_path=folder gave {score} for a completion of prompt 8, and 1 such",
    ):
        ModelReward(Judge(score), HELPFUL)(samples())
