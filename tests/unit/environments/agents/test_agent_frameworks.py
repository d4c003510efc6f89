"""Agents of two frameworks do tasks at our endpoint; what they were answered is kept token by token.

The frameworks are installed in a folder of their own from the registry (requirements/agents.txt).
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chat_formats import FORMATS
from tests.unit.environments.agents.test_openai_endpoint import rollouts

ROOT = Path(__file__).parents[4]
HEAD = """
import asyncio, json, os, sys
sys.path.insert(0, {packages!r})
task = json.loads(os.environ["TASK"])
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
"""
PYDANTIC = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[API]
agent = Agent(kind("policy", provider=OpenAIProvider(base_url=url, api_key=key)))

@agent.tool_plain
def add(a: int) -> int:
    return a + 3

said = agent.run_sync(task["prompt"]).output
print(json.dumps({"right": float(said == task["label"])}))
"""
OPENAI_AGENTS = """
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def add(a: int) -> int:
    return a + 3

kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[API]
model = kind(model="policy", openai_client=AsyncOpenAI(base_url=url, api_key=key))
agent = Agent(name="adder", instructions="Add.", tools=[add], model=model)
said = asyncio.run(Runner.run(agent, task["prompt"])).final_output
print(json.dumps({"right": float(said == task["label"])}))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the frameworks."""
    folder = tmp_path_factory.mktemp("frameworks")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [*pip, "-r", str(ROOT / "requirements/agents.txt")], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"requirements/agents.txt can't be installed: {done.stderr[-300:]}")
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("agent", [PYDANTIC, OPENAI_AGENTS], ids=["pydantic-ai", "openai-agents"])
def test_an_agent_of_a_framework_calls_a_tool_and_is_rewarded(
    agent: str, api: str, packages: Path, tmp_path: Path
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(HEAD.format(packages=str(packages)) + agent.replace("API", repr(api), 1))
    call = FORMATS["hermes"].call
    found = rollouts(
        tmp_path, [call, "4<|im_end|>"], command=[sys.executable, str(script)], seconds=120.0
    )
    assert found[0].rewards == {"right": 1.0}
    (trajectory,) = found[0].trajectories
    assert [turn.role for turn in trajectory.turns] == ["assistant", "tool", "assistant"]
    assert int(trajectory.loss_mask.sum()) == sum(
        turn.stop - turn.start for turn in trajectory.turns if turn.role == "assistant"
    )
