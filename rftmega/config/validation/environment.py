"""Checks that an environment finds what its options name: functions of tools and agents, text games,
and the Python interpreter in which the verifiers library is installed.
"""

import os
import shutil

from rftmega.config.options.agents import Agent, Verifiers
from rftmega.config.options.environments import Tools
from rftmega.config.options.text_games import OpenEnv, TextArena
from rftmega.config.schema import RunConfig
from rftmega.config.secrets import has_credentials
from rftmega.config.task_libraries import GAMES, task_source
from rftmega.config.user_code.functions import function_of
from rftmega.core.errors import ConfigError


def environment(config: RunConfig) -> list[str]:
    """Returns the problems of the environment's options, without contacting tool servers."""
    chosen = config.environment
    if isinstance(chosen, Tools):
        return _tools(chosen)
    if isinstance(chosen, Agent):
        return _agent(chosen)
    if isinstance(chosen, Verifiers):
        return _verifiers(chosen)
    found = _text_game(chosen) if isinstance(chosen, TextArena | OpenEnv) else []
    for source in _sources(config):
        library = task_source(source)
        if library is not None and library.library in GAMES and chosen.type != library.library:
            return [
                f"{source} needs environment.type={library.library}, and environment.python (docs/tasks.md)."
            ]
    return found


def _tools(chosen: Tools) -> list[str]:
    found = [problem for each in chosen.tools if (problem := _missing(each, "environment.tools"))]
    if not (chosen.tools or chosen.sandbox.python or chosen.http or chosen.mcp):
        found.append(
            "environment.type=tools has no tools. Give environment.tools, environment.sandbox.python=true, environment.http or "
            "environment.mcp."
        )
    found += [_keyless(f"http {each.name}", each.key_env) for each in chosen.http if each.key_env]
    found += [_keyless(f"mcp {each.name}", each.key_env) for each in chosen.mcp if each.key_env]
    for server in chosen.mcp:
        if bool(server.command) == bool(server.url):
            found.append(f"environment.mcp: {server.name or 'a server'} needs a command or a url.")
    for kind, named in (("http", chosen.http), ("mcp", chosen.mcp)):
        found += [
            f"environment.{kind}: the url of {each.name or 'a server'} holds a user or a password. Put a key in a variable "
            "that key_env names."
            for each in named
            if has_credentials(each.url)
        ]
    return [problem for problem in found if problem]


def _agent(chosen: Agent) -> list[str]:
    if bool(chosen.function) == bool(chosen.command):
        return [
            "environment.type=agent needs environment.function or environment.command, not both."
        ]
    if chosen.function:
        return [found for found in [_missing(chosen.function, "environment.function")] if found]
    program = chosen.command[0]
    if shutil.which(program) is None:
        return [f"environment.command: there is no program {program}."]
    return []


def _verifiers(chosen: Verifiers) -> list[str]:
    found = []
    if not chosen.environment:
        found.append(
            "environment.type=verifiers needs environment.environment, its taskset's name."
        )
    if not chosen.python or shutil.which(chosen.python) is None:
        found.append(
            f"environment.python={chosen.python or '(empty)'} is no program. Give the Python of a virtual environment that has "
            "requirements/verifiers.txt (docs/agents.md)."
        )
    return found


def _text_game(chosen: TextArena | OpenEnv) -> list[str]:
    if chosen.python and shutil.which(chosen.python) is not None:
        return []
    return [
        f"environment.python={chosen.python or '(empty)'} is no program. Give the Python of a virtual environment in which "
        f"{GAMES[chosen.type]} is installed (docs/tasks.md)."
    ]


def _sources(config: RunConfig) -> list[str]:
    data = config.data
    return [data.train, *data.sources, *data.held_out.values()]


def _missing(reference: str, option: str) -> str:
    """Returns the reason why the function of a reference cannot be used; "" if it can."""
    try:
        function_of(reference, option)
    except ConfigError as error:
        return str(error)
    return ""


def _keyless(tool: str, variable: str) -> str:
    if os.environ.get(variable):
        return ""
    return f"environment.{tool}: the environment variable {variable} (key_env) is not set."
