"""Knows which models vLLM's CPU kernels can't run."""

from pathlib import Path
from typing import Any

from rftmega.config import ModelConfig
from rftmega.core.json_files import read_json_object
from rftmega.model_providers.description import ModelDescription
from rftmega.runtime import device

LATENT_SIZE = 576
# model_type -> what vLLM's CPU build lacks for it
LACKS = {
    "inkling_text": "the layers of Inkling",
    "minimax_m2": "the choice of experts by sigmoid scores without groups",
    "gpt_oss": "experts with biases",
}
# model types to which vLLM 0.32 gives other log-probs than transformers, by more than the gate of a
# run in float32 lets pass; with random weights, on a CPU (python -m tests.families --vllm)
OTHERWISE = (
    *("apertus", "cohere2", "cohere2_moe", "ctrl", "doge", "ernie4_5_moe", "gemma3n_text"),
    *("hrm_text", "jetmoe", "mamba2", "moshi", "zaya"),
)
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
RANK, ROTATED = "kv_lora_rank", "qk_rope_head_dim"
EXPANDED = ("minicpm3",)  # latent attention that vLLM computes with whole keys and values

DELTA_NET_HEAD_DIMS = (64, 128)
KEYS, VALUES = "linear_key_head_dim", "linear_value_head_dim"


def refusals(options: ModelConfig, model: ModelDescription, on: device.Device) -> list[str]:
    """Returns the reasons why vLLM's CPU kernels can't run a model on the device `on`; [] if they
    can.
    """
    return _of_layers(options.path, model) + _of_delta_nets(options, model, on)


def _of_layers(path: str, model: ModelDescription) -> list[str]:
    if lacking := LACKS.get(model.family):
        return [
            f"rollout.engine=vllm: its CPU build lacks {lacking}, which model_type={model.family} needs. Set "
            "rollout.engine=transformers."
        ]
    if model.family in OTHERWISE:
        return [
            f"rollout.engine=vllm: on a CPU, vLLM 0.32 gives model_type={model.family} other log-probs than transformers, "
            "at which the run would stop. Set rollout.engine=transformers."
        ]
    if size := _latent_size(path, model):
        if size == LATENT_SIZE:
            return []
        return [
            f"vLLM's CPU kernels for latent attention know kv_lora_rank + qk_rope_head_dim = {LATENT_SIZE} only, not "
            f"{size}. Take rollout.engine=transformers for a small model of this family."
        ]
    if model.head_dim in HEAD_DIMS:
        return []
    known = ", ".join(map(str, HEAD_DIMS))
    return [
        f"rollout.engine=vllm: its kernels for CPUs know no head size {model.head_dim} (head_dim of the model), only {known}. "
        "Set rollout.engine=transformers."
    ]


def _latent_size(path: str, model: ModelDescription) -> int:
    """Returns the number of elements that latent attention caches of a token in the model of the
    folder `path`; 0 if vLLM computes it with other attention.
    """
    if latent := model.latent:
        return latent.key_value_rank + latent.rope_dim
    text = _text_config(path)  # a backend may describe no latent attention
    if model.family in EXPANDED or not (text.get(RANK) and text.get(ROTATED)):
        return 0
    return int(text[RANK]) + int(text[ROTATED])


def _of_delta_nets(options: ModelConfig, model: ModelDescription, on: device.Device) -> list[str]:
    """Returns the reasons why the kernels can't run the gated delta nets of a hybrid model: they
    compute in bfloat16, with heads of few sizes.
    """
    heads = _delta_net_heads(options.path, model)
    if heads is None:
        return []
    found = []
    dtype = str(on.train_dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype
    if dtype != "bfloat16":
        found.append(
            f"rollout.engine=vllm: its kernels for CPUs compute gated delta nets (linear attention) in bfloat16 only, and "
            f"model.dtype={options.dtype} is {dtype} here. Set model.dtype=bfloat16 or rollout.engine=transformers."
        )
    key, value = heads
    if key != value or key not in DELTA_NET_HEAD_DIMS:
        known = " or ".join(f"{KEYS}={VALUES}={size}" for size in DELTA_NET_HEAD_DIMS)
        found.append(
            f"rollout.engine=vllm: its kernels for CPUs know no gated delta nets with {KEYS}={key} and {VALUES}={value}, only "
            f"with {known}. Set rollout.engine=transformers."
        )
    return found


def _delta_net_heads(path: str, model: ModelDescription) -> tuple[int, int] | None:
    """Returns the sizes of a key head and a value head of the gated delta nets of a model folder;
    None if it has none.
    """
    if net := model.delta_net:
        return net.key_dim, net.value_dim
    text = _text_config(path)  # a backend may describe no delta nets
    return (text[KEYS], text[VALUES]) if KEYS in text and VALUES in text else None


def _text_config(path: str) -> dict[str, Any]:
    config = read_json_object(Path(path) / "config.json")
    text: dict[str, Any] = config.get("text_config") or config
    return text
