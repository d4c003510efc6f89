"""Merged and extracted adapters, against sums and singular values that are written out here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.models.hf.peft_folder import PEFTFolder
from rftmega.run.conversion import adapters, plain_safetensors
from tests import plain_adapters
from tests.tiny_decoders import save_decoder
from tests.tiny_models import save_tiny
from tools.convert import main

RANK, ALPHA = 4, 6.0
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = save_tiny(tmp_path / "model", "qwen3")
    (found / "tokenizer.json").write_text("{}")
    return found


def with_pairs(folder: Path, target: Path, **changed: Any) -> plain_adapters.Pairs:
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=("q_proj", "down_proj"))
    plain_adapters.write_pairs(target, pairs, alpha=ALPHA, **changed)
    return pairs


def weights(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_adapters_of_experts_are_merged_and_extracted(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3-moe")
    pairs = plain_adapters.random_pairs(folder, rank=RANK)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    adapters.merge(folder, adapter, tmp_path / "merged")
    after, by_hand = weights(tmp_path / "merged"), plain_adapters.merged_by_hand(folder, adapter)
    for name, wanted in by_hand.items():
        torch.testing.assert_close(after[name].double(), wanted, atol=1e-6, rtol=1e-6)
    found = adapters.extract(folder, tmp_path / "merged", tmp_path / "again", rank=RANK)
    assert (found.pairs, found.beside) == (len(pairs), [])
    assert len([name for name in pairs if ".experts." in name]) == 3 * 3 * 4  # layers, experts
    assert found.lost < 1e-4
    again = plain_adapters.merged_by_hand(folder, tmp_path / "again")
    for name, wanted in by_hand.items():
        torch.testing.assert_close(again[name], wanted, atol=1e-5, rtol=1e-4)


WORDS = ("q_proj", "embed_tokens", "lm_head")


def test_adapters_of_embedding_and_head_are_merged_and_extracted(
    folder: Path, tmp_path: Path
) -> None:
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=WORDS)
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    adapters.merge(folder, adapter, tmp_path / "merged")
    after, by_hand = weights(tmp_path / "merged"), plain_adapters.merged_by_hand(folder, adapter)
    for name, wanted in by_hand.items():
        torch.testing.assert_close(after[name].double(), wanted, atol=1e-6, rtol=1e-6)
    given: Any = {"rank": RANK, "targets": WORDS}
    found = adapters.extract(folder, tmp_path / "merged", tmp_path / "again", **given)
    assert (found.pairs, found.beside) == (len(pairs), [])
    assert found.lost < 1e-4
    written = load_file(tmp_path / "again" / "adapter_model.safetensors")
    table = plain_adapters.PREFIX + "model.embed_tokens.lora_embedding_"
    assert [tuple(written[table + letter].shape) for letter in "AB"] == [(RANK, 131), (64, RANK)]
    again = plain_adapters.merged_by_hand(folder, tmp_path / "again")
    for name, wanted in by_hand.items():
        torch.testing.assert_close(again[name], wanted, atol=1e-5, rtol=1e-4)


def test_an_embedding_that_is_the_head_as_well_is_neither_merged_nor_extracted(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3-tied")
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=WORDS[:2])
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens', which is the output head"):
        adapters.merge(folder, adapter, tmp_path / "merged")
    other = save_tiny(tmp_path / "other", "qwen3-tied", seed=1)
    with pytest.raises(ConfigError, match="Leave embed_tokens out"):
        adapters.extract(folder, other, tmp_path / "found", rank=RANK, targets=WORDS[:2])


@pytest.mark.parametrize(("rslora", "scaling"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_a_merged_model_is_the_model_and_its_adapters(
    rslora: bool, scaling: float, folder: Path, tmp_path: Path
) -> None:
    pairs = with_pairs(folder, tmp_path / "adapter", use_rslora=rslora)
    told: list[int] = []
    found = adapters.merge(folder, tmp_path / "adapter", tmp_path / "merged", progress=told.append)
    before, after = weights(folder), weights(tmp_path / "merged")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if module in pairs:
            a, b = (matrix.double() for matrix in pairs[module])
            wanted = weight.double() + scaling * (b @ a)
            torch.testing.assert_close(after[name].double(), wanted, atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(after[name], weight), name
    assert (found.pairs, sum(told)) == (len(pairs), sum(x.nbytes for x in before.values()))
    assert found.lost < 1e-5
    assert (tmp_path / "merged/tokenizer.json").exists()
    tokens = torch.arange(9)[None]
    model = plain_adapters.adapted(folder, pairs, alpha=scaling * RANK)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(
            merged(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5
        )


def test_what_rounding_takes_of_small_products_is_told(folder: Path, tmp_path: Path) -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in weights(folder).items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=("q_proj",), spread=1e-4)
    plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    found = adapters.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    after = weights(tmp_path / "merged")
    added, kept = [], []
    for module, (a, b) in pairs.items():
        added.append((ALPHA / RANK * (b.double() @ a.double())).flatten())
        moved = after[f"{module}.weight"].double() - rounded[f"{module}.weight"].double()
        kept.append(moved.flatten())
    whole, left = torch.cat(added), torch.cat(kept)
    assert found.lost == pytest.approx(float((whole - left).norm() / whole.norm()), rel=1e-3)
    assert 0.2 < found.lost < 1.5


def test_a_merge_that_was_broken_off_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pairs(folder, tmp_path / "adapter")
    adapters.merge(folder, tmp_path / "adapter", tmp_path / "whole")
    monkeypatch.setattr(plain_safetensors, "FILE_BYTES", 100_000)
    written: list[str] = []
    write = adapters.write_shard

    def twice(path: Path, *given: Any) -> Any:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path.name)
        return write(path, *given)

    monkeypatch.setattr(adapters, "write_shard", twice)
    with pytest.raises(CheckpointError, match="No space left"):
        adapters.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    first = list(written)
    written[:] = []

    def noted(path: Path, *given: Any) -> Any:
        written.append(path.name)
        return write(path, *given)

    monkeypatch.setattr(adapters, "write_shard", noted)
    found = adapters.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    assert written and not set(first) & set(written)
    after, whole = weights(tmp_path / "merged"), weights(tmp_path / "whole")
    assert after.keys() == whole.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in whole.items())
    assert found.pairs == 8
    assert not (tmp_path / "merged/progress.jsonl").exists()


def test_adapters_on_modules_that_the_model_lacks_are_refused(folder: Path, tmp_path: Path) -> None:
    pairs = {"model.layers.9.self_attn.q_proj": (torch.ones(RANK, 64), torch.ones(64, RANK))}
    plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    with pytest.raises(CheckpointError, match=r"layers\.9\.self_attn\.q_proj' \(1 such\), which"):
        adapters.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_what_was_merged_is_extracted_again(folder: Path, tmp_path: Path) -> None:
    pairs = with_pairs(folder, tmp_path / "adapter")
    adapters.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    found = adapters.extract(
        folder, tmp_path / "merged", tmp_path / "found", rank=RANK, targets=["q_proj", "down_proj"]
    )
    assert (found.pairs, found.beside) == (len(pairs), [])
    assert found.lost < 1e-4
    read = PEFTFolder(tmp_path / "found")
    assert (read.rank, read.scaling, read.targets) == (RANK, 1.0, {"q_proj", "down_proj"})
    for module, (a, b) in pairs.items():
        down, up = read.pair(module, len(b), a.shape[1])
        torch.testing.assert_close(up @ down, ALPHA / RANK * (b @ a), atol=1e-5, rtol=1e-4)
    adapters.merge(folder, tmp_path / "found", tmp_path / "again")
    again, merged = weights(tmp_path / "again"), weights(tmp_path / "merged")
    for name, tensor in merged.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-5, rtol=1e-4)


def test_what_a_rank_lacks_is_told_and_what_adapters_can_not_hold(
    folder: Path, tmp_path: Path
) -> None:
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "config.json").write_text((folder / "config.json").read_text())
    torch.manual_seed(0)
    held = weights(folder)
    moved = {f"{Q}.weight": 0.01 * torch.randn_like(held[f"{Q}.weight"])}
    moved["model.norm.weight"] = torch.full_like(held["model.norm.weight"], 0.5)
    changed = {name: tensor + moved.get(name, 0) for name, tensor in held.items()}
    save_file(changed, trained / "model.safetensors", {"format": "pt"})
    found = adapters.extract(folder, trained, tmp_path / "found", rank=RANK)
    values = torch.linalg.svdvals(moved[f"{Q}.weight"].double())
    lacking = float(values[RANK:].norm() / values.norm())
    assert found.lost == pytest.approx(lacking, rel=1e-4)
    assert found.beside == ["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"--rank 999 is above the \d+ that"):
        adapters.extract(folder, trained, tmp_path / "other", rank=999)
    with pytest.raises(ConfigError, match="--rank 0: a pair has a rank of 1 at least"):
        adapters.extract(folder, trained, tmp_path / "other", rank=0)
    with pytest.raises(ConfigError, match=r"has no q_prj\. Choose from: q_proj, k_proj"):
        adapters.extract(folder, trained, tmp_path / "other", rank=RANK, targets=["q_prj"])
    with pytest.raises(ConfigError, match="No layer of v_proj differs"):
        adapters.extract(folder, trained, tmp_path / "other", rank=RANK, targets=["v_proj"])


def test_large_differences_of_low_rank_are_found_by_the_randomised_method() -> None:
    torch.manual_seed(1)
    left, right = torch.randn(1100, 5), torch.randn(5, 1030)
    up, down = adapters.nearest(left @ right, 5)
    torch.testing.assert_close(up @ down, left @ right, atol=1e-3, rtol=1e-3)
    torch.manual_seed(2)
    again = adapters.nearest(left @ right, 5)
    assert torch.equal(again[0], up) and torch.equal(again[1], down)


def test_folders_of_different_models_are_refused(folder: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "qwen3", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"Only one of .* holds 'model\.layers\.2"):
        adapters.extract(folder, other, tmp_path / "found", rank=1)
    wide = save_tiny(tmp_path / "wide", "qwen3", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"is \(64, 96\) in .* and \(64, 128\) in"):
        adapters.extract(folder, wide, tmp_path / "found", rank=1)


def test_the_commands_merge_and_extract_and_say_what_was_lost(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_pairs(folder, tmp_path / "adapter")
    merged, found = tmp_path / "merged", tmp_path / "found"
    assert main(["merge", str(folder), str(tmp_path / "adapter"), str(merged)]) == 0
    assert "8 pairs are merged; rounding took 0.00% of what they add" in capsys.readouterr().out
    assert main(["extract", str(folder), str(merged), str(found), "--rank", "2"]) == 0
    said = capsys.readouterr().out
    assert "28 pairs; they lack " in said and "0.00%" not in said
    config = json.loads((found / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 2)
    refused = main(["merge", str(folder), str(tmp_path / "nothing"), str(tmp_path / "x")])
    assert refused == main(["merge", str(folder), str(merged), str(tmp_path / "x")]) != 0


def test_adapters_beside_a_head_with_a_bias_are_merged_into_a_model_without_a_table(
    tmp_path: Path,
) -> None:
    folder = save_decoder(tmp_path / "model", "phi")
    pairs = plain_adapters.random_pairs(folder, rank=RANK, targets=("lm_head", "dense"))
    adapter = plain_adapters.write_pairs(tmp_path / "adapter", pairs, alpha=ALPHA)
    adapters.merge(folder, adapter, tmp_path / "merged")
    before, after = weights(folder), weights(tmp_path / "merged")
    assert torch.equal(after["lm_head.bias"], before["lm_head.bias"])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    ids = torch.tensor([[5, 9, 4, 7]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        wanted = plain_adapters.adapted(folder, pairs, alpha=ALPHA)(ids).logits
        torch.testing.assert_close(merged(ids).logits, wanted, atol=1e-4, rtol=1e-5)
