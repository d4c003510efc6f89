"""Reads the options that a script for TRL or a command line for verl sets."""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from rftmega.config.files import read_yaml
from rftmega.core.errors import ConfigError

CALLS = {"GRPOConfig": "", "GRPOTrainer": "", "LoraConfig": "peft_config."}  # name -> prefix
POSITIONAL = {"GRPOConfig": ("output_dir",), "GRPOTrainer": ("model", "reward_funcs")}
PASSED_ON = ("args", "peft_config")  # arguments that are read where they are made
COMMENT = re.compile(r"(?m)^[ \t]*#.*\n?|[ \t]#[ \t].*$")
OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w.@/-]*=")


class Source(NamedTuple):
    """Source is what a program for another framework sets: `options`, name -> value, and
    `unreadable`, name -> source text of a value that is known only when the program runs.
    """

    options: dict[str, Any]
    unreadable: dict[str, str]


def read_trl(text: str) -> Source:
    """Returns the arguments of GRPOConfig, GRPOTrainer and LoraConfig in a Python script `text`,
    those of LoraConfig as peft_config.r and so on. Literals and names of literals have values.

    Raises ConfigError for text that is not Python, or without a GRPOConfig or GRPOTrainer.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"this is no Python: {error}. Give a script for TRL.") from error
    assigned = _assigned(tree)
    found = Source({}, {})
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _named(node)]
    if not {_named(call) for call in called} & {"GRPOConfig", "GRPOTrainer"}:
        raise ConfigError(
            "there is no GRPOConfig(...) or GRPOTrainer(...). Give a script with one."
        )
    for call in called:
        for name, node in _arguments(call):
            _add(found, name, node, assigned)
    return found


def _named(call: ast.Call) -> str:
    """Returns the name of the called class if it is one of CALLS, otherwise an empty string."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return name if name in CALLS else ""


def _arguments(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = _named(call)
    yield from zip(POSITIONAL.get(name, ()), call.args, strict=False)
    for keyword in call.keywords:
        if name != "GRPOTrainer" or keyword.arg not in PASSED_ON:
            yield CALLS[name] + (keyword.arg or f"**{ast.unparse(keyword.value)}"), keyword.value


def _add(found: Source, name: str, node: ast.expr, assigned: Mapping[str, ast.expr]) -> None:
    """Adds the argument `name` of a call, whose source is `node`, to `found`. `assigned`: name of a
    variable -> the expression that is assigned to it.
    """
    if isinstance(node, ast.Name) and node.id in assigned:
        node = assigned[node.id]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        found.unreadable[name] = " ".join(ast.unparse(node).split())
    else:
        found.options[name] = list(value) if isinstance(value, tuple | set) else value


def _assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """Returns name -> assigned expression for all variables that the program assigns exactly once,
    by a plain assignment to one name.
    """
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        for target in _targets(node):
            plain = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name)
            value = getattr(node, "value", None) if plain else None
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and values[0]}


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
        return [node.target]
    return []


def read_verl(text: str) -> Source:
    """Returns the options name=value of verl's command in a shell script `text`. A value with a
    $VARIABLE is unreadable, since the shell sets it.

    Raises ConfigError for unbalanced quotes, or if no command runs verl.
    """
    for words in _commands(text):
        starts = [at for at, word in enumerate(words) if "main_ppo" in word or "verl." in word]
        if starts:
            return _overrides(words[starts[0] + 1 :])
    raise ConfigError(
        "no command runs verl. Give a script with `python3 -m verl.trainer.main_ppo ...`."
    )


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command of a shell script."""
    joined = COMMENT.sub("", text).replace("\\\n", " ")
    lexer = shlex.shlex(joined, posix=True, punctuation_chars="\n;&|")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if word.strip("\n;&|"):
                words.append(word)
            else:
                yield words
                words = []
    except ValueError as error:
        raise ConfigError(f"this is no shell script: {error}.") from error
    yield words


def _overrides(words: list[str]) -> Source:
    found = Source({}, {})
    for word in words:
        name, _, value = word.partition("=")
        if not OVERRIDE.match(word):
            found.unreadable[word] = word
        elif "$" in value or "`" in value:
            found.unreadable[name] = value
        else:
            found.options[name.lstrip("+~")] = _parsed(value)
    return found


def _parsed(value: str) -> Any:
    try:
        parsed = read_yaml(value)
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError):
        return value
    if isinstance(parsed, str):
        try:
            return float(parsed)  # YAML 1.1 reads 1e-6 as a string
        except ValueError:
            return parsed
    return parsed
