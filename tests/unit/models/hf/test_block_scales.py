"""Folders of 8-bit numbers with a scale a block: every piece of a weight is what the numbers and
their scales say, and what is no such folder is refused.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rftmega.converters.block_scales import BlockScales, block_scales
from rftmega.core.errors import CheckpointError
from rftmega.model_providers.description import describe
from rftmega.model_providers.hf_config import read_hf_config
from rftmega.models.hf.block_scaled_files import BlockScaledFolder, BlockScaledFormat
from rftmega.models.hf.hf_folder import PlannedTensor, copy_companions
from rftmega.models.hf.quantised_folder import Quantising
from rftmega.models.hf.stacked_files import open_folder
from rftmega.models.kernels.block_scaled import quantise
from tests.block_scales import meant, quantise_folder, quantised
from tests.tiny_models import save_tiny
from tests.tiny_vision import save_tiny_vision

WEIGHT = "a.weight"
SCALES = "a.weight_scale_inv"
QUANTISED = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"a.{name}": each for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(5, 11), st.integers(5, 11)),
    block=st.tuples(st.integers(2, 7), st.integers(2, 7)),
    edges=st.tuples(*[st.integers(0, 11)] * 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_every_piece_of_a_weight_is_its_numbers_times_their_scales(
    shape: tuple[int, int],
    block: tuple[int, int],
    edges: tuple[int, ...],
    dtype: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    torch.manual_seed(sum(shape))
    numbers, scales = quantised(torch.randn(shape), block)
    folder = written(tmp_path_factory.mktemp("f"), weight=numbers, weight_scale_inv=scales)
    whole = meant(numbers, scales, block).to(getattr(torch, dtype))
    files = BlockScaledFolder(folder, BlockScales(*block, dtype))
    top, bottom = sorted(edge % (shape[0] + 1) for edge in edges[:2])
    left, right = sorted(edge % (shape[1] + 1) for edge in edges[2:])
    weight = files.slice_of(WEIGHT, shape)
    for begin, end in combinations(range(shape[0] + 1), 2):
        assert torch.equal(weight[begin:end], whole[begin:end])
    for begin, end in combinations(range(shape[1] + 1), 2):
        assert torch.equal(weight[:, begin:end], whole[:, begin:end])
    assert torch.equal(weight[top:bottom, left:right], whole[top:bottom, left:right])
    assert torch.equal(files.whole(WEIGHT, shape), whole)
    rows = [torch.empty(n, shape[1], dtype=whole.dtype) for n in (top, shape[0] - top)]
    told = files.fill(rows, WEIGHT, shape)
    assert torch.equal(torch.cat(rows), whole)
    assert told == xxhash.xxh3_64_hexdigest(whole.contiguous().view(torch.uint8).numpy())


def test_scales_are_no_tensors_of_the_folder(tmp_path: Path) -> None:
    numbers, scales = quantised(torch.randn(4, 4), (2, 2))
    bias = torch.ones(3, dtype=torch.bfloat16)
    written(tmp_path, weight=numbers, weight_scale_inv=scales, bias=bias)
    files = BlockScaledFolder(tmp_path, BlockScales(2, 2, "float16"))
    assert sorted(files.names) == ["a.bias", WEIGHT]
    assert SCALES not in files
    assert WEIGHT in files
    assert files.elements == 16 + 3
    assert (files.dtype_of(WEIGHT), files.dtype_of("a.bias")) == (torch.float16, torch.bfloat16)
    assert torch.equal(files.whole("a.bias", (3,)), bias)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"weight_scale_inv": torch.ones(2, 2)}, "weight_scale_inv', and no weight that it scales"),
        (
            {"weight": torch.ones(4, 4), "weight_scale_inv": torch.ones(2, 2)},
            "a.weight is of dtype F32 and has scales; F8_E4M3 has them",
        ),
        (
            {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)},
            "a.weight is of dtype F8_E4M3; weights are",
        ),
        (
            {
                "weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
                "weight_scale_inv": torch.ones(2, 1),
            },
            r"a.weight_scale_inv has shape \(2, 1\); config.json asks for \(2, 2\)",
        ),
        (
            {
                "weight": torch.ones(4, 5).to(torch.float8_e4m3fn),
                "weight_scale_inv": torch.ones(2, 2),
            },
            r"a.weight has shape \(4, 5\); config.json asks for \(4, 4\)",
        ),
    ],
)
def test_scales_that_do_not_fit_their_weight_are_refused_by_name(
    tensors: dict[str, torch.Tensor], complaint: str, tmp_path: Path
) -> None:
    written(tmp_path, **tensors)
    with pytest.raises(CheckpointError, match=complaint):
        BlockScaledFolder(tmp_path, BlockScales(2, 2, "bfloat16")).slice_of(WEIGHT, (4, 4))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not read"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\]"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\]"),
        ({"fmt": "e5m2"}, "fmt='e5m2'"),
        ({"kv_cache_scheme": {}}, "kv_cache_scheme={}, which is not honoured"),
        ("fp8", "quant_method='fp8' is not read"),
    ],
)
def test_another_way_of_quantising_is_refused_by_name(fields: Any, complaint: str) -> None:
    said = fields
    if isinstance(fields, dict):
        said = fields if "quant_method" in fields else QUANTISED | fields
    with pytest.raises(CheckpointError, match=complaint):
        block_scales({"quantization_config": said})


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "float32"}, "float32")],
)
def test_the_dtype_of_a_quantised_folder_is_that_of_config_json(
    fields: dict[str, str], dtype: str
) -> None:
    said = fields | {"quantization_config": QUANTISED}
    assert block_scales(said) == BlockScales(128, 128, dtype)
    with pytest.raises(CheckpointError, match="dtype='int8'"):
        block_scales(said | {"dtype": "int8"})


def test_a_folder_of_experts_in_one_tensor_is_not_read_quantised(tmp_path: Path) -> None:
    fields = read_hf_config(save_tiny_vision(tmp_path, "qwen3_vl_moe"))
    open_folder(tmp_path, fields)
    with pytest.raises(CheckpointError, match="experts in one tensor are not read"):
        open_folder(tmp_path, fields | {"quantization_config": QUANTISED})


def test_a_copy_of_config_json_does_not_say_that_weights_are_quantised(tmp_path: Path) -> None:
    plain = save_tiny(tmp_path / "plain", "deepseek-v3")
    said = quantise_folder(plain, tmp_path / "quantised", (16, 16))
    hf_config = read_hf_config(tmp_path / "quantised")
    assert describe(hf_config) == describe(read_hf_config(plain))
    files = open_folder(tmp_path / "quantised", hf_config)
    assert set(files.names) == set(said) == set(load_file(plain / "model.safetensors"))
    (tmp_path / "copy").mkdir()
    told = copy_companions(tmp_path / "quantised", tmp_path / "copy", {})
    assert told is not None
    assert "num_nextn_predict_layers=0" in told
    assert "config.json has no quantization_config: the weights are written unquantised" in told
    wanted = json.loads((plain / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    assert read_hf_config(tmp_path / "copy") == wanted


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 11), st.integers(1, 11)),
    block=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_a_weight_is_quantised_as_block_by_block(
    shape: tuple[int, int], block: tuple[int, int], dtype: str
) -> None:
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape).to(getattr(torch, dtype))
    numbers, scales = quantise(weight, *block)
    wanted, wanted_scales = quantised(weight.float(), block)
    assert torch.equal(numbers.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_a_block_of_zeros_stays_zero_and_what_is_not_finite_is_named() -> None:
    layout = BlockScales(2, 2, "bfloat16")
    weight = torch.tensor([[0.0, 0.0, 3.0], [0.0, 0.0, -448.0]])
    numbers, scales = quantise(weight, layout.rows, layout.columns)
    assert torch.equal(numbers.float(), weight)
    assert scales.tolist() == [[1.0, 1.0]]
    writing = Quantising(BlockScaledFormat(layout), {WEIGHT})
    planned = [PlannedTensor(name, torch.float32, (2, 3)) for name in (WEIGHT, "b")]
    given = [(each.name, each.dtype, each.shape) for each in writing.planned(planned)]
    found = writing.quantised([(WEIGHT, weight), ("b", weight)])
    assert given == [(name, each.dtype, tuple(each.shape)) for name, each in found]
    assert [name for name, _, _ in given] == [WEIGHT, SCALES, "b"]
    weight[1, 2] = torch.nan
    with pytest.raises(CheckpointError, match=f"{WEIGHT} holds NaN or infinity"):
        list(writing.quantised([(WEIGHT, weight)]))
