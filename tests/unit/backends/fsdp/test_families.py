"""Decoders of transformers, packed or padded by us, against transformers' own row by row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rftmega.backends.decoder import describe
from rftmega.backends.decoder.parameter_places import Placed, places_of, plans_of, read
from rftmega.backends.fsdp import module as fsdp_module
from rftmega.backends.fsdp.decoder_inputs import feed
from rftmega.backends.fsdp.module import Built
from rftmega.backends.fsdp.sharding import materialise
from rftmega.backends.fsdp.support import refusal_to_pack
from rftmega.core.errors import CheckpointError
from rftmega.core.shards import Shard
from rftmega.model_providers import transformers_decoders
from rftmega.model_providers.output_head import OutputHead
from rftmega.models.hf.hf_folder import HFFolder
from tests.tiny_decoders import FAMILIES, VOCABULARY, built_of, save_decoder
from tests.tiny_vision import save_tiny_vision

LENGTHS = (9, 2, 15, 9, 30, 1)
TEMPERATURE = 0.8
PACKED = {
    *("qwen3", "qwen3-tied", "llama", "mistral with a window", "gemma3", "glm4", "olmo2", "phi3"),
    *("gpt-oss", "qwen3-moe", "mixtral", "granite", "cohere", "gemma2"),
    *("phi", "phi-tied", "phimoe"),
}


def rows(first: int = 3) -> tuple[Tensor, Tensor]:
    """Rows that begin with the word `first`, and their lengths."""
    torch.manual_seed(7)
    lengths = torch.tensor(LENGTHS)
    tokens = torch.randint(3, VOCABULARY, (len(LENGTHS), max(LENGTHS)))
    tokens[:, 0] = first
    return tokens * (torch.arange(max(LENGTHS)) < lengths[:, None]), lengths


def loaded(folder: Path) -> tuple[Built, dict[str, list[Placed]], dict[str, Tensor]]:
    """Builds the network of a folder in this process, whole; with its parameters by name."""
    files = HFFolder(folder)
    built = built_of(folder)
    parameters = dict(built.network.named_parameters())
    shapes = {name: tuple(parameters[own].shape) for own, name in built.names.items()}
    places = places_of(built.model, shapes, files, allowed={"lm_head.weight"})
    materialise(built.network, built.model, torch.device("cpu"))
    built.network.eval()  # phimoe draws its experts while it learns
    named = {built.names[own]: each for own, each in built.network.named_parameters()}
    for name, parameter in named.items():
        read(files, shards_of(name, places[name], parameter.detach()))
    return built, places, named


def shards_of(name: str, places: list[Placed], tensor: Tensor, first: int = 0) -> list[Shard]:
    end = first + len(tensor)
    plans = plans_of(name, places, (first, end), torch.float32, opens=False)
    return [plan.of(tensor) for plan in plans]


def of_transformers(folder: Path, first: int = 3) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Log-probs row by row with whole logits, and the gradient of a weighted sum of them."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    tokens, lengths = rows(first)
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        if length > 1:
            logits = model(input_ids=row[None, : length - 1], use_cache=False).logits[0]
            every = (logits / TEMPERATURE).log_softmax(-1)
            logp = every.gather(-1, row[1:length, None])[:, 0]
            (logp * torch.arange(1, length)).sum().backward()
            found.append(logp.detach())
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return found, {name: each for name, each in gradients.items() if each is not None}


def worst(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor]) -> float:
    largest = max(float(each.abs().max()) for each in wanted.values())
    assert found.keys() >= wanted.keys()
    differences = []
    for name, each in wanted.items():
        gradient = found[name]
        assert gradient is not None, name
        differences.append(float((gradient - each).abs().max()) / largest)
    return max(differences)


# tests/mutations.jsonl names these
UNLIKE = ("cohere", "gemma2", "gpt-oss", "granite", "llama", "mistral with a window", "phi")


@pytest.mark.parametrize(
    "family",
    [pytest.param(x, marks=[] if x in UNLIKE else [pytest.mark.ranks]) for x in sorted(FAMILIES)],
)
def test_log_probs_and_gradients_are_transformers_own_row_by_row(
    family: str, tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path, family)
    built, _, named = loaded(folder)
    assert (built.unpacked is None) == (family in PACKED), built.unpacked
    tokens, lengths = rows()
    fed = feed(tokens, lengths, packed=built.unpacked is None, where=torch.device("cpu"))
    logp, _ = built.network(fed.arguments, fed.places, fed.targets, TEMPERATURE)
    wanted, gradients = of_transformers(folder)
    torch.testing.assert_close(logp.detach(), torch.cat(wanted), rtol=0, atol=1e-5)
    weights = [torch.arange(1.0, length) for length in LENGTHS]
    (logp * torch.cat(weights)).sum().backward()
    found = {name: parameter.grad for name, parameter in named.items()}
    assert worst(found, gradients) < 1e-5


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("layer_types", ["full_attention", "chunked_attention", "full_attention"], "chunked_att"),
        ("attention_chunk_size", 4, "within chunks"),
        ("sliding_window", 4, "not told its window"),
    ],
)
def test_a_model_whose_config_says_more_than_its_attention_is_told_is_not_packed(
    field: str, value: object, said: str, tmp_path: Path
) -> None:
    model = built_of(save_decoder(tmp_path, "llama")).model
    assert refusal_to_pack(model) is None
    setattr(model.config, field, value)
    assert said in str(refusal_to_pack(model))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("cu_seq_lens_q"), "(KeyError: 'cu_seq_lens_q')"),
        (
            RuntimeError("nonzero has no meta. To allow it, set x=True.."),
            "(RuntimeError: nonzero has no meta)",
        ),
        (RuntimeError("long " * 999), "long long"),
    ],
)
def test_what_fails_in_packed_rows_is_said_in_a_line(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, input_ids: Any = None, position_ids: Any = None, **named: object) -> None:
        raise error

    model = built_of(save_decoder(tmp_path, "llama")).model
    monkeypatch.setattr(type(model.model), "forward", fails)
    found = str(refusal_to_pack(model))
    assert said in found
    assert len(found) < 250


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "phi3", "gpt-oss", "gemma3"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_process_reads_its_own_rows_and_all_of_them_are_the_folder(
    family: str, ranks: int, tmp_path: Path
) -> None:
    folder = save_decoder(tmp_path, family)
    files = HFFolder(folder)
    _, places, named = loaded(folder)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(wanted.named_parameters())
    read_bytes, held = 0, {name: torch.zeros(files.shape_of(name)) for name in files.names}
    for name, whole in named.items():
        assert torch.equal(whole, parameters[name]), name
        block = -(-len(whole) // ranks)
        for first in range(0, len(whole), block):
            mine = torch.full_like(whole[first : first + block], torch.nan)
            shards = shards_of(name, places[name], mine, first)
            read_bytes += read(files, shards)
            assert torch.equal(mine, whole[first : first + block]), name
            for shard in shards:
                for number, hf_name in enumerate(shard.logical.names):
                    for box, elements in shard.views(number):
                        held[hf_name][tuple(slice(*edges) for edges in box)] = elements
    assert read_bytes == sum(each.nbytes for each in named.values())
    on_disk = {}
    for file in files.files:
        on_disk |= load_file(file)
    assert all(torch.equal(held[name], tensor) for name, tensor in on_disk.items())


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ({"model.stranger.weight": torch.ones(2)}, "no parameter for, 'model.stranger.weight'"),
        ({"model.norm.weight": torch.ones(3)}, "model.norm.weight is .32. by config.json"),
        ({"model.norm.weight": None}, "holds no model.norm.weight"),
    ],
)
def test_a_folder_that_is_not_the_models_is_refused(
    planted: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    folder = save_decoder(tmp_path, "qwen3")
    (file,) = HFFolder(folder).files
    tensors = {name: each for name, each in (load_file(file) | planted).items() if each is not None}
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message):
        loaded(folder)


def test_angles_that_old_folders_hold_are_not_taken_for_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = save_decoder(tmp_path, "llama")
    (file,) = HFFolder(folder).files
    angles = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(3)}
    save_file(load_file(file) | angles, file, {"format": "pt"})
    _, places, _ = loaded(folder)
    assert angles.keys().isdisjoint(place.name for each in places.values() for place in each)


def test_a_moe_that_sees_is_refused_before_a_model_is_built(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model_type=qwen3_vl_moe has more than a decoder"):
        loaded(save_tiny_vision(tmp_path, "qwen3_vl_moe"))


def test_a_tensor_that_transformers_transposes_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_vision(tmp_path, "qwen3_vl_moe")
    for module in (describe, transformers_decoders, fsdp_module):
        monkeypatch.setattr(module, "SEEING", ("qwen3_vl_moe",))
    with pytest.raises(
        CheckpointError, match="down_proj of model_type=qwen3_vl_moe another tensor by Transpose"
    ):
        loaded(folder)


class Forgetful(torch.nn.Module):
    """Forgetful has a buffer that no checkpoint has and that nobody makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)


def test_a_buffer_that_nobody_makes_anew_is_refused(tmp_path: Path) -> None:
    built = built_of(save_decoder(tmp_path, "qwen3"))
    built.model.base_model.layers[0].add_module("forgetful", Forgetful())
    with pytest.raises(
        CheckpointError, match="Forgetful of Qwen3ForCausalLM has buffers .'angles'"
    ):
        materialise(built.network, built.model, torch.device("cpu"))


def test_a_scale_before_the_head_leaves_its_bias_alone() -> None:
    torch.manual_seed(3)
    linear = torch.nn.Linear(8, VOCABULARY)
    hidden, targets = torch.randn(5, 8), torch.randint(0, VOCABULARY, (5,))
    head = fsdp_module.LogProbHead(OutputHead(linear, before=3.0, after=0.25))
    logp, _ = head(hidden, targets, TEMPERATURE)
    every = (0.25 * linear(3.0 * hidden) / TEMPERATURE).log_softmax(-1)
    torch.testing.assert_close(logp, every.gather(-1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
