"""Agents ask the model by the official client, and what they were answered becomes trajectories."""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rftmega.config.options.agents import Agent
from rftmega.core.errors import ConfigError, ContextTooLong, EnvironmentFailed
from rftmega.core.types import Completion, Prompt, Sampling
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.data.chat.replies import text_of
from rftmega.environments.agents.agent import AgentEnvironment, rewards_of
from rftmega.environments.agents.openai_endpoint import Endpoint
from rftmega.environments.agents.session import Session
from rftmega.rollout.pool.running_rollouts import RunningRollouts
from tests.chat_formats import FORMATS, TOOL, tokenizer

FORM = FORMATS["hermes"]
ASKED = [{"role": "user", "content": "1+3?"}]
TOOLS: Any = [TOOL]


class Scripted:
    """A model that says the texts of a list, one after another."""

    row_tokens = 4000
    sampling = Sampling()

    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.contexts: list[tuple[int, ...]] = []
        self.most: list[int | None] = []

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        if len(token_ids) > self.row_tokens:
            raise ContextTooLong("no room")
        await asyncio.sleep(0)
        self.contexts.append(tuple(token_ids))
        self.most.append(max_tokens)
        ids = self.tokenizer.encode_reply(self.texts.pop(0))
        cut = max_tokens is not None and max_tokens < len(ids)
        ids = ids[:max_tokens] if cut else ids
        return Completion(ids, [-0.5] * len(ids), "length" if cut else "stop", 3)


class Place:
    """A session, the official client that has its key, and what came of both."""

    def __init__(self, folder: Path, texts: Sequence[str]):
        self.tokenizer = tokenizer(folder, FORM)
        self.renderer = ConversationRenderer.of(self.tokenizer)
        self.model = Scripted(self.tokenizer, texts)

    def text(self, ids: Any) -> str:
        return text_of(self.tokenizer, [int(each) for each in ids])

    def run(self, work: Callable[["Place"], Coroutine[Any, Any, Any]]) -> Any:
        async def held() -> Any:
            self.session = Session(self.model, self.renderer)
            endpoint = Endpoint()
            self.key = await endpoint.open(self.session)
            self.url = endpoint.address
            self.client = openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key=self.key, max_retries=0
            )
            try:
                return await work(self)
            finally:
                await self.client.close()
                await endpoint.close()

        return asyncio.run(held())


def loop_of_calls(place: Place, client: Any) -> Coroutine[Any, Any, Any]:
    """The plainest agent: it adds until the model answers."""

    async def agent() -> Any:
        messages: list[Any] = list(ASKED)
        while True:
            done = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
            message = done.choices[0].message
            if not message.tool_calls:
                return done
            assert done.choices[0].finish_reason == "tool_calls"
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"a": 1}
                reply = {"role": "tool", "tool_call_id": call.id, "content": "4"}
                messages.append(reply)

    return agent()


def test_an_agent_s_loop_of_calls_is_one_trajectory_of_what_was_sampled(tmp_path: Path) -> None:
    place = Place(tmp_path, [FORM.call, FORM.call, "4<|im_end|>"])
    done = place.run(lambda own: loop_of_calls(own, own.client))
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("4", "stop")
    assert done.usage.prompt_tokens == len(place.model.contexts[2])
    assert done.usage.completion_tokens == 2
    (found,) = place.session.trajectories()
    assert place.session.turns == 3
    completions = [place.text(found.token_ids[turn.start : turn.stop]) for turn in found.turns]
    assert completions == [FORM.call, "4", FORM.call, "4", "4<|im_end|>"]
    for context in place.model.contexts:
        assert tuple(found.token_ids[: len(context)]) == context
    trained = found.token_ids[found.loss_mask]
    assert place.text(trained) == FORM.call + FORM.call + "4<|im_end|>"
    assert set(found.versions[found.loss_mask].tolist()) == {3}


def test_a_stream_says_the_same_and_tells_log_probs_and_usage(tmp_path: Path) -> None:
    place = Place(tmp_path, [FORM.call, "ab<|im_end|>"])

    async def agent(own: Place) -> Any:
        found = []
        for tools in (TOOLS, openai.omit):
            stream = await own.client.chat.completions.create(
                model="policy",
                messages=ASKED,
                tools=tools,
                stream=True,
                logprobs=True,
                stream_options={"include_usage": True},
            )
            found.append([chunk async for chunk in stream])
        return found

    called, said = place.run(agent)
    call = next(
        chunk.choices[0].delta.tool_calls[0]
        for chunk in called
        if chunk.choices[0].delta.tool_calls
    )
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said if chunk.choices) == "ab"
    assert said[-1].usage.completion_tokens == 2
    (logprobs,) = [
        chunk.choices[0].logprobs for chunk in said if chunk.choices and chunk.choices[0].logprobs
    ]
    assert [(each.token, each.logprob) for each in logprobs.content] == [
        ("ab", -0.5),
        ("<|im_end|>", -0.5),
    ]
    assert len(place.session.trajectories()) == 2


def test_what_goes_on_from_nothing_begins_another_trajectory(tmp_path: Path) -> None:
    """A sub-agent, a summary of the past, a second answer to the same: each is its own."""
    place = Place(
        tmp_path, ["4<|im_end|>", "a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>"]
    )
    answered = [*ASKED, {"role": "assistant", "content": "4"}]
    sure = {"role": "user", "content": "Sure?"}

    async def agent(own: Place) -> None:
        for messages in (
            ASKED,
            [*answered, sure],
            [*answered, sure],
            [
                *ASKED,
                {"role": "assistant", "content": "5"},
                sure,
                {"role": "assistant", "content": "a"},
                sure,
            ],
            [{"role": "system", "content": "Be brief."}, *ASKED],
        ):
            await own.client.chat.completions.create(model="policy", messages=messages)

    place.run(agent)
    found = place.session.trajectories()
    trained = [place.text(each.token_ids[each.loss_mask]) for each in found]
    assert trained == ["4<|im_end|>a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>"]
    assert "5<|im_end|>" in place.text(found[2].token_ids)


def test_requests_at_once_do_not_go_on_from_an_answer_that_is_not_there(tmp_path: Path) -> None:
    place = Place(tmp_path, [f"{each}<|im_end|>" for each in "abcd"])

    async def agent(own: Place) -> None:
        ask = own.client.chat.completions.create
        longer = [*ASKED, {"role": "user", "content": "Now."}]
        asked = (ASKED, longer, ASKED, longer)
        await asyncio.gather(*(ask(model="policy", messages=each) for each in asked))

    place.run(agent)
    found = place.session.trajectories()
    trained = sorted(place.text(each.token_ids[each.loss_mask]) for each in found)
    assert trained == [f"{each}<|im_end|>" for each in "abcd"]


@pytest.mark.parametrize(
    ("by_id", "stream"),
    [
        (False, False),
        (True, True),
        *(pytest.param(not x, x, marks=pytest.mark.ranks) for x in (False, True)),
    ],
)
def test_responses_with_calls_are_one_trajectory(stream: bool, by_id: bool, tmp_path: Path) -> None:
    place = Place(tmp_path, [FORM.call, "4<|im_end|>"])
    tools: Any = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]

    async def asked(own: Place, **fields: Any) -> Any:
        fields |= {"model": "policy", "tools": tools, "instructions": "Add."}
        if not stream:
            return await own.client.responses.create(**fields)
        async with own.client.responses.stream(**fields) as events:
            kinds = [event.type async for event in events]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            return await events.get_final_response()

    async def agent(own: Place) -> Any:
        first = await asked(own, input="1+3?")
        (call,) = first.output
        reply = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        if by_id:
            return await asked(own, input=[reply], previous_response_id=first.id)
        items = [{"role": "user", "content": "1+3?"}, call.model_dump(exclude_none=True), reply]
        return await asked(own, input=items)

    done = place.run(agent)
    assert (done.output_text, done.status) == ("4", "completed")
    assert done.usage.output_tokens == 2
    (found,) = place.session.trajectories()
    assert place.text(found.token_ids[found.loss_mask]) == f"{FORM.call}4<|im_end|>"
    assert "Add." in place.text(found.token_ids)


def test_requests_in_tokens_go_on_from_tokens(tmp_path: Path) -> None:
    place = Place(tmp_path, ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])
    other = (9, 8)

    async def agent(own: Place) -> list[Any]:
        found: list[Any] = []
        first = [1, 2, 3]
        for ids in (first, None, list(other)):
            if ids is None:
                ids = [*first, *found[0]["token_ids"], 7]
            ends = [own.tokenizer.stop_ids[0]]
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 9, "stop_token_ids": ends}}
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {own.key}"}) as client:
                reply = await client.post(f"{own.url}/inference/v1/generate", json=body)
            found += reply.json()["choices"]
        return found

    choices = place.run(agent)
    assert choices[0]["finish_reason"] == "stop"
    assert [each["logprob"] for each in choices[0]["logprobs"]["content"]] == [-0.5, -0.5]
    one, two = place.session.trajectories()
    a, b, c = (each["token_ids"] for each in choices)
    assert one.token_ids.tolist() == [1, 2, 3, *a, 7, *b]
    assert one.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2
    assert two.token_ids.tolist() == [*other, *c]
    assert place.model.most == [9, 9, 9]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": 0.7}, "temperature=0.7 is not the run's, which is 1"),
        ({"top_p": 0.9}, "top_p=0.9 is not the run's"),
        ({"n": 2}, "n=2"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"stop": ["a"]}, r"stop=\[.a.\] is not offered"),
        ({"tool_choice": "required"}, "tool_choice can only be auto"),
        ({"response_format": {"type": "json_object"}}, "response_format can only be text"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": {}}, "messages: Input should be a valid list, not {}"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "give text"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "no room"),
        ({"messages": [{"content": "a"}]}, "messages.0.role: Field required"),
    ],
)  # fmt: skip
def test_what_can_not_be_trained_from_is_refused_with_a_reason(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    place = Place(tmp_path, [])

    async def agent(own: Place) -> None:
        given = {"model": "policy", "messages": ASKED} | fields
        with pytest.raises(openai.BadRequestError, match=said):
            await own.client.chat.completions.create(**given)

    place.run(agent)
    assert place.session.trajectories() == []


def test_sampling_as_the_run_s_is_taken_and_the_limit_of_an_answer_holds(tmp_path: Path) -> None:
    place = Place(tmp_path, ["abcd<|im_end|>"])
    place.model.sampling = Sampling(0.8, 0.9, 20)  # type: ignore[attr-defined]

    async def agent(own: Place) -> Any:
        return await own.client.chat.completions.create(
            model="policy", messages=ASKED, temperature=0.8, top_p=0.9, n=1, max_tokens=2
        )  # fmt: skip

    done = place.run(agent)
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 2
    assert place.session.trajectories()[0].truncated


def test_another_key_opens_nothing_and_models_are_listed(tmp_path: Path) -> None:
    place = Place(tmp_path, [])

    async def agent(own: Place) -> None:
        listed = await own.client.models.list()
        assert [(model.id, model.max_model_len) for model in listed.data] == [("policy", 4000)]  # type: ignore[attr-defined]
        for key in ("x", own.key + "x", own.key[:-1]):
            stranger = own.client.with_options(api_key=key)
            with pytest.raises(openai.AuthenticationError, match="this key opens no rollout"):
                await stranger.models.list()

    place.run(agent)


AGENTS = """
import openai

def solve(task, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    done = client.chat.completions.create(model=model, messages=[{"role": "user", "content": task["prompt"]}])
    return {"right": float(done.choices[0].message.content == task["label"]), "bonus": 0.5}

async def later(task, base_url, api_key, model):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        done = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}])
    return 0.25

def silent(task, base_url, api_key, model):
    return 1.0

def fails(task, base_url, api_key, model):
    solve(task, base_url, api_key, model)
    raise ValueError("oh")

if __name__ == "__main__":
    import json, os
    task = json.loads(os.environ["TASK"])
    print(json.dumps(solve(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], "policy")))
"""


def rollouts(folder: Path, texts: Sequence[str], tasks: int = 1, **options: Any) -> Any:
    """Runs an agent's rollouts as an engine's thread does."""
    file = folder / "agents.py"
    file.write_text(AGENTS)
    if name := options.pop("name", ""):
        options["function"] = f"{file}:{name}"
    own = tokenizer(folder / "model", FORM)
    environment = AgentEnvironment(Agent(**options), own)
    prompts = [
        Prompt((1, 2), label="4", index=7, record=json.dumps({"prompt": f"1+3? {number}"}))
        for number in range(tasks)
    ]
    running = RunningRollouts(
        environment, prompts, list(range(tasks)), [10.0] * tasks, row_tokens=4000
    )
    ended: dict[int, Any] = {}
    try:
        running.begin(range(tasks))
        count = 0
        while len(running):
            running.wait(0.05)
            asked = running.asked()
            completions = []
            for _ in asked:
                ids = own.encode_reply(texts[count % len(texts)])
                completions.append(Completion(ids, [-0.5] * len(ids), "stop", 1))
                count += 1
            running.resume(range(count - len(asked), count), completions)
            ended |= running.ended()
    finally:
        running.close()
        asyncio.run(environment.close())
    return ended


@pytest.mark.parametrize("name", ["solve", "later"])
def test_agents_run_beside_the_engine_and_give_rewards(name: str, tmp_path: Path) -> None:
    found = rollouts(tmp_path, ["4<|im_end|>"], 5, name=name)
    assert len(found) == 5
    expected = {"right": 1.0, "bonus": 0.5} if name == "solve" else {"agent": 0.25}
    for rollout in found.values():
        assert rollout.rewards == expected
        assert rollout.measures["turns"] == 1.0
        assert len(rollout.trajectories) == 1


def test_a_program_is_an_agent_and_its_last_line_are_the_rewards(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    command = [sys.executable, str(tmp_path / "agents.py")]
    found = rollouts(tmp_path, ["4<|im_end|>"], command=command)
    assert found[0].rewards == {"right": 1.0, "bonus": 0.5}


def test_an_agent_that_fails_ends_the_run_or_is_scored_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"ValueError\('oh'\)"):
        rollouts(tmp_path, ["4<|im_end|>"], name="fails")
    found = rollouts(tmp_path, ["4<|im_end|>"], name="fails", agent_errors="score")
    assert found[0].rewards == {}
    with pytest.raises(EnvironmentFailed, match="exit status 3: "):
        rollouts(tmp_path, [], command=[sys.executable, "-c", "raise SystemExit(3)"])


def test_an_agent_that_asks_nothing_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="asked the model nothing in a rollout of prompt 7"):
        rollouts(tmp_path, [], name="silent")


def test_an_agent_that_takes_too_long_is_scored_as_it_is_and_its_program_ends(
    tmp_path: Path,
) -> None:
    (tmp_path / "slow.py").write_text(
        "import json, os, time\n"
        "from agents import solve\n"
        "given = [os.environ[f'OPENAI_{name}'] for name in ('BASE_URL', 'API_KEY', 'MODEL')]\n"
        "print(json.dumps(solve(json.loads(os.environ['TASK']), *given)), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, str(tmp_path / "slow.py")]
    found = rollouts(tmp_path, ["4<|im_end|>"], command=command, seconds=8.0)
    groups = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    left = [each for each in groups if str(tmp_path / "slow.py") in command_line(each)]
    assert left == []
    assert found[0].measures["over_seconds"] == 1.0
    assert found[0].rewards == {}


def command_line(process: int) -> str:
    """What a process was started with; "" of one that is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_options_name_one_agent_and_rewards_are_numbers(tmp_path: Path) -> None:
    own = tokenizer(tmp_path, FORM)
    for options in (Agent(), Agent(function="a.py:f", command=["a"])):
        with pytest.raises(ConfigError, match="set one of them"):
            AgentEnvironment(options, own)
    assert rewards_of(True) == {"agent": 1.0}
    for given in ("1", {"a": None}, {1: 1.0}, float("nan"), [1.0]):
        with pytest.raises(ValueError, match="a reward is a number"):
            rewards_of(given)
