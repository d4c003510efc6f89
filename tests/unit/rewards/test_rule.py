import pytest

from rftmega.config import RewardConfig
from rftmega.errors import ConfigError
from rftmega.rewards import RuleReward
from rftmega.types import Completion, Prompt


def score(config: RewardConfig, text: str, label: str = "42") -> dict[str, float]:
    reward = RuleReward(config, decode=lambda ids: "".join(map(chr, ids)))
    # The prompt holds label and format alike: a reward that reads it would always be content.
    prompt = Prompt(tuple(map(ord, "<a>42</a>")), label=label)
    return reward(prompt, Completion(tuple(map(ord, text)), (), "stop", 0))


@pytest.mark.parametrize(("text", "value"), [("42", 1.0), (" 42\n", 1.0), ("421", 0.0), ("", 0.0), ("4 2", 0.0)])
def test_an_exact_match_ignores_white_space_around_only(text: str, value: float) -> None:
    assert score(RewardConfig(), text) == {"exact_match": value, "reward": value}


def test_the_format_rule_must_match_the_whole_response() -> None:
    config = RewardConfig(exact_match=1.0, format=0.5, format_pattern="<a>.*</a>")
    assert score(config, "<a>7\n</a>") == {"exact_match": 0.0, "format": 1.0, "reward": 0.5}
    assert score(config, "so <a>7</a>")["format"] == 0.0
    assert score(config, "<a>42</a>", label="<a>42</a>")["reward"] == 1.5


def test_a_broken_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="format_pattern"):
        score(RewardConfig(format=1.0, format_pattern="("), "x")
