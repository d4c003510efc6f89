"""Runs with teachers, from the command line."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Run, metrics_of
from tests.e2e.test_loop import assert_memory_as_predicted
from tests.tiny_models import save_tiny
from tests.warm_command import run_warm

PLAIN = ("algorithm.kl.coef=0", "algorithm.entropy_coef=0", "trainer.steps=2", "data.eval=")


@pytest.fixture(scope="module")
def teacher(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    config = json.loads((arithmetic / "model" / "config.json").read_text())
    sizes = {"vocab_size": config["vocab_size"], "eos_token_id": config["eos_token_id"]}
    save_tiny(folder, "llama", seed=3, hidden_size=96, num_hidden_layers=2, **sizes)
    for file in (arithmetic / "model").glob("*token*"):
        shutil.copy(file, folder)
    return folder


def with_domains(arithmetic: Path, folder: Path) -> Path:
    records = [json.loads(line) for line in (arithmetic / "train.jsonl").read_text().splitlines()]
    file = folder / "train.jsonl"
    with file.open("w") as opened:
        for number, record in enumerate(records):
            more = {"domain": "ab"[number % 2], "hint": record["prompt"] + record["label"]}
            opened.write(json.dumps(record | more) + "\n")
    return file


SAME = dict.fromkeys(("megatron", "fsdp"), "parallel: {tensor: 2}")
OTHER = {
    "megatron": "backend: fsdp, parallel: {tensor: 2}",
    "fsdp": "backend: megatron, parallel: {pipeline: 2}",
}


@pytest.mark.parametrize("of_expert", [SAME, pytest.param(OTHER, marks=pytest.mark.ranks)])
def test_both_backends_learn_the_same_from_several_teachers(
    of_expert: dict[str, str], arithmetic: Path, teacher: Path, train: Run, tmp_path: Path
) -> None:
    data = with_domains(arithmetic, tmp_path)
    expert = f"name: expert, path: {teacher}, when: {{domain: a}}"
    teachers = [
        "{name: hinted, path: self, prompt: hint, vocabulary: top_k, top_k: 4, divergence: jsd}",
        f"{{name: scorer, path: {teacher}, vocabulary: sampled, signal: advantage, weight: 0.1}}",
    ]
    found = {}
    for backend, layout in (("megatron", "parallel.tensor=2"), ("fsdp", "parallel.tensor=1")):
        output = tmp_path / backend
        done = train(
            arithmetic / "run.yaml",
            *PLAIN,
            f"data.train={data}",
            f"algorithm.teachers=[{{{expert}, {of_expert[backend]}}}, {', '.join(teachers)}]",
            f"backend={backend}",
            layout,
            f"trainer.output={output}",
            *("--processes", "2"),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        computed_by = of_expert[backend].partition("backend: ")[2].partition(",")[0] or backend
        assert f"expert: {teacher}, backend {computed_by}, " in done.stdout
        found[backend] = metrics_of(output)[1:]
    first, other = found["megatron"], found["fsdp"]
    names = ("expert_divergence", "hinted_divergence", "scorer_log_ratio", "loss", "grad_norm")
    for step in (*first, *other):
        assert_memory_as_predicted(step)
    for one, two in zip(first, other, strict=True):
        for name in names:
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-6), name
        assert 0 < one["expert_rows"] < 1
        assert one["hinted_rows"] == one["scorer_rows"] == 1
    assert first[0]["expert_divergence"] > 0
    assert first[0]["hinted_divergence"] > 0


def test_a_teacher_stands_beside_a_critic_and_examples(
    arithmetic: Path, teacher: Path, train: Run, tmp_path: Path
) -> None:
    examples = tmp_path / "ptx.jsonl"
    examples.write_text('{"prompt": "1+2=", "response": "3"}\n' * 8)
    done = train(
        arithmetic / "run.yaml",
        *PLAIN,
        f"algorithm.teachers=[{{path: {teacher}}}]",
        *("algorithm.advantage=gae", f"data.ptx={examples}", "algorithm.ptx_coef=0.5"),
        f"trainer.output={tmp_path / 'out'}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for metrics in metrics_of(tmp_path / "out")[1:]:
        assert metrics["teacher_divergence"] > 0
        assert metrics["ptx_cross_entropy"] > 0
        assert metrics["critic_loss"] > 0


@pytest.mark.ranks
def test_the_policy_with_a_hint_is_probed_before_it_teaches(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    found = {}
    for backend, layout in (("megatron", "parallel.tensor=2"), ("fsdp", "parallel.tensor=1")):
        output = tmp_path / backend
        done = train(
            arithmetic / "run.yaml",
            *PLAIN,
            f"data.train={with_domains(arithmetic, tmp_path)}",
            "algorithm.teachers=[{path: self, prompt: hint, vocabulary: top_k, top_k: 4, probes: 2}]",
            *(f"backend={backend}", layout, f"trainer.output={output}", "--processes", "2"),
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found[backend] = metrics_of(output)[1:]
    for one, two in zip(found["megatron"], found["fsdp"], strict=True):
        for name in ("teacher_probed_reward", "teacher_rows", "teacher_divergence", "loss"):
            assert one[name] == pytest.approx(two[name], rel=1e-3, abs=1e-6), name
    assert found["megatron"][0]["teacher_rows"] < 1


@pytest.mark.ranks
def test_completions_of_a_file_are_taught_beside_sampled_ones_also_after_a_resume(
    arithmetic: Path, teacher: Path, train: Run, tmp_path: Path
) -> None:
    written = tmp_path / "written.jsonl"
    sums = [
        f'{{"prompt": "{a}+{b}=", "response": "{a + b}"}}\n' for a in range(5) for b in range(4)
    ]
    written.write_text("".join(sums))
    given = [
        *(arithmetic / "run.yaml", *PLAIN[:2], "data.eval=", "checkpoint.every=1"),
        f"algorithm.teachers=[{{path: {teacher}, divergence: jsd}}]",
        *("algorithm.on_policy_share=0.75", f"data.ptx={written}", "algorithm.policy_loss=none"),
        "algorithm.updates_per_epoch=2",
    ]
    runs = (
        ("whole", "trainer.steps=3"),
        ("parts", "trainer.steps=2"),
        ("parts", "trainer.steps=3", "checkpoint.resume=auto"),
        ("fsdp", "trainer.steps=3", "backend=fsdp", "parallel.tensor=1", "parallel.pipeline=1"),
    )
    for name, *options in runs:
        done = train(*given, f"trainer.output={tmp_path / name}", *options)
        assert done.returncode == 0, done.stderr[-2000:]
    whole, parts, fsdp = (metrics_of(tmp_path / name)[-1] for name in ("whole", "parts", "fsdp"))
    assert whole["step"] == parts["step"] == fsdp["step"] == 3
    assert whole["given_completions"] > 0
    for name in ("loss", "grad_norm", "teacher_divergence"):
        assert parts[name] == whole[name] != 0, name
        assert fsdp[name] == pytest.approx(whole[name], rel=1e-3), name


def test_a_teacher_with_another_tokenizer_is_refused_with_the_token(
    arithmetic: Path, teacher: Path, train: Run, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = train(arithmetic / "run.yaml", *PLAIN, f"algorithm.teachers=[{{path: {other}}}]")
    assert done.returncode == 2
    assert f"path={other}: its tokenizer has another vocabulary: '1' is id" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
def test_right_completions_of_an_evaluation_are_data_for_fine_tuning(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    kept, scores = tmp_path / "sft.jsonl", tmp_path / "scores.jsonl"
    given = [
        *(arithmetic / "model", "--config", arithmetic / "run.yaml", "--keep", kept),
        *("--keep-scores", scores, "--output", tmp_path / "evaluation", "--samples", 8),
        *("--rewards", f"{tmp_path / 'rewards.py'}:even", "trainer.eval_temperature=1.0"),
    ]
    (tmp_path / "rewards.py").write_text(
        "def even(prompts, completions, **columns):\n"
        "    return [float(len(each) % 2 == 0) for each in completions]\n"
    )
    done = run_warm(
        ROOT / "tools/evaluate.py", list(map(str, given)), folder=ROOT, timeout=240, path=ROOT
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    assert records
    assert all(len(each["response"]) % 2 == 0 for each in records)
    means = [json.loads(line)["mean_score"] for line in scores.read_text().splitlines()]
    assert len(means) == 8
    assert len(records) < 64
    done = train(
        arithmetic / "given.yaml",
        *("algorithm.task=sft", f"data.train={kept}", "data.eval=", "trainer.steps=1"),
        *("trainer.prompts_per_step=2", "data.too_long=drop"),
        f"trainer.output={tmp_path / 'sft'}",
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.ranks
def test_teachers_of_replayed_completions_go_on_after_a_resume(
    arithmetic: Path, teacher: Path, train: Run, tmp_path: Path
) -> None:
    teachers = [
        f"{{name: expert, path: {teacher}, weight: 0.1}}",
        "{name: hinted, path: self, prompt: hint, vocabulary: top_k, top_k: 4}",
        f"{{name: scorer, path: {teacher}, vocabulary: sampled, signal: advantage, weight: 0.1}}",
    ]
    given = [
        *(arithmetic / "run.yaml", *PLAIN[:2], "data.eval="),
        *(f"data.train={with_domains(arithmetic, tmp_path)}", "parallel.tensor=1"),
        *(f"algorithm.teachers=[{', '.join(teachers)}]", "checkpoint.every=1"),
        *("algorithm.replay.max_age=1", "algorithm.importance_sampling=token"),
    ]
    for name, *options in (
        ("whole", "trainer.steps=3"),
        ("parts", "trainer.steps=2"),
        ("parts", "trainer.steps=3", "checkpoint.resume=auto"),
    ):
        done = train(*given, f"trainer.output={tmp_path / name}", *options)
        assert done.returncode == 0, done.stderr[-2000:]
    whole, parts = (metrics_of(tmp_path / name)[-1] for name in ("whole", "parts"))
    assert whole["step"] == parts["step"] == 3
    assert whole["replay_rows"] > 0
    for name in ("loss", "grad_norm", "expert_divergence", "hinted_divergence"):
        assert parts[name] == whole[name] != 0, name
