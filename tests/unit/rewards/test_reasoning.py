"""Only what follows a model's reasoning is graded, and nothing of reasoning that does not end."""

import json
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import RewardConfig
from rftmega.core.errors import ConfigError
from rftmega.core.types import Completion, Prompt, Rollout, Trajectory, Turn
from rftmega.rewards import MajorityReward, Reasoning, create
from rftmega.rewards.create import PARTS
from rftmega.rewards.part import Answer
from tests.chat_formats import FORMATS, PLAIN, tokenizer
from tests.rollouts import answered

BOX = r"\boxed{9}"


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


def said(text: str) -> Rollout:
    return answered(tuple(map(ord, text)), (), "stop", 0)


PLAINLY = Reasoning.plain(decode)


@pytest.mark.parametrize(
    ("text", "graded"),
    [
        ("42", "42"),
        ("", ""),
        ("<think>7</think>42", "42"),
        ("4<think>7</think>2", "42"),
        ("<think>7</think>4<think>8</think>2", "42"),
        ("7</think>42", "42"),  # the prompt, or nobody, began it
        ("<think>a<think>b</think>42", "42"),
        ("<think>7</think>8</think>42", "42"),
        ("4<think>7</think>5</think>42", "42"),
        ("<think>7", None),
        ("42<think>7", None),
        ("<think>7</think>42<think>", None),
        (f"<think>maybe {BOX}", None),
        (f"<think>maybe {BOX}\n\nmore text", None),
        ("<thinking>", "<thinking>"),  # no marker of this template's
    ],
)
def test_what_follows_reasoning_is_graded_and_nothing_where_it_does_not_end(
    text: str, graded: str | None
) -> None:
    assert PLAINLY.read([], [*map(ord, text)]) == (text, graded)


@pytest.mark.parametrize(
    ("form", "text", "graded", "response"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\n4<|im_end|>", "\n\n4", "<think>\nHm.\n</think>\n\n4"),
        ("qwen3", "<think>\nHm 4", None, "<think>\nHm 4"),
        ("qwen3", "4<|im_end|>", "4", "4"),
        ("r1", "Hm.\n</think>\n\n4<｜end▁of▁sentence｜>", "\n\n4", "Hm.\n</think>\n\n4"),
        ("r1", "Hm 4<｜end▁of▁sentence｜>", None, "Hm 4"),
        ("gpt-oss", FORMATS["gpt-oss"].final, "4", "<|channel|>final<|message|>4"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            "4",
            "<|channel|>analysis<|message|>5assistant<|channel|>final<|message|>4",
        ),
        ("gpt-oss", "<|channel|>analysis<|message|>4<|return|>", None, "<|channel|>analysis<|message|>4"),
        ("glm", "\n<think>Hm.</think>\n4<|user|>", "\n\n4", "\n<think>Hm.</think>\n4"),
    ],
)  # fmt: skip
def test_the_template_says_what_reasoning_stands_between_even_where_markers_are_special_tokens(
    form: str, text: str, graded: str | None, response: str, tmp_path: Path
) -> None:
    own = tokenizer(tmp_path, (FORMATS | PLAIN)[form])
    context = own.encode("1+3?", chat_template=True)
    reasoning = Reasoning.of([], own)
    assert reasoning.read(context, own.encode_reply(text)) == (response, graded)


def test_a_template_that_ends_its_empty_thought_itself_asks_for_the_answer(tmp_path: Path) -> None:
    own = tokenizer(tmp_path, FORMATS["qwen3"], given={"enable_thinking": False})
    context = own.encode("1+3?", chat_template=True)
    assert own.decode(context).endswith("assistant\n\n\n\n\n")
    assert Reasoning.of([], own).read(context, own.encode_reply("4<|im_end|>")).graded == "4"


@pytest.mark.parametrize("opened", [False, True])
def test_markers_within_tokens_are_found_and_other_markers_take_their_place(
    opened: bool, tmp_path: Path
) -> None:
    """The tokenizer writes bc as one token, so that a marker may end inside of it."""
    own = tokenizer(tmp_path, PLAIN["chatml"])
    markers = ["<b>", "</b"]
    reasoning = Reasoning.of(markers, own)
    context = own.encode_reply("Think. <b>\n" if opened else "Think.")
    begin = "" if opened else "<b>"
    assert reasoning.read(context, own.encode_reply(f"{begin}7</bcd<think>")).graded == "cd<think>"
    assert reasoning.read(context, own.encode_reply(f"{begin}7")).graded is None


def test_every_built_in_part_sees_the_answer_only_and_gives_unfinished_reasoning_nothing() -> None:
    """Format sees reasoning, which its pattern may ask for, where it is finished."""
    names = list(PARTS)
    config = RewardConfig(format_pattern=".*", **dict.fromkeys(names, 1.0))
    seen: dict[str, list[str]] = {}

    def part(name: str) -> Any:
        def score(answers: Any) -> list[float]:
            seen[name] = [answer.response for answer in answers]
            return [1.0 for _ in answers]

        return score

    own = create(RewardConfig(), decode)
    own.config, own.parts = config, {name: part(name) for name in names}
    rollouts = [said("<think>9</think>4"), said("<think>4"), said("4")]
    found = own([Prompt((1,), "4")] * 3, rollouts)
    assert seen == dict.fromkeys(names, ["4", "4"]) | {"format": ["<think>9</think>4", "4"]}
    for name in names:
        assert [score[name] for score in found] == [1.0, 0.0, 1.0]
    assert [score["reward"] for score in found] == [len(names), 0.0, len(names)]


@pytest.mark.parametrize(
    ("config", "wrong", "right", "label"),
    [
        (RewardConfig(), "<think>4", "<think>5</think>4", "4"),
        (RewardConfig(math=1.0), f"<think>maybe {BOX}", f"<think>8</think>{BOX}", "9"),
        (RewardConfig(math=1.0), f"<think>maybe {BOX} and so on", f"x</think>{BOX}", "9"),
        (RewardConfig(multiple_choice=1.0), "<think>The answer is B", "<think>A.</think>(B)", "B"),
    ],
)
def test_an_answer_within_unfinished_reasoning_scores_nothing(
    config: RewardConfig, wrong: str, right: str, label: str
) -> None:
    reward = create(config, decode)
    found = reward([Prompt((1,), label)] * 2, [said(wrong), said(right)])
    parts = found[0].keys() - {"math_undecided", "exact_match"} or {"exact_match"}
    for name in parts:
        assert [score[name] for score in found] == [0.0, 1.0], name


def test_a_later_turn_is_read_by_what_stands_before_it() -> None:
    """The last turn begins behind an opened thought, the first does not."""
    context, first, asked, last = (tuple(map(ord, text)) for text in ("?", "a", "<think>", "b"))
    parts = [Completion(ids, (0.0,) * len(ids), "stop", 0) for ids in (first, last)]
    turns = (Turn("assistant", 1, 2), Turn("user", 2, 9), Turn("assistant", 9, 10))
    trajectory = Trajectory.of(context, parts[0], asked, parts[1], turns=turns)
    rollout = Rollout((trajectory,))
    assert decode(rollout.context_ids) == "?a<think>"
    (found,) = create(RewardConfig(), decode)([Prompt(context, "b")], [rollout])
    assert found["exact_match"] == 0.0


def test_functions_of_ones_own_see_all_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RewardConfig(exact_match=0.0)
    reward = create(config, decode)
    reward.config = RewardConfig(functions=["rewards.py:own"])
    reward._own = {"own"}
    heard: list[Answer] = []

    def own(answers: Any) -> list[float]:
        heard.extend(answers)
        return [0.5 for _ in answers]

    reward.parts = {"own": own}
    found = reward([Prompt((1,), "4")], [said("<think>4")])
    assert [answer.response for answer in heard] == ["<think>4"]
    assert found[0]["own"] == 0.5


def test_who_does_not_finish_reasoning_does_not_vote() -> None:
    prompt = Prompt((1,))
    texts = ["<think>7", "<think>7", "<think>7", "<think>7</think>4"]
    found = MajorityReward(PLAINLY, 4)([prompt] * 4, [said(text) for text in texts])
    assert [score["majority"] for score in found] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("pattern", ["</think>(.*)", r"<think>.*=(\d+)"])
def test_a_pattern_that_looks_for_what_is_removed_is_refused(pattern: str) -> None:
    with pytest.raises(
        ConfigError, match=r"answer_pattern=.* looks for </?think>.*reasoning_markers"
    ):
        create(RewardConfig(answer_pattern=pattern), decode)
    other = Reasoning(decode, lambda ids: list(map(chr, ids)), [("<a>", "</a>")])
    create(RewardConfig(answer_pattern=pattern), decode, other)


def test_a_tokenizer_without_a_template_knows_the_usual_markers(tmp_path: Path) -> None:
    own = tokenizer(tmp_path, PLAIN["chatml"])
    own.inner.chat_template = None
    reasoning = Reasoning.of([], own)
    assert reasoning.markers == (("<think>", "</think>"),)
    assert json.dumps(reasoning.read([], own.encode_reply("<think>x</think>4"))) == (
        '["<think>x</think>4", "4"]'
    )
