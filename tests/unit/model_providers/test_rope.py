"""Rotary settings of a config with settings for each layer type."""

from typing import Any

import pytest

from rftmega.core.errors import CheckpointError
from rftmega.model_providers.hf_config import HFConfig
from rftmega.model_providers.rope import Rope, read_two_ropes

GEMMA: dict[str, Any] = {
    **{"model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 48, "head_dim": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 40, "rms_norm_eps": 1e-6, "max_position_embeddings": 64},
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def read(**fields: Any) -> Rope:
    return read_two_ropes(HFConfig(GEMMA | fields))


def test_both_spellings_say_the_same() -> None:
    older = read(rope_theta=500.0, rope_local_base_freq=70.0, rope_scaling=LINEAR)
    newer = read(
        rope_parameters={
            "full_attention": LINEAR | {"rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
        }
    )
    assert older == newer == Rope(500.0, "linear", 8.0, local_base=70.0)


def test_absent_bases_are_those_of_transformers() -> None:
    assert read() == Rope(1e6, local_base=1e4)


def test_a_scaling_in_layers_with_a_window_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'linear' in layers with a sliding window"):
        read(rope_parameters={"sliding_attention": LINEAR | {"rope_theta": 70.0}})


def test_one_setting_for_all_layers_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_parameters has 'rope_theta'"):
        read(rope_parameters={"rope_theta": 500.0})
