"""Trajectories come back as the messages of their conversations, and these as their tokens."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rftmega.core.types import Completion, Prompt, Rollout, TokenStats, Trajectory
from rftmega.data.chat.conversation import Conversation
from rftmega.data.chat.exported import MessageExporter, in_openais_fields
from rftmega.data.chat.read_back import read_back
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.monitoring.observers.run_chat import RunChat
from rftmega.monitoring.observers.trajectories import Trajectories
from rftmega.tools import export_messages
from rftmega.trainer.experience import ExperienceMaker, collect
from tests.chat_formats import FORMATS, PLAIN, TOOL, Format, folder, tokenizer

QUESTION = 'Add "1" and\n 3'
REPLY = 'say "4"\nand\tä'


class Run:
    """A run in one chat format, whose rollouts are told by hand; its files are those of a run."""

    def __init__(self, path: Path, form: Format, tools: Sequence[Any] = (TOOL,), **chat: Any):
        self.path, self.form, self.tools = path, form, tools
        self.tokenizer = tokenizer(path / "model", form, tools=tools, **chat)
        self.renderer = ConversationRenderer.of(self.tokenizer)
        self.tasks: list[Prompt] = []
        self.rollouts: list[Rollout] = []

    def task(self, prompt: Any = QUESTION) -> Prompt:
        ids = self.tokenizer.encode(prompt, chat_template=True)
        return Prompt(ids, index=len(self.tasks), record=json.dumps({"prompt": prompt}))

    def conversation(self, prompt: Any = QUESTION) -> Conversation:
        return Conversation.of(self.task(prompt), self.renderer, self.tools)

    def answered(self, talk: Conversation, text: str, *, cut: bool = False) -> Any:
        ids = self.tokenizer.encode_reply(text)
        return talk.answered(Completion(ids, [-1.0] * len(ids), "length" if cut else "stop", 0))

    def called(self, talk: Conversation, number: int = 0, content: str = REPLY) -> None:
        call = self.form.call.replace("call00000", f"call0000{number}")
        reply = self.answered(talk, call)
        assert reply.calls
        head = {"role": "tool", "content": content}
        talk.reply([{**head, "name": call.name, "tool_call_id": call.id} for call in reply.calls])

    def keep(self, task: Prompt, *trajectories: Trajectory) -> None:
        self.tasks.append(task)
        self.rollouts.append(Rollout(trajectories))

    def exported(self, *options: str) -> list[dict[str, Any]]:
        """Writes the files of the run's first step. Returns the lines of the export."""
        size = len(self.tasks)
        samples = collect(self.tasks, self.rollouts, scores, samples_per_prompt=size)
        experience = ExperienceMaker(Silent()).make(samples)
        chat = RunChat(str(self.path / "model"), chat=self._chat())
        tokens, out = self.tokenizer, self.path / "out"
        observer = Trajectories(
            out / "trajectories", tokens.decode, tokens.pieces, every=1, most_bytes=10**9, chat=chat
        )
        observer.on_start(SimpleNamespace(step=0, resumed=False), {})
        observer.on_experience(SimpleNamespace(step=1), samples, experience)
        assert export_messages.main([str(out), *options]) == 0
        text = (out / "messages.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def _chat(self) -> dict[str, Any]:
        found = RunChat.of(options(), self.tokenizer.chat).chat
        assert found is not None
        return dict(found)


class Silent:
    """A policy for which all tokens have one log-prob."""

    def log_probs(self, rows: Any, *, temperature: float | None = None) -> Any:
        columns = torch.zeros(len(rows), int(rows.lengths.max()) - 1)
        return rows.like(TokenStats(columns, None))

    reference_log_probs = log_probs


def scores(prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
    return [{"right": 0.5, "reward": float(number)} for number in range(len(rollouts))]


def options() -> Any:
    single = SimpleNamespace(type="single_turn")
    return SimpleNamespace(environment=single, model=SimpleNamespace(path=""))


def of_openai(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [in_openais_fields(message) for message in messages]


def for_the_template(messages: Sequence[Any], run: Run) -> list[dict[str, Any]]:
    """Returns exported messages with arguments as objects, and thinking where the template reads it."""
    found = []
    for message in json.loads(json.dumps(messages)):
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if thinking := message.pop("reasoning_content", None):
            message[run.renderer.by_template.reasoning_key] = thinking
        found.append(message)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_conversation_of_calls_comes_back_and_renders_to_its_tokens(
    name: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, FORMATS[name])
    talk = run.conversation()
    run.called(talk, 0)
    run.called(talk, 1, '{"sum": 4}')
    run.answered(talk, run.form.final)
    talk.reward(0.25)
    run.keep(run.task(), *talk.trajectories())
    (line,) = run.exported()
    assert line["messages"] == of_openai(talk.messages)
    assert line["tools"] == [TOOL]
    assert line["weights"] == [0, 1, 0, 1, 0, 1]
    assert line["turn_rewards"] == [0, 0, 0, 0, 0, 0.25]
    call = line["messages"][1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert line["messages"][2]["tool_call_id"] == call["id"]
    (trajectory,) = talk.trajectories()
    messages = for_the_template(line["messages"], run)
    ids = tuple(trajectory.token_ids.tolist())
    assert run.renderer.render(messages[:-1], [TOOL]) == ids[: trajectory.turns[-1].start]
    whole = run.tokenizer.encode_reply(run.tokenizer.template.text(messages, open_=False))
    # GLM writes the token that ends an answer with the next message
    same = whole[: len(ids) - 1] == ids[:-1]
    assert line["exact"] == same
    assert same == (name != "gpt-oss"), "which drops the thinking before a final answer"


def test_replies_to_calls_of_one_answer_have_their_ids_and_an_answer_that_was_cut_off_goes_on(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, FORMATS["hermes"])
    talk = run.conversation()
    call = run.form.call.removesuffix("<|im_end|>")
    reply = run.answered(talk, f"Twice.\n{call}\n{call}<|im_end|>")
    assert len(reply.calls) == 2
    contents = ["4", '"5"']
    talk.reply(
        [
            {"role": "tool", "name": "add", "tool_call_id": call.id, "content": content}
            for call, content in zip(reply.calls, contents, strict=True)
        ]
    )
    run.answered(talk, "It is", cut=True)
    talk.reply([{"role": "user", "content": "Go on."}])
    run.answered(talk, "4<|im_end|>")
    run.keep(run.task(), *talk.trajectories())
    (line,) = run.exported()
    assert line["messages"] == of_openai(talk.messages)
    assert [each.get("tool_call_id") for each in line["messages"][2:4]] == [
        "call00000",
        "call00001",
    ]
    assert line["exact"]


def test_what_was_sampled_otherwise_than_it_is_encoded_is_not_exact(tmp_path: Path) -> None:
    run = Run(tmp_path, FORMATS["hermes"])
    odd = [*run.tokenizer.inner.convert_tokens_to_ids(["ab", "cd"]), *run.tokenizer.stop_ids]
    for ids in (odd, run.tokenizer.encode_reply("abcd<|im_end|>")):
        talk = run.conversation()
        talk.answered(Completion(ids, [-1.0] * len(ids), "stop", 0))
        run.keep(run.task(), *talk.trajectories())
    one, other = run.exported()
    assert one["messages"] == other["messages"]
    assert (one["exact"], other["exact"]) == (False, True)


@pytest.mark.parametrize("said", ["Sure?", '"Sure?"', " Sure?\n", "", "<|im_end|>"])
def test_trajectories_of_a_rewritten_conversation_have_all_that_was_said_before(
    said: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, FORMATS["qwen3"])
    talk = run.conversation()
    run.called(talk)
    run.answered(talk, run.form.final)
    before = of_openai(talk.messages)
    talk.reply([{"role": "user", "content": said}])
    run.called(talk)
    run.answered(talk, run.form.final)
    run.keep(run.task(), *talk.trajectories())
    one, two = run.exported()
    assert one["messages"] == before
    whole = of_openai(talk.messages)
    assert whole[len(before)]["role"] == "user"
    whole[len(before)]["content"] = said  # what names a control token is kept as a stand-in
    assert two["messages"] == whole
    assert (one["trajectory"], two["trajectory"], two["trajectories"]) == (0, 1, 2)
    assert one["rollout"] == two["rollout"] == 0
    assert one["weights"] == [0, 1, 0, 1]
    assert two["weights"] == [0] * 5 + [1, 0, 1], "what was said before is context"
    ids = [call["id"] for each in two["messages"] for call in each.get("tool_calls", ())]
    assert ids == ["call00000", "call00001"]


def test_another_rollout_goes_on_from_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, PLAIN["r1"], ())
    for number in range(2):
        talk = run.conversation(f"question {number}")
        run.answered(talk, run.form.final)
        talk.reply([{"role": "user", "content": "Sure?"}])
        run.answered(talk, run.form.final)
        run.keep(run.task(f"question {number}"), *talk.trajectories())
    lines = run.exported()
    assert [line["messages"][0]["content"] for line in lines] == [
        *("question 0", "question 0"),
        *("question 1", "question 1"),
    ]
    assert [len(line["messages"]) for line in lines] == [2, 4, 2, 4]


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("hermes", ""),
        ("hermes", "Be brief."),
        ("llama", ""),
        ("llama", "Be brief."),
        ("mistral", ""),
    ],
)
def test_a_run_of_single_turns_exports_what_was_asked_and_answered(
    name: str, system: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, FORMATS[name], (), system=system)
    asked = run.tokenizer.encode(QUESTION, chat_template=True)
    ids = run.tokenizer.encode_reply("4" + run.form.final[-len(FORMATS[name].ends[0]) :])
    completion = Completion(ids, [-1.0] * len(ids), "stop", 0)
    for record in ("", json.dumps({"prompt": QUESTION})):  # single turns mostly keep no record
        run.keep(Prompt(asked, index=7, record=record), Trajectory.of(asked, completion))
    lines = run.exported()
    before = [{"role": "system", "content": system}] if system else []
    for line in lines:
        assert line["messages"] == [
            *before,
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "4"},
        ]
        assert "tools" not in line
        assert (line["step"], line["group"], line["index"]) == (1, 0, 7)
        assert line["reward_parts"] == {"right": 0.5}
    assert [line["reward"] for line in lines] == [0.0, 1.0]


def test_a_prompt_that_no_template_made_is_the_user_s_text(tmp_path: Path) -> None:
    run = Run(tmp_path, FORMATS["llama"], ())
    ids = run.tokenizer.encode_reply("<|begin_of_text|>1+3=")
    completion = Completion(run.tokenizer.encode_reply("4<|eot_id|>"), [-1.0] * 2, "stop", 0)
    run.keep(Prompt(ids), Trajectory.of(ids, completion, ids[1:], completion))
    (line,) = run.exported()
    assert line["messages"][1:] == [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "1+3="},
        {"role": "assistant", "content": "4"},
    ]
    assert line["messages"][0]["content"].endswith("1+3=")
    assert not line["exact"]


@pytest.mark.parametrize("name", ["hermes", "glm", "mistral"])
def test_replies_that_no_turn_tells_are_read_from_the_template_s_text(
    name: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, FORMATS[name])
    talk = run.conversation()
    run.called(talk)
    run.answered(talk, run.form.final)
    (trajectory,) = talk.trajectories()
    completions = tuple(turn for turn in trajectory.turns if turn.role == "assistant")
    for turns in ((), completions):
        run.keep(run.task(), replace(trajectory, turns=turns))
    for line in run.exported():
        assert line["messages"] == of_openai(talk.messages)
        assert line["weights"] == [0, 1, 0, 1]


def test_a_record_that_was_not_what_the_model_was_asked_is_not_exported(tmp_path: Path) -> None:
    run = Run(tmp_path, FORMATS["hermes"], ())
    ids = run.tokenizer.encode_reply("4<|im_end|>")
    completion = Completion(ids, [-1.0] * len(ids), "stop", 0)
    record = json.dumps({"prompt": "the task"})
    asked = [{"role": "system", "content": "You are asked."}, {"role": "user", "content": "1+3"}]
    for prompt in (run.renderer.render(asked), run.tokenizer.encode_reply("no template")):
        run.keep(Prompt(prompt, record=record), Trajectory.of(prompt, completion))
    one, other = run.exported()
    assert one["messages"][:-1] == asked
    assert other["messages"][:-1] == [{"role": "user", "content": "no template"}]


def test_a_trajectory_of_another_rollout_does_not_go_on_from_the_last(tmp_path: Path) -> None:
    run = Run(tmp_path, FORMATS["hermes"], ())
    exporter = MessageExporter(run.tokenizer, run.renderer)
    ids = list(run.tokenizer.encode_reply("4<|im_end|>"))
    asked = [
        {"role": "user", "content": "1+3"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "2+2"},
    ]
    prompts = [run.tokenizer.template.text(asked[:size], open_=True) for size in (1, 3)]
    row = {"step": 1, "group": 0, "index": 0, "tokens": {"id": ids}, "trajectories": 2}
    begun = row | {"prompt": prompts[0], "rollout": 0, "trajectory": 0}
    exporter.exported(begun)
    own = exporter.exported(row | {"prompt": prompts[1], "rollout": 0, "trajectory": 1})
    assert [each["content"] for each in own["messages"]] == ["1+3", "4", "2+2", "4"]
    exporter.exported(begun)
    # a file whose lines were chosen may have no other of the rollout
    other = exporter.exported(row | {"prompt": prompts[1], "rollout": 1, "trajectory": 1})
    assert len(other["messages"]) == 2


def test_an_export_that_fails_leaves_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, FORMATS["hermes"])
    talk = run.conversation()
    run.answered(talk, run.form.final)
    run.keep(run.task(), *talk.trajectories())
    before = run.exported()
    (tmp_path / "out" / "trajectories" / "step_000000.jsonl.gz").write_bytes(b"no gzip")
    assert export_messages.main([str(tmp_path / "out")]) == 2
    assert "is no whole gzip file" in capsys.readouterr().err
    text = (tmp_path / "out" / "messages.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == before


def test_without_a_chat_template_texts_are_the_contents(tmp_path: Path) -> None:
    run = Run(tmp_path, FORMATS["hermes"], ())
    exporter = MessageExporter(run.tokenizer, None)
    ids = run.tokenizer.encode_reply("4<|im_end|>")
    row = {"step": 1, "group": 0, "index": 0, "prompt": "1+3", "tokens": {"id": list(ids)}}
    assert exporter.exported(row)["messages"] == [
        {"role": "user", "content": "1+3"},
        {"role": "assistant", "content": "4"},
    ]


def test_only_texts_that_the_template_writes_again_are_read_back() -> None:
    def template(messages: Any) -> str:
        return "".join(f"[{each['role']}:{each['content'].strip()}]" for each in messages)

    user = {"role": "user"}
    assert read_back(template, [], [user], "[user:a]b]") == [{"role": "user", "content": "a]b"}]
    assert read_back(template, [], [user], "[user: a]") is None
    assert read_back(template, [], [user], "[system:a]") is None


def test_errors_say_what_is_wrong_and_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, FORMATS["hermes"])
    talk = run.conversation()
    run.answered(talk, run.form.final)
    run.keep(run.task(), *talk.trajectories())
    run.exported("--step", "1")
    out = tmp_path / "out"
    capsys.readouterr()
    for given, complaint in (
        ([tmp_path / "nowhere"], "There is no"),
        ([out / "messages.jsonl"], "is a file. Give the run's output folder"),
        ([out, "--step", "3"], "there are 1. Choose one of them"),
        ([out, "--model", tmp_path], "There is no tokenizer in"),
        ([out, "--output", tmp_path / "no" / "a.jsonl"], "Choose another --output."),
    ):
        assert export_messages.main(list(map(str, given))) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert complaint in said
    (out / "trajectories" / "chat.json").unlink()
    assert export_messages.main([str(out)]) == 2
    assert "Give --model" in capsys.readouterr().err
    folder(tmp_path / "out" / "policy", FORMATS["hermes"])
    assert export_messages.main([str(out)]) == 0
    assert "1 trajectories of 1 step(s)" in capsys.readouterr().out
