"""`rftmega init`: a first run of models that no machine here could hold, and of one that any could."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftmega import config as configuration
from rftmega.config.validation import violations
from rftmega.examples.arithmetic import warm_start
from rftmega.run import preflight
from rftmega.run.command_line import run
from rftmega.run.planning.fit import Machine, misfits, push_bound
from rftmega.run.planning.memory import Budget
from rftmega.run.planning.models import POLICY, models_of
from rftmega.run.planning.times import Speeds
from rftmega.tools import init, plan
from tests.tiny_models import save_tiny
from tests.unit.model_providers.test_published import COMMON, PUBLISHED

EXAMPLES = Path(__file__).parents[3] / "examples/planning"
SMOL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "rope_theta": 100000, "max_position_embeddings": 8192,
}  # fmt: skip
IN_EXAMPLES = {
    "Qwen3-8B": "qwen3-8b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "DeepSeek-V3": "deepseek-v3",
    "Llama-3-70B": "llama-3-70b",
}
SPEEDS = Speeds(989e12, 3350e9, 450e9, 50e9, 50e9, 8)
CASES = [("Qwen3-30B-A3B", 16), ("SmolLM2-135M", 1)]
MORE_CASES = [
    ("Qwen3-8B", 8),
    ("Qwen3-30B-A3B", 32),
    ("Qwen3-30B-A3B", 64),
    ("GLM-4.5-Air", 64),
    ("Qwen3-235B-A22B", 128),
    ("DeepSeek-V3", 256),
    ("DeepSeek-V3", 512),
    ("Llama-3-70B", 32),
]


def folder_of(name: str, above: Path) -> Path:
    if name in IN_EXAMPLES:
        return EXAMPLES / IN_EXAMPLES[name]
    folder = above / name
    folder.mkdir()
    fields = SMOL if name.startswith("SmolLM2") else PUBLISHED[name][1]
    (folder / "config.json").write_text(json.dumps(COMMON | fields))
    return folder


@pytest.mark.parametrize(
    ("name", "devices"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.ranks) for case in MORE_CASES)],
)
def test_a_first_run_of_a_published_model_fits_as_it_is_written(
    name: str, devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, size = tmp_path / "run.yaml", ["--gpus", str(devices), "--gpu-memory", "80"]
    assert init.main([str(folder_of(name, tmp_path)), *size, "--output", str(target)]) == 0
    assert "a step takes at least" in capsys.readouterr().out
    config = configuration.load(target)
    models, machine = models_of(config), Machine(devices, Budget(80e9, 4e9), SPEEDS)
    assert misfits(models, config, machine, push_bound(models[POLICY], config)) == []
    if devices <= 64:  # a plan of more simulates a push for a quarter of a minute
        assert plan.main([str(target), *size, "--no-search"]) == 0
        assert "All of it fits." in capsys.readouterr().out
    assert violations(config, devices, data=False) == []
    assert f"processes   {devices} = " in preflight.dry_run(config, devices)
    lines = target.read_text().splitlines()
    written = [
        line for line in lines if line.startswith("  ") and not line.lstrip().startswith("#")
    ]
    told = [after for before, after in zip(lines, lines[1:], strict=False) if "  # " in before]
    assert all(line in told or line.startswith("  # ") for line in written), "each with its meaning"


@pytest.mark.parametrize(
    ("folder", "devices", "tokens"),
    [
        ("qwen3-30b-a3b-256k", 256, 262_144),
        pytest.param("llama-3.1-8b-128k", 64, 131_072, marks=pytest.mark.ranks),
    ],
)
def test_a_first_run_with_a_long_context_fits(
    folder: str, devices: int, tokens: int, tmp_path: Path
) -> None:
    target, size = tmp_path / "run.yaml", ["--gpus", str(devices), "--gpu-memory", "80"]
    lengths = ["--prompt-tokens", "1024", "--response-tokens", str(tokens - 1024)]
    assert init.main([str(EXAMPLES / folder), *size, *lengths, "--output", str(target)]) == 0
    config = configuration.load(target)
    models, machine = models_of(config), Machine(devices, Budget(80e9, 4e9), SPEEDS)
    assert misfits(models, config, machine, push_bound(models[POLICY], config)) == []
    assert violations(config, devices, data=False) == []


def test_what_is_written_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run of a model that is there, with its weights and its tokenizer."""
    model, target = tmp_path / "model", tmp_path / "run.yaml"
    save_tiny(model, "qwen3", vocab_size=16)
    warm_start.tokenizer().save_pretrained(model)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 4)
    given = [str(model), "--gpus", "1", "--gpu-memory", "24", "--output", str(target)]
    lengths = ["--prompt-tokens", "8", "--response-tokens", "8"]
    assert init.main([*given, *lengths, "--data", str(tmp_path / "tasks.jsonl")]) == 0
    more = ["rollout.engine=transformers", "rollout.memory_fraction=0.5"]
    command = ["rftmega", str(target), *more, "--processes", "1", "--dry-run"]
    monkeypatch.setattr("sys.argv", command)
    capsys.readouterr()
    code = run("")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "looked at   the first 8 records" in said.out


def test_options_given_are_written_and_data_of_ones_own_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, target = tmp_path / "tasks.jsonl", tmp_path / "own.yaml"
    tasks.write_text('{"prompt": "What is 2 + 2?", "label": "4"}\n')
    folder = folder_of("SmolLM2-135M", tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    given = [str(folder), "--gpus", "1", "--gpu-memory", "24", "--data", str(tasks)]
    more = ["--response-tokens", "512", "--prompt-tokens", "256", "--output", str(target)]
    assert init.main([*given, *more]) == 0
    config = configuration.load(target)
    assert config.data.train == str(tasks)
    assert config.data.chat_template
    assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (256, 512)
    assert config.reward.weights()["math"] == 1
    assert config.reward.weights()["exact_match"] == 0
    assert not target.with_name("own_tasks.jsonl").exists()
    capsys.readouterr()
    assert init.main([*given, *more]) == 2
    assert "is there already" in capsys.readouterr().err


def test_without_data_sums_are_written_whose_labels_are_right(tmp_path: Path) -> None:
    target = tmp_path / "run.yaml"
    folder = folder_of("SmolLM2-135M", tmp_path)
    given = [str(folder), "--gpus", "1", "--gpu-memory", "24", "--output", str(target)]
    assert init.main(given) == 0
    train = yaml.safe_load(target.read_text())["data"]["train"]
    records = [json.loads(line) for line in Path(train).read_text().splitlines()]
    assert len(records) == init.TASKS
    for record in records:
        question = record["prompt"].removeprefix("What is ").partition("?")[0]
        first, second = map(int, question.split(" + "))
        assert record["label"] == str(first + second)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (
            ["--gpus", "1", "--gpu-memory", "24", "--response-tokens", "16384"],
            "knows 8192 positions",
        ),
        (["--gpus", "1", "--gpu-memory", "24", "--response-tokens", "0"], "at least 1"),
        (["--gpus", "1", "--gpu-memory", "24", "--data", "nowhere.jsonl"], "is not there"),
        (["--gpus", "1", "--gpu-memory", "4.5"], "No layout of"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    more: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "run.yaml"
    folder = folder_of("SmolLM2-135M", tmp_path)
    assert init.main([str(folder), *more, "--output", str(target)]) == 2
    assert complaint in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["SmolLM2-135M"]


def test_a_model_that_is_nowhere_is_refused_without_asking_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "nowhere"), "--gpus", "8", "--gpu-memory", "80"]
    assert init.main([*given, "--output", str(tmp_path / "run.yaml")]) == 2
    assert "is no folder with a config.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
