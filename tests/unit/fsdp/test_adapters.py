"""Which linear layers of transformers' models have adapters, and what one computes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from rftmega.config import LoRA
from rftmega.errors import ConfigError
from rftmega.fsdp.adapters import LinearWithPair
from rftmega.hf_folders.adapted_linears import linears_of, targets_of
from rftmega.hf_folders.decoder import read_config
from rftmega.hf_folders.meta_decoder import on_meta
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
    layers = linears_of(model, targets)
    assert targets_of(layers) == set(found)
    assert len(layers) == 3 * len(found)
    assert "lm_head" not in layers


@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-next"])
def test_experts_in_one_tensor_are_refused_with_what_can_be_had(
    family: str, tmp_path: Path
) -> None:
    model = on_meta(read_config(save_decoder(tmp_path, family)), "eager")
    for targets in ((), ("q_proj", "down_proj")):
        with pytest.raises(
            ConfigError, match=r"keeps the experts .* in one tensor \(model.layers.0"
        ):
            linears_of(model, targets)


def test_a_model_with_a_tower_can_have_no_adapters(tmp_path: Path) -> None:
    model = on_meta(read_config(save_tiny_vision(tmp_path, "qwen2_vl")), "eager")
    with pytest.raises(ConfigError, match="has a tower beside its decoder"):
        linears_of(model, ())


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
