"""Tiny random Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 (dense and MoE) folders, with a tokenizer and what an image
processor reads.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY = 131  # prime: every tensor-parallel size needs padding rows
SPECIAL = (
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PAD, IM_START, IM_END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
IMAGE_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"  # one, as a prompt's text has it
FILM = "<|vision_start|><|video_pad|><|vision_end|>"
PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "qwen3_5": "Qwen3VLProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
}
KINDS = tuple(PROCESSORS)
PATCH = {kind: 14 if kind in ("qwen2_vl", "qwen2_5_vl") else 16 for kind in KINDS}
EXPERTS = 4
EXPERT_FFN = 48
MERGE = 2  # one token each MERGE x MERGE patches
SIZES = ((64, 96), (100, 50), (56, 56))  # height and width of `images`
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}}{IMAGE_TEXT}"
    "{% elif part['type'] == 'video' or 'video' in part %}"
    f"{FILM}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": IM_END,
    "pad_token_id": PAD,
}
# 32 elements a head (vLLM takes no fewer on a CPU): 16 angles of time, height and width
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
TOWER = {
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
OWN_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"bos_token_id": None, "rope_parameters": ROPE},
    "qwen2_5_vl": {"bos_token_id": None, "rope_parameters": ROPE},
    "qwen3_vl": {"head_dim": 32, "rope_parameters": ROPE | {"mrope_interleaved": True}},
}
OWN_TEXT["qwen3_vl_moe"] = OWN_TEXT["qwen3_vl"] | {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_FFN,
    "mlp_only_layers": [1],
}
OWN_TEXT["qwen3_5"] = {
    "head_dim": 32,
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "rms_norm_eps": 1e-3},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 12},
    "layer_types": ["linear_attention", "full_attention"] * 2,
    # 8 angles: half of a head is rotated
    "rope_parameters": ROPE
    | {"mrope_section": [2, 3, 3], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
OWN_TEXT["qwen3_5_moe"] = OWN_TEXT["qwen3_5"] | {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_FFN,
    "shared_expert_intermediate_size": 56,
}
OWN_TOWER: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "window_size": 56,  # 2 x 2 tokens see each other in block 0, all of an image in block 1
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
OWN_TOWER["qwen3_vl_moe"] = OWN_TOWER["qwen3_vl"]
OWN_TOWER["qwen3_5"] = {
    name: value
    for name, value in OWN_TOWER["qwen3_vl"].items()
    if name != "deepstack_visual_indexes"
}
OWN_TOWER["qwen3_5_moe"] = OWN_TOWER["qwen3_5"]


def save_tiny_vision(folder: Path, kind: str, *, seed: int = 0, **text_changes: Any) -> Path:
    """Writes config.json, weights, a tokenizer and preprocessor_config.json; `text_changes` are
    fields of text_config.

    Norms and biases are random too, and all is so large that each tensor shows in the logits.
    """
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        vision_config(kind, **text_changes), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        publish_experts(folder / "model.safetensors")
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor(kind), indent=2))
    if kind.startswith("qwen3"):  # which bounds all frames together; the others' is that of images
        fields = preprocessor(kind) | {"video_processor_type": "Qwen3VLVideoProcessor"}
        fields.pop("image_processor_type")
        (folder / "video_preprocessor_config.json").write_text(json.dumps(fields, indent=2))
    return folder


def publish_experts(path: Path) -> None:
    """Transposes the matrices of experts, which transformers 5 writes otherwise than they are
    published.
    """
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dim() == 3 and ".mlp.experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def by_matrix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a folder, published or of transformers 5, with a tensor for each
    matrix of an expert, [out, in].
    """
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or ".mlp.experts." not in name:
            found[name] = tensor
            continue
        stem, _, kind = name.rpartition(".")
        width = 2 * EXPERT_FFN if kind == "gate_up_proj" else TEXT["hidden_size"]
        for expert, each in enumerate(tensor):
            matrix = each if len(each) == width else each.T
            if kind == "down_proj":
                found[f"{stem}.{expert}.down_proj.weight"] = matrix
                continue
            gate, up = matrix[:EXPERT_FFN], matrix[EXPERT_FFN:]
            found[f"{stem}.{expert}.gate_proj.weight"] = gate
            found[f"{stem}.{expert}.up_proj.weight"] = up
    return found


def vision_config(kind: str, **text_changes: Any) -> Any:
    text = TEXT | OWN_TEXT[kind] | text_changes
    tower = TOWER | OWN_TOWER[kind] | {"patch_size": PATCH[kind]}
    # Qwen2-VL calls the width of what leaves the tower by the name that the others have for its own
    leaves = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
    return AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=tower | {leaves: text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns one with a token a character of ASCII, and words that no text has up to VOCABULARY."""
    symbols = [*SPECIAL, "\n", *map(chr, range(32, 127))]
    symbols += [f"w{n}" for n in range(len(symbols), VOCABULARY)]
    vocabulary = {symbol: n for n, symbol in enumerate(symbols)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        chat_template=CHAT_TEMPLATE,
    )


def preprocessor(kind: str) -> dict[str, Any]:
    """Returns what preprocessor_config.json says: images of 1 to 16 tokens."""
    patch = PATCH[kind]
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": PROCESSORS[kind],
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2},
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.25, 0.4],
    }


def images() -> list[Image.Image]:
    """Returns images of noise, one of each of SIZES."""
    drawn = np.random.default_rng(0)
    return [
        Image.fromarray(drawn.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in SIZES
    ]
