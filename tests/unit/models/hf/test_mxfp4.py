"""Weights of 4 bits: what is read is what the bytes say and what transformers reads, and what is
written is the nearest of what 4 bits can say.
"""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rftmega.converters.mxfp4 import MXFP4
from rftmega.core.errors import CheckpointError
from rftmega.models.hf.hf_folder import PlannedTensor, write_shard
from rftmega.models.hf.mxfp4_files import MXFP4Folder, MXFP4Format
from rftmega.models.hf.quantised_folder import Quantising, is_quantised, open_quantised
from rftmega.models.kernels.mxfp4 import dequantised, quantise
from tests.packed_weights import drawn, meant, value_of

NAME = "model.layers.0.mlp.experts.down_proj"
MAGNITUDES = sorted({abs(value_of(code)) for code in range(16)})


def written(folder: Path, **more: torch.Tensor) -> tuple[MXFP4Folder, torch.Tensor]:
    """A folder of 3 experts with 64 columns and 5 rows, and what it means [3, 64, 5]."""
    blocks, scales = drawn(3, 5, 2)
    folder.mkdir(exist_ok=True)
    stored = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales, "norm": torch.rand(4), **more}
    save_file(stored, folder / "model.safetensors")
    means = torch.stack([meant(b, s).T for b, s in zip(blocks, scales, strict=True)])
    return MXFP4Folder(folder, MXFP4("bfloat16")), means.bfloat16()


def test_every_piece_is_what_the_bytes_say_and_the_whole_is_what_transformers_reads(
    tmp_path: Path,
) -> None:
    files, means = written(tmp_path)
    shape = (3, 64, 5)
    assert sorted(files.names) == [NAME, "norm"]
    assert files.shape_of(NAME) == shape and files.dtype_of(NAME) == torch.bfloat16
    assert torch.equal(files.whole(NAME, shape), means)
    blocks, scales = drawn(3, 5, 2)
    assert torch.equal(convert_moe_packed_tensors(blocks, scales), means)
    weight = files.slice_of(NAME, shape)
    for experts, columns, rows in product(
        [slice(0, 3), slice(1, 2), slice(2, 2)],
        [slice(0, 64), slice(7, 33), slice(32, 64), slice(40, 41), slice(5, 5)],
        [slice(0, 5), slice(2, 4)],
    ):
        assert torch.equal(weight[experts, columns, rows], means[experts, columns, rows])
    assert torch.equal(weight[1:3], means[1:3])
    parts = [torch.empty(n, 64, 5, dtype=torch.bfloat16) for n in (1, 2)]
    files.fill(parts, NAME, shape)
    assert torch.equal(torch.cat(parts), means)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32),
    st.integers(-40, 30),
)
def test_each_number_becomes_the_nearest_that_its_group_has(
    numbers: list[float], power: int
) -> None:
    weight = torch.tensor([numbers]) * 2.0**power
    blocks, scales = quantise(weight)
    assert blocks.shape == (1, 1, 16) and scales.shape == (1, 1)
    scale = 2.0 ** (int(scales) - 127)
    back = dequantised(blocks, scales)[0].tolist()
    most = float(weight.abs().max())
    assert most <= 7 * scale
    assert most == 0 or 3.5 * scale < most or scale == 2.0**-127  # no scale is smaller
    for given_, found in zip(weight[0].tolist(), back, strict=True):
        nearest = min(abs(abs(given_) - each * scale) for each in MAGNITUDES)
        assert abs(given_ - found) == pytest.approx(nearest, abs=1e-6 * scale)


def test_what_was_read_is_written_as_the_same_bytes(tmp_path: Path) -> None:
    files, means = written(tmp_path / "a")
    writing = Quantising(MXFP4Format(), files.packed)
    norm = files.whole("norm", (4,))
    planned = [
        PlannedTensor("norm", norm.dtype, (4,)),
        PlannedTensor(NAME, means.dtype, (3, 64, 5)),
    ]
    coming = writing.planned(planned)
    stream = writing.quantised(iter([("norm", norm), (NAME, means)]))
    (tmp_path / "b").mkdir()
    write_shard(tmp_path / "b/model.safetensors", coming, stream)
    one, other = (load_file(tmp_path / f / "model.safetensors") for f in "ab")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    broken = means.clone()
    broken[1, 2, 3] = torch.inf
    with pytest.raises(CheckpointError, match=f"{NAME} holds NaN or infinity"):
        list(writing.quantised(iter([(NAME, broken)])))
    with pytest.raises(CheckpointError, match="48 columns, no multiple of 32"):
        writing.planned([PlannedTensor(NAME, means.dtype, (3, 48, 5))])


def test_a_number_in_the_middle_of_two_goes_to_the_even_code() -> None:
    middles = [(a + b) / 2 for a, b in zip(MAGNITUDES, MAGNITUDES[1:], strict=False)]
    weight = torch.zeros(1, 32)
    weight[0, : len(middles)] = torch.tensor(middles)
    weight[0, 8:15] = -weight[0, :7]
    weight[0, 31] = 6.0  # so the scale is 1
    blocks, scales = quantise(weight)
    assert int(scales) == 127
    back = dequantised(blocks, scales)[0]
    assert back[:7].tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert back[8:15].tolist() == [-0.0, -1, -1, -2, -2, -4, -4]


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    blocks, scales = drawn(3, 5, 2)
    for number, (stored, said) in enumerate(
        [
            ({f"{NAME}_blocks": blocks}, f"holds no '{NAME}_scales'"),
            ({f"{NAME}_scales": scales}, f"holds no '{NAME}_blocks'"),
            ({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales[:, 1:].clone()}, "must be"),
            ({f"{NAME}_blocks": blocks.float(), f"{NAME}_scales": scales}, "is of dtype F32"),
            (
                {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales, NAME: torch.rand(3, 64, 5)},
                "and once more as",
            ),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            MXFP4Folder(folder, MXFP4("bfloat16"))


def test_config_json_says_how_weights_are_stored(tmp_path: Path) -> None:
    written(tmp_path)
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    assert is_quantised(config) and not is_quantised({})
    assert isinstance(open_quantised(tmp_path, config), MXFP4Folder)
    assert open_quantised(tmp_path, config).dtype_of(NAME) == torch.bfloat16
    assert open_quantised(tmp_path, config | {"dtype": "float32"}).dtype_of(NAME) == torch.float32
    with pytest.raises(CheckpointError, match="dtype='int4'"):
        is_quantised(config | {"dtype": "int4"})
    with pytest.raises(CheckpointError, match="quant_method='gptq' is not read"):
        is_quantised(json.loads('{"quantization_config": {"quant_method": "gptq"}}'))
