"""The form in which a chat template reads messages is found by what it renders."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat_formats import FORMATS, IM, PLAIN, Format, template, tokenizer
from tests.unit.data.test_parts_trained import CALLS, COMPLETION, FORMS, TOLD, USER, call


@pytest.mark.parametrize("name", FORMS)
def test_calls_of_programs_reach_a_template_in_the_form_that_it_reads(
    name: str, tmp_path: Path
) -> None:
    """Programs send arguments as JSON text, rollouts have them as dictionaries."""
    ours = tokenizer(tmp_path, FORMS[name])
    talk = [USER, CALLS, TOLD, COMPLETION]
    in_text = [USER, {**CALLS, "tool_calls": call(json.dumps({"a": 2}))}, TOLD, COMPLETION]
    text = ours.template.text(talk, open_=False)
    assert ours.template.text(in_text, open_=False) == text
    given = json.dumps({"a": 2}) if name == "joins text" else {"a": 2}
    as_it_reads = [USER, {**CALLS, "tool_calls": call(given)}, TOLD, COMPLETION]
    assert text == ours.inner.apply_chat_template(as_it_reads, tokenize=False)
    assert talk[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}


@pytest.mark.parametrize("arguments", ["{", "words", "", None, 7])
def test_arguments_that_are_no_json_go_to_the_template_as_they_are(
    arguments: Any, tmp_path: Path
) -> None:
    ours = tokenizer(tmp_path, FORMATS["hermes"])
    talk = [USER, {**CALLS, "tool_calls": call(arguments)}]
    assert ours.template.forms.adapted(talk) == talk


def test_what_a_template_shows_is_what_it_shows_and_not_its_source(tmp_path: Path) -> None:
    named = "{# reasoning_content #}" + template("chatml")
    ours = tokenizer(tmp_path, Format(named, IM, ("<|im_end|>",)))
    assert ours.template.forms.reasoning_key == ""
    shown = tokenizer(tmp_path / "qwen3", FORMATS["qwen3"]).template.forms
    assert (shown.reasoning_key, shown.text, shown.arguments_as_text) == (
        "reasoning_content",
        True,
        False,
    )


def test_a_template_that_refuses_a_word_of_the_user_is_asked_all_the_same(tmp_path: Path) -> None:
    strict = "{% if messages|length < 2 %}{{ raise_exception('too few') }}{% endif %}"
    ours = tokenizer(tmp_path, Format(strict + template("chatml"), IM, ("<|im_end|>",)))
    text = ours.template.text([USER, COMPLETION, USER], open_=True)
    assert text == tokenizer(tmp_path / "plain", PLAIN["chatml"]).template.text(
        [USER, COMPLETION, USER], open_=True
    )
