"""Canaries in the options that carry secrets are in nothing that is stored, published or told."""

import json
import pickle
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rftmega.config import RunConfig, changes, load, without_secrets
from rftmega.config.secrets import holds_secrets, resolved, without_credentials
from rftmega.config.validation import violations
from rftmega.core.errors import ConfigError
from rftmega.monitoring.model_card import chosen_options

MCP = "environment: {type: tools, mcp: [{name: x, %s}]}\n"
JUDGE = "reward: {judge: 1.0, judge_model: m, judge_url: '%s'}\n"
GIVEN = {  # name -> options, and what is stored beside the names
    "variables of a server": (MCP % "command: ['true'], env: {API_KEY: CANARY}", "API_KEY"),
    "a key of a command": (MCP % "command: [srv, --key, CANARY, --token=CANARY, -pCANARY]", "srv"),
    "a user of a server": (MCP % "url: 'https://CANARY@h/x'", "https://h/x"),
    "a password of a server": (MCP % "url: 'https://u:CANARY@h/x'", "https://h/x"),
    "a password with a slash": (MCP % "url: 'https://u:a/CANARY@h/x'", "https://h/x"),
    "a key behind an address": (MCP % "url: 'https://h/x?key=CANARY'", "https://h/x?..."),
    "a tool's address": (
        "environment: {type: tools, http: [{name: x, url: 'https://u:CANARY@h/x'}]}\n",
        "https://h/x",
    ),
    "an agent's command": ("environment: {type: agent, command: [prog, CANARY]}\n", "prog"),
    "a judge's password": (JUDGE % "http://u:CANARY@h/v1", "http://h/v1"),
    "a judge's key": (JUDGE % "http://h/v1?key=CANARY", "http://h/v1?..."),
    "a reward server": ("reward: {remote: 1.0, remote_url: 'http://u:CANARY@h/v1'}\n", ""),
    "a server's password": (
        "strategy: separate\nrollout: {addresses: ['http://u:CANARY@h:1'], transport: disk}\n",
        "http://h:1",
    ),
    "another library's options": (
        "environment: {type: verifiers, options: {api_key: CANARY, more: {pin: 'CANARY'}}}\n",
        "api_key",
    ),
    "a folder that is an address": ("rollout: {weights_folder: 's3://u:CANARY@h/x'}\n", "s3://h/x"),
    "a default of a variable": (
        MCP % "command: ['true'], env: {API_KEY: '${oc.env:NOT_SET,CANARY}'}",
        "API_KEY",
    ),
}
OF_VARIABLES = {  # options that name a variable with a secret
    "a text": "logging: {wandb: '${oc.env:HELD}'}\n",
    "a part of a text": "data: {system_prompt: 'be ${oc.env:HELD}'}\n",
    "a server's variable": MCP % "command: ['true'], env: {API_KEY: '${oc.env:HELD}'}",
    "an argument": MCP % "command: [srv, '${oc.env:HELD}']",
    "a list": "rollout: {stop: [a, '${oc.env:HELD}']}\n",
    "a mapping": "data: {chat_template_kwargs: {key: {inner: '${oc.env:HELD}'}}}\n",
    "a reward server": "reward: {remote: 1.0, remote_url: '${oc.env:HELD}'}\n",
    "an option of an option": "logging: {wandb: '${oc.env:HELD}', mlflow: '${logging.wandb}'}\n",
}
WRONG = {  # what is refused, and would be quoted
    "text for a list": "environment: {type: tools, mcp: CANARY}\n",
    "a key that there is not": MCP % "command: [a], envs: {K: CANARY}",
    "a list for a mapping": MCP % "command: [a], env: [CANARY]",
    "another part's option": "environment: {type: single_turn, mcp: [{name: CANARY}]}\n",
    "a number for a name": "environment: {type: verifiers, options: CANARY}\n",
    "a list for an address": "reward: {remote: 1, remote_url: [CANARY]}\n",
    "a server without strategy": "rollout: {addresses: ['http://u:CANARY@h:1']}\n",
    "a server that is no address": "strategy: separate\nrollout: {addresses: ['u:CANARY@h']}\n",
}


def read(folder: Path, text: str, *overrides: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text(f"model: {{path: nowhere}}\n{text}")
    return load(file, overrides)


def told(config: RunConfig) -> str:
    """Returns all that is kept of a config: manifest, trackers and bundles have the first, an
    export's card the second.
    """
    return json.dumps(without_secrets(config)) + json.dumps(chosen_options(config))


@pytest.mark.parametrize("kind", GIVEN)
def test_a_secret_in_a_config_is_not_stored_and_what_is_none_is(kind: str, tmp_path: Path) -> None:
    text, kept = GIVEN[kind]
    config = read(tmp_path, text)
    assert "CANARY" in str(asdict(config)), "nothing was given"
    assert "CANARY" not in told(config)
    assert kept in told(config)
    assert "CANARY" not in "\n".join(violations(config, 1))


@pytest.mark.parametrize("kind", GIVEN)
def test_what_an_older_version_stored_is_not_told_either(kind: str, tmp_path: Path) -> None:
    config = read(tmp_path, GIVEN[kind][0])
    before = json.loads(json.dumps(asdict(config)))
    assert "CANARY" not in "\n".join(changes(before, without_secrets(RunConfig())))
    assert changes(before, without_secrets(config)) == []


@pytest.mark.parametrize("kind", OF_VARIABLES)
def test_a_variable_is_stored_by_its_name_and_used_by_its_value(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD", "CANARY")
    config = read(tmp_path, OF_VARIABLES[kind])
    moved = replace(deepcopy(pickle.loads(pickle.dumps(config))), strategy="colocated")
    for each in (config, moved):
        assert "CANARY" in str(asdict(each)) and "oc.env" not in str(asdict(each))
        assert "CANARY" not in told(each)
        assert "${oc.env:HELD}" in told(each)
    assert changes(json.loads(json.dumps(without_secrets(moved))), without_secrets(config)) == []


def test_a_choice_and_a_number_may_come_from_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTYPE", "float32")
    monkeypatch.setenv("STEPS", "7")
    config = read(tmp_path, "trainer: {steps: '${oc.env:STEPS}'}\n", "model.dtype=${oc.env:DTYPE}")
    assert config.trainer.steps == 7 and config.model.dtype == "float32"
    assert [each for each in violations(config, 1, data=False) if "dtype" in each] == []


@pytest.mark.parametrize("kind", WRONG)
def test_an_error_about_an_option_with_secrets_shows_none(kind: str, tmp_path: Path) -> None:
    try:
        found = "\n".join(violations(read(tmp_path, WRONG[kind]), 1))
    except ConfigError as error:
        found = str(error)
    assert "environment" in found or "rollout.addresses" in found or "remote_url" in found
    assert "CANARY" not in found


def test_an_override_with_a_secret_that_is_no_yaml_is_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, "", "environment.mcp=[{name: CANARY, name: CANARY}]")
    assert "environment.mcp" in str(refused.value) and "CANARY" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            GIVEN["a user of a server"][0],
            "environment.mcp: the url of x holds a user or a password",
        ),
        (GIVEN["a tool's address"][0], "environment.http: the url of x holds a user or a password"),
        (GIVEN["a judge's password"][0], "reward.judge_url holds a user or a password"),
        (GIVEN["a server's password"][0], "rollout.addresses has a user or a password"),
    ],
)
def test_credentials_in_an_address_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in "\n".join(violations(read(tmp_path, text), 1))


def test_options_that_hold_secrets_are_known_by_their_marks() -> None:
    assert all(
        map(
            holds_secrets,
            (
                "reward.remote_url",
                "environment.mcp",
                "environment.mcp.0.env.KEY",
                "environment.options",
            ),
        )
    )
    assert not any(map(holds_secrets, ("reward.judge_url", "data.train", "environment.tools", "x")))


def test_a_stored_config_is_read_with_the_variables_of_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree: dict[str, Any] = {"model": {"path": "${oc.env:HELD}/m"}}
    monkeypatch.delenv("HELD", raising=False)
    assert resolved(tree, "model.path") == "${oc.env:HELD}/m"
    monkeypatch.setenv("HELD", "/here")
    assert resolved(tree, "model.path") == "/here/m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/x?key=CANARY", "https://h/x?..."),
        ("reward.judge_url=['http://u:CANARY@h/v1?key=CANARY'] must be text.", None),
        ("a http://h/x?key=CAN'ARY&b=CANARY, and ws://h?CANARY.", None),
        ('[{"url": "http://h?a=CANARY"}]', '[{"url": "http://h?..."}]'),
        ("What is http://h?... for? Nothing.", "What is http://h?... for? Nothing."),
        ("no address, is it?", "no address, is it?"),
    ],
)
def test_no_text_shows_what_a_url_asks_for(text: str, shown: str | None) -> None:
    found = without_credentials(text)
    assert "CAN" not in found
    assert "ARY" not in found
    assert shown in (None, found)
    assert without_credentials(found) == found


def test_a_mistyped_address_is_told_without_its_key(tmp_path: Path) -> None:
    text = "reward: {judge: 1.0, judge_url: ['http://u:CANARY@h/v1?key=CANARY']}\n"
    with pytest.raises(ConfigError, match="must be text") as raised:
        read(tmp_path, text)
    assert "CANARY" not in str(raised.value)
