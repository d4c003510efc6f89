"""Folders of PEFT that hold something else than what the options say are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rftmega.errors import CheckpointError
from rftmega.hf_folders.peft_folder import PEFTFolder, write_config
from tests.plain_adapters import write_pairs

NAME = "model.layers.0.self_attn.q_proj"
PAIRS = {NAME: (torch.ones(2, 6), torch.ones(5, 2))}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": 4}, "r=4 is not 2, which model.lora.rank says"),
        ({"lora_alpha": 5}, "lora_alpha=5 is not 3.0, which model.lora.alpha says"),
        ({"target_modules": ["q_proj", "v_proj"]}, "are not those of model.lora.targets, q_proj"),
        ({"target_modules": ".*q_proj"}, "are not those of model.lora.targets"),
        ({"peft_type": "IA3"}, "peft_type=IA3 is not LORA"),
        ({"use_dora": True}, "use_dora=True is not known here"),
        ({"use_rslora": True}, "use_rslora=True is not known here"),
        ({"bias": "all"}, "bias=all is not known here"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern={'q_proj': 8} is not known here"),
    ],
    ids=str,
)
def test_adapters_of_another_kind_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_pairs(tmp_path, PAIRS, alpha=3)
    PEFTFolder(tmp_path, rank=2, alpha=3.0, targets=["q_proj"])
    write_pairs(tmp_path, PAIRS, alpha=3, **changed)
    with pytest.raises(CheckpointError) as caught:
        PEFTFolder(tmp_path, rank=2, alpha=3.0, targets=["q_proj"])
    assert said in str(caught.value)


def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = PEFTFolder(write_pairs(tmp_path, PAIRS, alpha=3), rank=2, alpha=3, targets=["q_proj"])
    assert folder.whole(f"{NAME}.lora_A.weight", (2, 6)).sum() == 12
    with pytest.raises(CheckpointError, match="shape"):
        folder.whole(f"{NAME}.lora_A.weight", (2, 7))
    with pytest.raises(CheckpointError, match="no tensor"):
        folder.whole(f"{NAME}.lora_C.weight", (2, 6))


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
    PEFTFolder(tmp_path, rank=2, alpha=3.0, targets=["q_proj"])
