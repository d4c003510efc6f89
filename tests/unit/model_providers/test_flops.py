from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Qwen2AudioForConditionalGeneration,
)

from rftmega.backends.runner.flops import (
    BACKWARD,
    audio_flops,
    forward_flops,
    head_cost,
    media_costs,
    row_cost,
    tower_flops,
)
from rftmega.core.media_positions import PlacedImage, RowImages
from rftmega.model_providers.description import ModelDescription, describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.model_providers.tower import AudioTower
from tests.tiny_audio import save_tiny_audio
from tests.tiny_models import save_tiny
from tests.tiny_vision import KINDS, save_tiny_vision


@pytest.mark.parametrize(
    "variant",
    [
        *("qwen3", "qwen2-tied", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "glm4-moe"),
        "arcee",
    ],
)
def test_the_operations_of_a_forward_pass_are_those_that_torch_counts_in_transformers(
    variant: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, variant)
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    description = describe(read_hf_config(folder))
    for tokens in (7, 61):  # where the projections dominate, and where attention's square counts
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.randint(0, 131, (2, tokens)))
        assert forward_flops(description, [tokens] * 2) == pytest.approx(
            counter.get_total_flops(), rel=0.01
        )


def test_a_gated_delta_net_multiplies_each_token_with_its_states(tmp_path: Path) -> None:
    model = describe(read_hf_config(save_tiny(tmp_path, "qwen3.5")))
    without = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for layer in without.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.forward = layer.linear_attn.out_proj.forward  # counted by hand
            layer.linear_attn.register_forward_pre_hook(
                lambda _, given, named: ((named["hidden_states"].repeat(1, 1, 2)[..., :96],), {}),
                with_kwargs=True,
            )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        without(torch.randint(0, 131, (1, 50)))
    rows = 4 * 16 * 2 + 8 * 12 * 2 + 8 * 2  # queries and keys, values and gates, two numbers a head
    projections, convolution = 64 * rows, 4 * (4 * 16 * 2 + 8 * 12)
    states = 3 * 8 * 16 * 12  # read, written and read again
    by_hand = 2 * 50 * 3 * (projections + convolution + states)
    assert forward_flops(model, [50]) == pytest.approx(
        counter.get_total_flops() + by_hand, rel=1e-6
    )


def of_a_token(model: ModelDescription) -> float:
    """FLOPs of a token in the layers, without its pairs with other tokens."""
    one, two = (forward_flops(model, [tokens], predicted=0) for tokens in (1, 2))
    return one - (two - 2 * one) / 2  # n tokens: n x the result + n^2 x the pairs'


@pytest.mark.parametrize("variant", ["qwen3", "gpt-oss", "deepseek-v3", "qwen3.5"])
def test_a_row_costs_its_tokens_and_the_pairs_that_masks_leave(
    variant: str, tmp_path: Path
) -> None:
    model = describe(read_hf_config(save_tiny(tmp_path, variant)))
    tokens, token = 40, of_a_token(model)
    pair = (forward_flops(model, [1], predicted=0) - token) / model.attention_layers
    window = model.window or tokens
    causal = [(i, j) for i in range(tokens) for j in range(i + 1)]
    inside = sum(i - j < window for i, j in causal)
    assert bool(model.windowed) == (variant == "gpt-oss")
    full = model.attention_layers - len(model.windowed)
    pairs = full * len(causal) + len(model.windowed) * inside
    assert row_cost(model)(tokens) == pytest.approx(tokens + pairs * pair / token)


def test_the_head_and_the_images_are_counted_in_tokens_of_the_layers(tmp_path: Path) -> None:
    kind = next(iter(KINDS))
    model = describe(read_hf_config(save_tiny_vision(tmp_path, kind)))
    token = of_a_token(model)
    head = forward_flops(model, [1]) - forward_flops(model, [1], predicted=0)
    assert head_cost(model) == pytest.approx(head / token)
    assert model.tower is not None
    grids = [(1, 4, 8), (1, 8, 8)]
    placed = [PlacedImage("x", digest=str(grid), grid=grid, start=0, tokens=1) for grid in grids]
    images = RowImages(((placed[0],), (), (placed[0], placed[1])))
    one, other = (tower_flops(model.tower, [grid]) / token for grid in grids)
    assert media_costs(model, images) == pytest.approx([one, 0.0, one + other])


def test_learning_takes_three_forward_passes(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.randint(0, 131, (1, 50))
    with FlopCounterMode(display=False) as counter:
        model(
            inputs_embeds=model.get_input_embeddings()(ids).requires_grad_()
        ).logits.sum().backward()
    flops = (1 + BACKWARD) * forward_flops(describe(read_hf_config(folder)), [50])
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_value_head_takes_the_place_of_the_logits(tmp_path: Path) -> None:
    description = describe(read_hf_config(save_tiny(tmp_path, "llama")))
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 131, (1, 20)))
    assert forward_flops(description, [20], value_head=True) == pytest.approx(
        counter.get_total_flops(), rel=0.001
    )


def test_rows_of_a_windowed_layer_grow_no_faster_than_their_tokens(tmp_path: Path) -> None:
    description = describe(read_hf_config(save_tiny(tmp_path, "mistral-window")))
    assert description.window == 8
    short, long = (forward_flops(description, [n]) for n in (16, 32))
    assert long == 2 * short
    # below the window a row is its own square
    assert forward_flops(description, [4]) > short / 4 * 0.9
    assert forward_flops(description, [4]) < short / 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_s_operations_are_those_that_torch_counts(kind: str, tmp_path: Path) -> None:
    """Of images whose windows are cut off at their edges, too."""
    folder = save_tiny_vision(tmp_path, kind)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    tower = describe(read_hf_config(folder)).tower
    assert tower is not None
    for grids in ([(1, 4, 4)], [(1, 6, 10), (1, 14, 2)]):
        patches = torch.randn(sum(h * w for _, h, w in grids), tower.patch_width)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.model.visual(patches, grid_thw=torch.tensor(grids))
        assert tower_flops(tower, grids) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_operations_of_a_tower_that_hears_are_those_that_torch_counts(tmp_path: Path) -> None:
    folder = save_tiny_audio(tmp_path)
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    description = describe(read_hf_config(folder))
    assert isinstance(description.tower, AudioTower)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoded = model.model.audio_tower(torch.randn(1, 16, 100)).last_hidden_state
        model.model.multi_modal_projector(encoded)
    counted = audio_flops(description.tower, description.hidden)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)
