"""Folders of PEFT that hold something else than what the options say are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from rftmega.config import LoRA
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.peft_folder import PEFTFolder, write_config
from tests.plain_adapters import write_pairs

NAME = "model.layers.0.self_attn.q_proj"
PAIRS = {NAME: (torch.ones(2, 6), torch.ones(5, 2))}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": 4}, "r=4 is not 2, which model.lora.rank says"),
        ({"lora_alpha": 5}, "lora_alpha=5 is not 3, which model.lora.alpha says"),
        ({"target_modules": ["q_proj", "v_proj"]}, "are not those of model.lora.targets, q_proj"),
        ({"target_modules": ".*q_proj"}, "target_modules=.*q_proj is no list of modules"),
        ({"r": None}, "r or lora_alpha is no number"),
        ({"peft_type": "IA3"}, "peft_type=IA3 is not LORA"),
        ({"use_dora": True}, "use_dora=True is not known here"),
        ({"use_rslora": True}, "use_rslora=True is not False, which model.lora.rslora says"),
        ({"bias": "all"}, "bias=all is not known here"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8} is not known here"),
    ],
    ids=str,
)
def test_adapters_of_another_kind_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_pairs(tmp_path, PAIRS, alpha=3)
    opened(tmp_path)
    write_pairs(tmp_path, PAIRS, alpha=3, **changed)
    with pytest.raises(CheckpointError, match=r"^model\.lora\.path: ") as caught:
        opened(tmp_path)
    assert said in str(caught.value)


def opened(folder: Path, **given: Any) -> PEFTFolder:
    found = PEFTFolder(folder, option="model.lora.path")
    found.check(LoRA(rank=2, alpha=3.0, **given), ["q_proj"])
    return found


def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = opened(write_pairs(tmp_path, PAIRS, alpha=3))
    assert folder.whole(f"{NAME}.lora_A.weight", (2, 6)).sum() == 12
    with pytest.raises(CheckpointError, match="shape"):
        folder.whole(f"{NAME}.lora_A.weight", (2, 7))
    with pytest.raises(CheckpointError, match="no tensor"):
        folder.whole(f"{NAME}.lora_C.weight", (2, 6))


def test_a_tensor_that_is_of_no_pair_is_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path, PAIRS, alpha=3)
    held = load_file(tmp_path / "adapter_model.safetensors")
    held["base_model.model.lm_head.weight"] = torch.ones(3, 3)
    save_file(held, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight' is no matrix of a pair"):
        opened(tmp_path)


def test_copies_of_frozen_weights_that_peft_writes_beside_pairs_of_words_are_left_out(
    tmp_path: Path,
) -> None:
    pairs = {
        "lm_head": (torch.ones(2, 6), torch.ones(5, 2)),
        "model.embed_tokens": (torch.ones(2, 5), torch.full((6, 2), 3.0)),
    }
    write_pairs(tmp_path, pairs, alpha=3)
    held = load_file(tmp_path / "adapter_model.safetensors")
    for module in pairs:
        held[f"base_model.model.{module}.base_layer.weight"] = torch.ones(5, 6)
    save_file(held, tmp_path / "adapter_model.safetensors")
    folder = PEFTFolder(tmp_path)
    assert sorted(folder.modules) == sorted(pairs)
    a, b = folder.pair("model.embed_tokens", 5, 6)  # of the weight, whose rows A looks up
    assert (a.shape, b.shape, float(a.mean())) == ((2, 6), (5, 2), 3.0)


def test_what_is_written_is_what_peft_reads_and_so_do_we(tmp_path: Path) -> None:
    write_pairs(tmp_path, PAIRS, alpha=3)
    write_config(tmp_path, base="base", rank=2, alpha=3.0, dropout=0.1, targets={"q_proj"})
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 3,
    }.items() <= said.items()
    assert said["base_model_name_or_path"] == "base"
    assert opened(tmp_path).scaling == 1.5
    write_config(tmp_path, base="base", rank=2, alpha=3.0, targets={"q_proj"}, rslora=True)
    assert opened(tmp_path, rslora=True).scaling == pytest.approx(3 / 2**0.5)


@pytest.mark.parametrize(
    ("whole", "task", "says", "never"),
    [
        ((), "text-generation", "--max-lora-rank 2", "num_labels"),
        (("score.weight",), "text-classification", "num_labels=1", "vllm"),
        (("score.weight", "score.bias"), "token-classification", "score learnt whole", "vllm"),
    ],
)
def test_a_card_says_to_the_hub_and_to_people_what_the_folder_is(
    whole: tuple[str, ...], task: str, says: str, never: str, tmp_path: Path
) -> None:
    given: Any = {"rank": 2, "alpha": 3.0, "targets": {"v_proj", "q_proj"}, "whole": whole}
    write_config(tmp_path, base="org/name", **given)
    _, front, text = (tmp_path / "README.md").read_text().split("---\n")
    said = yaml.safe_load(front)
    assert said == {
        "library_name": "peft",
        "pipeline_tag": task,
        "tags": ["lora", "rftmega"],
        "base_model": "org/name",
    }
    assert "rank 2, alpha 3, on q_proj, v_proj" in text
    assert says in text and never not in text
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "README.md", "exec")
    write_config(tmp_path, base=str(tmp_path), **given)
    _, front, _ = (tmp_path / "README.md").read_text().split("---\n")
    assert "base_model" not in yaml.safe_load(front), (
        "a folder of this machine is no model of the hub"
    )
