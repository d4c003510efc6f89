"""Every field of PEFT's LoraConfig is read, without influence, or refused where it has one."""

from typing import Any

import pytest

from rftmega.config.options.peft_fields import INITS, PLAIN, READ, foreign_fields

# what adapter_config.json of peft 0.21.2 holds (LoraConfig().to_dict(), save_pretrained), by its defaults
DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "base", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "kasa_config": None, "layer_replication": None, "layers_pattern": None,
    "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.0,
    "lora_ga_config": None, "megatron_config": None, "megatron_core": "megatron.core", "modules_to_save": None,
    "monteclora_config": None, "peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 8,
    "rank_pattern": {}, "revision": None, "runtime_config": {}, "target_modules": ["q_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_bdlora": None,
    "use_dora": False, "use_qalora": False, "use_rslora": False, "velora_config": None,
}  # fmt: skip
WITHOUT_INFLUENCE = {
    "lora_dropout": 0.5, "task_type": "SEQ_CLS", "revision": "main", "peft_version": "1.0", "inference_mode": False,
    "eva_config": {"rho": 2.0}, "corda_config": {}, "lora_ga_config": {"scale": "stable"}, "loftq_config": {"loftq_bits": 4},
    "qalora_group_size": 8, "auto_mapping": {"parent_library": "x"}, "megatron_core": "mine",
}  # fmt: skip
CHANGED: dict[str, Any] = {
    "alora_invocation_tokens": [3], "alpha_pattern": {"q_proj": 3}, "arrow_config": {}, "bias": "lora_only",
    "ensure_weight_tying": True, "exclude_modules": ["v_proj"], "fan_in_fan_out": True, "kasa_config": {},
    "layer_replication": [[0, 2]], "layers_pattern": "layers", "layers_to_transform": [1], "lora_bias": True,
    "megatron_config": {"num_layers": 2}, "modules_to_save": ["lm_head"], "monteclora_config": {},
    "rank_pattern": {"q_proj": 2}, "target_parameters": ["k_proj.weight"], "trainable_token_indices": [1],
    "use_bdlora": {"nblocks": 2}, "use_dora": True, "use_qalora": True, "velora_config": {},
}  # fmt: skip


def test_every_field_of_peft_is_decided() -> None:
    assert READ | PLAIN.keys() | {INITS} == DEFAULTS.keys()
    assert CHANGED.keys() == PLAIN.keys()
    assert foreign_fields(DEFAULTS) == []
    assert foreign_fields(DEFAULTS | WITHOUT_INFLUENCE) == []


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_field_that_changes_the_computation_is_refused_by_name(name: str) -> None:
    (said,) = foreign_fields(DEFAULTS | {name: CHANGED[name]})
    assert said.startswith(f"{name}=")
    assert foreign_fields({name: None}) == []


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "new", 1]
)
def test_an_init_that_changed_the_frozen_weights_is_refused_with_a_way_out(init: Any) -> None:
    (said,) = foreign_fields(DEFAULTS | {INITS: init})
    assert f"{INITS}={init}" in said and "path_initial_model_for_weight_conversion" in said


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_an_init_that_left_them_alone_is_taken(init: Any) -> None:
    assert foreign_fields(DEFAULTS | {INITS: init}) == []


def test_a_field_that_nobody_knows_is_refused_unless_it_says_nothing() -> None:
    for nothing in (None, False, [], {}, ""):
        assert foreign_fields({"use_tomorrow": nothing}) == []
    for something in (True, 0.5, "yes", [0], {"a": 1}):
        assert foreign_fields({"use_tomorrow": something}) == [
            f"use_tomorrow={something} is no field that is known here"
        ]
