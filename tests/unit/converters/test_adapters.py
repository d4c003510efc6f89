"""Which layers have adapters follows from the tables alone."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from rftmega.config.options.adapters import HF_TARGETS, MEGATRON_TARGETS
from rftmega.converters import FAMILIES, table
from rftmega.converters.adapters import adapted_layers
from rftmega.converters.decoder import value_head
from rftmega.converters.rules import QKV, Replicated, Row, shard, shard_shape
from tests.tiny_models import VARIANTS

DENSE = [
    *("llama", "qwen2", "qwen3", "olmo2", "phi3", "seed-oss", "mistral-window"),
    *("arcee", "smollm3", "granite", "exaone4", "hunyuan", "gemma3"),
]


def rules_of(variant: str) -> Any:
    from tests.tiny_models import SHAPE

    kind, changes = VARIANTS[variant]
    return table(kind(**(SHAPE | changes)).to_dict())


@pytest.mark.parametrize("variant", DENSE)
def test_without_targets_every_linear_layer_of_a_decoder_has_an_adapter(variant: str) -> None:
    layers = adapted_layers(rules_of(variant), rank=8, targets=[])
    found = {target for layer in layers for target in layer.targets}
    fused = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    plain = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    plain -= {"gate_proj"} if variant == "arcee" else set()  # its MLP has no gate
    assert found == (fused if variant == "phi3" else plain)


def test_the_names_that_options_know_are_those_of_the_tables() -> None:
    hf, megatron = set(), set()
    for variant in (*DENSE, "mixtral", "qwen3.5", "qwen3-next-moe"):
        for layer in adapted_layers(rules_of(variant), rank=8, targets=[]):
            hf |= set(layer.targets)
            megatron.add(layer.base.megatron[0].split(".")[-2])
    assert hf == set(HF_TARGETS)
    assert megatron == set(MEGATRON_TARGETS)
    assert {"llama", "phi3"} <= set(FAMILIES)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pairs_of_embedding_and_head_are_cut_by_words(ranks: int) -> None:
    embedding, head = adapted_layers(rules_of("qwen3"), rank=8, targets=["lm_head", "embed_tokens"])
    assert (embedding.targets, head.targets) == (("embed_tokens",), ("lm_head",))
    (down,), (up,) = embedding.down.hf, embedding.up.hf
    assert down == ("model.embed_tokens.lora_embedding_A", (8, 131))
    assert up == ("model.embed_tokens.lora_embedding_B", (64, 8))
    each = -(-131 // ranks)  # padded
    for rank in range(ranks):
        assert shard_shape(embedding.down, rank, ranks) == (8, each)
        assert shard_shape(head.up, rank, ranks) == (each, 8)
    part = torch.arange(8 * 131.0).view(8, 131)
    joined = torch.cat([shard(embedding.down, [part], rank, ranks) for rank in range(ranks)], 1)
    assert torch.equal(joined, F.pad(part, (0, each * ranks - 131)))


def test_a_value_model_has_an_adapter_on_its_embedding_and_none_on_a_head() -> None:
    rules = [*rules_of("qwen3")[:-1], *value_head({"hidden_size": 64})]
    layers = adapted_layers(rules, rank=8, targets=["q_proj", "embed_tokens", "lm_head"])
    assert [layer.targets for layer in layers] == [("q_proj",), ("embed_tokens",)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_pair_is_cut_as_its_weight_is(ranks: int) -> None:
    for layer in adapted_layers(rules_of("qwen3"), rank=8, targets=[]):
        for rank in range(ranks):
            out, into = shard_shape(layer.base, rank, ranks)
            split = (rank, ranks)
            down, up = (split, (0, 1)) if layer.row_parallel else ((0, 1), split)
            pairs = len(layer.parts)
            assert shard_shape(layer.down, *down) == (8 * pairs, into)
            assert shard_shape(layer.up, *up) == (out, 8)
        assert layer.row_parallel == isinstance(layer.base, Row)
        assert isinstance(layer.up, Replicated if layer.row_parallel else type(layer.base))


@pytest.mark.parametrize(
    ("variant", "targets"),
    [
        ("qwen3-moe", {"gate_proj", "up_proj", "down_proj"}),
        ("qwen2-moe", {"gate_proj", "up_proj", "down_proj"}),
        ("glm4-moe", {"gate_proj", "up_proj", "down_proj"}),
        ("mixtral", {"w1", "w2", "w3"}),
    ],
)
def test_without_targets_experts_have_adapters_and_routers_have_none(
    variant: str, targets: set[str]
) -> None:
    layers = adapted_layers(rules_of(variant), rank=8, targets=[])
    of_experts = [layer for layer in layers if layer.base.per_expert]
    assert {target for layer in of_experts for target in layer.targets} == targets
    for layer in of_experts:
        names = [tensor.name for rule in (layer.down, layer.up) for tensor in rule.hf]
        assert layer.down.per_expert and layer.up.per_expert
        assert all(".experts.{expert}." in name for name in names)
        assert {layer.down.layers, layer.up.layers} == {layer.base.layers}
    every = {tensor.name for layer in layers for tensor in layer.base.hf}
    shared = {name for name in every if "shared_expert" in name}
    assert len(shared) == (0 if variant in ("qwen3-moe", "mixtral") else 3)
    assert not any(name.endswith(("gate.weight", "embed_tokens.weight")) for name in every)
    attention = adapted_layers(rules_of(variant), rank=8, targets=["q_proj", "o_proj"])
    assert {target for layer in attention for target in layer.targets} == {"q_proj", "o_proj"}
    assert not any(layer.base.per_expert for layer in attention)


def test_some_of_the_parts_of_one_weight_can_have_pairs() -> None:
    chosen = adapted_layers(rules_of("qwen3"), rank=8, targets=["q_proj", "v_proj", "linear_fc2"])
    by_rule = {type(layer.base): layer for layer in chosen}
    assert by_rule[QKV].parts == (0, 2)
    assert [tensor.name for tensor in by_rule[QKV].down.hf] == [
        "model.layers.{layer}.self_attn.q_proj.lora_A.weight",
        "model.layers.{layer}.self_attn.v_proj.lora_A.weight",
    ]
    assert by_rule[Row].targets == ("down_proj",)
    assert len(chosen) == 2
