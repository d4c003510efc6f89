"""AgentEnvironment runs each task with a user's agent program, which has its own loop."""

import asyncio
import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rftmega.config.options.agents import Agent
from rftmega.config.options.parts import implements
from rftmega.config.user_code.functions import function_of
from rftmega.core.errors import ConfigError, EnvironmentFailed
from rftmega.core.interfaces import Model
from rftmega.core.types import Prompt, Rollout
from rftmega.data.chat.renderer import ConversationRenderer
from rftmega.environments.agents.openai_endpoint import MODEL, Endpoint
from rftmega.environments.agents.session import Session
from rftmega.environments.agents.threads import in_thread

log = logging.getLogger(__name__)
LAST_WORDS = 2000  # characters of a program's error output that an exception quotes


@implements(Agent)
class AgentEnvironment:
    """AgentEnvironment gives each rollout's agent a key for the OpenAI-compatible endpoint, and
    returns the trajectories of the agent's requests.
    """

    def __init__(self, options: Agent, tokenizer: Any):
        """Raises ConfigError unless the options name exactly one agent."""
        if bool(options.function) == bool(options.command):
            raise ConfigError(
                "environment: an agent is environment.function or environment.command; set one of them."
            )
        self.options = options
        self.renderer = ConversationRenderer.of(
            tokenizer, options.renderer, tool_parser=options.tool_parser
        )
        self.stop_ids: Sequence[int] = self.renderer.stop_ids
        self.endpoint = Endpoint()
        self._function: Callable[..., Any] | None = None
        if options.function:
            self._function = function_of(options.function, "environment.function")

    async def run(self, task: Prompt, model: Model) -> Rollout:
        """Runs the agent on a task and returns the rollout: the trajectories of the agent's
        requests to `model`, and its rewards.

        Raises EnvironmentFailed if the agent obtained no completion. Exceptions of the agent are
        raised again if the option agent_errors is "raise", and only logged otherwise.
        """
        session = Session(model, self.renderer)
        key = await self.endpoint.open(session)
        given, late = None, False
        try:
            async with asyncio.timeout(self.options.seconds):
                given = await self._solved(task, key)
        except TimeoutError:
            late = True
        except (Exception, asyncio.CancelledError) as error:
            if self.options.agent_errors == "raise" or isinstance(error, asyncio.CancelledError):
                raise
            log.warning("the agent failed in a rollout of prompt %d: %r", task.index, error)
        finally:
            self.endpoint.shut(key)
        trajectories = session.trajectories()
        if not trajectories:
            raise EnvironmentFailed(
                f"The agent asked the model nothing in a rollout of prompt {task.index}. It is to send its requests to base_url "
                f"with api_key{' and had ' + format(self.options.seconds, 'g') + ' s (environment.seconds)' if late else ''}."
            )
        measures = {
            "turns": float(session.turns),
            "trajectories": float(len(trajectories)),
            "over_seconds": float(late),
            "control_tokens": float(session.control_tokens),
        }
        return Rollout(tuple(trajectories), rewards=rewards_of(given), measures=measures)

    async def close(self) -> None:
        """Stops the endpoint."""
        await self.endpoint.close()

    async def _solved(self, task: Prompt, key: str) -> Any:
        """Runs the agent on a task and returns its result (see `rewards_of`). `key`: the API key
        with which the agent calls the endpoint.
        """
        fields, url = task_of(task), f"{self.endpoint.address}/v1"
        if self._function is None:
            return await _run(self.options.command, fields, url, key)
        if inspect.iscoroutinefunction(self._function):
            return await self._function(fields, url, key, MODEL)
        return await in_thread(self._function, fields, url, key, MODEL)


def task_of(task: Prompt) -> dict[str, Any]:
    """Returns the dictionary by which an agent gets a task: the columns of the task's record, and
    its label, index and kind (task type).
    """
    record: dict[str, Any] = json.loads(task.record) if task.record else {}
    return record | {"label": task.label, "index": task.index, "kind": task.kind}


def rewards_of(given: Any) -> dict[str, float]:
    """Converts an agent's result `given` to rewards by name: a number becomes the reward "agent", a
    dictionary stays, None becomes no reward.

    Raises ValueError unless the result is a finite number, a dictionary of finite numbers, or None.
    """
    if given is None:
        return {}
    named = given if isinstance(given, Mapping) else {"agent": given}
    rewards = {}
    for name, value in named.items():
        number = isinstance(value, int | float) and math.isfinite(value)
        if not number or not isinstance(name, str):
            raise ValueError(f"the agent gave {given!r}: a reward is a number, or numbers by name")
        rewards[name] = float(value)
    return rewards


async def _run(command: Sequence[str], task: Mapping[str, Any], url: str, key: str) -> Any:
    """Runs an agent program on a task. Returns the value in the last line of its output (see
    `_json`), or None if it wrote nothing.

    The program gets the endpoint's address `url`, its API key `key`, and the task as JSON, in
    environment variables. Raises EnvironmentFailed if the exit status is not 0.
    """
    own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL}
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | own | {"TASK": json.dumps(task)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        said, complained = await process.communicate()
    finally:
        _kill(process.pid)
        await process.wait()
    if process.returncode:
        words = complained.decode(errors="replace")[-LAST_WORDS:]
        raise EnvironmentFailed(
            f"{command[0]} ended with exit status {process.returncode}: {words}"
        )
    lines = said.decode(errors="replace").strip().splitlines()
    return _json(lines[-1]) if lines else None


def _kill(group: int) -> None:
    """Kills all processes in the process group with id `group`."""
    with suppress(ProcessLookupError):
        os.killpg(group, 9)


def _json(line: str) -> Any:
    """Returns the number or object in a line of JSON; None if the line contains neither."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict | int | float) else None
