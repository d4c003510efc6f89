"""Adapters without anything of ours: transformers' model, torch's AdamW, one row at a time, and PEFT
folders read and written in a few lines.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."
Pairs = dict[str, tuple[Tensor, Tensor]]  # by the module's name: A [r, in], B [out, r]


class WithPair(nn.Module):
    """A linear layer and alpha / r times B A beside it."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scaling: float):
        super().__init__()
        self.base, self.scaling = base, scaling
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * F.linear(F.linear(x, self.a), self.b)


def random_pairs(
    folder: Path, *, rank: int, targets: Sequence[str] = ALL, spread: float = 0.02
) -> Pairs:
    """Both matrices of every target are random: a B of zeros would hide mistakes."""
    random = torch.Generator().manual_seed(5)
    found = {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in targets:
            a = torch.randn(rank, module.in_features, generator=random)
            b = torch.randn(module.out_features, rank, generator=random)
            found[name] = a / module.in_features**0.5, spread * b
    return found


def adapted(folder: Path, pairs: Pairs, *, alpha: float) -> Any:
    """The model of a folder, frozen, with pairs that learn."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.requires_grad_(False)
    for name, (a, b) in pairs.items():
        above, leaf = name.rsplit(".", 1)
        parent = model.get_submodule(above)
        setattr(parent, leaf, WithPair(getattr(parent, leaf), a, b, alpha / len(a)))
    return model


def pairs_of(model: Any) -> Pairs:
    return {
        name: (module.a.detach(), module.b.detach())
        for name, module in model.named_modules()
        if isinstance(module, WithPair)
    }


def learn(
    model: Any, rows: Sequence[list[int]], *, steps: int, clip: float, **adam: Any
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: the mean over all rows' answers, whose prompts are a token."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, foreach=False, **adam)
    count = sum(len(row) - 1 for row in rows)
    told = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for row in rows:
            if len(row) > 1:
                logits = model(torch.tensor([row[:-1]])).logits[0]
                loss = F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum") / count
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        told.append((total, norm.item()))
    return told


def write_pairs(folder: Path, pairs: Pairs, *, alpha: float, **more: Any) -> Path:
    """Writes a PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": len(next(iter(pairs.values()))[0]),
        "lora_alpha": alpha,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in pairs}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(said | more))
    return folder


def merged_by_hand(base: Path, adapter: Path) -> dict[str, Tensor]:
    """The folder's weights plus alpha / r times B A of a PEFT folder, in float64."""
    said = json.loads((adapter / "adapter_config.json").read_text())
    found = {
        name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()
    }
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix(PREFIX).replace(".lora_A", "")
            found[weight] += said["lora_alpha"] / said["r"] * (b.double() @ a.double())
    return found
