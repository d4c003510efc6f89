"""Environments of verifiers do tasks in a process of their own, by our endpoint."""

import asyncio
import json
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rftmega.config.options.agents import Verifiers
from rftmega.core.errors import ConfigError, DataError, InfrastructureFault
from rftmega.core.types import Prompt
from rftmega.environments.agents.verifiers import WORKER, VerifiersEnvironment, Worker
from tests.chat_formats import FORMATS, tokenizer
from tests.unit.environments.agents.test_openai_endpoint import Scripted

ROOT = Path(__file__).parents[4]
FORM = FORMATS["hermes"]
FAKE = """
import json, os, sys, urllib.request
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["task"].get("dies"):
        os._exit(7)
    body = json.dumps({"messages": [{"role": "user", "content": asked["task"].get("prompt", "")}]}).encode()
    head = {"Authorization": "Bearer " + asked["api_key"], "Content-Type": "application/json"}
    if not asked["task"].get("silent"):
        request = urllib.request.Request(asked["base_url"] + "/chat/completions", body, head)
        said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
        told = {"rewards": {"right": float(said == "4")}, "metrics": {"length": 1.0}}
    else:
        told = {"error": "oh"} if asked["task"]["silent"] == "error" else {"rewards": {}, "metrics": {}}
    print(json.dumps({"id": asked["id"], **told}), flush=True)
"""
TASKSET = '''
import json
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class AddData(vf.TaskData):
    answer: str


class AddTask(vf.Task[AddData]):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float(trace.nodes[-1].message.content == self.data.answer)

    @vf.metric
    async def answers(self, trace) -> float:
        return float(sum(node.message.role == "assistant" for node in trace.nodes))


class AddTasks(vf.Taskset[AddTask]):
    def load(self):
        for number in range(3):
            yield AddTask(AddData(prompt=f"{number}+1?", answer="4"))


class AddHarnessConfig(vf.HarnessConfig):
    pass


class AddHarness(vf.Harness[AddHarnessConfig]):
    """A loop of calls in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                done = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[tool])
                message = done.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "4"})


__all__ = ["AddTasks", "AddHarness"]
'''


def environment_of(folder: Path, **options: Any) -> VerifiersEnvironment:
    given = {"environment": "add", "python": sys.executable, "start_seconds": 60.0} | options
    return VerifiersEnvironment(Verifiers(**given), tokenizer(folder / "model", FORM))


WAIT = 90.0  # seconds after which rollouts count as waiting for ever


def held(
    environment: VerifiersEnvironment,
    tasks: Sequence[dict[str, Any]],
    texts: Sequence[str] = ("4<|im_end|>",),
) -> list[Any]:
    """Rollouts of tasks, all at once, or what they raised."""

    async def run() -> list[Any]:
        prompts = [Prompt((1,), record=json.dumps({"task": task})) for task in tasks]
        models = [Scripted(environment.renderer.tokenizer, texts) for _ in tasks]
        try:
            rollouts = [
                environment.run(prompt, model)
                for prompt, model in zip(prompts, models, strict=True)
            ]
            together = asyncio.gather(*rollouts, return_exceptions=True)
            return await asyncio.wait_for(together, WAIT)
        finally:
            await environment.close()

    return asyncio.run(run())


def faked(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> VerifiersEnvironment:
    script = folder / "fake.py"
    script.write_text(FAKE)
    command: Callable[[Any], list[str]] = lambda self: [sys.executable, str(script)]  # noqa: E731
    monkeypatch.setattr(VerifiersEnvironment, "command", command)
    return environment_of(folder, **options)


def test_rollouts_are_asked_for_and_answered_in_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = held(faked(tmp_path, monkeypatch), [{"prompt": f"{n}+1?"} for n in range(5)])
    for rollout in found:
        assert rollout.rewards == {"right": 1.0}
        assert rollout.measures == {"length": 1.0, "turns": 1.0, "control_tokens": 0.0}
        (trajectory,) = rollout.trajectories
        assert int(trajectory.loss_mask.sum()) == 2


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"dies": 1}, r"is gone \(exit status 7\)"),
        ({"silent": "error"}, "failed: oh"),
        ({"silent": 1}, "asked the model nothing"),
    ],
)
def test_what_fails_there_is_a_fault_of_the_infrastructure(
    task: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (error,) = held(faked(tmp_path, monkeypatch), [task])
    assert isinstance(error, InfrastructureFault)
    with pytest.raises(InfrastructureFault, match=said):
        raise error


def test_a_process_that_died_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = faked(tmp_path, monkeypatch)
    (error,) = held(environment, [{"dies": 1}])
    assert isinstance(error, InfrastructureFault)
    (rollout,) = held(environment, [{"prompt": "1+3?"}])
    assert rollout.rewards == {"right": 1.0}


def test_a_process_that_does_not_come_up_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFault, match="did not come up in 30 s"):
        Worker([sys.executable, "-c", "raise SystemExit(2)"], 30.0)
    with pytest.raises(InfrastructureFault, match=r"did not come up in 0.2 s"):
        Worker([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


def test_options_and_tasks_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs environment\.environment"):
        environment_of(tmp_path, environment="")
    with pytest.raises(ConfigError, match=r"environment\.python=/nowhere is not there"):
        environment_of(tmp_path, python="/nowhere")
    environment = faked(tmp_path, monkeypatch)
    with pytest.raises(DataError, match="has no column `task`"):
        asyncio.run(environment.run(Prompt((1,)), Scripted(environment.renderer.tokenizer, [])))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with verifiers, and a taskset `add` in it."""
    folder = tmp_path_factory.mktemp("verifiers")
    venv.create(folder, with_pip=True)
    found = str(folder / "bin/python")
    pip = [found, "-m", "pip", "install", "-q", "--no-deps", "-r"]
    done = subprocess.run(
        [*pip, str(ROOT / "requirements/verifiers.txt")], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"requirements/verifiers.txt can't be installed: {done.stderr[-300:]}")
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "add.py").write_text(TASKSET)
    return found


@pytest.mark.ranks
def test_a_taskset_of_verifiers_is_done_token_by_token(python: str, tmp_path: Path) -> None:
    options = {"agent": {"runtime": {"type": "subprocess"}}}
    listed = subprocess.run(
        [python, str(WORKER), "tasks", "add", json.dumps(options)],
        capture_output=True,
        text=True,
        check=True,
    )
    records = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["0+1?", "1+1?", "2+1?"]
    environment = environment_of(tmp_path, python=python, options=options)
    tasks = [record["task"] for record in records]
    found = held(environment, tasks, [FORM.call, "4<|im_end|>"])
    for rollout in found:
        if isinstance(rollout, BaseException):
            raise rollout
        assert rollout.rewards == {"right": 0.5}
        assert rollout.measures == {"answers": 2.0, "turns": 2.0, "control_tokens": 0.0}
        (trajectory,) = rollout.trajectories
        assert [turn.role for turn in trajectory.turns] == ["assistant", "tool", "assistant"]
        trained = trajectory.token_ids[trajectory.loss_mask].tolist()
        completions = [
            environment.renderer.tokenizer.encode_reply(text) for text in (FORM.call, "4<|im_end|>")
        ]
        assert trained == [token for ids in completions for token in ids]
