"""Errors name another backend exactly if it accepts the model's config.json, and say of transformers
what is so.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from rftmega.backends.decoder.adapted_layers import adapted_of
from rftmega.backends.decoder.describe import read_config
from rftmega.backends.decoder.tensor_plan import styles_of
from rftmega.core.errors import CheckpointError, ConfigError
from rftmega.model_providers.backend_support import refusal_of
from rftmega.model_providers.description import FAMILIES, describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.transformers_decoders import on_meta
from tests.families import ACCEPTED, TABLE, causal_types, types_with_media
from tests.family_configs import tiny_config
from tests.tiny_decoders import save_decoder

MEASURED = {row["type"]: row for row in json.loads(TABLE.read_text())["rows"]}
TYPES = sorted(
    {
        *causal_types(),
        *types_with_media(),
        *(config.model_type for config in AutoModelForImageTextToText._model_mapping),
    }
)
OF_MODELS = ("can't be trained with backend=fsdp", "layers that share")
FEW = ("cohere2_vision", "gemma3", "llava", "lfm2", "mamba", "bert", "blt", "zamba2", "minimax")


def saved(model_type: str, folder: Path) -> PreTrainedConfig:
    """Writes the config.json of a tiny model, as it was measured; of one that needs other sizes, its
    model_type alone.
    """
    folder.mkdir(exist_ok=True)
    try:
        config = tiny_config(model_type)
        for field, value in ACCEPTED.get(model_type, {}).items():
            setattr(config, field, value)
        config.save_pretrained(folder)
    except Exception:  # of each class's own code
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception:  # some can't be without their parts
        return PreTrainedConfig()


def has_decoder(config: Any) -> bool:
    """Returns whether transformers has a causal language model for a config of text."""
    return any(type(config) is each for each in AutoModelForCausalLM._model_mapping)


def wrong_statements(model_type: str, folder: Path) -> list[str]:
    """Lists the statements of both backends about a type that aren't so."""
    config, found = saved(model_type, folder), []
    try:
        describe(read_hf_config(folder))
    except CheckpointError as error:
        said = str(error)
        told = "backend=fsdp accepts this config.json" in said
        measured = MEASURED.get(model_type, {"refused": ""})
        reason = measured.get("refused", "build: ")
        # weights that don't fit are none of config.json's
        of_weights = not any(each in reason for each in OF_MODELS)
        fits = reason.startswith("build: ") and of_weights
        sized = measured.get("verdict") == "ok"
        if "is not supported by backend=megatron" in said and (told > fits or told < sized):
            found.append(f"{model_type}: {measured}: {said}")
        if "transformers has no language model" in said and has_decoder(config):
            found.append(f"{model_type}: it has: {said}")
        text = config.get_text_config()
        alone = re.search(r"decoder alone \(model_type=(\w+)\)", said)
        other = has_decoder(text) and text.model_type != model_type
        if "more than a decoder" in said and bool(alone) != other:
            found.append(f"{model_type}: {text.model_type}: {said}")
        if alone and alone[1] != text.model_type:
            found.append(f"{model_type}: not {text.model_type}: {said}")
    try:
        read_config(folder)
    except CheckpointError as error:
        megatrons = not refusal_of("megatron", read_hf_config(folder))
        if ("backend=megatron" in str(error)) != megatrons:
            found.append(f"{model_type}: Megatron trains it: {megatrons}: {error}")
    return found


def test_what_errors_say_of_the_other_backend_and_of_transformers_is_so(tmp_path: Path) -> None:
    assert [each for kind in FEW for each in wrong_statements(kind, tmp_path / kind)] == []


@pytest.mark.ranks  # half a minute
def test_of_every_type_of_transformers_errors_say_what_is_so(tmp_path: Path) -> None:
    assert len(TYPES) > 250
    assert [each for kind in TYPES for each in wrong_statements(kind, tmp_path / kind)] == []


def refusals_of_tensor_and_adapters(folder: Path) -> list[str]:
    """Returns the errors for layouts and adapters that a folder's model can't have on FSDP2."""
    found = []
    model = on_meta(read_config(folder), "eager")
    for attempt in (lambda: styles_of(model, 2), lambda: adapted_of(model, [])):
        try:
            attempt()
        except (CheckpointError, ConfigError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("families", ["few", pytest.param("all", marks=pytest.mark.ranks)])
def test_refusals_of_tensor_parallelism_and_adapters_name_megatron_if_it_has_the_model(
    families: str, tmp_path: Path
) -> None:
    seen = set()
    for kind in ("lfm2", "gpt_oss", "bloom") if families == "few" else causal_types():
        saved(kind, tmp_path / kind)
        if refusal_of("fsdp", read_hf_config(tmp_path / kind)):
            continue
        for said in refusals_of_tensor_and_adapters(tmp_path / kind):
            if "model.lora.rank" in said or "does not divide" in said:
                continue  # these have another remedy
            wanted = not refusal_of("megatron", read_hf_config(tmp_path / kind))
            assert ("backend=megatron" in said) == wanted, (kind, said)
            seen.add(wanted)
    assert False in seen
    assert True in seen


def test_a_config_that_both_backends_know_is_accepted_by_both(tmp_path: Path) -> None:
    fields = read_hf_config(save_decoder(tmp_path, "qwen3"))
    assert (refusal_of("megatron", fields), refusal_of("fsdp", fields)) == ("", "")
    other = fields | {"hidden_act": "relu"}
    assert "hidden_act" in refusal_of("megatron", other)
    assert refusal_of("fsdp", other) == ""


def test_families_of_megatron_and_types_of_transformers_are_named_alike() -> None:
    assert set(FAMILIES) - {"kimi_k2"} <= set(CONFIG_MAPPING)


@pytest.mark.parametrize(
    ("kind", "said", "unsaid"),
    [
        ("xlnet", "it predicts tokens from those before and behind them", "positions"),
        ("git", "model_type=git has more than a decoder of text", "(model_type=git) is a model"),
        ("chameleon", "model_type=chameleon has more than a decoder of text", "no language model"),
        ("hrm_text", "as a causal decoder. Otherwise take another model.", ". Take another"),
    ],
)
def test_a_type_is_refused_for_what_it_is(
    kind: str, said: str, unsaid: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        read_config(tmp_path)
    assert said in str(raised.value)
    assert unsaid not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("hrm_text", {}, "prefix_lm=true: the tokens of a prompt see each other"),
        ("hrm_text", {"prefix_lm": False}, ""),
        ("mpt", {"prefix_lm": True}, "Set prefix_lm=false in config.json"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "tokens see later ones"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "tokens see later ones"),
        ("xlm", {"causal": False}, "causal=false: tokens see later ones"),
        ("llama", {"is_causal": False}, "is_causal=false: tokens see later ones"),
        ("bert", {}, "is_decoder=false in"),
        ("roformer", {}, "is_decoder=false in"),
        ("cpmant", {}, "its tokens see later ones"),
        ("doge", {}, ""),
        ("doge", {"is_moe": True}, "is_moe=true can't be trained"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0: a token attends to none"),
        ("qwen2_moe", {"sliding_window": 0}, ""),  # no layer has a window
        ("nemotron_h", {"sliding_window": 0}, ""),
        ("glm_moe_dsa", {"index_topk": 0}, "index_topk=0"),
        ("recurrent_gemma", {"attention_window_size": 0}, "attention_window_size=0"),
        ("gpt_neox", {"is_decoder": False}, ""),  # it reads no such field
    ],
)
def test_attention_to_later_tokens_is_refused_by_the_field_that_asks_for_it(
    kind: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = tiny_config(kind).to_dict() | fields
    found = refusal_of("fsdp", config)
    assert said in found
    assert bool(said) == bool(found), found
