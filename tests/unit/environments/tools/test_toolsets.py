from pathlib import Path
from typing import Any

import pytest

from rftmega.config import load
from rftmega.config.options.environments import Tools
from rftmega.config.options.tools import HTTPTool, MCPServer, SandboxTool
from rftmega.config.validation.ranges import choices_and_ranges
from rftmega.core.errors import ConfigError
from rftmega.environments.tools.create import toolsets_of

SOURCE = '''
def f(a: int) -> int:
    """F."""


class C:
    def g(self) -> int:
        """G."""
'''
WEB = HTTPTool("h", "H.", "http://x")
RUN = """
model: {path: policy}
data: {train: train.jsonl}
environment:
  type: tools
  tools: ["my_tools.py:f"]
  sandbox: {python: true, seconds: 3}
  http:
    - name: look
      description: Looks.
      url: http://localhost/look
      parameters: {type: object, properties: {city: {type: string}}}
  mcp: [{name: numbers, command: [python, server.py], start_seconds: 0}]
  limits: {characters: 10}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(SOURCE)
    return path


def test_every_kind_of_tools_has_its_toolset(file: Path) -> None:
    options = Tools(
        tools=[f"{file}:f", f"{file}:C"],
        sandbox=SandboxTool(python=True),
        http=[WEB],
        mcp=[MCPServer("m", command=["m"])],
    )
    found = toolsets_of(options)
    assert [toolset.names for toolset in found] == [["g"], ["f"], ["python"], ["h"], []]
    assert [toolset.stateful for toolset in found] == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "has no tools"),
        ({"tools": ["f", "f"]}, "two tools have the name f"),
        ({"http": [WEB, WEB]}, "two tools have the name h"),
        ({"tools": ["f"], "http": [HTTPTool("f", "F.", "http://x")]}, "two tools have the name f"),
    ],
)
def test_no_tool_and_two_of_one_name_are_refused(
    options: dict[str, Any], says: str, file: Path
) -> None:
    if "tools" in options:
        options = options | {"tools": [f"{file}:{name}" for name in options["tools"]]}
    with pytest.raises(ConfigError, match=says):
        toolsets_of(Tools(**options))


def test_a_config_file_may_list_tools_with_their_options(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    config = load(tmp_path / "run.yaml", ["environment.sandbox.memory_mib=64"])
    given: Any = config.environment
    assert given.tools == ["my_tools.py:f"]
    assert given.sandbox == SandboxTool(python=True, seconds=3.0, memory_mib=64)
    (look,) = given.http
    assert isinstance(look, HTTPTool) and look.parameters["properties"] == {
        "city": {"type": "string"}
    }
    assert given.mcp == [MCPServer("numbers", ["python", "server.py"], start_seconds=0.0)]
    assert given.limits.characters == 10
    assert "environment.mcp.0.start_seconds=0.0 must be positive." in choices_and_ranges(config)[1]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "environment.http=[{name: a, b: 3}]",
            "environment.http=.*each with options of: name, description, url",
        ),
        ("environment.http=3", "environment.http=3 must be"),
        (
            "environment.limits.second=3",
            "environment.limits.second is not an option. Did you mean environment.limits.seconds",
        ),
    ],
)
def test_options_that_there_are_not_are_told(override: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with pytest.raises(ConfigError, match=says):
        load(tmp_path / "run.yaml", [override])


def test_another_environment_drops_them_and_refuses_their_options(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    path, other = tmp_path / "run.yaml", "environment.type=single_turn"
    assert load(path, [other]).environment.type == "single_turn"
    with pytest.raises(
        ConfigError, match=r"environment\.limits\.seconds=3 needs environment\.type=tools"
    ):
        load(path, [other, "environment.limits.seconds=3"])
