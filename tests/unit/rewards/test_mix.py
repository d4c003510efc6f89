from concurrent.futures import ThreadPoolExecutor

import pytest

from rftmega.config import RewardConfig
from rftmega.core.errors import ConfigError, DataError, RewardError
from rftmega.core.types import Completion, Prompt, Rollout, Trajectory, Turn
from rftmega.rewards import check_prompts, create
from rftmega.rewards.create import PARTS
from rftmega.rewards.mix import MixedReward
from tests.rollouts import answered


def said(text: str) -> Rollout:
    return answered(tuple(map(ord, text)), (), "stop", 0)


def decode(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def asked(label: str = "42", kind: str = "", index: int = 0) -> Prompt:
    """The prompt holds label and format alike: a reward that reads it would always be content."""
    return Prompt(tuple(map(ord, "<a>42</a>")), label, index, kind)


def score(config: RewardConfig, text: str, label: str = "42") -> dict[str, float]:
    return create(config, decode)([asked(label)], [said(text)])[0]


@pytest.mark.parametrize(
    ("text", "value"), [("42", 1.0), (" 42\n", 1.0), ("421", 0.0), ("", 0.0), ("4 2", 0.0)]
)
def test_an_exact_match_ignores_white_space_around_only(text: str, value: float) -> None:
    assert score(RewardConfig(), text) == {"exact_match": value, "reward": value}


def test_the_format_rule_must_match_the_whole_response() -> None:
    config = RewardConfig(exact_match=1.0, format=0.5, format_pattern="<a>.*</a>")
    assert score(config, "<a>7\n</a>") == {"exact_match": 0.0, "format": 1.0, "reward": 0.5}
    assert score(config, "so <a>7</a>")["format"] == 0.0
    assert score(config, "<a>42</a>", label="<a>42</a>")["reward"] == 1.5


def given(rewards: dict[str, float], *turns: float, zero: bool = False) -> Rollout:
    """A rollout whose environment gave these rewards, and these for its turns."""
    ids, own = (1,), []
    for reward in turns:
        own.append(Turn("assistant", len(ids), len(ids) + 1, reward=reward))
        ids = (*ids, 52)
    completion = Completion(ids[1:] or (52,), (0.0,) * max(len(turns), 1), "stop", 0)
    trajectory = Trajectory.of((1,), completion, turns=tuple(own))
    return Rollout((trajectory,), rewards=rewards, score_zero=zero)


def test_rewards_of_the_environment_are_added_with_their_weights_and_those_of_turns_with_1() -> (
    None
):
    config = RewardConfig(exact_match=0.5, environment={"found": 2.0})
    reward = create(config, decode)
    (found,) = reward([asked("4")], [given({"found": 1.0, "speed": 0.25})])
    assert found == {"exact_match": 1.0, "found": 1.0, "speed": 0.25, "reward": 2.75}
    (turns,) = reward([asked("5")], [given({}, 0.5, 0.0, -0.25)])
    assert turns == {"exact_match": 0.0, "turns": 0.25, "reward": 0.25}
    (zero,) = reward([asked("4")], [given({"found": 1.0}, 1.0, zero=True)])
    assert zero == {"exact_match": 0.0, "found": 0.0, "turns": 0.0, "reward": 0.0}


@pytest.mark.parametrize(
    ("rewards", "told"),
    [({"exact_match": 1.0}, "a part of the reward already"), ({"a": float("nan")}, "not a finite")],
)
def test_rewards_of_the_environment_that_can_not_be_added_are_refused(
    rewards: dict[str, float], told: str
) -> None:
    with pytest.raises(RewardError, match=told):
        create(RewardConfig(), decode)([asked()], [given(rewards)])


def test_a_broken_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="format_pattern"):
        score(RewardConfig(format=1.0, format_pattern="("), "x")


def test_an_exact_match_is_reported_without_a_weight_and_other_parts_are_not() -> None:
    config = RewardConfig(exact_match=0.0, multiple_choice=2.0)
    assert score(config, "B", "B") == {"exact_match": 1.0, "multiple_choice": 1.0, "reward": 2.0}


RECIPE = {
    "letter": {"multiple_choice": 2.0, "exact_match": -0.5},
    "word": {"exact_match": 1.0, "multiple_choice": 0.0},
}


def test_every_kind_has_its_own_parts_and_weights_and_the_order_stays() -> None:
    prompts = [asked("B", "letter"), asked("B", "word"), asked("B", "letter")]
    found = create(RewardConfig(recipe=RECIPE), decode)(
        prompts, [said("(B)"), said("B"), said("B")]
    )
    assert found == [
        {"exact_match": 0.0, "multiple_choice": 1.0, "reward": 2.0},
        {"exact_match": 1.0, "reward": 1.0},
        {"exact_match": 1.0, "multiple_choice": 1.0, "reward": 1.5},
    ]


def test_a_kind_that_the_recipe_does_not_hold_is_found_before_training_and_refused_while_scoring() -> (
    None
):
    config = RewardConfig(recipe=RECIPE)
    prompts = [asked("B", "word"), asked("B", "words"), asked("B", "words")]
    with pytest.raises(
        DataError, match=r"no kind 'words', only 'letter', 'word': .*data\.kind_key.*2 prompt"
    ):
        check_prompts(config, prompts)
    with pytest.raises(RewardError, match="no kind 'words', only 'letter', 'word'"):
        create(config, decode)(prompts, [said("B")] * 3)
    check_prompts(config, prompts[:1])
    check_prompts(RewardConfig(), prompts)  # without a recipe, kinds are the data's own business


def test_a_label_that_a_part_cannot_read_is_found_before_training_where_the_part_scores_it() -> (
    None
):
    config = RewardConfig(recipe=RECIPE)
    with pytest.raises(
        DataError,
        match=r"reward\.multiple_choice: the label 'Paris' is not one letter \(prompt 7\)",
    ):
        check_prompts(config, [asked("Paris", "letter", index=7)])
    check_prompts(config, [asked("Paris", "word")])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused_by_part_and_prompt(value: float) -> None:
    parts = {
        "exact_match": lambda answers: [1.0 for _ in answers],
        "remote": lambda answers: [0.5, value],
    }
    reward = MixedReward(RewardConfig(remote=1.0), parts, decode)
    with pytest.raises(RewardError, match=f"remote gave {value} for prompt 9"):
        reward([asked(index=8), asked(index=9)], [said("x")] * 2)


def test_no_answers_give_no_scores() -> None:
    assert create(RewardConfig(), decode)([], []) == []


def test_threads_get_the_scores_of_their_own_answers() -> None:
    reward = create(RewardConfig(recipe=RECIPE), decode)
    calls = [
        [asked("ABCD"[(i + j) % 4], "letter" if j % 2 else "word") for j in range(i % 5 + 1)]
        for i in range(40)
    ]
    alone = [reward(prompts, [said("B")] * len(prompts)) for prompts in calls]
    with ThreadPoolExecutor(8) as pool:
        assert (
            list(pool.map(lambda prompts: reward(prompts, [said("B")] * len(prompts)), calls))
            == alone
        )


def test_every_weight_is_a_part() -> None:
    assert set(RewardConfig().parts()) == PARTS.keys()
    assert all(isinstance(getattr(RewardConfig(), name), float) for name in PARTS)
