import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rftmega.config.options.tools import ToolLimits
from rftmega.core.errors import ConfigError, InfrastructureFault
from rftmega.core.types import Prompt
from rftmega.environments.tools.tool import PlainSession, ToolError, ToolSpec
from rftmega.environments.tools.tool_runner import OpenTools, ToolReply, ToolRunner, shortened
from tests.unit.environments.tools.tool_calls import in_rollout

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FAST = ToolLimits(pause=0.001)


class OneTool(PlainSession):
    """One tool, `say`, which does `work`; it is its own session."""

    stateful = False

    def __init__(self, work: Callable[[int], Any], **of_spec: Any):
        self.work, self.names = work, ["say"]
        self.spec = ToolSpec("say", "Says.", NUMBER, **of_spec)

    async def open(self) -> list[ToolSpec]:
        return [self.spec]

    def session(self, task: Prompt | None = None) -> "OneTool":
        return self

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        said = self.work(arguments["n"])
        return str(await said if asyncio.iscoroutine(said) else said)


def called(
    tool: OneTool, *arguments: Any, limits: ToolLimits = FAST
) -> tuple[list[ToolReply], dict[str, float]]:
    """Returns the replies of `say`, and what was counted."""

    async def work(runner: ToolRunner) -> tuple[list[ToolReply], dict[str, float]]:
        return [await runner.call("say", each) for each in arguments], runner.measures

    return in_rollout(work, tool, limits=limits)


class Fails:
    """Raises `error` in the first calls."""

    def __init__(self, error: Exception, times: int):
        self.error, self.times, self.calls = error, times, 0

    def __call__(self, n: int) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return f"said {n}"


def test_a_reply_and_a_failure_of_the_models_are_told_apart() -> None:
    def work(n: int) -> str:
        if n:
            raise ToolError("not that one")
        return "fine"

    (good, bad), counted = called(OneTool(work), {"n": 0}, {"n": 1})
    assert (good.text, good.failed, bad.text, bad.failed) == (
        "fine",
        False,
        "error: not that one",
        True,
    )
    assert (counted["tool_calls"], counted["tool_errors"], counted["tool_retries"]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "'n' is a required property"),
        ({"n": "x"}, "arguments['n']: 'x' is not of type 'integer'"),
        ([1], "is not of type 'object'"),
        ("n", "is not of type 'object'"),
    ],
)
def test_wrong_arguments_are_explained_to_the_model_and_reach_no_tool(
    arguments: Any, says: str
) -> None:
    work = Fails(ToolError(""), 0)
    (reply,), counted = called(OneTool(work), arguments)
    assert reply.failed and says in reply.text
    assert (work.calls, counted["tool_errors"]) == (0, 1)


def test_a_tool_that_there_is_not_is_the_models_failure() -> None:
    async def work(runner: ToolRunner) -> ToolReply:
        return await runner.call("shout", {})

    reply = in_rollout(work, OneTool(str))
    assert reply.failed and reply.text == "error: there is no tool 'shout'; there are: say"


def test_a_call_that_could_not_be_read_counts_as_the_models_failure() -> None:
    async def work(runner: ToolRunner) -> dict[str, float]:
        runner.refuse()
        return runner.measures

    counted = in_rollout(work, OneTool(str))
    assert (counted["tool_calls"], counted["tool_errors"]) == (1, 1)


def test_only_an_idempotent_tool_is_called_again_after_a_fault() -> None:
    work = Fails(InfrastructureFault("gone"), 2)
    (reply,), counted = called(OneTool(work, idempotent=True), {"n": 1})
    assert reply == ("said 1", False, reply.seconds)
    assert (counted["tool_retries"], counted["tool_errors"]) == (2, 0)
    once = Fails(InfrastructureFault("gone"), 1)
    with pytest.raises(InfrastructureFault, match="gone"):
        called(OneTool(once), {"n": 1})
    assert once.calls == 1


def test_a_fault_that_stays_is_raised_after_the_last_attempt() -> None:
    work = Fails(InfrastructureFault("gone"), 100)
    with pytest.raises(InfrastructureFault):
        called(OneTool(work, idempotent=True), {"n": 1}, limits=ToolLimits(retries=2, pause=0.001))
    assert work.calls == 3


def test_a_call_that_takes_too_long_is_cancelled_and_the_blame_is_the_tools_to_say() -> None:
    cancelled = threading.Event()

    async def never(n: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    limits = ToolLimits(seconds=0.01)
    (reply,), _ = called(OneTool(never), {"n": 1}, limits=limits)
    assert reply.failed and reply.text == "error: say gave no reply within 0.01 s"
    assert cancelled.is_set()
    with pytest.raises(InfrastructureFault, match=r"no reply within 0\.01 s"):
        called(OneTool(never, late_is_fault=True), {"n": 1}, limits=limits)


def test_a_rollout_whose_time_for_tools_is_used_up_calls_no_more() -> None:
    async def never(n: int) -> None:
        await asyncio.Event().wait()

    limits = ToolLimits(seconds=30, rollout_seconds=0.01)
    (late, refused), _ = called(OneTool(never), {"n": 1}, {"n": 1}, limits=limits)
    assert late.failed and "no reply within 0.01 s" in late.text
    assert refused.failed and "is used up" in refused.text


def test_a_loop_that_stands_still_makes_no_call_late() -> None:
    """A loop of rollouts is stepped between the steps of an engine, which may take long."""
    replied = threading.Event()

    async def soon(n: int) -> str:
        await asyncio.sleep(0.01)
        replied.set()
        return "in time"

    loop = asyncio.new_event_loop()
    tools = OpenTools([OneTool(soon)], ToolLimits(seconds=30))
    loop.run_until_complete(tools.open())
    task = loop.create_task(tools.runner().call("say", {"n": 1}))
    loop.call_soon(loop.stop)
    loop.run_forever()
    assert replied.wait(30)
    clock = loop.time
    loop.time = lambda: clock() + 1000  # type: ignore[method-assign]  # nobody steps it for so long
    assert loop.run_until_complete(task).text == "in time"
    loop.run_until_complete(tools.close())
    loop.close()


def test_a_rollout_that_is_broken_off_cancels_its_call() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def never(n: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def work(runner: ToolRunner) -> None:
        task = asyncio.create_task(runner.call("say", {"n": 1}))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    in_rollout(work, OneTool(never))
    assert cancelled.wait(30)


def test_calls_of_a_tool_with_a_state_come_one_after_another() -> None:
    at_once, most = 0, 0

    async def count(n: int) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1

    async def work(runner: ToolRunner) -> None:
        await asyncio.gather(*(runner.call("say", {"n": n}) for n in range(5)))

    tool = OneTool(count)
    tool.stateful = True
    in_rollout(work, tool)
    assert most == 1


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefghij", 4, "ab\n[... 6 characters left out ...]\nij"),
        ("abcdefghij", 1, "a\n[... 9 characters left out ...]\n"),
        ("a\ud800b", 9, "a?b"),
    ],
)
def test_a_long_reply_loses_its_middle_and_says_how_much(
    text: str, most: int, expected: str
) -> None:
    assert shortened(text, most) == expected


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two tools have the name say"):
        in_rollout(lambda runner: asyncio.sleep(0), OneTool(str), OneTool(str))


@pytest.mark.parametrize("schema", [{"type": "strin"}, {"type": "string"}, {}])
def test_parameters_that_are_no_schema_of_an_object_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="The parameters of the tool t"):
        ToolSpec("t", "T.", schema)


def test_a_schema_fetches_nothing() -> None:
    spec = ToolSpec(
        "t", "T.", {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}
    )
    with pytest.raises(Exception, match="Unresolvable"):
        spec.check({"a": 1})


@pytest.mark.parametrize(
    ("properties", "n"),
    [
        ({"n": {"type": "integer", "multipleOf": 0.5}}, 10**4000),
        ({"n": {"$ref": "#/nowhere"}}, 1),
    ],
)
def test_arguments_that_a_schema_can_not_be_held_to_are_the_models_failure(
    properties: dict[str, Any], n: Any
) -> None:
    tool = OneTool(lambda n: n)
    tool.spec = ToolSpec("say", "Says.", {"type": "object", "properties": properties})
    (reply,), measures = called(tool, {"n": n})
    assert reply.failed
    assert "the arguments of say can't be compared with its schema" in reply.text
    assert measures["tool_errors"] == 1


def test_a_tool_is_told_as_openais_api_has_it() -> None:
    told = {"name": "t", "description": "T.", "parameters": NUMBER}
    assert ToolSpec("t", "T.", NUMBER).openai() == {"type": "function", "function": told}
