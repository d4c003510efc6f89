"""`rftmega check` of weight files, each with one defect."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rftmega.run.model_check import weights
from rftmega.run.model_check.findings import Finding, table
from tests.tiny_models import save_tiny

BOTH = ("megatron", "fsdp")
NAME, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("good"), "llama")


@pytest.fixture
def copied(good: Path, tmp_path: Path) -> Path:
    for name in ("config.json", NAME):
        (tmp_path / name).write_bytes((good / name).read_bytes())
    return tmp_path


def found(folder: Path, backends: tuple[str, ...] = BOTH) -> list[Finding]:
    read = weights.read(folder, backends)
    return [*weights.of_config(folder, read, []), *weights.of_files(folder, read)]


def fields(folder: Path, **changed: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


def tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    held = load_file(folder / NAME)
    change(held)
    save_file(held, folder / NAME)


def indexed(folder: Path, **places: str) -> None:
    held = dict.fromkeys(load_file(folder / NAME), NAME)
    (folder / INDEX).write_text(json.dumps({"weight_map": held | places}))


def cut(size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / NAME, size)


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (cut(60_000), "model.safetensors is cut off: it has 60,000 of its"),
    "cut off in its header": (cut(100), "cut off: it has 100 bytes, and not even its header is whole"),
    "empty": (cut(0), "cut off: it has 0 bytes"),
    "no file": (lambda folder: (folder / NAME).unlink(), "holds no *.safetensors weights"),
    "a tensor missing": (
        lambda folder: tensors(folder, lambda held: held.pop(UP)),
        f"lacks 1 tensor(s) that config.json leads to, '{UP}' first",
    ),
    "a tensor left over": (
        lambda folder: tensors(folder, lambda held: held.update({"model.extra.weight": torch.rand(3)})),
        "holds 1 tensor(s) that its config.json does not lead to, 'model.extra.weight' first",
    ),
    "another shape": (
        lambda folder: fields(folder, intermediate_size=128),
        "model.layers.0.mlp.gate_proj.weight has shape [96, 64], and config.json leads to [128, 64]",
    ),
    "more layers in config.json": (lambda folder: fields(folder, num_hidden_layers=6), "lacks 18 tensor(s)"),
    "a file that the index names": (
        lambda folder: indexed(folder, **{UP: "model-2.safetensors"}),
        f"{INDEX} names model-2.safetensors, which is not in the folder",
    ),
    "a tensor that the index names": (
        lambda folder: indexed(folder, other=NAME),
        f"{INDEX} names {NAME} for 'other' (1 such), which is not in that file",
    ),
    "another head": (
        lambda folder: fields(folder, tie_word_embeddings=True),
        "tie_word_embeddings=true, but lm_head.weight is not model.embed_tokens.weight",
    ),
    "an unknown architecture": (lambda folder: fields(folder, model_type="foo"), "model_type='foo' is not supported"),
    "a field that changes the model": (
        lambda folder: fields(folder, rope_interleaved=True),
        "rope_interleaved=true is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_with_a_defect_is_named_once(damage: str, copied: Path) -> None:
    change, said = DAMAGES[damage]
    change(copied)
    backends = ("megatron",) if damage.startswith("a field") else BOTH
    (problem,) = [each for each in found(copied, backends) if each.state == "problem"]
    assert said in problem.said


def test_pickled_weights_are_named_with_the_command_that_converts_them(copied: Path) -> None:
    (copied / NAME).rename(copied / "pytorch_model.bin")
    (problem,) = [each for each in found(copied) if each.state == "problem"]
    assert problem.change == f"Convert them: rftmega convert to-plain {copied} OUT"


def test_a_good_folder_has_no_problem_and_its_numbers_are_right(good: Path) -> None:
    findings = found(good)
    assert [each.state for each in findings] == ["ok", "ok"]
    held = load_file(good / NAME)
    elements = sum(each.numel() for each in held.values())
    assert f"llama, {elements:,} parameters, 4 layers" in findings[0].said
    assert f"{len(held)} tensors in 1 file(s)" in findings[1].said
    assert weights.elements_of(good) == elements


def test_a_head_equal_to_a_tied_embedding_and_a_file_beside_the_index_are_no_problem(
    copied: Path,
) -> None:
    tensors(
        copied,
        lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}),
    )
    fields(copied, tie_word_embeddings=True)
    indexed(copied)
    (copied / "other.safetensors").write_bytes((copied / NAME).read_bytes())
    findings = found(copied)
    assert [each.state for each in findings] == ["ok", "ok", "note"]
    assert "does not name other.safetensors" in findings[-1].said


def test_a_backend_that_the_user_named_may_not_refuse(copied: Path) -> None:
    fields(copied, model_type="olmo")
    read = weights.read(copied, BOTH)
    assert list(read.refusals) == ["megatron"]
    states = {
        asked: [each.state for each in weights.of_config(copied, read, asked)]
        for asked in ((), ("megatron",))
    }
    assert states == {(): ["ok", "note"], ("megatron",): ["ok", "problem"]}


def test_a_table_has_each_cause_with_its_remedy_and_counts_problems() -> None:
    text = table([Finding("weights", "problem", "a " * 80, "Do this."), Finding("x", "ok", "fine")])
    assert text.splitlines()[-1] == "1 problem(s) in 2 checks"
    assert "-> Do this." in text
    assert max(map(len, text.splitlines())) <= 110
    assert table([Finding("x", "note", "y")]).endswith("no problem\n")
