"""Packs experts' weights in MXFP4 as gpt-oss's makers publish theirs, and says what the bytes mean, one
by one.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PACKED = ("gate_up_proj", "down_proj")


def value_of(code: int) -> float:
    """Returns the number of e2m1 that these 4 bits are: a sign, 2 bits of exponent, 1 of fraction."""
    sign = -1.0 if code & 8 else 1.0
    exponent, fraction = (code >> 1) & 3, code & 1
    if exponent == 0:
        return sign * fraction / 2
    return sign * (1 + fraction / 2) * 2.0 ** (exponent - 1)


def meant(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns what blocks [R, G, 16] and scales [R, G] say, in float64 [R, 32 G]."""
    rows, groups, _ = blocks.shape
    found = torch.empty(rows, 32 * groups, dtype=torch.float64)
    for row in range(rows):
        for group in range(groups):
            scale = 2.0 ** (int(scales[row, group]) - 127)
            for place in range(16):
                byte = int(blocks[row, group, place])
                found[row, 32 * group + 2 * place] = value_of(byte & 15) * scale
                found[row, 32 * group + 2 * place + 1] = value_of(byte >> 4) * scale
    return found


def drawn(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns random blocks [*shape, 16], with a 6 in each group, and scales around 2 ** -5."""
    source = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=source, dtype=torch.uint8)
    blocks[..., 3] = blocks[..., 3] & 0xF0 | 7
    return blocks, torch.randint(120, 125, shape, generator=source, dtype=torch.uint8)


def pack_folder(source: Path, target: Path) -> dict[str, Tensor]:
    """Writes the gpt-oss folder `source` with random packed experts' weights. Returns the tensors
    that the packed folder means, in bfloat16.
    """
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    stored: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if not name.endswith(PACKED):
            stored[name] = means[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        blocks, scales = drawn(experts, rows, columns // 32, seed=number)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = [meant(b, s).T for b, s in zip(blocks, scales, strict=True)]
        means[name] = torch.stack(whole).bfloat16()
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"dtype": "bfloat16", "quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}}  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return means
