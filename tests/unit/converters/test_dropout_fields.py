"""The fields of config.json that say what a model drops, over all config classes of transformers."""

import dataclasses
import re
import typing

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from rftmega.converters.dropout_fields import dropped_by, drops

# have such a word in their names, and are no share of anything: switches, and noise in what a model
# of proteins, speech or boxes is fed
OTHERS = {
    "drop_vision_last_layer",
    "normalize_router_prob_before_dropping",
    "token_dropout",
    "per_loop_lm_dropout",
}
ASKED_FOR = (
    *("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "emb_pdrop", "hidden_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "residual_dropout", "ffn_dropout"),
    *("activation_dropout", "embedding_dropout", "dropout", "dropout_rate", "layerdrop", "layer_drop"),
    *("encoder_layerdrop", "decoder_layerdrop", "drop_path_rate", "classifier_dropout"),
    *("router_jitter_noise", "input_jitter_noise", "moe_jitter_eps", "mlp_dropout", "attn_dropout"),
)  # fmt: skip


def fields_of_transformers() -> dict[str, dict[str, str]]:
    """Returns the fields of every config class by model_type, with their types."""
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return {
        family: {
            field.name: str(field.type)
            for field in dataclasses.fields(CONFIG_MAPPING[family])
            if field.name not in common
        }
        for family in typing.cast("list[str]", list(CONFIG_MAPPING))
        if dataclasses.is_dataclass(CONFIG_MAPPING[family])
    }


def test_every_field_of_transformers_about_dropping_is_known() -> None:
    named = re.compile("drop|jitter")
    every = fields_of_transformers()
    assert len(every) > 300
    found = {name for fields in every.values() for name in fields if named.search(name)}
    assert set(ASKED_FOR) <= found | {"moe_jitter_eps", "layer_drop"}  # of parts
    for family, fields in every.items():
        for name in set(fields) & found - OTHERS:
            computed = (family, name) == ("phimoe", "router_jitter_noise")
            assert bool(dropped_by({"model_type": family, name: 0.25})) != computed, (family, name)
            assert not dropped_by({"model_type": family, name: 0.0})


@pytest.mark.parametrize("name", ASKED_FOR)
def test_a_share_that_is_dropped_is_told(name: str) -> None:
    assert dropped_by({"model_type": "llama", name: 0.1, "hidden_size": 64}) == {name: 0.1}
    inner = {"vision_config": {name: 0.5}, "text_config": {name: None}}
    assert dropped_by({"model_type": "x", **inner}) == {f"vision_config.{name}": 0.5}


def test_what_drops_nothing_is_not_told() -> None:
    assert dropped_by(dict.fromkeys(OTHERS, True) | {"attention_dropout": 0}) == {}
    assert drops("router_jitter_noise") and not drops("router_jitter_noise", family="phimoe")
    assert not drops("hidden_size")
