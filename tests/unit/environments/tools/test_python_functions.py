import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rftmega.config.options.tools import ToolLimits
from rftmega.core.errors import ConfigError, InfrastructureFault
from rftmega.core.types import Prompt
from rftmega.environments.tools.python_functions import PythonClass, PythonFunctions
from rftmega.environments.tools.tool import ToolSpec
from rftmega.environments.tools.tool_runner import OpenTools, ToolReply, ToolRunner
from tests.unit.environments.tools.tool_calls import LIMITS, in_rollout

SOURCE = '''
import asyncio, sys, threading
from dataclasses import dataclass
from typing import Literal, Optional

from rftmega.core.errors import InfrastructureFault

STOP = threading.Event()


def weather(
    city: str, days: int = 3, unit: Literal["C", "F"] = "C",
    tags: Optional[list[str]] = None, weights: dict[str, float] = {},
) -> str:
    """Looks up the weather
    of a city.

    More that no model needs.

    Args:
        city: The city,
            in English.
        days: How many.

    Returns:
        What it says.
    """
    return f"{city} {days!r} {unit} {tags} {weights}"


def sphinx(a: float) -> dict:
    """Doubles.

    :param a: What is
        doubled.
    """
    return {"twice": 2 * a}


async def waits(n: int) -> int:
    """Waits."""
    await asyncio.sleep(0)
    return n + 1


async def never() -> None:
    """Never ends."""
    await asyncio.Event().wait()


def hangs() -> None:
    """Hangs."""
    STOP.wait()


async def blocks() -> None:
    """Blocks the loop that it is in."""
    STOP.wait()


def thread() -> str:
    """Tells its thread."""
    return threading.current_thread().name


def raises(what: str) -> None:
    """Raises."""
    raise {"value": ValueError("no such city"), "stop": StopIteration(), "exit": SystemExit(3),
           "fault": InfrastructureFault("the service is gone")}[what]


class Mute(Exception):
    def __str__(self):
        raise SystemExit(3)

    __repr__ = __str__


class MuteExit(SystemExit):
    __str__ = __repr__ = Mute.__str__


def mute(kind: str) -> None:
    """Raises what can't be told, or returns it."""
    if kind == "returned":
        return Mute()
    if kind == "nested":
        return {"a": [Mute()]}
    raise MuteExit() if kind == "exit" else Mute()


async def mute_later(kind: str) -> None:
    """The same, in a coroutine."""
    return mute(kind)


class Shout(str):
    def encode(self, *given, **options):
        raise Mute()


def shouts() -> str:
    """Returns a text of a class of its own."""
    return Shout("hey")


def silent(a: int) -> int:
    return a


def bare(a) -> None:
    """Takes anything."""


def many(*a: int) -> None:
    """Takes many."""


@dataclass
class Point:
    x: int


def point(p: Point) -> None:
    """Takes a point."""


def function(f: type(len)) -> None:
    """Takes a function."""


class Base:
    def reset(self) -> str:
        """Begins anew."""
        self.n = 0
        return "done"


class Counter(Base):
    """Counts."""

    made, closed = [], []

    def __init__(self):
        self.n = 0
        Counter.made.append(self)

    def add(self, n: int) -> int:
        """Adds."""
        self.n += n
        return self.n

    def begin(self, task):
        self.n = int(task.label)

    def turn_reward(self):
        return self.n / 2

    async def rewards(self):
        return {"count": self.n}

    def close(self):
        Counter.closed.append(self.n)

    def _hidden(self):
        """Is no tool."""


class NeedsOptions:
    def __init__(self, path):
        """Takes a path."""


class Empty:
    pass
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_tools.py"
    path.write_text(SOURCE)
    return str(path)


def functions(file: str, *names: str) -> PythonFunctions:
    return PythonFunctions([f"{file}:{name}" for name in names])


def module(file: str, name: str) -> Any:
    """Returns what the file has under a name."""
    toolset = functions(file, "hangs")
    return toolset._functions["hangs"].__globals__[name]


def replied(
    toolset: Any, *calls: tuple[str, dict[str, Any]], limits: ToolLimits = LIMITS
) -> list[ToolReply]:
    async def work(runner: ToolRunner) -> list[ToolReply]:
        return [await runner.call(name, arguments) for name, arguments in calls]

    return in_rollout(work, toolset, limits=limits)


def specs(toolset: Any) -> dict[str, ToolSpec]:
    return {spec.name: spec for spec in asyncio.run(toolset.open())}


def test_a_signature_and_a_docstring_become_a_schema(file: str) -> None:
    told = specs(functions(file, "weather"))["weather"].openai()["function"]
    assert told["description"] == "Looks up the weather of a city."
    assert told["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city, in English."},
            "days": {"type": "integer", "description": "How many.", "default": 3},
            "unit": {"enum": ["C", "F"], "type": "string", "default": "C"},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "weights": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_a_docstring_of_sphinx_describes_arguments_too(file: str) -> None:
    told = specs(functions(file, "sphinx"))["sphinx"]
    assert told.description == "Doubles."
    assert told.parameters["properties"]["a"]["description"] == "What is doubled."


def test_arguments_arrive_as_they_are_annotated_and_replies_are_text_or_json(file: str) -> None:
    calls = [
        ("weather", {"city": "Rome", "days": 2.0, "tags": ["a"]}),
        ("sphinx", {"a": 2}),
        ("waits", {"n": 1}),
    ]
    toolset = functions(file, "weather", "sphinx", "waits")
    assert [reply.text for reply in replied(toolset, *calls)] == [
        "Rome 2 C ['a'] {}",
        '{"twice": 4.0}',
        "2",
    ]


def test_a_function_runs_in_a_thread_of_its_own(file: str) -> None:
    (reply,) = replied(functions(file, "thread"), ("thread", {}))
    assert reply.text == "python tool"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("value", "error: ValueError: no such city"),
        ("stop", "error: RuntimeError: StopIteration()"),
        ("exit", "error: RuntimeError: SystemExit(3)"),
    ],
)
def test_what_a_function_raises_is_told_to_the_model(file: str, what: str, says: str) -> None:
    (reply,) = replied(functions(file, "raises"), ("raises", {"what": what}))
    assert (reply.text, reply.failed) == (says, True)


@pytest.mark.parametrize("kind", ["raised", "exit", "returned", "nested"])
def test_what_a_function_raises_or_returns_need_not_be_telling(file: str, kind: str) -> None:
    toolset = functions(file, "mute", "mute_later", "shouts")

    async def work(runner: ToolRunner) -> None:
        for name in ("mute", "mute_later"):
            reply = await runner.call(name, {"kind": kind})
            assert reply.failed
            assert reply.text.startswith(("error: Mute", "error: RuntimeError: "))
            # the loops that ran it still run
            assert (await runner.call("shouts", {})).text == "hey"

    in_rollout(work, toolset)


def test_a_function_may_say_that_the_infrastructure_failed(file: str) -> None:
    with pytest.raises(InfrastructureFault, match="the service is gone"):
        replied(functions(file, "raises"), ("raises", {"what": "fault"}))


def test_what_hangs_or_blocks_is_the_models_failure_and_holds_nothing_up(file: str) -> None:
    toolset = functions(file, "hangs", "never", "blocks", "sphinx")
    calls = [("hangs", {}), ("never", {}), ("blocks", {}), ("hangs", {}), ("sphinx", {"a": 1})]

    async def work(runner: ToolRunner) -> list[ToolReply]:
        try:
            return [await runner.call(name, arguments) for name, arguments in calls]
        finally:
            module(file, "STOP").set()

    *late, good = in_rollout(work, toolset, limits=ToolLimits(seconds=0.05))
    assert all(reply.failed and "gave no reply within 0.05 s" in reply.text for reply in late)
    assert good.text == '{"twice": 2.0}'


def test_a_process_ends_although_a_function_hangs(file: str) -> None:
    program = f"""
import asyncio
from rftmega.config.options.tools import ToolLimits
from rftmega.environments.tools.python_functions import PythonFunctions
from rftmega.environments.tools.tool_runner import OpenTools

async def main():
    tools = OpenTools([PythonFunctions(["{file}:hangs"])], ToolLimits(seconds=0.01))
    await tools.open()
    print((await tools.runner().call("hangs", {{}})).text)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "error: hangs gave no reply within 0.01 s\n"), (
        done.stderr
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("silent", "silent has no docstring"),
        ("bare", "the argument a of bare has no annotation"),
        ("many", r"many takes \*a: int"),
        ("point", "point takes Point, a class of its own"),
        ("function", "has a type that JSON has not"),
        ("nothing", "nothing of .* is not there"),
        ("STOP", "STOP of .* is no function"),
    ],
)
def test_a_function_that_no_model_can_be_told_of_is_refused(
    file: str, name: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"environment.tools: .*{says}"):
        functions(file, name)


@pytest.mark.parametrize(
    ("name", "says"), [("NeedsOptions", "called without arguments"), ("Empty", "no public methods")]
)
def test_a_class_that_can_be_no_toolset_is_refused(file: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PythonClass(f"{file}:{name}")


def test_an_object_of_a_class_keeps_the_state_of_one_rollout(file: str) -> None:
    toolset = PythonClass(f"{file}:Counter")
    assert sorted(specs(toolset)) == ["add", "reset"]

    async def work() -> list[str]:
        tools = OpenTools([toolset], ToolLimits())
        await tools.open()
        first, second = tools.runner(), tools.runner()
        said = [await first.call("add", {"n": 1}), await second.call("add", {"n": 5})]
        said += [await first.call("add", {"n": 1}), await second.call("reset", {})]
        await first.close()
        await tools.close()
        return [reply.text for reply in said]

    assert asyncio.run(work()) == ["1", "5", "2", "done"]
    assert module(file, "Counter").closed == [2]


def test_an_object_hears_its_task_and_may_give_rewards(file: str) -> None:
    async def work() -> tuple[Any, ...]:
        tools = OpenTools([PythonClass(f"{file}:Counter"), functions(file, "sphinx")], ToolLimits())
        await tools.open()
        async with tools.runner(Prompt((1,), label="7")) as runner:
            await runner.call("add", {"n": 1})
            given = await runner.turn_reward(), await runner.rewards()
        async with tools.runner(Prompt((1,), label="4")) as runner:  # which calls nothing
            given = *given, await runner.rewards()
        await tools.close()
        return given

    assert asyncio.run(work()) == (4.0, {"count": 8.0}, {"count": 4.0})


def test_tools_without_rewards_give_none(file: str) -> None:
    async def work(runner: ToolRunner) -> tuple[Any, ...]:
        return await runner.turn_reward(), await runner.rewards()

    assert in_rollout(work, functions(file, "sphinx")) == (None, {})


def test_the_room_of_tools_imports_nothing_heavy() -> None:
    program = """
import sys, rftmega.environments.tools.create
print([name for name in ("transformers", "vllm", "mcp") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
