"""Options of adapters: small matrices that learn in place of the model's own (LoRA)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rftmega.config.options.bounds import BelowOne, NotNegativeInt, Positive

# what vLLM takes as max_lora_rank
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# the linear layers of attention, MLP and experts: in Hugging Face's folders, and in Megatron's modules
HF_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("w1", "w2", "w3"),  # of Mixtral's experts: gate, down, up
)
# those of attention, which no expert has
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
# what turns words into vectors, and these into logits: have an adapter where they are named alone
EMBEDDING, HEAD = "embed_tokens", "lm_head"
MEGATRON_EMBEDDING, MEGATRON_HEAD = "word_embeddings", "output_layer"
OF_VOCABULARY = (EMBEDDING, HEAD, MEGATRON_EMBEDDING, MEGATRON_HEAD)
MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

# with one scale, of base_on_host=int8: shards of a row have the scales of the whole one where they
# begin at a multiple
COLUMNS_OF_A_SCALE = 64


@dataclass
class LoRA:
    rank: NotNegativeInt = 0
    """Rank of an adapter on each target of whatever learns: policy, critic, reward model. Its own
    weights are frozen then, but for a value head. 0: none, all of the model learns
    (docs/adapters.md).
    """

    alpha: Positive = 32.0
    """What an adapter gives is multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that larger ranks do not learn more slowly (rsLoRA,
    arXiv:2312.03732).
    """

    targets: list[str] = field(default_factory=list)
    """Layers with an adapter, by their names in Hugging Face's folder (q_proj, down_proj) or in
    Megatron (linear_qkv); empty: all linear layers of attention, MLP and experts. Embedding and
    output head, embed_tokens and lm_head, have one where they are named.
    """

    push: Literal["auto", "merged", "adapters"] = "auto"
    """What engines get: the adapters by themselves, unrounded (vLLM), or weights with the adapters
    added, rounded to the engine's precision, which in bfloat16 loses much of a small update. auto:
    adapters where the engine takes them (docs/adapters.md).
    """

    base_on_host: Literal["whole", "int8"] = "whole"
    """How the frozen weights wait on the host while an engine has the device. int8: their linear layers
    as whole numbers of 8 bits with a scale for each 64 columns, half of bfloat16's memory; they are
    rounded to that from the start (docs/adapters.md; backend=megatron, trainer.offload).
    """

    dropout: BelowOne = 0.0
    """Dropout of what an adapter is given, while learning; scoring never drops, nor does an
    embedding's.
    """

    path: str = ""
    """PEFT folder that the policy starts from, of the same rank, alpha and targets; empty: adapters
    that change nothing yet.
    """

    evaluated: dict[str, str] = field(default_factory=dict)
    """PEFT folders of other adapters by name, as {first: runs/first/policy_adapter}, which answer
    held-out prompts beside the policy's; an empty folder: the model without adapters. Metrics are
    eval_first_... (push=adapters, colocated vLLM).
    """

    @property
    def scaling(self) -> float:
        """Returns what an adapter's product is multiplied by."""
        return scaling_of(self.rank, self.alpha, rslora=self.rslora)

    def told(self, targets: Iterable[str]) -> dict[str, Any]:
        """Returns what a checkpoint says of adapters on `targets`."""
        said: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha, "targets": sorted(targets)}
        if self.rslora:  # of which earlier checkpoints say nothing
            said["rslora"] = True
        if self.base_on_host != "whole":  # the frozen weights are rounded
            said["base_on_host"] = self.base_on_host
        return said


def experts_targeted(targets: Sequence[str]) -> bool:
    """Returns whether `targets` name layers that experts have; an empty one names all layers."""
    return not targets or not set(targets) <= {*OF_ATTENTION, *OF_VOCABULARY}


def scaling_of(rank: int, alpha: float, *, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)
