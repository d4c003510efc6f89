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
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

from rftmega.config import OptimizerConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}  # what it calls them
EMBEDDING = "embed_tokens"
STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
PREFIX = "base_model.model."
# by the module's name: A [r, in], B [out, r]; of an embedding A [r, words], B [hidden, r]
Pairs = dict[str, tuple[Tensor, Tensor]]


class WithPair(nn.Module):
    """A linear layer and alpha / r times B A beside it."""

    def __init__(self, base: nn.Module, a: Tensor, b: Tensor, scaling: float):
        super().__init__()
        self.base, self.scaling = base, scaling
        self.a, self.b = nn.Parameter(a.clone()), nn.Parameter(b.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * F.linear(F.linear(x, self.a), self.b)


class EmbeddingWithPair(WithPair):
    """An embedding and alpha / r times B A[x] beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * F.linear(F.embedding(x, self.a.T), self.b)


class StackWithPairs(nn.Module):
    """A layer's experts in one tensor, as transformers keeps them, and alpha / r times B A beside each
    matrix in it.
    """

    def __init__(self, pairs: Sequence[Sequence[tuple[Tensor, Tensor]]], scaling: float):
        """`pairs`: of each expert, those of the matrices that stand one below the other."""
        super().__init__()
        self.scaling = scaling
        self.pairs = nn.ModuleList(
            nn.ModuleList(nn.ParameterList([a.clone(), b.clone()]) for a, b in each)
            for each in pairs
        )

    def forward(self, stack: Tensor) -> Tensor:
        products = [torch.cat([b @ a for a, b in each]) for each in self.pairs]
        return stack + self.scaling * torch.stack(products)


def random_pairs(
    folder: Path, *, rank: int, targets: Sequence[str] = ALL, spread: float = 0.02
) -> Pairs:
    """Both matrices of every target are random: a B of zeros would hide mistakes."""
    random = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shapes = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    shapes |= {
        name: (module.embedding_dim, module.num_embeddings)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    for file in sorted(folder.glob("*.safetensors")):  # which have each expert by itself
        for name, tensor in load_file(file).items():
            if ".experts." in name:
                shapes[name.removesuffix(".weight")] = tuple(tensor.shape)
    found = {}
    for name, (out, into) in shapes.items():
        if name.rsplit(".", 1)[-1] in targets:
            a = torch.randn(rank, into, generator=random)
            b = torch.randn(out, rank, generator=random)
            found[name] = a / into**0.5, spread * b
            if name.endswith(EMBEDDING):  # one column is looked up, not the sum of all
                found[name] = spread * a, b
    return found


def adapted(
    folder: Path, pairs: Pairs, *, alpha: float, kind: Any = AutoModelForCausalLM, **more: Any
) -> Any:
    """The model of a folder, frozen, with pairs that learn, as a value model's head does.

    `kind` of transformers' classes, which reads the folder with `more`.
    """
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind.from_pretrained(folder, dtype=torch.float32, **eager, **more)
    model.requires_grad_(False)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    for stack, names in stacks(pairs).items():
        above, leaf = stack.replace("block_sparse_moe", "mlp").rsplit(".", 1)
        held = [[pairs[name] for name in each] for each in names]
        beside = StackWithPairs(held, alpha / len(held[0][0][0]))
        register_parametrization(model.get_submodule(above), leaf, beside)
    for name, (a, b) in pairs.items():
        if ".experts." in name:
            continue
        above, _, leaf = name.rpartition(".")
        parent = model.get_submodule(above)
        kind_of_pair = EmbeddingWithPair if leaf == EMBEDDING else WithPair
        setattr(parent, leaf, kind_of_pair(getattr(parent, leaf), a, b, alpha / len(a)))
    return model


def stacks(pairs: Pairs) -> dict[str, list[list[str]]]:
    """The tensors that transformers keeps experts in, which all have pairs, and the names of what
    stands in them: of each expert, one below the other.
    """
    experts = {name.rsplit(".", 2)[0] for name in pairs if ".experts." in name}
    found = {}
    for above in experts:
        number = len({name.rsplit(".", 2)[1] for name in pairs if name.startswith(above + ".")})
        for stack, parts in STACKS.items():
            called = [MIXTRAL[part] if "sparse" in above else part for part in parts]
            found[f"{above}.{stack}"] = [
                [f"{above}.{expert}.{part}" for part in called] for expert in range(number)
            ]
    return found


def pairs_of(model: Any, names: Pairs) -> Pairs:
    """What pairs of these names have learnt."""
    found = {
        name: (module.a.detach(), module.b.detach())
        for name, module in model.named_modules()
        if isinstance(module, WithPair)
    }
    for stack, held in stacks(names).items():
        above, leaf = stack.replace("block_sparse_moe", "mlp").rsplit(".", 1)
        (beside,) = model.get_submodule(above).parametrizations[leaf]
        for each, trained in zip(held, beside.pairs, strict=True):
            found |= {
                name: (a.detach(), b.detach()) for name, (a, b) in zip(each, trained, strict=True)
            }
    assert found.keys() == names.keys()
    return found


def learn(
    model: Any, rows: Sequence[list[int]], chosen: OptimizerConfig, *, steps: int
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step: the mean over all rows' answers, whose prompts are a token."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        foreach=False,
        lr=chosen.learning_rate,
        eps=chosen.epsilon,
        weight_decay=chosen.weight_decay,
        betas=(chosen.beta1, chosen.beta2),
    )
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
        norm = nn.utils.clip_grad_norm_(parameters, chosen.clip_grad)
        optimizer.step()
        told.append((total, norm.item()))
    return told


def learn_values(
    model: Any,
    rows: Sequence[list[int]],
    prompts: Sequence[int],
    targets: Tensor,
    *,
    steps: int,
    clip: float,
    weight_decay: float,
    **adam: Any,
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a token classifier: the mean square of what its values of
    answers' tokens are off `targets` [B, T], one row at a time. A bias does not decay.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, foreach=False, **adam)
    count = sum(len(row) - prompt for row, prompt in zip(rows, prompts, strict=True))
    told = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for row, prompt, target in zip(rows, prompts, targets, strict=True):
            if len(row) > prompt:
                found = values(model, row)[prompt - 1 :]
                wanted = target[prompt - 1 : len(row) - 1]
                loss = (found - wanted).square().sum() / count
                loss.backward()
                total += loss.item()
        norm = nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        told.append((total, norm.item()))
    return told


def values(model: Any, row: list[int]) -> Tensor:
    """[n - 1]: what a token classifier says of a row's tokens before the last."""
    found: Tensor = model(torch.tensor([row])).logits[0, :-1, 0]
    return found


def assert_pairs(found: dict[str, Tensor], model: Any, pairs: Pairs) -> None:
    """Compares matrices by PEFT's names with those that the model has learnt."""
    for module, pair in pairs_of(model, pairs).items():
        matrices = [found[name] for name in names_of(module)]
        torch.testing.assert_close(matrices, list(pair), atol=2e-5, rtol=1e-4)


def names_of(module: str) -> tuple[str, str]:
    """PEFT's names of a pair."""
    if module.endswith(EMBEDDING):
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def write_pairs(folder: Path, pairs: Pairs, *, alpha: float, **more: Any) -> Path:
    """Writes a PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for module, pair in pairs.items():
        for name, matrix in zip(names_of(module), pair, strict=True):
            tensors[PREFIX + name] = matrix.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": len(next(iter(pairs.values()))[0]),
        "lora_alpha": alpha,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in pairs}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(said | more))
    return folder


def merged_by_hand(
    base: Path, adapter: Path, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The folder's weights, read in `dtype`, plus alpha / r times B A of a PEFT folder, in float64."""
    said = json.loads((adapter / "adapter_config.json").read_text())
    found = {
        name: tensor.to(dtype).double()
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix(PREFIX).replace(".lora_A", "")
            found[weight] += said["lora_alpha"] / said["r"] * (b.double() @ a.double())
        if ".lora_embedding_A" in name:
            b = tensors[name.replace("embedding_A", "embedding_B")]
            weight = name.removeprefix(PREFIX).replace("lora_embedding_A", "weight")
            found[weight] += said["lora_alpha"] / said["r"] * (b.double() @ a.double()).T
    return found
