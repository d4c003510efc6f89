import json
from pathlib import Path

import pytest

from rftmega.config import RunConfig, load, without_secrets
from rftmega.config.validation import violations
from rftmega.core.errors import ConfigError
from rftmega.run.evaluation.options import (
    candidates_of,
    is_run,
    loaded,
    of_run,
    overrides_of,
    refuse_processes,
    stored_options,
    without_unknown,
)


def hf(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_run_stands_for_all_its_exports_in_order(tmp_path: Path) -> None:
    for name in ("checkpoints/step_000010/hf", "checkpoints/step_000002/hf", "policy"):
        hf(tmp_path / name)
    (tmp_path / "checkpoints/step_000012").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 12}\n')
    assert is_run(str(tmp_path))
    assert [(each.label, each.step) for each in candidates_of(str(tmp_path))] == [
        ("step_000002", 2),
        ("step_000010", 10),
        ("policy", 12),
    ]


def test_a_folder_and_a_name_of_the_hub_stand_for_themselves(tmp_path: Path) -> None:
    model = str(hf(tmp_path / "model"))
    assert candidates_of(model) == [("model", model, None)]
    assert candidates_of("org/name") == [("name", "org/name", None)]
    assert not is_run(model)


def test_a_run_without_an_export_says_how_to_convert_its_checkpoint(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints/step_000004"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text('{"kind": "training", "step": 4}')
    (saved / "rank_0.json").write_text("{}")
    (saved.parent / "latest").write_text("step_000004")
    with pytest.raises(ConfigError, match=f"rftmega convert to-hf {saved} OUT"):
        candidates_of(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no model"):
        candidates_of(str(tmp_path / "empty"))


def test_stored_options_are_those_of_the_run_without_its_secrets(tmp_path: Path) -> None:
    config = load(
        {"model": {"path": "m"}, "data": {"train": "d"}}, ["reward.remote_url=http://hidden"]
    )
    (tmp_path / "run.json").write_text(json.dumps(without_secrets(config)))
    stored = stored_options(tmp_path)
    assert "hidden" not in str(stored)
    tree = {"headers": {"key": "(not stored)", "kind": "a"}}
    assert without_unknown(tree) == {"headers": {"kind": "a"}}
    assert load(stored).rollout == config.rollout
    assert load(stored).reward.remote_url == RunConfig().reward.remote_url
    with pytest.raises(ConfigError, match="--config FILE"):
        stored_options(tmp_path / "elsewhere")


def test_the_first_function_judges_a_run_without_labels_that_evaluated_nothing(
    tmp_path: Path,
) -> None:
    body = "(response, label):\n    return 1.0\n"
    (tmp_path / "r.py").write_text(f"def short{body}\n\ndef right{body}")
    function = f"{tmp_path}/r.py:short"
    config = load(
        {"model": {"path": "m"}, "data": {"train": "d"}}, [f"reward.functions=['{function}']"]
    )
    assert config.data.label_key == ""
    (tmp_path / "run.json").write_text(json.dumps(without_secrets(config)))
    stored = stored_options(tmp_path)
    found = loaded(stored, "m", "out", ["data.eval=e"])
    assert found.trainer.eval_accuracy == "short"
    assert not any("label_key" in each for each in violations(found, 1, data=False))
    chosen = [f"reward.functions=['{tmp_path}/r.py:right']"]
    assert loaded(stored, "m", "out", ["data.eval=e", *chosen]).trainer.eval_accuracy == "right"
    other = loaded(stored, "m", "out", ["data.eval=e", "trainer.eval_accuracy=math"])
    assert other.trainer.eval_accuracy == "math"


def test_data_rewards_and_numbers_become_options() -> None:
    given = {"model": {"path": "m"}, "data": {"eval": "of the run"}}
    asked = overrides_of(["easy=a.jsonl", "hard=it's.jsonl"], ["math", "format.py:f"], 4, [1, 4])
    config = load(given, asked)
    assert config.data.held_out == {"easy": "a.jsonl", "hard": "it's.jsonl"}
    assert (config.reward.math, config.reward.functions) == (1.0, ["format.py:f"])
    assert config.trainer.eval_accuracy == "math"
    assert (config.trainer.eval_samples, config.trainer.eval_pass_at) == (4, [1, 4])
    alone = load(
        {"model": {"path": "m"}, "data": {"evals": {"a": "b"}}},
        overrides_of(["a b.jsonl"], [], None, []),
    )
    assert alone.data.held_out == {"": "a b.jsonl"}
    with pytest.raises(ConfigError, match="give each of several files a name"):
        overrides_of(["a.jsonl", "b.jsonl"], [], None, [])


def test_fewer_samples_drop_the_k_of_the_run() -> None:
    given = {"model": {"path": "m"}, "trainer": {"eval_samples": 8, "eval_pass_at": [8]}}
    assert load(given, overrides_of([], [], 2, [])).trainer.eval_pass_at == []


def test_an_evaluation_keeps_what_decides_on_completions_and_nothing_else() -> None:
    config = load(
        {"model": {"path": "m", "dtype": "float32"}, "data": {"train": "t", "eval": "e"}},
        [
            *("parallel.tensor=4", "model.lora.rank=8", "algorithm.ema_beta=0.9", "data.ptx=p"),
            *(
                "rollout.samples_per_prompt=1",
                "rollout.max_response_tokens=7",
                "data.label_key=gold",
            ),
            *("trainer.eval_temperature=0.5", "trainer.eval_samples=3", "trainer.eval_every=2"),
            *(
                "trainer.push_to_hub=a/b",
                "reward.exact_match=0.5",
                "trainer.seed=5",
                "faults.max_restarts=3",
            ),
        ],
    )
    found = of_run(config, "out")
    assert found.reward == config.reward
    assert found.environment == config.environment
    assert found.rollout.max_response_tokens == 7
    assert found.data.label_key == "gold"
    assert found.data.held_out == {"": "e"}
    assert (found.trainer.eval_temperature, found.trainer.eval_samples) == (0.5, 3)
    assert (found.model.dtype, found.trainer.seed) == ("float32", 5)
    assert not found.model.lora.rank
    assert not found.data.ptx
    assert violations(found, 1, data=False) == []


def test_an_unknown_option_has_a_hint_and_data_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.eval_temperature"):
        loaded({}, "m", "out", ["trainer.eval_temprature=1"])
    with pytest.raises(ConfigError, match="--data FILE"):
        loaded({}, "m", "out", [])


def test_several_processes_are_refused_since_each_would_evaluate_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_processes()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="one process, and 4 were launched"):
        refuse_processes()
