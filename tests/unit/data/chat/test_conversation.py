"""Conversations of many turns become trajectories whose tokens are those that were sampled."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftmega.core.errors import DataError
from rftmega.core.types import Completion, Prompt
from rftmega.data.chat.conversation import Conversation, messages_of
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.data.chat.replies import text_of
from tests.chat_formats import FORMATS, PLAIN, TOOL, Format, tokenizer

QUESTION = "1+3? abcd"


class Rollout:
    """A conversation in one format, and an oracle of all that was sampled in it."""

    def __init__(
        self,
        path: Path,
        form: Format,
        tools: Sequence[Any] = (TOOL,),
        *,
        keep_reasoning: bool = False,
    ):
        self.tokenizer = tokenizer(path, form, tools=tools, keep_reasoning=keep_reasoning)
        self.renderer = ConversationRenderer.of(self.tokenizer)
        ids = self.tokenizer.encode(QUESTION, chat_template=True)
        self.task = Prompt(ids, record=json.dumps({"prompt": QUESTION}))
        self.talk = Conversation.of(self.task, self.renderer, tools)
        self.completions: list[tuple[int, ...]] = []

    def completion(self, text: str, *, cut: bool = False, ids: Sequence[int] = ()) -> Any:
        sampled = tuple(ids) or self.tokenizer.encode_reply(text)
        number = len(self.completions)
        self.completions.append(sampled)
        logprobs = [-(number + 1.0)] * len(sampled)
        reason = "length" if cut else "stop"
        return self.talk.answered(Completion(sampled, logprobs, reason, number))

    def reply(self, reply: Any, content: str = "4") -> None:
        self.talk.reply(
            [
                {"role": "tool", "name": call.name, "content": content, "tool_call_id": call.id}
                for call in reply.calls
            ]
        )

    def text(self, ids: Any) -> str:
        return text_of(self.tokenizer, [int(each) for each in ids])


@pytest.mark.parametrize("name", FORMATS)
def test_a_rollout_of_calls_is_one_trajectory_that_the_template_would_write(
    name: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    rollout = Rollout(tmp_path, form)
    for number in range(2):
        # Mistral's calls carry their ids
        call = form.call.replace("call00000", f"call0000{number}")
        rollout.reply(rollout.completion(call))
        known = (*rollout.talk.context,)
        assert known == rollout.renderer.render(rollout.talk.messages, [TOOL])
    rollout.completion(form.final)
    (found,) = rollout.talk.trajectories()
    delta = rollout.tokenizer.encode_reply(form.tool_delta.replace("call00000", "call00001"))
    first = rollout.tokenizer.encode_reply(form.tool_delta)
    parts = [
        (rollout.task.token_ids, False),
        (rollout.completions[0], True),
        (first, False),
        (rollout.completions[1], True),
        (delta, False),
        (rollout.completions[2], True),
    ]
    assert found.token_ids.tolist() == [token for ids, _ in parts for token in ids]
    assert found.loss_mask.tolist() == [trained for ids, trained in parts for _ in ids]
    expected = [number for number, ids in enumerate(rollout.completions) for _ in ids]
    assert found.versions[found.loss_mask].tolist() == expected
    assert found.logprobs[found.loss_mask].tolist() == [-(each + 1.0) for each in expected]
    roles = [turn.role for turn in found.turns]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    spans = [range(turn.start, turn.stop) for turn in found.turns if turn.role == "assistant"]
    assert np.flatnonzero(found.loss_mask).tolist() == [place for span in spans for place in span]
    words = [rollout.text(found.token_ids[turn.start : turn.stop]) for turn in found.turns]
    assert words[0] == form.call
    assert words[1].strip('"') == words[3].strip('"') == "4"
    assert words[4] == form.final
    assert [turn.name for turn in found.turns] == ["", "add", "", "add", ""]


@pytest.mark.parametrize(("turns", "pieces"), [(1, 1), (2, 3), (5, 2)])
@pytest.mark.parametrize("name", ["qwen3", "hermes", "glm"])
def test_ragged_rollouts_keep_every_sampled_token(
    name: str, turns: int, pieces: int, tmp_path: Path
) -> None:
    """Answers are sampled in pieces that encoding would not give; the oracle is their list."""
    form = FORMATS[name]
    rollout = Rollout(tmp_path, form)
    odd = rollout.tokenizer.inner.convert_tokens_to_ids(["ab", "cd"]) * pieces
    expected = list(rollout.task.token_ids)
    mask = [False] * len(expected)
    for turn in range(turns):
        body = rollout.tokenizer.encode_reply(form.call)
        begin = rollout.tokenizer.encode_reply("\n<think>" if name == "glm" else "<think>\n")
        assert name == "hermes" or body[: len(begin)] == begin
        sampled = (
            (*begin, *odd * (turn + 1), *body[len(begin) :]) if name != "hermes" else (*odd, *body)
        )
        reply = rollout.completion("", ids=sampled)
        assert [call.arguments for call in reply.calls] == [{"a": 1}]
        expected += sampled
        mask += [True] * len(sampled)
        if turn + 1 < turns:
            rollout.reply(reply)
            delta = rollout.tokenizer.encode_reply(form.tool_delta)
            expected += delta
            mask += [False] * len(delta)
    (found,) = rollout.talk.trajectories()
    assert found.token_ids.tolist() == expected
    assert found.loss_mask.tolist() == mask


def test_r1s_thinking_is_kept_on_request_as_well(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path, PLAIN["r1"], (), keep_reasoning=True)
    for _ in range(2):
        rollout.completion(PLAIN["r1"].final)
        rollout.talk.reply([{"role": "user", "content": "Sure?"}])
    rollout.completion(PLAIN["r1"].final)
    (found,) = rollout.talk.trajectories()
    assert int(found.loss_mask.sum()) == sum(map(len, rollout.completions))


def test_thinking_that_the_template_drops_is_kept_on_request(tmp_path: Path) -> None:
    plain, kept = (
        Rollout(tmp_path / name, FORMATS["qwen3"], keep_reasoning=keep)
        for name, keep in (("plain", False), ("kept", True))
    )
    for rollout in (plain, kept):
        for number in range(3):
            rollout.completion(f"<think>\nHm {number}.\n</think>\n\nFour.<|im_end|>")
            if number < 2:
                rollout.talk.reply([{"role": "user", "content": "Sure?"}])
    assert len(plain.talk.trajectories()) == 3
    (found,) = kept.talk.trajectories()
    bridge = kept.tokenizer.encode_reply(
        "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    one, two, three = kept.completions
    assert found.token_ids.tolist() == [
        *kept.task.token_ids, *one, *bridge, *two, *bridge, *three,
    ]  # fmt: skip
    assert int(found.loss_mask.sum()) == len(one) + len(two) + len(three)


def test_where_thinking_is_dropped_another_trajectory_begins_and_learns_no_history(
    tmp_path: Path,
) -> None:
    form = FORMATS["qwen3"]
    rollout = Rollout(tmp_path, form)
    rollout.reply(rollout.completion(form.call))
    rollout.completion(form.final)
    before = rollout.talk.context
    rollout.talk.reply([{"role": "user", "content": "Sure?"}])
    context = rollout.talk.context
    assert context == rollout.renderer.render(rollout.talk.messages, [TOOL])
    assert "I add." in rollout.text(before)
    assert "I add." not in rollout.text(context)
    rollout.completion("<think>\nYes.\n</think>\n\nYes.<|im_end|>")
    rollout.talk.reward(0.5)
    one, two = rollout.talk.trajectories()
    assert tuple(one.token_ids) == before
    assert int(one.loss_mask.sum()) == len(rollout.completions[0]) + len(rollout.completions[1])
    assert tuple(two.token_ids) == (*context, *rollout.completions[2])
    assert two.prompt_length == len(context)
    assert int(two.loss_mask.sum()) == len(rollout.completions[2])
    assert [turn.reward for turn in one.turns] == [0.0] * 3
    (turn,) = two.turns
    assert turn == ("assistant", len(context), len(two), "", 0.5)


@pytest.mark.parametrize("name", ["r1", "counts"])
def test_a_template_that_is_never_stable_gives_a_trajectory_a_turn(
    name: str, tmp_path: Path
) -> None:
    form = PLAIN[name]
    rollout = Rollout(tmp_path, form, ())
    for _ in range(3):
        rollout.completion(form.final)
        rollout.talk.reply([{"role": "user", "content": "Sure?"}])
    rollout.completion(form.final)
    found = rollout.talk.trajectories()
    assert [int(each.loss_mask.sum()) for each in found] == list(map(len, rollout.completions))
    assert all(tuple(each.token_ids[each.loss_mask]) == rollout.completions[0] for each in found)


def test_a_new_answer_s_reward_is_the_last_s_even_behind_a_reply(tmp_path: Path) -> None:
    form = FORMATS["qwen3"]
    rollout = Rollout(tmp_path, form)
    with pytest.raises(ValueError, match="no completion to reward"):
        rollout.talk.reward(1.0)
    reply = rollout.completion(form.call)
    rollout.talk.reward(0.25)
    rollout.reply(reply)
    rollout.talk.reward(0.5)
    (found,) = rollout.talk.trajectories()
    assert [turn.reward for turn in found.turns] == [0.5]


def test_what_stands_behind_the_last_answer_is_left_out(tmp_path: Path) -> None:
    form = FORMATS["hermes"]
    rollout = Rollout(tmp_path, form)
    assert rollout.talk.trajectories() == []
    rollout.reply(rollout.completion(form.call))
    (found,) = rollout.talk.trajectories()
    assert tuple(found.token_ids) == (*rollout.task.token_ids, *rollout.completions[0])
    assert [turn.role for turn in found.turns] == ["assistant"]
    with pytest.raises(ValueError, match="follows a completion"):
        rollout.talk.reply([{"role": "user", "content": "?"}])


def test_the_end_of_an_answer_that_was_cut_off_is_not_trained(tmp_path: Path) -> None:
    form = FORMATS["hermes"]
    rollout = Rollout(tmp_path, form)
    assert not rollout.completion("It is", cut=True).complete
    rollout.talk.reply([{"role": "user", "content": "Go on."}])
    assert rollout.talk.context == rollout.renderer.render(rollout.talk.messages, [TOOL])
    rollout.completion(form.final)
    (found,) = rollout.talk.trajectories()
    behind = len(rollout.task.token_ids) + len(rollout.completions[0])
    assert rollout.text(found.token_ids[behind : behind + 1]) == "<|im_end|>"
    assert not found.loss_mask[behind]
    assert not found.truncated


def test_a_task_is_to_be_what_the_template_makes_of_its_messages(tmp_path: Path) -> None:
    rollout = Rollout(tmp_path, FORMATS["hermes"])
    other = Prompt(rollout.task.token_ids, record=json.dumps({"prompt": "1+4?"}), index=7)
    with pytest.raises(DataError, match="prompt 7 is not what the chat template makes"):
        Conversation.of(other, rollout.renderer, [TOOL])
    with pytest.raises(DataError, match="is not what the chat template makes"):
        Conversation.of(rollout.task, rollout.renderer, [])
    with pytest.raises(DataError, match="comes without its text"):
        Conversation.of(Prompt(rollout.task.token_ids), rollout.renderer, [TOOL])


def test_images_are_kept_while_the_template_goes_on_and_never_lost(tmp_path: Path) -> None:
    form = FORMATS["qwen3"]
    rollout = Rollout(tmp_path, form)
    expanded = (*rollout.task.token_ids, 5, 5, 5)
    messages = messages_of(rollout.task)
    talk = Conversation(expanded, rollout.renderer, [TOOL], messages=messages, images=True)
    rollout.talk = talk
    rollout.reply(rollout.completion(form.call))
    assert talk.context[: len(expanded)] == expanded
    rollout.completion(form.final)
    with pytest.raises(DataError, match="with images can't be rendered anew"):
        talk.reply([{"role": "user", "content": "Sure?"}])


@pytest.mark.parametrize("name", ["hermes", "qwen3 without its table", "qwen3"])
def test_an_answer_goes_on_with_the_text_that_a_task_ends_with(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    ours = tokenizer(tmp_path, form, tools=(TOOL,))
    begun = [
        {"role": "user", "content": "1+3?"},
        {"role": "assistant", "content": "I add:"},
    ]
    task = Prompt(ours.encode(begun, chat_template=True), record=json.dumps({"prompt": begun}))
    assert text_of(ours, task.token_ids).endswith("I add:")
    talk = Conversation.of(task, ConversationRenderer.of(ours), (TOOL,))
    call = form.call.rpartition("</think>\n\n")[2]
    sampled = ours.encode_reply(f"\n{call}")
    reply = talk.answered(Completion(sampled, [-1.0] * len(sampled), "stop", 0))
    assert [each.name for each in reply.calls] == ["add"]
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert talk.messages[-1]["content"].strip() == "I add:"
    talk.reply([{"role": "tool", "name": "add", "content": "4", "tool_call_id": "call00000"}])
    assert talk.context[: len(task.token_ids) + len(sampled)] == (*task.token_ids, *sampled)
    behind = text_of(ours, talk.context[len(task.token_ids) + len(sampled) :])
    assert behind == form.tool_delta
