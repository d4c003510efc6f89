"""`rftmega check` as a user starts it: tables, exit codes, copies of few layers."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.chat_formats import FORMATS, folder
from tests.e2e.conftest import ROOT
from tests.tiny_models import save_tiny
from tests.warm_command import run_warm

# a hybrid with experts, dense layers before experts, windows, Megatron's packed tensors
MORE = ("deepseek-v3", "gemma3", "gpt-oss", "granite", "minimax-m2", "phi4-mini", "qwen3.5-moe")


def checked(*arguments: object) -> subprocess.CompletedProcess[str]:
    program, given = ROOT / "tools/check.py", list(map(str, arguments))
    return run_warm(program, given, folder=ROOT, timeout=240, path=ROOT)


def save(path: Path, variant: str) -> Path:
    """A model with the tokenizer of Qwen3 and its stop tokens."""
    folder(path, FORMATS["qwen3"])
    (path / "config.json").unlink()
    ends = json.loads((path / "generation_config.json").read_text())
    save_tiny(path, variant, vocab_size=300, **ends)
    (path / "generation_config.json").write_text(json.dumps(ends))
    return path


def checks_in(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())["checks"]
    return found


@pytest.mark.parametrize(
    ("variant", "layers"),
    [("qwen3-next-moe", 3)]
    + [
        pytest.param(variant, layers, marks=pytest.mark.ranks)
        for variant in MORE
        for layers in (2, 4)
    ],
)
def test_a_good_folder_has_no_problem(variant: str, layers: int, tmp_path: Path) -> None:
    model = save(tmp_path / "model", variant)
    done = checked(model, "--layers", layers, "--tokens", 4, "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("no problem\n")
    states = {each["check"]: each["state"] for each in checks_in(tmp_path / "found.json")}
    for name in ("log-probs", "packing", "export"):
        for backend in ("megatron", "fsdp"):
            assert states[f"{name}, {backend}"] == "ok", done.stdout
    assert states["logits"] == "ok"
    assert json.loads((tmp_path / "found.json").read_text())["layers"] == layers
    assert "Traceback" not in done.stderr


def test_a_problem_is_named_with_its_remedy_and_the_exit_code_says_it(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "qwen3")
    held = load_file(model / "model.safetensors")
    del held["model.layers.2.self_attn.q_proj.weight"]
    save_file(held, model / "model.safetensors")
    done = checked(model, "--backend", "megatron")
    assert done.returncode == 1
    assert "'model.layers.2.self_attn.q_proj.weight' first" in " ".join(done.stdout.split())
    assert "-> Download the folder again" in done.stdout
    assert "1 problem(s) in" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("given", ["no/such/folder/here", "/etc/passwd", "/tmp"])
def test_what_is_no_model_is_an_error_of_one_line(given: str) -> None:
    done = checked(given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
