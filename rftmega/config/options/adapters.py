"""Options of LoRA adapters."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rftmega.config.options.bounds import BelowOne, NotNegativeInt, Positive

# values that vLLM accepts as max_lora_rank
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# linear layers of attention, MLP and experts: names in Hugging Face folders and in Megatron
# of gated delta nets (Qwen3.5, Qwen3-Next)
DELTA_NET = (
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    *("in_proj_qkvz", "in_proj_ba", "out_proj"),
)
HF_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("w1", "w2", "w3"),  # of Mixtral's experts: gate, down, up
    *DELTA_NET,
)
# layers of attention, which experts lack
OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
# embedding and LM head: get an adapter only if they are named
EMBEDDING, HEAD = "embed_tokens", "lm_head"
MEGATRON_EMBEDDING, MEGATRON_HEAD = "word_embeddings", "output_layer"
OF_VOCABULARY = (EMBEDDING, HEAD, MEGATRON_EMBEDDING, MEGATRON_HEAD)
MEGATRON_TARGETS = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    *("in_proj", "out_proj"),  # of gated delta nets
)

# columns that share a scale in base_on_host=int8: a row's shards have the scales of the whole row
# if they begin at a multiple
COLUMNS_OF_A_SCALE = 64


@dataclass
class LoRA:
    rank: NotNegativeInt = 0
    """LoRA rank of the adapters of every trained model: policy, critic, reward model. The model's
    own weights are then frozen, except for a value head. 0: no adapters, full fine-tuning
    (docs/adapters.md).
    """

    alpha: Positive = 32.0
    """LoRA alpha: an adapter's output is scaled by alpha / rank."""

    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that adapters of larger rank are not trained more
    slowly (rsLoRA, arXiv:2312.03732).
    """

    targets: list[str] = field(default_factory=list)
    """Layers with an adapter, by their names in the Hugging Face folder (q_proj, down_proj) or in
    Megatron (linear_qkv); empty: all linear layers of attention, MLP and experts. Embedding and LM
    head, embed_tokens and lm_head, have one only if they are named.
    """

    push: Literal["auto", "merged", "adapters"] = "auto"
    """Weight sync of adapters: adapters (sent alone, unrounded; vLLM) or merged (weights with the
    adapters added, rounded to the engine's precision, which in bfloat16 loses much of a small
    update). auto: merged with model.dtype=float32, else adapters if the engine
    supports them (docs/adapters.md).
    """

    base_on_host: Literal["whole", "int8"] = "whole"
    """Format of the frozen weights in host memory while an engine uses the device. int8: their
    linear layers as int8 with a scale per 64 columns, half of bfloat16's memory; they are rounded
    to that from the start (docs/adapters.md; backend=megatron, trainer.offload).
    """

    dropout: BelowOne = 0.0
    """Dropout of an adapter's input in training; scoring uses no dropout, nor do adapters of the
    embedding.
    """

    path: str = ""
    """PEFT folder with the policy's initial adapters, of the same rank, alpha and targets; empty:
    new adapters that initially change nothing.
    """

    evaluated: dict[str, str] = field(default_factory=dict)
    """PEFT folders of other adapters by name, as {first: runs/first/policy_adapter}, which are
    evaluated beside the policy's; an empty folder: the model without adapters. Metrics are
    eval_first_... (push=adapters, colocated vLLM).
    """

    @property
    def scaling(self) -> float:
        """Returns the factor by which the product of an adapter's two matrices is scaled."""
        return scaling_of(self.rank, self.alpha, rslora=self.rslora)

    def told(self, targets: Iterable[str]) -> dict[str, Any]:
        """Returns the settings of adapters that a checkpoint stores: rank, alpha, targets and
        others that change the computation. `targets`: names of the layers that have adapters.
        """
        said: dict[str, Any] = {"rank": self.rank, "alpha": self.alpha, "targets": sorted(targets)}
        if self.rslora:  # absent in earlier checkpoints
            said["rslora"] = True
        if self.base_on_host != "whole":  # the frozen weights are rounded
            said["base_on_host"] = self.base_on_host
        return said


def experts_targeted(targets: Sequence[str]) -> bool:
    """Returns whether `targets`, the value of model.lora.targets, contains layers that experts
    have; an empty list means all layers.
    """
    return not targets or not set(targets) <= {*OF_ATTENTION, *DELTA_NET, *OF_VOCABULARY}


def scaling_of(rank: int, alpha: float, *, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)
