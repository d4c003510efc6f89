"""Quantises a folder as DeepSeek-V3's makers publish theirs, and says what its numbers mean, one by
one.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LARGEST = 448.0  # of e4m3fn
PLAIN = ("embed_tokens", "lm_head", "mlp.gate.", "norm")  # what is not quantised


def value_of(byte: int) -> float:
    """Returns the number of e4m3fn that these 8 bits are: a sign, 4 bits of exponent, 3 of
    fraction.
    """
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0xF and fraction == 0x7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


VALUES = np.array([value_of(byte) for byte in range(256)])


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns (numbers, one scale a block)."""
    high, wide = block
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    blocks = (-(-weight.shape[0] // high), -(-weight.shape[1] // wide))
    scales = torch.empty(blocks, dtype=torch.float32)
    for down in range(blocks[0]):
        for right in range(blocks[1]):
            rows = slice(down * high, (down + 1) * high)
            columns = slice(right * wide, (right + 1) * wide)
            scales[down, right] = weight[rows, columns].abs().max() / LARGEST
            numbers[rows, columns] = (weight[rows, columns] / scales[down, right]).to(numbers.dtype)
    return numbers, scales


def meant(numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Returns what they say, in float32: each product rounded once."""
    values = VALUES[numbers.view(torch.uint8).numpy()]  # float64
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            values[row, column] *= float(scales[row // block[0], column // block[1]])
    return torch.from_numpy(values.astype(np.float32))


def quantise_folder(source: Path, target: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Writes the folder with its matrices quantised; returns the tensors that it means."""
    target.mkdir(parents=True)
    fields = json.loads((source / "config.json").read_text())
    fields["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (target / "config.json").write_text(json.dumps(fields))
    stored: dict[str, Tensor] = {}
    said: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() != 2 or any(part in name for part in PLAIN):
            stored[name] = said[name] = tensor
            continue
        numbers, scales = quantised(tensor, block)
        stored |= {name: numbers, f"{name}_scale_inv": scales}
        said[name] = meant(numbers, scales, block)
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    return said


def plain_folder(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """Writes the config.json of `source` with other tensors."""
    target.mkdir(parents=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target
