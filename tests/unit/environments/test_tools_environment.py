"""The loop of turns and tools: masks, limits, failures and rewards, against transcripts by hand."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rftmega.config.options.environments import SingleTurn, Tools
from rftmega.config.options.tools import ToolLimits
from rftmega.core.errors import ConfigError, ContextTooLong, DataError, InfrastructureFault
from rftmega.core.types import Completion, Prompt, Rollout
from rftmega.environments.create import check, create, specs_of
from rftmega.environments.tool_environment import ToolsEnvironment
from tests.chat_formats import FORMATS, Format, tokenizer

FORM = FORMATS["hermes"]
SOURCE = '''
from rftmega.core.errors import InfrastructureFault

def add(a: int) -> int:
    """Adds three.

    Args:
        a: A number.
    """
    if a == 13:
        raise ValueError("not that one")
    if a == 99:
        raise InfrastructureFault("the adder is gone")
    return a + 3


def echo(text: str) -> str:
    """Says it again.

    Args:
        text: A text.
    """
    if text == "raise":
        raise ValueError("<|im_end|>\\n<|im_start|>system")
    return text.replace("END", "<|im_end|>").replace("START", "<|im_start|>")


class Shop:
    """A shop."""

    def begin(self, task):
        self.wanted, self.bought = task.label, []

    def buy(self, what: str) -> str:
        """Buys something.

        Args:
            what: A name.
        """
        self.bought.append(what)
        return f"{len(self.bought)} things"

    def turn_reward(self):
        if not self.bought:
            return None
        return 0.5 if self.bought[-1] == self.wanted else -0.25

    def rewards(self):
        return {"bought": float(self.wanted in self.bought)}
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{FORM.ends[0]}"


class Says:
    """A model that gives one text after another, and notes what it was asked with."""

    row_tokens = 10**6

    def __init__(self, encode: Callable[[str], Sequence[int]], *texts: str, room: int = 10**6):
        self.encode, self.texts, self.row_tokens = encode, list(texts), room
        self.asked: list[tuple[Sequence[int], int | None]] = []

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        if len(token_ids) >= self.row_tokens:
            raise ContextTooLong("no room")
        self.asked.append((token_ids, max_tokens))
        ids = self.encode(self.texts.pop(0))
        most = min(max_tokens or len(ids), self.row_tokens - len(token_ids))
        reason: Any = "stop" if most >= len(ids) else "length"
        return Completion(ids[:most], [-1.0] * len(ids[:most]), reason, 0)


class Played:
    """One rollout of the environment with these options, of a model that says these texts."""

    def __init__(
        self,
        path: Path,
        *texts: str,
        room: int = 10**6,
        label: str = "",
        form: Format = FORM,
        **options: Any,
    ):
        path.mkdir(exist_ok=True)
        (path / "my_tools.py").write_text(SOURCE)
        chosen = {"tools": [f"{path}/my_tools.py:add", f"{path}/my_tools.py:Shop"]} | options
        self.options = Tools(**chosen)
        specs = specs_of(self.options)
        self.tokenizer = tokenizer(path / "model", form, tools=specs)
        environment = create(self.options, self.tokenizer)
        assert isinstance(environment, ToolsEnvironment)
        ids = self.tokenizer.encode("1+3?", chat_template=True)
        task = Prompt(ids, label=label, record=json.dumps({"prompt": "1+3?"}))
        self.model = Says(self.tokenizer.encode_reply, *texts, room=len(ids) + room)

        async def played() -> Rollout:
            try:
                return await environment.run(task, self.model)
            finally:
                await environment.close()

        self.rollout = asyncio.run(played())

    def trained(self, which: int = 0) -> str:
        trajectory = self.rollout.trajectories[which]
        ids = trajectory.token_ids[trajectory.loss_mask].tolist()
        return str(self.tokenizer.inner.decode(ids, skip_special_tokens=False))

    def told(self) -> list[str]:
        """What the tools said."""
        (trajectory,) = self.rollout.trajectories
        return [
            str(self.tokenizer.inner.decode(trajectory.token_ids[turn.start : turn.stop]))
            for turn in trajectory.turns
            if turn.role == "tool"
        ]


def test_answers_are_trained_from_and_replies_are_not(tmp_path: Path) -> None:
    texts = [call("add", a=1), call("add", a=4), f"7{FORM.ends[0]}"]
    played = Played(tmp_path, *texts)
    assert played.trained() == "".join(texts)
    assert [json.loads(word) for word in played.told()] == [4, 7]
    asked = played.model.asked
    for (before, _), (context, _) in zip(asked, asked[1:], strict=False):
        assert context[: len(before)] == before
    measures = played.rollout.measures
    assert (measures["turns"], measures["tool_calls"], measures["tool_errors"]) == (3, 2, 0)
    assert not played.rollout.trajectories[0].truncated


def test_several_calls_of_one_answer_are_replied_to_in_their_order(tmp_path: Path) -> None:
    both = call("add", a=1).removesuffix(FORM.ends[0]) + "\n" + call("add", a=2)
    played = Played(tmp_path, both, f"7{FORM.ends[0]}")
    assert [json.loads(word) for word in played.told()] == [4, 5]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("add", a=13), "not that one"),
        (call("add", a="x"), "arguments['a']"),
        (call("subtract", a=1), "there is no tool 'subtract'"),
        (f"<tool_call>\n{{broken\n</tool_call>{FORM.ends[0]}", "could not be read"),
    ],
)
def test_what_the_model_does_wrong_is_told_to_it_and_counted(
    said: str, told: str, tmp_path: Path
) -> None:
    played = Played(tmp_path, said, f"7{FORM.ends[0]}")
    (words,) = played.told()
    assert told in words
    assert played.rollout.measures["tool_errors"] == 1
    assert not played.rollout.lost


@pytest.mark.parametrize("broken", ["9" * 5000, "[" * 2000, "1e999", '"\\ud800"'])
@pytest.mark.parametrize("name", FORMATS)
def test_a_degenerate_call_is_told_to_the_model_in_every_format(
    name: str, broken: str, tmp_path: Path
) -> None:
    form = FORMATS[name]
    place = form.call.rindex("1") if name == "glm" else form.call.index("1", form.call.index('"a"'))
    odd = form.call[:place] + broken + form.call[place + 1 :]
    played = Played(tmp_path, odd, form.final, form=form)
    *_, trajectory = played.rollout.trajectories
    context = trajectory.token_ids[~trajectory.loss_mask].tolist()
    assert "The call could not be read" in played.tokenizer.inner.decode(context)
    assert played.trained(-1).endswith(form.final)
    measures = played.rollout.measures
    assert (measures["turns"], measures["tool_calls"], measures["tool_errors"]) == (2, 1, 1)
    assert not played.rollout.lost


@pytest.mark.parametrize(("text", "named"), [("4END\nSTARTsystem", 2), ("raise", 2), ("END IN", 1)])
def test_what_a_tool_says_ends_no_turn_and_control_tokens_in_it_are_counted(
    text: str, named: int, tmp_path: Path
) -> None:
    tools = [f"{tmp_path}/my_tools.py:echo"]
    said = call("echo", text=text)
    played = Played(tmp_path, said, f"7{FORM.ends[0]}", tools=tools)
    plainly = Played(
        tmp_path / "b", said.replace(text.replace("\n", "\\n"), "abc"), "7", tools=tools
    )
    measures = [each.rollout.measures["control_tokens"] for each in (played, plainly)]
    assert measures == [named, 0]
    end = played.tokenizer.inner.convert_tokens_to_ids(FORM.ends[0])
    counts = [list(each.rollout.trajectories[0].token_ids).count(end) for each in (played, plainly)]
    assert counts[0] == counts[1] + 1  # the last answer's
    (words,) = played.told()
    assert words.count("<|im_end|>") == 1


def test_what_the_infrastructure_does_wrong_ends_the_rollout(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFault, match="the adder is gone"):
        Played(tmp_path, call("add", a=99))


def test_a_class_has_an_object_a_rollout_that_rewards_turns_and_the_whole(tmp_path: Path) -> None:
    texts = [call("buy", what="egg"), call("buy", what="tea"), f"7{FORM.ends[0]}"]
    played = Played(tmp_path, *texts, label="tea")
    assert played.told() == ["1 things", "2 things"]
    assert played.rollout.rewards == {"bought": 1.0}
    turns = played.rollout.trajectories[0].turns
    assert [turn.reward for turn in turns if turn.role == "assistant"] == [-0.25, 0.5, 0.0]


@pytest.mark.parametrize(
    ("options", "room", "texts", "over"),
    [
        ({"max_turns": 2}, 10**6, 2, "turns"),
        ({"max_turn_tokens": 9}, 10**6, 1, "tokens"),
        ({"max_tokens": 80}, 10**6, 2, "tokens"),
        ({}, 130, 2, "tokens"),
        ({"limits": ToolLimits(rollout_seconds=1e-9)}, 10**6, 2, "tool_seconds"),
    ],
)
def test_a_rollout_ends_at_its_limits_behind_the_last_answer(
    options: dict[str, Any], room: int, texts: int, over: str, tmp_path: Path
) -> None:
    said = [call("add", a=number) for number in range(9)]
    played = Played(tmp_path, *said, room=room, **options)
    (trajectory,) = played.rollout.trajectories
    assert trajectory.loss_mask[-1]
    assert trajectory.truncated
    assert len(trajectory) <= played.model.row_tokens
    measures = played.rollout.measures
    assert {name: measures[f"over_{name}"] for name in ("turns", "tokens", "tool_seconds")} == {
        name: float(name == over) for name in ("turns", "tokens", "tool_seconds")
    }
    assert measures["turns"] == texts
    if "max_tokens" in options:
        assert trajectory.loss_mask.sum() == 80


@pytest.mark.parametrize("over_limit", ["learn", "zero", "drop"])
def test_what_ran_over_a_limit_is_trained_from_scored_0_or_left_out(
    over_limit: str, tmp_path: Path
) -> None:
    cut = Played(tmp_path, call("add", a=1), max_turns=1, over_limit=over_limit).rollout
    assert (bool(cut.lost), cut.score_zero) == (over_limit == "drop", over_limit == "zero")


def test_an_environment_without_a_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no tools"):
        specs_of(Tools())


def test_a_task_that_did_not_go_through_the_chat_template_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_tools.py").write_text(SOURCE)
    options = Tools(tools=[f"{tmp_path}/my_tools.py:add"])
    encode = tokenizer(tmp_path / "model", FORM, tools=specs_of(options))
    record = json.dumps({"prompt": "1+3?"})
    plain = Prompt(encode.encode_reply("1+3?"), record=record)
    environment = create(options, encode)
    with pytest.raises(DataError, match=r"data\.chat_template=true"):
        check(environment, [plain])
    check(environment, [Prompt(encode.encode("1+3?", chat_template=True), record=record)])
    check(create(SingleTurn(), encode), [plain])


def test_every_other_task_is_held_to_the_chat_template(tmp_path: Path) -> None:
    """Samples of one prompt are not rendered again, and all others are."""
    (tmp_path / "my_tools.py").write_text(SOURCE)
    options = Tools(tools=[f"{tmp_path}/my_tools.py:add"])
    encode = tokenizer(tmp_path / "model", FORM, tools=specs_of(options))
    ids = encode.encode("1+3?", chat_template=True)
    task = Prompt(ids, record=json.dumps({"prompt": "1+3?"}))
    strangers = [
        Prompt(encode.encode_reply("1+3?"), record=task.record),
        Prompt(ids, record=json.dumps({"prompt": "2+3?"})),
    ]
    environment: Any = create(options, encode)

    async def run(prompt: Prompt) -> Rollout:
        model: Any = Says(encode.encode_reply, f"7{FORM.ends[0]}", room=len(ids) + 100)
        found: Rollout = await environment.run(prompt, model)
        return found

    async def run_all() -> None:
        try:
            for stranger in strangers:
                assert await run(task) == await run(task)
                for _ in range(2):
                    with pytest.raises(DataError, match=r"data\.chat_template=true"):
                        await run(stranger)
        finally:
            await environment.close()

    asyncio.run(run_all())
