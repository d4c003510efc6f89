"""Runs rollouts of an environment of the verifiers library, in a Python that has it installed:

    PYTHON verifiers_worker.py run ENVIRONMENT OPTIONS       # what rftmega starts
    PYTHON verifiers_worker.py tasks ENVIRONMENT OPTIONS     # writes the tasks as records of data.path

OPTIONS is JSON. A line on the standard input of `run` is a rollout to do, {"id", "task",
"base_url", "api_key", "model"}, and a line on its standard output is its result, {"id", "rewards",
"metrics", "error"}; the first line is {"ready": true}. This file imports nothing of rftmega.
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent


def loaded(name: str, options: dict[str, Any]) -> Any:
    """Returns the verifiers environment of the taskset `name`, built with `options`."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    taskset = {**options.get("taskset", {}), "id": name}
    return load_environment(resolve_env_config({**options, "taskset": taskset}))


def list_tasks(environment: Any, out: TextIO) -> None:
    """Writes one line of JSON per task of the environment to `out`: the task's prompt, and all its
    data under "task".
    """
    for task in environment.taskset:
        data = task.data.model_dump(mode="json", exclude_none=True)
        record = {"prompt": task.data.prompt_text or "(the environment asks)", "task": data}
        out.write(json.dumps(record) + "\n")


async def rollout(environment: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Runs one rollout for the request `asked`, whose fields the module's docstring lists. Returns
    {"rewards", "metrics"}, each a dictionary by name, or {"error": message}.
    """
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import EvalClientConfig

    variable = f"RFTMEGA_KEY_{asked['id']}"  # the library reads keys from environment variables
    os.environ[variable] = asked["api_key"]
    try:
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate(asked["task"])
        task = kind(data, environment.config.taskset.task)
        client = EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
        (slot,) = environment.slots(task)
        context = ModelContext(client=client, model=asked["model"])
        episode = await environment.run_slot(slot, context)
    finally:
        del os.environ[variable]
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = "; ".join(f"{error.type}: {error.message}" for error in errors[-3:])
        return {"error": said or "the episode did not end well"}
    return told(episode.traces)


def told(traces: list[Any]) -> dict[str, Any]:
    """Returns {"rewards": values by name, "metrics": values by name} of an episode's `traces`, one
    for each agent. If there are several agents, the names begin with the agent's name.
    """
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for trace in traces:
        head = f"{trace.agent.name}." if len(traces) > 1 and trace.agent.name else ""
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[head + name] = rewards.get(head + name, 0.0) + float(reward.value)
        for name, value in trace.metrics.items():
            if value is not None:
                metrics[head + name] = float(value)
    return {"rewards": rewards, "metrics": metrics}


async def serve(environment: Any, out: TextIO) -> None:
    """Runs the rollouts that are requested on standard input until it is closed, and writes their
    results to `out`.
    """
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    async def run(asked: dict[str, Any]) -> None:
        try:
            found = await rollout(environment, asked)
        except Exception as error:  # reported to the requester: the other rollouts continue
            found = {"error": f"{type(error).__name__}: {error}"}
        say({"id": asked["id"], **found})

    def say(fields: dict[str, Any]) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    running: set[asyncio.Task[None]] = set()
    async with environment.serving():
        say({"ready": True})
        threading.Thread(target=read, daemon=True).start()
        while line := await lines.get():
            task = asyncio.create_task(run(json.loads(line)))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def main(what: str, name: str, options: str) -> None:
    # a file in this folder has the library's name
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != HERE]
    # prints of an environment go to the log: standard output carries replies
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    environment = loaded(name, json.loads(options))
    if what == "tasks":
        list_tasks(environment, out)
    else:
        asyncio.run(serve(environment, out))


if __name__ == "__main__":
    main(*sys.argv[1:4])
