"""Fields of config.json: without effect where transformers' class does not know them, an error where
it does and nothing here reads them.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftmega.config import load
from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models import known_fields
from rftmega.run.preflight import preflight
from tests.tiny_models import save_tiny
from tests.tiny_vision import save_tiny_vision


@pytest.fixture(autouse=True)
def _told_anew() -> Iterator[None]:
    known_fields._tell.cache_clear()
    yield
    known_fields.ignore([])


def changed(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


STRANGE = {  # of published files, none of which LlamaConfig knows
    "_model_name_or_path": "org/name",
    "_from_model_config": True,
    "quantized_by": "somebody",
    "max_sequence_length": 4096,
}


def test_fields_that_transformers_class_does_not_know_change_nothing_and_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, strange = save_tiny(tmp_path / "a", "llama"), save_tiny(tmp_path / "b", "llama")
    changed(strange, **STRANGE)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert describe(read_hf_config(strange)) == describe(read_hf_config(plain))
    (told,) = caplog.messages
    for name in STRANGE:
        assert f"{name}=" in told
    ids = torch.arange(7)[None]
    one, two = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (plain, strange)
    )
    assert torch.equal(one, two), "transformers reads one of them"


def test_a_field_that_the_class_knows_and_nothing_reads_is_an_error_until_it_is_ignored(
    tmp_path: Path,
) -> None:
    folder = changed(save_tiny(tmp_path, "deepseek-v3"), num_mtp_layers=2)
    with pytest.raises(CheckpointError, match=r"model\.ignore_config_fields=\[num_mtp_layers\]"):
        describe(read_hf_config(folder))
    known_fields.ignore(["num_mtp_layers"])
    describe(read_hf_config(folder))


def test_code_of_the_folders_own_may_read_any_field(tmp_path: Path) -> None:
    folder = changed(
        save_tiny(tmp_path, "llama"), auto_map={"AutoConfig": "mine.Config"}, strange=1
    )
    with pytest.raises(CheckpointError, match="strange=1"):
        describe(read_hf_config(folder))


@pytest.mark.parametrize("name", ["sliding_window", "logit_scale", "final_logit_softcapping"])
def test_what_shared_code_reads_of_any_config_stays_an_error(name: str, tmp_path: Path) -> None:
    folder = changed(save_tiny(tmp_path, "llama"), **{name: 16})
    with pytest.raises(CheckpointError, match=name):
        describe(read_hf_config(folder))


def test_a_section_of_a_tower_may_have_fields_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_vision(tmp_path, "qwen3_vl")
    said = describe(read_hf_config(folder))
    inner = json.loads((folder / "config.json").read_text())["vision_config"]
    changed(folder, vision_config=inner | {"_made_by": "somebody"})
    assert describe(read_hf_config(folder)) == said
    assert any("vision_config._made_by" in message for message in caplog.messages)


def test_the_option_reaches_the_check_before_a_run(tmp_path: Path) -> None:
    folder = changed(save_tiny(tmp_path / "model", "deepseek-v3"), num_mtp_layers=2)
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    tree = {
        "model": {"path": str(folder)},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "rollout": {"engine": "scripted", "max_prompt_tokens": 8, "max_response_tokens": 8},
    }
    with pytest.raises(ConfigError, match="num_mtp_layers"):
        preflight(load(tree), 1)
    preflight(load(tree, ["model.ignore_config_fields=[num_mtp_layers]"]), 1)
