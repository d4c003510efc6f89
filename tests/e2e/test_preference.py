"""Preference optimization by the command line: it learns, resumes, and writes a model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rftmega.run.placement.reference_log_probs import FILE
from tests.e2e.conftest import Run
from tests.e2e.test_loop import trained_alike

PREFER = ("algorithm.task=preference", "optimizer.learning_rate=3e-3", "algorithm.updates_per_epoch=1")  # fmt: skip


def of(arithmetic: Path, kind: str, folder: Path) -> list[str]:
    """Sums and the numbers next to them, as pairs or single; few, since each is scored first."""
    pairs = [
        json.loads(line) for line in (arithmetic / "pairs.jsonl").read_text().splitlines()[:16]
    ]
    if kind == "single":
        pairs = [
            {"prompt": pair["prompt"], "response": pair[side], "label": side == "chosen"}
            for pair in pairs
            for side in ("chosen", "rejected")
        ]
    for name, records in (("train", pairs[:12]), ("eval", pairs[12:])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = [f"data.{name}={folder / name}.jsonl" for name in ("train", "eval")]
    label = ["data.desirable_key=label"] if kind == "single" else []
    return [*PREFER, *data, *label]


def steps_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@torch.no_grad()
def margin_of(arithmetic: Path, policy: Path, records: Path) -> float:
    """By how much the margin of DPO's reward has risen, as transformers computes it (beta is 0.1)."""
    start, end = (
        AutoModelForCausalLM.from_pretrained(each) for each in (arithmetic / "model", policy)
    )
    encode, margins = AutoTokenizer.from_pretrained(arithmetic / "model"), []
    for record in map(json.loads, records.read_text().splitlines()):
        sums = []
        prompt = encode.encode(record["prompt"])
        for side in ("chosen", "rejected"):
            ids = [*prompt, *encode.encode(record[side]), encode.eos_token_id]
            for model in (end, start):
                logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                sums.append(sum(float(logp[at - 1, ids[at]]) for at in range(len(prompt), len(ids))))  # fmt: skip
        margins.append(0.1 * (sums[0] - sums[1] - sums[2] + sums[3]))
    return sum(margins) / len(margins)


@pytest.mark.ranks
def test_a_resumed_run_of_dpo_reads_the_reference_of_the_first_and_has_the_margin_of_transformers(
    arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    given = [*of(arithmetic, "pairs", tmp_path), "checkpoint.every=1", f"trainer.output={tmp_path}"]
    done = train(arithmetic / "given.yaml", *given, "trainer.steps=2", "trainer.export=false")
    assert done.returncode == 0, done.stderr
    assert "reference log-probs: 32 of 32 responses" in done.stdout + done.stderr
    done = train(arithmetic / "given.yaml", *given, "trainer.steps=3")
    assert done.returncode == 0, done.stderr
    assert "reference log-probs" not in done.stdout + done.stderr
    steps = steps_of(tmp_path)
    assert steps[0]["eval_margin"] == pytest.approx(0.0, abs=1e-5)
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    margin = margin_of(arithmetic, tmp_path / "policy", tmp_path / "eval.jsonl")
    assert steps[-1]["eval_margin"] == pytest.approx(margin, rel=1e-3, abs=1e-5)
    assert abs(margin) > 1e-3, "nothing to compare"


@pytest.mark.ranks
@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "kto", "single", "orpo"])
def test_a_preference_loss_is_trained_alike_under_two_layouts(
    loss: str, arithmetic: Path, tmp_path: Path
) -> None:
    kind = "single" if loss == "single" else "pairs"
    name = "kto" if loss == "single" else loss
    options = [*of(arithmetic, kind, tmp_path), f"algorithm.preference.type={name}"]
    seen = trained_alike(arithmetic / "given.yaml", options, "eval_loss", tmp_path)
    assert "eval_accuracy" in seen["alone"][-1]
    for folder in ("alone", "TP2 x PP2"):
        assert (tmp_path / folder / FILE).is_file() == (name not in ("simpo", "orpo"))


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_adapters_learn_preferences_and_go_on_from_a_folder(
    backend: str, arithmetic: Path, train: Run, tmp_path: Path
) -> None:
    """The second run begins with the first one's adapters, and is compared with the base model."""
    data = of(arithmetic, "pairs", tmp_path)
    given: list[Any] = [arithmetic / "given.yaml", *data, "model.lora.rank=4", f"backend={backend}"]
    first, second = tmp_path / "first", tmp_path / "second"
    done = train(*given, f"trainer.output={first}", "trainer.steps=4", "--processes", 2)
    assert done.returncode == 0, done.stderr
    second.mkdir()
    shutil.copy(first / FILE, second / FILE)
    path = f"model.lora.path={first / 'policy_adapter'}"
    done = train(*given, f"trainer.output={second}", path, "trainer.steps=1", "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert "reference log-probs" not in done.stdout + done.stderr, "it is the same reference"
    end, start = steps_of(first)[-1], steps_of(second)[0]
    assert start["eval_margin"] == pytest.approx(end["eval_margin"], rel=1e-4)
    assert abs(end["eval_margin"]) > 1e-4
    assert load_file(first / "policy_adapter" / "adapter_model.safetensors")
