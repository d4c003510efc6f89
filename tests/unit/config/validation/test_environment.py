"""What an environment lacks is told before a model is built."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import RunConfig
from rftmega.config.options.agents import Agent, Verifiers
from rftmega.config.options.environments import SingleTurn, Tools
from rftmega.config.options.tools import HTTPTool, MCPServer, SandboxTool
from rftmega.config.validation.environment import environment


def told(chosen: Any) -> list[str]:
    return environment(RunConfig(environment=chosen))


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        (Tools(), "has no tools"),
        (Tools(tools=["no_file.py:f"]), "there is no file"),
        (Tools(http=[HTTPTool("a", url="http://b", key_env="RFTMEGA_NO_KEY")]), "RFTMEGA_NO_KEY"),
        (Tools(mcp=[MCPServer("a")]), "needs a command or a url"),
        (Tools(mcp=[MCPServer("a", command=["b"], url="http://c")]), "needs a command or a url"),
        (Agent(), "needs environment.function or"),
        (Agent(function="a.py:f", command=["b"]), "not both"),
        (Agent(function="no_file.py:f"), "there is no file"),
        (Agent(command=["no-such-program"]), "there is no program no-such-program"),
        (Verifiers(python=sys.executable), "needs environment.environment"),
        (Verifiers(environment="a"), "is no program"),
    ],
)
def test_what_is_missing_is_named(chosen: Any, problem: str) -> None:
    (found,) = told(chosen)
    assert problem in found


def test_what_can_run_is_not_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(a: int) -> int:\n    'Adds.'\n    return a\n")
    function = f"{tmp_path}/mine.py:f"
    sound = [
        SingleTurn(),
        Tools(tools=[function]),
        Tools(sandbox=SandboxTool(python=True)),
        Agent(function=function),
        Agent(command=[sys.executable]),
        Verifiers(environment="a", python=sys.executable),
    ]
    assert [told(chosen) for chosen in sound] == [[]] * len(sound)
