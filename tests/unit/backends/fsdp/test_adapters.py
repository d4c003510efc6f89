"""Which layers of transformers' models have adapters, and what one computes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from rftmega.backends.decoder.adapted_layers import adapted_of
from rftmega.backends.decoder.describe import read_config
from rftmega.config import LoRA
from rftmega.core.errors import ConfigError
from rftmega.model_providers.transformers_decoders import on_meta
from rftmega.models.lora.embedding import EmbeddingWithPair
from rftmega.models.lora.experts import PairsOfExperts, StackDelta, StackWithPairs
from rftmega.models.lora.linear import LinearWithPair
from tests.plain_adapters import ALL
from tests.tiny_decoders import save_decoder
from tests.tiny_vision import save_tiny_vision

OPTIONS = LoRA(rank=2, alpha=6.0, dropout=0.5)


@pytest.mark.parametrize(
    ("family", "targets", "found"),
    [
        ("qwen3", (), ALL),
        ("gemma3", ("q_proj",), ("q_proj",)),
        ("glm4", (), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("phi3", (), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gpt-oss", ("q_proj", "o_proj"), ("q_proj", "o_proj")),
        ("granite", ("up_proj",), ("up_proj",)),
    ],
)
def test_linear_layers_of_every_decoder_have_adapters(
    family: str, targets: tuple[str, ...], found: tuple[str, ...], tmp_path: Path
) -> None:
    model = on_meta(read_config(save_decoder(tmp_path, family)), "eager")
    layers = adapted_of(model, targets)
    assert layers.targets == set(found)
    assert len(layers.linears) == 3 * len(found)
    assert "lm_head" not in layers.linears


def test_embedding_and_head_have_adapters_where_they_are_named_and_are_like_those_of_most(
    tmp_path: Path,
) -> None:
    model = on_meta(read_config(save_decoder(tmp_path / "qwen3", "qwen3")), "eager")
    both = ("lm_head", "embed_tokens")
    layers = adapted_of(model, both)
    assert (list(layers.linears), list(layers.embeddings)) == (["lm_head"], ["model.embed_tokens"])
    value = adapted_of(model, both, value=True)
    assert (value.linears, value.targets) == ({}, {"embed_tokens"})
    scaled = on_meta(read_config(save_decoder(tmp_path / "gemma3", "gemma3")), "eager")
    with pytest.raises(ConfigError, match="embed_tokens can't have an adapter"):
        adapted_of(scaled, ("embed_tokens",), value=True)


def test_an_embeddings_adapter_adds_the_product_for_the_words_that_are_looked_up() -> None:
    torch.manual_seed(0)
    plain, ids = nn.Embedding(7, 5), torch.tensor([[6, 0], [6, 3]])
    layer = EmbeddingWithPair(plain, OPTIONS)
    for name, matrix in zip(("A", "B"), layer.pair, strict=True):
        setattr(layer, f"lora_embedding_{name}", nn.Parameter(torch.randn(matrix.shape)))
    a, b = layer.pair
    torch.testing.assert_close(layer(ids), plain(ids) + 3.0 * a.T[ids] @ b.T)
    layer.off = True
    assert torch.equal(layer(ids), plain(ids))


def test_an_embeddings_adapter_learns_nothing_from_the_padding_token_as_pefts() -> None:
    torch.manual_seed(0)
    layer = EmbeddingWithPair(nn.Embedding(7, 5, padding_idx=3), OPTIONS)
    for name, matrix in zip(("A", "B"), layer.pair, strict=True):
        setattr(layer, f"lora_embedding_{name}", nn.Parameter(torch.randn(matrix.shape)))
    ids, weights = torch.tensor([[6, 0], [3, 3]]), torch.randn(2, 2, 5)
    (layer(ids) * weights).sum().backward()
    a, b = (matrix.detach().clone().requires_grad_() for matrix in layer.pair)
    found = nn.functional.embedding(ids, a.T, padding_idx=3)  # as PEFT looks them up
    (3.0 * found @ b.T * weights).sum().backward()
    for matrix, wanted in zip(layer.pair, (a, b), strict=True):
        torch.testing.assert_close(matrix.grad, wanted.grad)


GATE_AND_UP = ("gate_proj", "up_proj")


@pytest.mark.parametrize(
    ("family", "targets", "stacks"),
    [
        ("qwen3-moe", (), {"gate_up_proj": GATE_AND_UP, "down_proj": ("down_proj",)}),
        ("qwen3-moe", ("up_proj",), {"gate_up_proj": GATE_AND_UP}),
        ("qwen3-moe", ("q_proj",), {}),
        ("mixtral", ("w2", "q_proj"), {"down_proj": ("w2",)}),
        ("mixtral", ("w3",), {"gate_up_proj": ("w1", "w3")}),
        ("qwen3-next", ("down_proj",), {"down_proj": ("down_proj",)}),
    ],
)
def test_experts_have_adapters_by_the_names_that_they_were_published_with(
    family: str, targets: tuple[str, ...], stacks: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    model = on_meta(read_config(save_decoder(tmp_path, family)), "eager")
    layers = adapted_of(model, targets)
    of_layers = {
        f"model.layers.{number}.mlp.experts.{name}": parts
        for number in range(3)
        for name, parts in stacks.items()
    }
    assert layers.stacks == of_layers
    if targets:
        assert layers.targets == set(targets)


def test_a_router_has_no_adapter(tmp_path: Path) -> None:
    model = on_meta(read_config(save_decoder(tmp_path, "qwen3-next")), "eager")
    layers = adapted_of(model, ())
    assert "model.layers.0.mlp.shared_expert.up_proj" in layers.linears
    assert isinstance(model.get_submodule("model.layers.0.mlp.shared_expert_gate"), nn.Linear)
    assert not any(name.endswith("gate") for name in layers.linears)


def test_experts_that_transformers_does_not_tell_apart_are_refused_with_what_can_be_had(
    tmp_path: Path,
) -> None:
    model = on_meta(read_config(save_decoder(tmp_path, "gpt-oss")), "eager")
    for targets in ((), ("q_proj", "down_proj")):
        with pytest.raises(
            ConfigError, match=r"keeps the experts .* in model.layers.0.*q_proj, k_proj"
        ):
            adapted_of(model, targets)


def test_a_model_with_a_tower_can_have_no_adapters(tmp_path: Path) -> None:
    model = on_meta(read_config(save_tiny_vision(tmp_path, "qwen2_vl")), "eager")
    with pytest.raises(ConfigError, match="has a tower beside its decoder"):
        adapted_of(model, ())


def adapted(plain: nn.Linear) -> LinearWithPair:
    layer = LinearWithPair(plain, OPTIONS)
    for matrix in (layer.lora_A, layer.lora_B):
        nn.init.normal_(matrix.to_empty(device="cpu").weight)
    return layer


def test_a_row_parallel_layer_drops_its_own_columns_of_all() -> None:
    """Shares of two processes whose streams are alike add up to what one process computes."""
    torch.manual_seed(0)
    whole, x = adapted(nn.Linear(6, 4)), torch.randn(3, 5, 6)
    torch.manual_seed(1)
    wanted = whole(x) - functional.linear(x, whole.weight, whole.bias)
    found = torch.zeros_like(wanted)
    for columns in (slice(0, 3), slice(3, 6)):
        share = adapted(nn.Linear(6, 4))
        share.lora_A.weight = nn.Parameter(whole.lora_A.weight[:, columns])
        share.lora_B.weight, share.columns = whole.lora_B.weight, columns
        torch.manual_seed(1)
        found += share.with_product(x[..., columns], torch.zeros_like(wanted))
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(wanted, whole.with_product(x, torch.zeros_like(wanted)))


def of_experts(rows: int, columns: int) -> PairsOfExperts:
    """Of two experts."""
    pairs = PairsOfExperts(2, rows, columns, OPTIONS).to_empty(device="cpu")
    for matrix in pairs.parameters():
        nn.init.normal_(matrix)
    return pairs


def test_an_experts_share_of_columns_drops_its_own_of_all() -> None:
    """Shares of two processes whose streams are alike add up to what one process computes."""
    torch.manual_seed(0)
    whole, x = of_experts(4, 6), torch.randn(5, 6)
    a, b = whole.lora_A[1], whole.lora_B[1]
    torch.manual_seed(1)
    kept = functional.dropout(x, 0.5)
    torch.manual_seed(1)
    wanted = whole.product(x, a, b)
    torch.testing.assert_close(wanted, 3.0 * kept @ a.T @ b.T)
    found = torch.zeros_like(wanted)
    for columns in (slice(0, 3), slice(3, 6)):
        share = of_experts(4, 6)
        share.columns = columns
        torch.manual_seed(1)
        found += share.product(x[:, columns], a[:, columns], b)
    torch.testing.assert_close(found, wanted)
    whole.eval()
    torch.testing.assert_close(whole.product(x, a, b), 3.0 * x @ a.T @ b.T)


def test_an_expert_in_the_place_of_others_is_a_weight_of_linear_layers_alone() -> None:
    torch.manual_seed(0)
    up, stack, x = of_experts(3, 6).eval(), torch.randn(2, 6, 6), torch.randn(5, 6)
    adapted = StackWithPairs(stack, [None, up])[torch.tensor(1)]
    found = functional.linear(x, adapted)  # type: ignore[arg-type]
    merged = stack[1].clone()
    merged[3:] += 3.0 * up.lora_B[1].detach() @ up.lora_A[1].detach()
    torch.testing.assert_close(found, x @ merged.T)
    with pytest.raises(TypeError, match="Leave experts out of model.lora.targets"):
        torch.matmul(x, adapted)  # type: ignore[call-overload]


def test_what_is_added_to_one_of_two_matrices_in_a_tensor_is_its_own_pairs_product() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 6), torch.randn(4, 2)
    delta = StackDelta([None, (a, b)], rows=4, scaling=3.0)
    assert torch.equal(delta.of(((1, 3), (0, 6))), torch.zeros(2, 6))
    torch.testing.assert_close(delta.of(((5, 8), (2, 6))), 3.0 * (b @ a)[1:4, 2:6])
