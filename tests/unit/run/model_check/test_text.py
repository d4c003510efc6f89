"""`rftmega check` of tokenizers and chat templates, each with one defect, and of good ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rftmega.run.model_check.findings import Finding
from rftmega.run.model_check.text import of_text
from tests.chat_formats import FORMATS, MORE, PLAIN, Format, folder

EVERY = {**FORMATS, **PLAIN, **MORE}
CHATML = PLAIN["chatml"]
REVERSED, SAME = "{% for m in messages | reverse %}", "{% for m in messages %}"
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def found(path: Path, rows: int | None = 300) -> list[Finding]:
    return of_text(path, rows)[0]


def of_state(findings: list[Finding], state: str) -> list[str]:
    return [f"{each.check}: {each.said}" for each in findings if each.state == state]


def with_template(path: Path, template: str) -> Path:
    folder(path, CHATML)
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize("name", EVERY)
def test_a_good_chat_format_has_no_problem(name: str, tmp_path: Path) -> None:
    form = EVERY[name]
    findings = found(folder(tmp_path, form))
    checks = {each.check for each in findings}
    left_out = ["system: The template silently leaves system messages out."]
    assert of_state(findings, "problem") == (left_out if name == "mistral" else [])
    assert {"tokenizer", "special tokens", "chat template", "turns", "stop tokens"} <= checks


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TURNS.replace(SAME, REVERSED) + OPEN, "turns: The template renders the turns in another order"),
        (TURNS.replace("messages %}", "messages[-1:] %}") + OPEN, "turns: The template leaves the first question of two"),
        (TURNS.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}") + OPEN, "leaves the response of two turns"),
        (TURNS.replace("messages %}", "messages if m.role != 'system' %}") + OPEN, "system: The template silently leaves"),
        (TURNS.replace("im_end", "im_stop") + OPEN, "stop tokens: The chat template ends a turn with <|im_stop|>, which"),
        ("{{ raise_exception('only on Sundays') }}", "chat template: It can't render one user message: only on Sundays."),
        ("{% for m in %}", "chat template: It can't render one user message: Expected an expression"),
        ("{{ messages | length }}", "chat template: It can't render one user message: the chat template renders nothing"),
        ("{% if add_generation_prompt %}Now: {% endif %}" + TURNS, "add_generation_prompt=true it also changes the text before"),
    ],
)  # fmt: skip
def test_a_template_with_a_defect_is_named_with_the_remedy(
    template: str, said: str, tmp_path: Path
) -> None:
    findings = found(with_template(tmp_path, template))
    problems = of_state(findings, "problem")
    assert any(said in each for each in problems), problems
    assert all(each.change for each in findings if each.state == "problem")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TURNS.replace("im_start", "im_begin") + OPEN, "It writes <|im_begin|>, which the tokenizer does not know"),
        (TURNS, "chat template: add_generation_prompt has no effect"),
        (TURNS.replace("{{ m.role }}", "{{ m.role }} {{ messages | length }}") + OPEN, "turns: A response does not follow"),
        (TURNS.replace("<|im_end|>", "") + OPEN, "stop tokens: The chat template writes no special token behind a response"),
        (TURNS.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}") + OPEN, "reasoning: The template drops"),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('none, please') }}{% endif %}" + TURNS + OPEN,
            "system: The template refuses a system message, so leave data.system_prompt out: none, please.",
        ),
    ],
)  # fmt: skip
def test_what_only_some_runs_must_know_of_a_template_is_a_note(
    template: str, said: str, tmp_path: Path
) -> None:
    findings = found(with_template(tmp_path, template))
    assert of_state(findings, "problem") == []
    assert any(said in each for each in of_state(findings, "note")), findings


def test_a_folder_without_a_template_skips_its_checks(tmp_path: Path) -> None:
    folder(tmp_path, CHATML)
    (tmp_path / "chat_template.jinja").unlink()
    findings = found(tmp_path)
    assert of_state(findings, "problem") == []
    assert [each.check for each in findings if each.state == "skipped"] == [
        "chat template",
        "turns",
    ]


def change(name: str, **fields: object) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        file = path / name
        before = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(before | fields))

    return changed


def without(pattern: str) -> Callable[[Path], None]:
    return lambda path: [each.unlink() for each in path.glob(pattern)] and None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change("generation_config.json", eos_token_id=5), "eos_token is <|im_end|> (260), and generation_config.json stops at"),
        (change("config.json", eos_token_id=7), "stop tokens: config.json stops at"),
        (change("config.json", eos_token_id=999), "stop tokens: config.json stops at 999, which is no token"),
        (change("generation_config.json", eos_token_id="end"), "tokenizer: "),
        (without("tokenizer.json"), "holds no tokenizer. Copy tokenizer.json"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "holds no tokenizer that transformers can read"),
    ],
)  # fmt: skip
def test_a_tokenizer_with_a_defect_is_named(
    damage: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    folder(tmp_path, CHATML)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    damage(tmp_path)
    assert any(said in each for each in of_state(found(tmp_path), "problem")), found(tmp_path)


def test_an_end_of_turn_that_stops_nothing_is_named_with_its_id(tmp_path: Path) -> None:
    """As of a base model: its eos is another token than the template's."""
    form = Format(CHATML.template, CHATML.special, ("<|endoftext|>",))
    folder(tmp_path, form)
    (problem,) = [each for each in found(tmp_path) if each.state == "problem"]
    assert "ends a turn with <|im_end|> (260), which is not among the stop tokens" in problem.said
    assert problem.change == "Add 260 to eos_token_id in generation_config.json."


def test_tokens_without_a_row_in_the_embedding_are_counted(tmp_path: Path) -> None:
    folder(tmp_path, CHATML)
    (problem,) = [each for each in found(tmp_path, 261) if each.state == "problem"]
    assert problem.said == (
        "It has 262 tokens and the embedding 261 rows: ids from 261 on (<|endoftext|>) have none."
    )


def test_bos_twice_is_a_problem_and_none_where_text_has_one_is_a_note(tmp_path: Path) -> None:
    from tests.unit.data.test_tokenizer import tokenizer

    tokenizer(tmp_path / "none", "{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    tokenizer(tmp_path / "two", "<b><b>{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    tokenizer(tmp_path / "one", "<b>{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    said = {name: found(tmp_path / name, 40) for name in ("none", "one", "two")}
    assert any(
        "chat begins with <b> (2) twice" in each for each in of_state(said["two"], "problem")
    )
    assert any("writes no bos_token" in each for each in of_state(said["none"], "note"))
    assert not any(
        "bos" in each or "<b> (2) twice" in each for each in of_state(said["one"], "note")
    )
