"""A run shows what its reward makes of the first completions, before it learns from them."""

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from rftmega.config import RewardConfig
from rftmega.core.ragged import Ragged
from rftmega.core.types import Completion, Prompt, Rollout, Samples
from rftmega.monitoring.observers.reward_check import RewardCheck, shown
from rftmega.rewards import MajorityReward, Reasoning
from rftmega.rewards.create import create
from rftmega.trainer.experience import collect
from tests.rollouts import rollout_of

PROMPTS = [Prompt((97,), label=str(at)) for at in range(6)]


def text(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def samples_of(said: Sequence[str], scores: Sequence[Mapping[str, float]]) -> Samples[Ragged]:
    """Two completions per prompt; the last token of a text that ends in ~ is missing."""
    requests = [PROMPTS[at // 2] for at in range(len(said))]
    rollouts: list[Rollout] = []
    for prompt, each in zip(requests, said, strict=True):
        ids, reason = tuple(map(ord, each)), "length" if each.endswith("~") else "stop"
        rollouts.append(rollout_of(prompt, Completion(ids, (-1.0,) * len(ids), reason, 0)))

    def reward(_: Sequence[Prompt], __: Sequence[Rollout]) -> list[dict[str, float]]:
        return [dict(score) for score in scores]

    return collect(requests, rollouts, reward, samples_per_prompt=2)


def checked(
    caplog: pytest.LogCaptureFixture,
    samples: Samples[Ragged],
    *,
    resumed: bool = False,
    graded: str | None = "4",
) -> list[str]:
    check = RewardCheck(
        text,
        grading=lambda context, ids: graded,
        extracting=lambda prompt, said: {"math": said, "exact_match": None},
    )
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for step in range(2):
            check.on_rollouts(SimpleNamespace(step=step, resumed=resumed), samples)
    return caplog.messages


def test_completions_are_shown_once_with_answers_and_rewards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scores = [
        {"math": 1.0, "math_undecided": 0.0, "model": -1.0, "reward": 0.5},
        {"format": 0.25, "model": -1.0, "reward": 0.0},
    ]
    (told,) = checked(caplog, samples_of(["so 4", "\x1b[2J\nno~"], scores))
    assert told.splitlines() == [
        "Reward check: 2 of the 2 completions of the first step, before the first update.",
        '- reward 0.5 (math 1, model -1); label "0"; math reads "4"; exact_match reads no answer',
        '  "so 4"',
        '- reward 0 (model -1, format 0.25); label "0"; math reads "4"; exact_match reads no answer',
        '  "\\x1b[2J\\nno~" [cut off by its length]',
        "Equal for all 2: model -1.",
    ]
    assert checked(caplog, samples_of(["a", "b"], scores), resumed=True) == []
    assert (
        "; unfinished reasoning\n"
        in checked(caplog, samples_of(["a", "b"], scores), graded=None)[0]
    )


def test_ten_completions_of_many_prompts_are_shown_and_equal_rewards_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = [f"<{at}>" for at in range(12)]
    told, warning = checked(caplog, samples_of(said, [{"reward": 0.5}] * 12))
    assert "10 of the 12" in told and told.count("- reward 0.5") == 10
    assert [each for each in said if each not in told] == ["<5>", "<11>"]
    assert "all 12 completions of the first step have the reward 0.5" in warning
    assert "never fires" in warning
    scores = [{"reward": float(at == 11)} for at in range(12)]
    assert len(checked(caplog, samples_of(said, scores))) == 1, "one that is not shown differs"


def test_untrusted_text_is_one_short_line() -> None:
    assert shown("a\u202e\r\x9b\ud800é", 9) == '"a\\u202e\\r\\x9b\\ud800é"'
    assert shown("abc" + "x" * 10**6 + "defghi", 9) == '"abc" [...] "defghi"'


def test_rewards_tell_which_answers_they_read() -> None:
    weights = {"exact_match": 1.0, "multiple_choice": 1.0, "code": 1.0, "format": 1.0}
    config = RewardConfig(
        recipe={"all": weights, "one": {"format": 1.0}}, answer_pattern=r"(\d)$", format_pattern="x"
    )
    reward = create(config, text)
    said = "Answer: B\n```python\nx\n```\n7"
    assert reward.extracted(Prompt((1,), kind="all"), said) == {
        "exact_match": "7",
        "multiple_choice": "B",
        "code": "x\n",
    }
    assert reward.extracted(Prompt((1,), kind="all"), "no")["exact_match"] is None
    assert reward.extracted(Prompt((1,), kind="one"), said) == {}
    majority = MajorityReward(Reasoning.plain(text), 2, r"\d")
    assert majority.extracted(Prompt((1,)), said) == {"majority": "7"}
